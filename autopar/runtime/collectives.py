"""Conversions of a tensor along a group, each with its adjoint.

forward         backward, each rank's gradient a share     backward, each rank's gradient whole
all_gather      reduce_scatter                              slice
identity        all_reduce
all_reduce      all_reduce                                  identity
reduce_scatter  all_gather
slice           all_gather
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from autopar.documents.plan import Conversion

_ADJOINT = {"all_gather": "reduce_scatter", "identity": "all_reduce", "all_reduce": "identity",
            "reduce_scatter": "all_gather", "slice": "all_gather"}  # fmt: skip
_EXCEPTIONS = {("all_gather", "whole"): "slice", ("all_reduce", "share"): "all_reduce"}

_CONVERTING: list[bool] = []


def adjoint(conversion: Conversion) -> str:
    """What the gradient undergoes."""
    return _EXCEPTIONS.get((conversion.forward, conversion.gradient or ""), _ADJOINT[conversion.forward])


def convert(tensor: torch.Tensor, conversion: Conversion, group: dist.ProcessGroup) -> torch.Tensor:
    """The tensor after a conversion, differentiable."""
    dim = conversion.dim or 0
    _CONVERTING.append(True)
    try:
        if not tensor.is_floating_point():
            return _MOVES[conversion.forward](tensor, dim, group)
        moved: torch.Tensor = _Moved.apply(tensor, conversion.forward, adjoint(conversion), dim, group)
        return moved
    finally:
        _CONVERTING.pop()


def is_converting() -> bool:
    """Whether a conversion runs now: its operators are the runtime's, not the model's."""
    return bool(_CONVERTING)


def summed_whole(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum over a group of which every rank then computes the same: the gradient is whole already."""
    total: torch.Tensor = _Moved.apply(tensor, "all_reduce", "identity", 0, group)
    return total


class _Moved(torch.autograd.Function):
    """One movement forward, another backward."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, forward: str, backward: str, dim: int, group: Any) -> torch.Tensor:
        ctx.backward_as, ctx.dim, ctx.group = backward, dim, group
        return _MOVES[forward](tensor, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _MOVES[ctx.backward_as](gradient, ctx.dim, ctx.group), None, None, None, None


def all_gather(tensor: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Equal parts of all ranks, one after another along a dim."""
    source = tensor.movedim(dim, 0).contiguous()
    gathered = source.new_empty((group.size() * source.shape[0], *source.shape[1:]))
    dist.all_gather_single(gathered, source, group=group)
    return gathered.movedim(0, dim).contiguous()


def reduce_scatter(tensor: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum over ranks, of which each keeps its part along a dim."""
    source = tensor.movedim(dim, 0).contiguous()
    part = source.new_empty((_share(source.shape[0], group), *source.shape[1:]))
    dist.reduce_scatter_single(part, source, group=group)
    return part.movedim(0, dim).contiguous()


def all_reduce(tensor: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum over ranks; the tensor itself is not changed."""
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def own_part(tensor: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Each rank's own part along a dim."""
    size = _share(tensor.shape[dim], group)
    return tensor.narrow(dim, group.rank() * size, size).contiguous()


def _identity(tensor: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    return tensor.view_as(tensor)


def _share(size: int, group: dist.ProcessGroup) -> int:
    if size % group.size():
        raise ValueError(f"{group.size()} ranks cannot share {size} rows of an activation evenly")
    return size // group.size()


_MOVES = {"all_gather": all_gather, "reduce_scatter": reduce_scatter, "all_reduce": all_reduce, "slice": own_part,
          "identity": _identity}  # fmt: skip
