"""What each aten operator does with the dims of its tensors.

A rule returns `Letters`: the letters of the operator's einsum, each with its role and the (tensor, dim) places where it stands.
Places of one letter hold the same index and are unified. A view relates whole tensors in row-major order instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import torch

from autopar.tracer.recording import OperatorRecord, Recording, Ref

Role = Literal["parallel", "summed", "whole"]
Place = tuple[int, int]


@dataclass
class Letter:
    """One letter: a role, its places, and named composites that divide a whole one all the same."""

    role: Role
    places: list[Place]
    composites: tuple[tuple[str, tuple[tuple[str, str, int], ...]], ...] = ()
    """(name, ((phase, collective, tensor), ...))"""


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
    return found if found is not None else (pointwise if _is_pointwise(name) else None)


def base_name(name: str) -> str:
    """``aten.mm`` of ``aten.mm.default``."""
    return ".".join(name.split(".")[:2])


@cache
def _is_pointwise(name: str) -> bool:
    parts = name.split(".")
    if len(parts) != 3 or parts[0] != "aten":
        return False
    return torch.Tag.pointwise in getattr(getattr(torch.ops.aten, parts[1]), parts[2]).tags


@rule(
    "aten.clone", "aten._to_copy", "aten.copy_", "aten.detach", "aten.alias", "aten.fill_", "aten.zero_", "aten.zeros_like",
    "aten.ones_like", "aten.empty_like", "aten.full_like", "aten.native_dropout", "aten.native_dropout_backward",
    "aten.masked_fill", "aten.lift_fresh", "aten.bernoulli_", "aten.rand_like", "aten.tril", "aten.triu",
    "aten.to", "aten.contiguous", "aten._conj", "aten.rms_norm", "aten.floor_divide", "aten.softplus_backward", "aten.polar",
    "aten.silu_backward", "aten.gelu_backward",
)  # fmt: skip
def pointwise(c: Context) -> Rule:
    """Every tensor's dims stand, from the right, against those of the first write."""
    out = c.operator.writes[0]
    found = Rule()
    for dim in range(len(c.shape(out))):
        places = [(tensor, own) for tensor in c.operator.writes if (own := _against(c, tensor, out, dim)) is not None]
        places += [(tensor, own) for tensor in c.operator.reads if (own := _against(c, tensor, out, dim)) is not None]
        found.letters.append(Letter("parallel", places))
    if base_name(c.operator.name) in ("aten.detach", "aten.alias", "aten.lift_fresh"):
        found.moves = []
    return found


def _against(c: Context, tensor: int, out: int, dim: int) -> int | None:
    """The dim of `tensor` that is broadcast against `dim` of `out`; None where it has none or size 1."""
    own = dim - len(c.shape(out)) + len(c.shape(tensor))
    return own if own >= 0 and c.shape(tensor)[own] == c.shape(out)[dim] != 1 else None
