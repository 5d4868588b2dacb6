"""Carry out an operator-local dim with real tensors: divide it, run each shard, put the results together.

    parallel   a write that holds the dim is divided; any other is the same on every shard
    summed     a write that holds the dim is divided; any other is a partial sum
    whole      not divided

Reads that do not hold the dim are whole on every shard. A mean is an average of averages; a bias is added by one shard.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from autopar.documents.graph import LocalDim
from autopar.tracer.indices import Analysis, local_dims
from autopar.tracer.recording import OperatorRecord, Recording, Ref, TensorRecord
from autopar.tracer.routing import device_kernels


@dataclass
class Step:
    """An operator that ran: its function, arguments with a `Ref` for every tensor, and the tensors' values."""

    function: Any
    record: OperatorRecord
    reads: dict[int, torch.Tensor]
    writes: dict[int, torch.Tensor]


@dataclass
class Run:
    """A recording and every operator's values."""

    recording: Recording = field(default_factory=Recording)
    steps: list[Step] = field(default_factory=list)


class RealRecorder(TorchDispatchMode):
    """Records real tensors, values included."""

    def __init__(self) -> None:
        super().__init__()
        self.run = Run()
        self._ids: dict[Any, int] = {}
        self._alive: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        reads = {self._id(tensor): tensor.clone() for tensor in tensors}
        read_ids = tuple(self._id(tensor) for tensor in tensors)
        given = tree_map(lambda leaf: Ref(self._id(leaf)) if isinstance(leaf, torch.Tensor) else leaf, (args, kwargs))
        backward = torch._C._current_autograd_node() is not None
        output = runnable(func)(*args, **kwargs)
        results = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        writes = {self._register(tensor): tensor.clone() for tensor in results}
        number = len(self.run.steps)
        phase = "backward" if backward else "forward"
        record = OperatorRecord(number, str(func), phase, "", *given, read_ids, tuple(writes))
        self.run.recording.operators.append(record)
        self.run.steps.append(Step(func, record, reads, writes))
        return output

    def _id(self, tensor: torch.Tensor) -> int:
        found = self._ids.get(_key(tensor))
        return self._register(tensor) if found is None else found

    def _register(self, tensor: torch.Tensor) -> int:
        number = len(self.run.recording.tensors)
        self.run.recording.tensors[number] = TensorRecord(
            number,
            tuple(tensor.shape),
            tuple(tensor.stride()),
            str(tensor.dtype).removeprefix("torch."),
            tensor.untyped_storage().data_ptr(),
            tensor.storage_offset(),
        )
        self._ids[_key(tensor)] = number
        self._alive.append(tensor)
        return number

    def note_gradients(self, parameters: Any) -> None:
        """Parameter and gradient hold the same indices."""
        for parameter in parameters:
            if parameter.grad is not None and _key(parameter) in self._ids:
                self.run.recording.gradients[self._id(parameter)] = self._id(parameter.grad)


def _key(tensor: torch.Tensor) -> Any:
    return (
        tensor.untyped_storage()._cdata,
        tensor.storage_offset(),
        tuple(tensor.shape),
        tuple(tensor.stride()),
        tensor.dtype,
    )


# Routed operators are only recorded in a capture; these are their formulas.


def runnable(func: Any) -> Any:
    """The function, or the formula of a routed operator."""
    return {
        torch.ops.autopar.attention.default: attention,
        torch.ops.autopar.attention_backward.default: attention_backward,
        torch.ops.autopar.rms_norm.default: rms_norm,
        torch.ops.autopar.rms_norm_backward.default: rms_norm_backward,
    }.get(func, func)


