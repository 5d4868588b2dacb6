"""A division of one block class over the tp axis, independent of sizes.

States of a tensor on the axis:

    R       whole on every rank, and so is its gradient
    R*      whole on every rank, but each rank's gradient is only its own share: the sum is due (Megatron's `f`)
    S(d,a)  divided along atom `a` of dim `d`
    P       every rank holds a share of the sum

A conversion changes a state at a site; its backward is the adjoint:

    S -> R*   all_gather      | reduce_scatter        P -> R   all_reduce | identity
    R -> R*   identity        | all_reduce            R -> S   slice      | all_gather
    P -> S    reduce_scatter  | all_gather            S -> R   all_gather | slice
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from autopar.documents.graph import BlockClass, LocalDim, Operator, Site

CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter"]
Boundary = Literal["replicated", "sequence"]


class State(NamedTuple):
    """R, R*, P, or S with its dim and atom."""

    kind: Literal["R", "R*", "S", "P"]
    dim: int = -1
    atom: int = -1


WHOLE, WHOLE_PARTIAL_GRADIENT, PARTIAL = State("R"), State("R*"), State("P")

Movement = Literal["all_gather", "reduce_scatter", "all_reduce", "identity", "slice"]
FORWARD: dict[tuple[str, str], Movement] = {
    ("S", "R*"): "all_gather", ("S", "R"): "all_gather", ("R", "R*"): "identity", ("P", "R"): "all_reduce",
    ("P", "S"): "reduce_scatter", ("R", "S"): "slice", ("P", "R*"): "all_reduce",
}  # fmt: skip
BACKWARD: dict[tuple[str, str], Movement] = {
    ("S", "R*"): "reduce_scatter", ("S", "R"): "slice", ("R", "R*"): "all_reduce", ("P", "R"): "identity",
    ("P", "S"): "all_gather", ("R", "S"): "all_gather", ("P", "R*"): "all_reduce",
}  # fmt: skip


@dataclass(frozen=True)
class SiteConversion:
    """A change of state of a tensor at a site."""

    site: Site
    source: State
    target: State

    @property
    def forward(self) -> Movement:
        """The collective on the way forward (identity and slice move nothing)."""
        return FORWARD[self.source.kind, self.target.kind]

    @property
    def backward(self) -> Movement:
        """Its adjoint."""
        return BACKWARD[self.source.kind, self.target.kind]

    @property
    def dim(self) -> int | None:
        """The tensor dim that is gathered, scattered or sliced."""
        divided = self.source if self.source.kind == "S" else self.target
        return divided.dim if divided.kind == "S" else None


@dataclass(frozen=True)
class CompositeUse:
    """A whole dim divided by a composite: the collectives inside the operator."""

    operator: int
    name: str
    collectives: tuple[tuple[Literal["forward", "backward"], str, int], ...]


@dataclass(frozen=True)
class Division:
    """Which local dim each forward operator divides over the axis; absent operators run whole on every rank."""

    block_class: str
    boundary: Boundary
    divided: Mapping[int, int] = field(default_factory=dict)
    """Forward operator -> number of the local dim it divides."""
    states: Mapping[int, State] = field(default_factory=dict)
    """Tensor -> its state as produced (parameters: as stored)."""
    gathered: frozenset[int] = frozenset()
    """Tensors produced divided of which an operator keeps a gathered copy."""
    conversions: tuple[SiteConversion, ...] = ()
    composites: tuple[CompositeUse, ...] = ()

    @property
    def name(self) -> str:
        """A short description: the boundary and how many operators are divided."""
        return f"{self.boundary}, {len(self.divided)} operators divided" if self.divided else "not divided"

    def atoms(self, block_class: BlockClass) -> set[int]:
        """Atoms that are divided: the degree must divide the size of each."""
        found: set[int] = set()
        for number, dim in self.divided.items():
            atom = divided_atom(block_class, block_class.operator_by_id[number].local_dims[dim])
            if atom is not None:
                found.add(atom)
        return found

    def allows(self, degree: int, block_class: BlockClass, sizes: Mapping[int, int]) -> bool:
        """Whether every divided atom can be divided by the degree."""
        return all(sizes[atom] % degree == 0 for atom in self.atoms(block_class))


def undivided(block_class: str) -> Division:
    """Everything whole on every rank: the division of degree 1."""
    return Division(block_class, "replicated")


def divided_atom(block_class: BlockClass, dim: LocalDim) -> int | None:
    """The atom of an operator-local dim."""
    for position in (*dim.reads, *dim.writes):
        atoms = block_class.tensor_by_id[position.tensor].dims[position.dim]
        if position.atom < len(atoms):
            return atoms[position.atom]
    return None


def position_state(dim: LocalDim, tensor: int, writes: bool) -> State | None:
    """S where the local dim stands in that tensor."""
    for position in dim.writes if writes else dim.reads:
        if position.tensor == tensor:
            return State("S", position.dim, position.atom)
    return None


def is_view(operator: Operator) -> bool:
    """Whether it moves nothing."""
    return operator.traffic == ()
