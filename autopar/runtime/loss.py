"""The loss of a step, its parts summed over micro-batches and ranks; and a cross entropy over a divided vocabulary.

A loss returns the mean over its samples, or (total, count) for a global denominator. With counts of 1 for means,

    loss = sum of totals / sum of counts          over micro-batches and data-parallel ranks.

Cross entropy of logits x of which each rank holds a part of the vocabulary (Shoeybi et al., arXiv 1909.08053, section 3):

    -log p(t) = log sum_v exp(x_v - max) + max - x_t     the maximum, the sum and x_t are reduced over ranks, a number per row
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from autopar.errors import RequestError
from autopar.runtime.collectives import summed_whole
from autopar.runtime.probe import Inputs

UserLoss = Callable[..., Any]


class LossMeter:
    """Computes the loss of each micro-batch of a stage and keeps its parts."""

    def __init__(self, loss: UserLoss | None, micro_batches: int) -> None:
        self.loss, self.micro_batches = loss, micro_batches
        self.parts: dict[int, tuple[torch.Tensor, float | torch.Tensor]] = {}

    def __call__(self, output: Any, inputs: Inputs, number: int) -> torch.Tensor:
        """The total of one micro-batch divided by the number of micro-batches, to be differentiated."""
        value = self._value(output, inputs)
        total, count = value if isinstance(value, tuple) else (value, 1.0)
        if not isinstance(total, torch.Tensor) or total.numel() != 1:
            raise RequestError(f"loss() returned {type(total).__name__}, expected one number as a tensor")
        total = total.reshape(())
        self.parts[number] = total.detach(), count
        return total / self.micro_batches

    def _value(self, output: Any, inputs: Inputs) -> Any:
        if self.loss is not None:
            return self.loss(output, *inputs[0], **inputs[1])
        own = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
        if own is None and isinstance(output, torch.Tensor) and output.dim() == 0:
            own = output
        if own is None:
            raise RequestError(
                "training needs a loss: define `def loss(output, *inputs)` beside build_model, return it from forward, or "
                "give the model its labels so that its output has one"
            )
        return own

    def sums(self) -> tuple[float, float]:
        """(sum of totals, sum of counts) of this rank's micro-batches."""
        totals = sum(float(total) for total, _ in self.parts.values())
        return totals, sum(float(count) for _, count in self.parts.values())


class VocabularyParallel(TorchFunctionMode):
    """Takes cross entropies of logits whose classes are divided over a group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.cross_entropy:
            return divided_cross_entropy(self.group, *args, **kwargs)
        return func(*args, **kwargs)


def divided_cross_entropy(
    group: dist.ProcessGroup,
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """As torch's cross_entropy of class numbers, for (rows, classes of this rank, ...) logits."""
    if weight is not None or target.is_floating_point() or size_average is not None or reduce is not None:
        raise RequestError(
            "a loss over a divided vocabulary takes class numbers without weights; plan with tp=1, or use plain cross_entropy"
        )
    logits = input.movedim(1, -1) if input.dim() > 1 else input
    classes = logits.shape[-1]
    log_sum = _log_sum_exp(logits, group)
    ignored = target == ignore_index
    own = target - group.rank() * classes
    absent = (own < 0) | (own >= classes) | ignored
    picked = logits.gather(-1, own.masked_fill(absent, 0).unsqueeze(-1)).squeeze(-1).masked_fill(absent, 0)
    losses = log_sum - summed_whole(picked, group)
    if label_smoothing:
        mean = summed_whole(logits.sum(dim=-1), group) / (classes * group.size())
        losses = (1 - label_smoothing) * losses + label_smoothing * (log_sum - mean)
    losses = losses.masked_fill(ignored, 0)
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / (~ignored).sum()


def _log_sum_exp(logits: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    highest = logits.detach().amax(dim=-1)
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
    return summed_whole((logits - highest.unsqueeze(-1)).exp().sum(dim=-1), group).log() + highest