def attention(q: Any, k: Any, v: Any, mask: Any, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax of scaled scores, query heads in groups."""
    repeat = q.shape[1] // k.shape[1]
    scores = scores_of(q, k.repeat_interleave(repeat, 1), mask, causal)
    return scores.softmax(-1) @ v.repeat_interleave(repeat, 1), scores.logsumexp(-1)


def scores_of(q: Any, k: Any, mask: Any, causal: bool) -> torch.Tensor:
    """Scaled products of queries and keys, masked."""
    scores = q @ k.transpose(2, 3) / q.shape[-1] ** 0.5
    if causal:
        future = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype is torch.bool else scores + mask
    return scores


def attention_backward(
    grad: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, mask: Any, learned: bool, causal: bool
) -> list[torch.Tensor]:
    """From o and lse, as flash attention's backward does (Dao et al., arXiv 2205.14135, algorithm 4)."""
    repeat = q.shape[1] // k.shape[1]
    keys, values = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    scale = q.shape[-1] ** -0.5
    weights = (scores_of(q, keys, mask, causal) - lse[..., None]).exp()
    dscores = weights * (grad @ values.transpose(2, 3) - (grad * o).sum(-1, keepdim=True))
    dq = dscores @ keys * scale
    dk = (dscores.transpose(2, 3) @ q * scale).unflatten(1, (-1, repeat)).sum(2)
    dv = (weights.transpose(2, 3) @ grad).unflatten(1, (-1, repeat)).sum(2)
    return [dq, dk, dv, *([dscores.sum_to_size(mask.shape)] if learned else [])]


def rms_norm(x: Any, shape: Any, weight: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """X over its root mean square."""
    dims = tuple(range(-len(shape), 0))
    factor = (x.square().mean(dims, keepdim=True) + 1e-6).rsqrt()
    return x * factor * (1 if weight is None else weight), factor


def rms_norm_backward(grad: Any, x: Any, shape: Any, factor: Any, weight: Any) -> tuple[torch.Tensor, ...]:
    """The chain rule for x * factor * weight."""
    dims = tuple(range(-len(shape), 0))
    normal, inside = x * factor, grad * weight
    dx = factor * (inside - normal * (inside * normal).mean(dims, keepdim=True))
    return dx, (grad * normal).sum_to_size(weight.shape)


class Indivisible(Exception):
    """The number of shards does not divide a part."""


@dataclass
class Shards:
    """Which elements of an atom each of `count` shards holds; an atom that joins unlike parts has each part divided."""

    found: Analysis
    count: int

    def elements(self, atom: Any, shard: int) -> list[int]:
        """The shard's positions along the atom."""
        parts = self.found.segments.get(atom)
        if parts is None:
            if atom.size % self.count:
                raise Indivisible
            length = atom.size // self.count
            return list(range(shard * length, (shard + 1) * length))
        chosen: list[int] = []
        start = 0
        for place in parts:
            leaves = self.found.at(place)
            if not leaves:
                raise Indivisible
            inner = prod(leaf.size for leaf in leaves[1:])
            outer = self.elements(leaves[0], shard)
            chosen += [start + position * inner + offset for position in outer for offset in range(inner)]
            start += leaves[0].size * inner
        assert start == atom.size
        return chosen

    def part(self, value: torch.Tensor, tensor: int, spots: Any, shard: int) -> torch.Tensor:
        """The shard's part of a tensor that holds the dim at the given positions."""
        for spot in spots:
            if spot.tensor == tensor:
                leaves = self.found.atoms_of(tensor)[spot.dim]
                shape = list(value.shape)
                sizes = [leaf.size for leaf in leaves]
                split = value.reshape(*shape[: spot.dim], *sizes, *shape[spot.dim + 1 :])
                index = torch.tensor(self.elements(leaves[spot.atom], shard))
                kept = split.index_select(spot.dim + spot.atom, index)
                shape[spot.dim] = prod(sizes) // self.count
                value = kept.reshape(shape)
        return value


def run_shard(step: Step, local: LocalDim, shards: Shards, shard: int) -> list[torch.Tensor]:
    """The operator on one shard's reads, sizes among its arguments made local."""
    reads = {t: shards.part(value, t, local.reads, shard).clone() for t, value in step.reads.items()}
    shapes = [shards.part(value, t, local.writes, shard).shape for t, value in step.writes.items()]
    name, args = step.record.name.split(".")[1], step.record.args
    if local.role == "summed" and shard:
        if name in ADDS_FIRST:
            reads[args[0].tensor].zero_()
        elif name == "convolution" and args[2] is not None:
            reads[args[2].tensor].zero_()
    args, kwargs = tree_map(
        lambda leaf: reads[leaf.tensor] if isinstance(leaf, Ref) else leaf,
        (localised(step, shapes), step.record.kwargs),
    )
    output = runnable(step.function)(*args, **kwargs)
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]


ADDS_FIRST = ("addmm", "baddbmm", "addmv", "addbmm", "index_add", "index_add_", "scatter_add", "scatter_add_",
              "index_put", "index_put_", "_index_put_impl_")  # fmt: skip
"""They add to their first argument: only one shard does."""
SHAPE_AT = {"view": 1, "_unsafe_view": 1, "reshape": 1, "expand": 1, "slice_backward": 1, "select_backward": 1, "as_strided": 1,
            "zeros": 0, "ones": 0, "full": 0, "empty": 0, "rand": 0, "randn": 0, "new_zeros": 1, "new_ones": 1, "new_full": 1,
            "new_empty": 1, "empty_strided": 0, "new_empty_strided": 1, "diagonal_backward": 1,
            "unfold_backward": 1}  # fmt: skip


def localised(step: Step, shapes: list[torch.Size]) -> tuple[Any, ...]:
    """The arguments with sizes as they are on one shard."""
    args, name = list(step.record.args), step.record.name.split(".")[1]
    if name in SHAPE_AT and not isinstance(args[SHAPE_AT[name]], torch.dtype):
        args[SHAPE_AT[name]] = list(shapes[0])
        if "strided" in name:
            args[SHAPE_AT[name] + 1] = list(torch.empty(shapes[0], device="meta").stride())
    if name in ("slice", "slice_backward"):
        _localise_range(step, args, shapes[0], 1 if name == "slice" else 2)
    elif name in ("split_with_sizes", "unsafe_split_with_sizes"):
        args[1] = [shape[args[2] if len(args) > 2 else 0] for shape in shapes]
    elif name in ("split", "unsafe_split"):
        args[1] = shapes[0][args[2] if len(args) > 2 else 0]
    elif name in ("upsample_nearest2d_backward", "upsample_bilinear2d_backward", "upsample_bicubic2d_backward"):
        args[2] = list(shapes[0])
    elif name == "native_group_norm":
        args[3] = shapes[0][0]
    elif name == "native_group_norm_backward":
        args[5] = shapes[0][0]
    return tuple(args)


def _localise_range(step: Step, args: list[Any], shape: torch.Size, at: int) -> None:
    """Where the cut dim is divided, start and end shrink with it."""
    small, large = [next(iter(values.values())).shape for values in (step.writes, step.reads)][:: 1 if at == 1 else -1]
    dim = args[at] if len(args) > at else 0
    local = shape[dim]
    undivided = (small if at == 1 else large)[dim]
    if local != undivided and small[dim] != large[dim]:
        for number in range(at + 1, min(at + 3, len(args))):
            if args[number] is not None:
                start = args[number] if args[number] >= 0 else args[number] + large[dim]
                args[number] = min(start, large[dim]) * local // undivided


def averages(step: Step) -> bool:
    """Whether the first write is a mean over all elements or rows, or the gradient of one by a shard's own count."""
    name, args = step.record.name.split(".")[1], step.record.args
    at = {"nll_loss_forward": 3, "nll_loss2d_forward": 3, "mse_loss": 2, "mse_loss_backward": 3, "huber_loss": 2,
          "huber_loss_backward": 3, "smooth_l1_loss": 2, "smooth_l1_loss_backward": 3, "binary_cross_entropy": 3,
          "binary_cross_entropy_backward": 4, "binary_cross_entropy_with_logits": 4, "soft_margin_loss": 2,
          "soft_margin_loss_backward": 3}  # fmt: skip
    return name == "mean" or (name in at and (args[at[name]] if len(args) > at[name] else 1) == 1)


def weights_of(step: Step, results: list[list[torch.Tensor]]) -> list[Any]:
    """The share of each shard's mean: rows whose label is ignored do not count."""
    if "nll_loss" in step.record.name:
        counted = sum(result[1] for result in results)
        return [result[1] / counted for result in results]
    return [1 / len(results)] * len(results)


def mismatch(step: Step, local: LocalDim, shards: Shards) -> str | None:
    """What is wrong with dividing a parallel or summed dim; None where the shards together give the undivided result."""
    results = [run_shard(step, local, shards, shard) for shard in range(shards.count)]
    for number, (tensor, expected) in enumerate(step.writes.items()):
        parts = [result[number] for result in results]
        if any(spot.tensor == tensor for spot in local.writes):
            wanted = [shards.part(expected, tensor, local.writes, shard) for shard in range(shards.count)]
            if averages(step) and step.record.name.split(".")[1].endswith("backward"):
                parts = [part / shards.count for part in parts]
        elif local.role == "parallel":
            wanted = [expected] * shards.count
        else:
            weights = weights_of(step, results) if number == 0 and averages(step) else [1.0] * shards.count
            parts, wanted = [sum(part * weight for part, weight in zip(parts, weights, strict=True))], [expected]
        for part, goal in zip(parts, wanted, strict=True):
            if part.shape != goal.shape:
                return f"write {number} has shape {tuple(part.shape)}, not {tuple(goal.shape)}"
            exact = goal.dtype in (torch.float64, torch.complex128)
            tolerance = 1e-9 if exact else 1e-4
            if not torch.allclose(part.to(goal.dtype), goal, rtol=tolerance, atol=tolerance, equal_nan=True):
                return f"write {number} differs by {(part - goal).abs().max()}"
    return None


def recorded(step: Callable[[], torch.Tensor], parameters: Any = ()) -> Run:
    """One forward and backward pass, in float64; an output of several numbers is weighted at random."""
    torch.manual_seed(0)
    recorder = RealRecorder()
    with device_kernels(), recorder:
        output = step()
        if output.requires_grad:
            (output if output.dim() == 0 else (output * torch.randn_like(output)).sum()).backward()
    recorder.note_gradients(parameters)
    return recorder.run


RANDOM = ("native_dropout", "bernoulli", "rand", "randn", "randint", "rand_like", "randn_like", "normal_", "uniform_",
          "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")  # fmt: skip
"""Operators whose result is not the same twice."""


def divide_everything(run: Run, found: Analysis, counts: tuple[int, ...] = (2, 3)) -> set[str]:
    """Check every dim of every operator at the first count that divides it; the operators that were divided."""
    ids = {tensor: tensor for tensor in run.recording.tensors}
    seen = set()
    for step in run.steps:
        if step.record.name.split(".")[1] in RANDOM:
            continue
        for local in local_dims(found, step.record.id, ids):
            positions = (*local.reads, *local.writes)
            assert positions, step.record.name
            if local.role == "whole":
                continue
            for count in counts:
                try:
                    wrong = mismatch(step, local, Shards(found, count))
                except Indivisible:
                    continue
                assert wrong is None, (step.record, local, count, wrong)
                seen.add(step.record.name.split(".")[1])
                break
    return seen
