"""What the names in a Plan stand for in a model, and which part of a parameter a rank holds.

A name with ``*`` stands for every block of its chain: ``layers.*.ffn.up.weight``. A placement divides one dim evenly:

    Shard(d)            rank r of n holds [r, r + 1) * size / n of dim d
    {dim, segments}     the same within each segment of the dim, the pieces one after another
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from autopar.documents.plan import SegmentPlacement
from autopar.errors import PlanMismatch

Placement = str | SegmentPlacement


def named_modules_of(model: nn.Module, pattern: str) -> list[tuple[str, nn.Module]]:
    """(name, module) that a name with ``*`` for the block's number stands for; those the model does not hold are left out."""
    head, star, tail = pattern.partition("*")
    if not star:
        names = [pattern]
    else:
        container = _submodule(model, head.rstrip("."))
        names = [f"{head}{child}{tail}" for child, _ in container.named_children()] if container is not None else []
    found = [(name, _submodule(model, name)) for name in names]
    return [(name, module) for name, module in found if module is not None]


def modules_of(model: nn.Module, pattern: str) -> list[nn.Module]:
    """Modules that a name with ``*`` stands for."""
    return [module for _, module in named_modules_of(model, pattern)]


def _submodule(model: nn.Module, name: str) -> nn.Module | None:
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None


def parameters_of(model: nn.Module, pattern: str) -> Iterator[tuple[str, nn.Module, str]]:
    """(full name, owning module, attribute) of every parameter a name with ``*`` stands for."""
    owner, _, attribute = pattern.rpartition(".")
    for name, module in named_modules_of(model, owner):
        if module._parameters.get(attribute) is not None:
            yield (f"{name}.{attribute}" if name else attribute), module, attribute


def pattern_of(name: str) -> str:
    """A module's name with ``*`` for its block's number."""
    parts = name.split(".")
    number = next((place for place, part in enumerate(parts) if part.isdecimal()), None)
    return name if number is None else ".".join([*parts[:number], "*", *parts[number + 1 :]])


def divided_dim(placement: Placement) -> int | None:
    """The dim that a placement divides."""
    if isinstance(placement, SegmentPlacement):
        return placement.dim
    return None if placement == "Replicate" else int(placement[6:-1])


@dataclass(frozen=True)
class Piece:
    """Rows [whole, whole + size) of the divided dim of the whole parameter lie at [local, local + size) of a rank's part."""

    whole: int
    local: int
    size: int


def pieces(size: int, placement: Placement, degree: int, rank: int, what: str = "a parameter") -> list[Piece]:
    """The pieces of a dim of `size` that a rank holds. Raises PlanMismatch where the degree does not divide it."""
    segments = placement.segments if isinstance(placement, SegmentPlacement) else (size,)
    if sum(segments) != size or any(segment % degree for segment in segments):
        raise PlanMismatch(f"tp({degree}) cannot divide dim {divided_dim(placement)} of {what}: {size} as {segments}")
    found, start, local = [], 0, 0
    for segment in segments:
        part = segment // degree
        found.append(Piece(start + rank * part, local, part))
        start, local = start + segment, local + part
    return found


def local_shape(shape: tuple[int, ...], placement: Placement, degree: int) -> tuple[int, ...]:
    """A rank's part of a shape. Raises PlanMismatch where the degree does not divide it."""
    dim = divided_dim(placement)
    if dim is None:
        return shape
    size = sum(piece.size for piece in pieces(shape[dim], placement, degree, 0))
    return (*shape[:dim], size, *shape[dim + 1 :])


def local_part(
    whole: torch.Tensor, placement: Placement, degree: int, rank: int, name: str = "a parameter"
) -> torch.Tensor:
    """A rank's part of a tensor: its own contiguous memory, or the tensor itself where nothing is divided."""
    dim = divided_dim(placement)
    if dim is None:
        return whole
    found = pieces(whole.shape[dim], placement, degree, rank, name)
    parts = [whole.narrow(dim, piece.whole, piece.size) for piece in found]
    return torch.cat(parts, dim=dim).contiguous()
