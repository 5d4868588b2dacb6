"""What each aten operator does with the dims of its tensors.

A rule returns `Letters`: the letters of the operator's einsum, each with its role and the (tensor, dim) places where it stands.
Places of one letter hold the same index and are unified. A view relates whole tensors in row-major order instead.

    parallel   a write that holds the letter is divided, any other is the same on every shard
    summed     a write that holds the letter is divided, any other is a partial sum
    whole      not divided, unless a composite says how

Reads that do not hold a divided letter are whole on every shard. Divided means: each shard runs the same operator on its
part, with sizes among its arguments made local; what would need more than that (an offset of positions) is whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import torch

from autopar.tracer.recording import OperatorRecord, Recording, Ref

Role = Literal["parallel", "summed", "whole"]
Place = tuple[int, int]
Composites = tuple[tuple[str, tuple[tuple[str, str, int], ...]], ...]
"""(name, ((phase, collective, tensor), ...)); the tensor's full bytes travel, -1 stands for one number a row."""


@dataclass
class Letter:
    """One letter: a role, its places, and named composites that divide a whole one all the same."""

    role: Role
    places: list[Place]
    composites: Composites = ()


@dataclass
class Rule:
    """What a rule found."""

    letters: list[Letter] = field(default_factory=list)
    views: list[tuple[int, int]] = field(default_factory=list)
    """(read, write) pairs of equal row-major content."""
    flops: float = 0.0
    """Model FLOPs per element of the letters' product."""
    executed: float = 0.0
    flop_places: list[Place] = field(default_factory=list)
    """Places whose sizes multiply to the FLOPs."""
    segments: list[tuple[Place, list[Place]]] = field(default_factory=list)
    """A dim and the dims of the parts it concatenates."""
    cut: tuple[Place, Place, int] | None = None
    """A dim, a dim that is a range of it, and where the range begins."""
    heads: tuple[list[Place], list[Place], int] | None = None
    """Grouped heads: places of all query heads, places of key and value heads, query heads per group."""
    moves: list[tuple[int, float]] | None = None
    """(tensor, times) moved through memory; None: all reads and writes once; []: nothing (views)."""


class Context:
    """One operator with shapes at hand."""

    def __init__(self, recording: Recording, operator: OperatorRecord) -> None:
        self.recording, self.operator = recording, operator

    def shape(self, tensor: int) -> tuple[int, ...]:
        """A tensor's shape."""
        return self.recording.tensors[tensor].shape

    def size(self, place: Place) -> int:
        """The size of a dim."""
        return self.shape(place[0])[place[1]]

    def arg(self, number: int, name: str = "", default: Any = None) -> Any:
        """A positional argument, or the keyword of that name."""
        if number < len(self.operator.args):
            return self.operator.args[number]
        return self.operator.kwargs.get(name, default)

    def tensor(self, number: int, name: str = "") -> int:
        """The tensor at an argument."""
        value = self.arg(number, name)
        assert isinstance(value, Ref), (self.operator.name, number)
        return value.tensor

    @property
    def out(self) -> int:
        """The first write."""
        return self.operator.writes[0]

    def dim(self, tensor: int, dim: int) -> int:
        """A dim counted from the front."""
        return dim % max(1, len(self.shape(tensor)))


RuleFunction = Callable[[Context], Rule]
RULES: dict[str, RuleFunction] = {}


def rule(*names: str) -> Callable[[RuleFunction], RuleFunction]:
    """Register a rule for aten names without overload."""

    def register(function: RuleFunction) -> RuleFunction:
        for name in names:
            RULES[name] = function
        return function

    return register


def find_rule(name: str) -> RuleFunction | None:
    """The rule of ``aten.mm.default``; pointwise operators are known by torch's own tag."""
    base = base_name(name)
    found = RULES.get(base)
    return found if found is not None else (RULES["pointwise"] if _is_pointwise(name) else None)


def base_name(name: str) -> str:
    """``aten.mm`` of ``aten.mm.default``."""
    return ".".join(name.split(".")[:2])


@cache
def _is_pointwise(name: str) -> bool:
    parts = name.split(".")
    if len(parts) != 3 or parts[0] != "aten":
        return False
    return torch.Tag.pointwise in getattr(getattr(torch.ops.aten, parts[1]), parts[2]).tags


def base(c: Context) -> str:
    """The name between ``aten.`` and the overload."""
    return c.operator.name.split(".")[1]


def places_of(c: Context, *tensors: int) -> list[Place]:
    """All places of tensors."""
    return [(tensor, dim) for tensor in tensors for dim in range(len(c.shape(tensor)))]


def divided(c: Context, places: list[Place]) -> Letter:
    """A letter of an operator whose writes, where they do not hold it, are sums over it."""
    held = {tensor for tensor, _ in places}
    return Letter("parallel" if held.issuperset(c.operator.writes) else "summed", places)


def whole(c: Context, *tensors: int) -> list[Letter]:
    """Every dim of these tensors on its own, whole."""
    return [Letter("whole", [place]) for place in places_of(c, *tensors)]


def along(c: Context, dims: Iterable[int], tensors: Iterable[int] | None = None) -> Rule:
    """Tensors of one rank: whole in the dims that the operator works along or changes, parallel in the others."""
    rank = len(c.shape(c.out))
    every = (*c.operator.writes, *c.operator.reads) if tensors is None else tensors
    alike = [tensor for tensor in every if len(c.shape(tensor)) == rank]
    worked = {dim % rank for dim in dims} if rank else set()
    found = Rule()
    for dim in range(rank):
        places = [(tensor, dim) for tensor in alike]
        if len({c.size(place) for place in places}) > 1:
            found.letters += [Letter("whole", [place]) for place in places]
        else:
            found.letters.append(Letter("whole" if dim in worked else "parallel", places))
    return found
