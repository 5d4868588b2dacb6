"""Recompute: which blocks drop what autograd would keep, and run it again in backward.

`full` keeps a block's inputs. `selective` keeps the outputs a plan names as ``module#n``, the n-th aten operator in forward order
within that module of the block, where attention, RMS norms and dropout count as one operator each, as they do in the capture.
Checkpoints of the model's own code keep everything: what runs again is the plan's choice.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from autopar.documents.plan import Recompute
from autopar.runtime.collectives import is_converting

_ONE_OPERATOR = (F.scaled_dot_product_attention, F.rms_norm, torch.rms_norm, F.dropout, torch.dropout)
_SAME_TENSOR = ("detach", "alias", "lift_fresh")


def apply_recompute(blocks: Mapping[tuple[str, int], nn.Module], entries: Iterable[Recompute]) -> None:
    """Let the blocks that the plan names run again in backward."""
    for entry in entries:
        for number in range(entry.blocks[0], entry.blocks[1] + 1):
            block = blocks.get((entry.chain, number))
            if block is not None and entry.mode != "none":
                _rerun(block, frozenset(entry.keep) if entry.mode == "selective" else None)


def _rerun(block: nn.Module, keep: frozenset[str] | None) -> None:
    forward = block.forward
    if keep is None:

        def plain(*args: Any, **kwargs: Any) -> Any:
            return forward(*args, **kwargs)

        def whole(*args: Any, **kwargs: Any) -> Any:
            return checkpoint(plain, *args, use_reentrant=False, **kwargs)

        _PLANNED.add(plain)
        block.forward = whole
        return
    ordinals = _Ordinals(block)

    def counted(*args: Any, **kwargs: Any) -> Any:
        with ordinals.counting():
            return forward(*args, **kwargs)

    def selective(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(counted, *args, use_reentrant=False, context_fn=_contexts(ordinals, keep), **kwargs)

    _PLANNED.add(counted)
    block.forward = selective


_PLANNED: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()
"""Functions that run again because a plan says so."""


@contextmanager
def only_planned() -> Iterator[None]:
    """Within the block, forward and backward, `torch.utils.checkpoint` keeps everything but for what the plan runs again."""
    before = (torch_checkpoint.CheckpointFunction, torch_checkpoint._checkpoint_without_reentrant_generator)

    def planned(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[None]:
        if function in _PLANNED:
            yield from before[1](function, *args, **kwargs)
        else:
            yield

    torch_checkpoint.CheckpointFunction = _Plain
    torch_checkpoint._checkpoint_without_reentrant_generator = planned
    try:
        yield
    finally:
        torch_checkpoint.CheckpointFunction, torch_checkpoint._checkpoint_without_reentrant_generator = before


class _Plain:
    """In the place of torch's function of reentrant checkpoints."""

    @staticmethod
    def apply(function: Callable[..., Any], _preserve: bool, *args: Any) -> Any:
        """Run it once."""
        return function(*args)


def _contexts(ordinals: _Ordinals, keep: frozenset[str]) -> Callable[[], Any]:
    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        named = ordinals.name(operator)
        return CheckpointPolicy.MUST_SAVE if named in keep else CheckpointPolicy.PREFER_RECOMPUTE

    return lambda: create_selective_checkpoint_contexts(policy)


class _Ordinals:
    """Names the aten operators of a block's forward as they run: ``module#n``."""

    def __init__(self, block: nn.Module) -> None:
        self.stack: list[str] = []
        self.counts: dict[str, int] = {}
        self.single: str | None = None
        self.in_single = False
        for name, module in block.named_modules():
            if name:
                module.register_forward_pre_hook(self._enter(name))
                module.register_forward_hook(self._leave, always_call=True)

    def _enter(self, name: str) -> Callable[..., None]:
        return lambda module, args: self.stack.append(name)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.stack:
            self.stack.pop()

    def counting(self) -> Any:
        """A context in which counting starts anew."""
        self.stack, self.counts, self.single, self.in_single = [], {}, None, False
        return _Singles(self)

    def name(self, operator: Any) -> str:
        """The name of the operator that runs now; operators of the runtime's own conversions have none."""
        if is_converting() or operator.namespace != "aten" or operator.overloadpacket.__name__ in _SAME_TENSOR:
            return ""
        if self.in_single and self.single is not None:
            return self.single
        module = self.stack[-1] if self.stack else ""
        number = self.counts.get(module, 0)
        self.counts[module] = number + 1
        named = f"{module}#{number}"
        self.single = named if self.in_single else None
        return named


class _Singles(TorchFunctionMode):
    """Tells `_Ordinals` when what runs counts as one operator."""

    def __init__(self, ordinals: _Ordinals) -> None:
        super().__init__()
        self.ordinals = ordinals

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outermost = func in _ONE_OPERATOR and not self.ordinals.in_single
        if not outermost:
            return func(*args, **(kwargs or {}))
        self.ordinals.in_single, self.ordinals.single = True, None
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.ordinals.in_single, self.ordinals.single = False, None
