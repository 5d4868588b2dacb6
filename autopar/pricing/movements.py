"""Collectives within a block, and which of them recompute repeats."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from autopar.documents.graph import BlockClass, RecomputeOption, element_bytes
from autopar.documents.plan import Axis, Collective
from autopar.pricing.amounts import Amounts
from autopar.pricing.kernels import Point
from autopar.pricing.layout import Layout, Movement
from cost_models.collectives import Kind, collective_seconds
from cost_models.overlap import overlap_fraction
from hardware_profiles.chip import Chip
from hardware_profiles.cluster import Group

ROW_BYTES = 4
"""Vocabulary-parallel loss exchanges one fp32 number a row (maximum, sum, picked logit)."""


class Prices:
    """Seconds of single collectives over a group, each asked for once."""

    def __init__(self, group: Group, chip: Chip) -> None:
        self.group, self.chip = group, chip
        self._seconds: dict[tuple[Kind, float], float] = {}

    def __call__(self, kind: Kind, bytes_: float) -> float:
        """Seconds of one collective of a full buffer."""
        key = (kind, bytes_)
        if key not in self._seconds:
            self._seconds[key] = float(collective_seconds(kind, bytes_, self.group, self.chip))
        return self._seconds[key]


class MovementList:
    """Collectives of one kind after another, compiled for repeated pricing."""

    def __init__(self, movements: Iterable[Movement], block_class: BlockClass, axis: Axis) -> None:
        self.axis: Axis = axis
        self.overlap = overlap_fraction("tp")
        self.amounts: dict[Kind, Amounts] = {}
        by_kind: dict[Kind, list[Movement]] = {}
        for movement in movements:
            by_kind.setdefault(movement.kind, []).append(movement)
        for kind, members in by_kind.items():
            self.amounts[kind] = Amounts(len(members))
            for owner, movement in enumerate(members):
                _add_full_bytes(self.amounts[kind], owner, movement, block_class)

    def price(self, point: Point, known: Prices) -> tuple[Collective, ...]:
        """Equal ones together."""
        if point.degree == 1:
            return ()
        found = []
        for kind, amounts in self.amounts.items():
            sizes, counts = np.unique(np.rint(amounts.evaluate(*point)), return_counts=True)
            for size, count in zip(sizes.tolist(), counts.tolist(), strict=True):
                seconds = known(kind, size) * count
                found.append(
                    Collective(
                        axis=self.axis, kind=kind, count=count, bytes=size, seconds=seconds, overlap=self.overlap
                    )
                )
        return tuple(found)


def _add_full_bytes(amounts: Amounts, owner: int, movement: Movement, block_class: BlockClass) -> None:
    """Bytes of the undivided tensor; for tensor -1 one number a row of the operator's undivided dims."""
    tensors = block_class.tensor_by_id
    if movement.tensor >= 0:
        tensor = tensors[movement.tensor]
        width = 1 if tensor.dtype == "compute" else element_bytes(tensor.dtype, 1)
        amounts.add(owner, tensor.atoms, coefficient=width, compute=tensor.dtype == "compute")
        return
    rows: dict[int, None] = {}
    for dim in block_class.operator_by_id[movement.before].local_dims:
        if dim.role != "whole":
            rows.update((tensors[p.tensor].dims[p.dim][p.atom], None) for p in (*dim.reads, *dim.writes))
    amounts.add(owner, rows, coefficient=ROW_BYTES)


def repeated(option: RecomputeOption, layout: Layout) -> list[Movement]:
    """Forward collectives that run again: out of an operator that runs again, or into one."""
    again = set(option.operators)
    return [m for m in layout.movements if m.phase == "forward" and (m.source in again or m.before in again)]
