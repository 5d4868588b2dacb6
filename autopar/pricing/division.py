"""How one block class is divided over one mesh axis: placements, conversions, and the collectives these imply.

An activation x and its gradient g travel together, so a placement says both (t ranks on the axis):

    REPLICATE   x whole,            g whole                         SHARED   x whole, g a partial sum
    shard(d)    x divided on dim d, g divided on dim d              PARTIAL  x a partial sum, g whole

Converting a placement at a site costs `forward_collective`; its adjoint costs `backward_collective`: an all-gather
(shard to SHARED) comes back as a reduce-scatter, an identity (REPLICATE to SHARED) as an all-reduce, a reduce-scatter
(PARTIAL to shard) as an all-gather.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from autopar.documents.graph import Site
from autopar.documents.plan import Axis

Kind = Literal["replicate", "shared", "partial", "shard"]
CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
ConversionKind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "slice", "identity"]
Boundary = Literal["replicate", "sequence"]

PASS_SHARED = "~shared"
"""Choice of an operator that runs whole on every rank and hands a partial gradient on."""
PASS_PARTIAL = "~partial"
"""Choice of a linear operator that runs on partial sums."""


class Placement(NamedTuple):
    """Placement of a tensor and its gradient on the axis; `dim` and `atom` only for ``shard``."""

    kind: Kind
    dim: int = -1
    atom: int = -1

    @property
    def divided(self) -> bool:
        """Whether a rank holds only its part."""
        return self.kind == "shard"


REPLICATE = Placement("replicate")
SHARED = Placement("shared")
PARTIAL = Placement("partial")


def shard(dim: int, atom: int = 0) -> Placement:
    """Divided on an atom of a dim."""
    return Placement("shard", dim, atom)


def gradient(placement: Placement) -> Placement:
    """Placement of the gradient alone, as a value."""
    return {"shared": PARTIAL, "partial": REPLICATE}.get(placement.kind, placement)


def value_collective(source: Placement, target: Placement) -> CollectiveKind | None:
    """The collective that turns one value placement into another; None where local work suffices (slice, identity).

    Raises ValueError for a conversion that has no meaning (a divided value into a partial sum).
    """
    if source.divided and target.kind == "partial":
        raise ValueError(f"{source} cannot become {target}")
    if source == target or (target.kind == "partial"):
        return None
    if source.divided:
        return "all_to_all" if target.divided else "all_gather"
    if source.kind == "partial":
        return "reduce_scatter" if target.divided else "all_reduce"
    return None


def forward_collective(source: Placement, target: Placement) -> CollectiveKind | None:
    """The collective of a conversion in forward."""
    return value_collective(source, target)


def backward_collective(source: Placement, target: Placement) -> CollectiveKind | None:
    """The adjoint: from the gradient of the target to the gradient of the source."""
    return value_collective(gradient(target), gradient(source))


@dataclass(frozen=True)
class SiteConversion:
    """A change of placement at a site; its backward is the adjoint."""

    site: Site
    source: Placement
    target: Placement

    @property
    def kind(self) -> ConversionKind:
        """The forward side, by the names of the plan's conversions."""
        collective = forward_collective(self.source, self.target)
        return collective or ("slice" if self.target.divided else "identity")

    @property
    def dim(self) -> int | None:
        """The tensor dim that is gathered, scattered or sliced; None for all_reduce and identity."""
        divided = self.target if self.target.divided else self.source
        return divided.dim if divided.divided else None


@dataclass(frozen=True)
class Division:
    """One block class over one axis; free of sizes and degrees.

    `choices`: forward operator -> the LocalDim it divides, ``dim:composite``, None (runs whole on every rank),
    PASS_SHARED or PASS_PARTIAL. `placements`: forward tensor -> placement as produced (parameters: as stored).
    """

    block_class: str
    axis: Axis
    boundary: Boundary
    choices: Mapping[int, str | None]
    placements: Mapping[int, Placement]
    conversions: tuple[SiteConversion, ...] = ()
    label: str = field(default="", compare=False)

    @property
    def trivial(self) -> bool:
        """Whether nothing is divided."""
        return not any(placement.divided for placement in self.placements.values())
