"""A lower bound for every configuration, from sums alone: tens of thousands in a second.

    step >= (m - 1/v) g(max(A, W*)) + p A / v + sends + U + b D
    step >= (m - 1/v - 1) max(A, W*) + p A / v + sends + U + D

A: work of all layers over p, with the share of dp collectives that nothing hides; W*: the least that the busiest
stage can have when blocks are whole, one or more a chunk; g and sends as in `estimate`. Of an average stage, U: the update; D:
what it gathers and reduces once a step, of which a share b hides behind nothing and the rest behind one forward and one backward
at most. Recompute counts at the cheapest entry of its menu. Every term is at most what the stages' own objective has
(`estimate.Pipeline`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from autopar.planner.bills import Bills
from autopar.planner.case import Case, Model, Totals
from autopar.planner.estimate import Pipeline
from autopar.planner.space import Configuration


def by_bound(model: Model, space: Sequence[Configuration]) -> list[tuple[float, Configuration]]:
    """Configurations with their bounds, least first; of equal ones the simpler first."""
    bounds = _Bounds(model)
    return sorted(((bounds.seconds(c), c) for c in space), key=lambda item: (item[0], _simplicity(item[1])))


def _simplicity(c: Configuration) -> tuple[int, ...]:
    """Less pipeline, less tensor parallelism, fewer chunks, 1F1B before GPipe, lower ZeRO."""
    return (c.pp, c.tp, c.virtual_stages, int(c.schedule == "gpipe"), c.zero, int(c.sp), c.micro_batch)


class _DataParallel(NamedTuple):
    """Seconds of collectives over dp, of the update, and the share of the former that nothing hides."""

    per_action: float
    per_step: float
    update: float
    bare: float


class _Bounds:
    """Terms that many configurations share, kept by what they depend on."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.busiest: dict[tuple[int, bool, int, int, int], float] = {}
        self.terms: dict[tuple[int, ...], _DataParallel] = {}
        self.sends: dict[tuple[int, ...], float] = {}

    def seconds(self, c: Configuration) -> float:
        """The bound of one configuration."""
        totals, dp = self.model.totals(c), self._data_parallel(c)
        average = max(totals.work / c.pp + dp.per_action * dp.bare, dp.per_action)
        most = max(average, self._busiest(c, totals))
        pipeline = Pipeline(c.pp, c.micro_batches, c.virtual_stages, self._send(c), c.schedule, totals.forward_share)
        others = average * c.pp / c.virtual_stages + pipeline.sends_seconds + dp.update
        bound = pipeline.rounds * pipeline.pace(most) + others + dp.per_step * dp.bare
        if pipeline.rounds < 1:
            return bound
        # What runs once a step hides behind one forward and one backward of its stage, no more.
        return max(bound, (pipeline.rounds - 1) * pipeline.pace(most, least=True) + others + dp.per_step)

    def _data_parallel(self, c: Configuration) -> _DataParallel:
        """Gathers and reductions of an average stage."""
        key = (c.pp, c.tp, c.dp, c.zero, int(c.micro_batches > 1))
        if key not in self.terms:
            bills: Bills = Case(self.model, c).bills
            each = self.model.totals(c).parameters / c.pp
            dp = bills.data_parallel(each, 0.0)
            per_action = 2 * dp.gather if dp.gathers == "each_action" else 0.0
            per_action += dp.reduce if dp.reduces == "each_backward" else 0.0
            per_step = (dp.gather if dp.gathers == "once" else 0.0) + (dp.reduce if dp.reduces == "once" else 0.0)
            self.terms[key] = _DataParallel(per_action, per_step, bills.optimizer_seconds(each), 1 - bills.overlap)
        return self.terms[key]

    def _send(self, c: Configuration) -> float:
        key = (c.tp, int(c.sp), c.micro_batch, c.dp, min(c.pp, 2))
        if key not in self.sends:
            self.sends[key] = Case(self.model, c).pipeline.send_seconds
        return self.sends[key]

    def _busiest(self, c: Configuration, totals: Totals) -> float:
        key = (c.tp, c.sp, c.micro_batch, c.pp, c.virtual_stages)
        if key not in self.busiest:
            works = totals.works
            if c.pp == 1:
                self.busiest[key] = 0.0
            elif self.model.is_equal and len(works) >= 3:
                self.busiest[key] = least_busiest(works, c.pp, c.virtual_stages)
            else:
                self.busiest[key] = max(works)
        return self.busiest[key]


def least_busiest(works: Sequence[float], stages: int, chunks: int) -> float:
    """The least that the busiest stage can have: equal blocks between unequal ends, `chunks` or more a stage."""
    unit = works[1]
    first, last = works[0] - works[1], works[-1] - works[1]
    # The busiest stage is one of these sums: the smallest under which all blocks find room.
    sums = sorted(end + count * unit for end in {first, last, 0.0} for count in range(chunks, len(works) + 1))
    low, high = 0, len(sums) - 1
    while low < high:
        middle = (low + high) // 2
        if _has_room(sums[middle], len(works), stages, chunks, unit, first, last):
            high = middle
        else:
            low = middle + 1
    return sums[low] if _has_room(sums[low], len(works), stages, chunks, unit, first, last) else sum(works) / stages


def _has_room(most: float, blocks: int, stages: int, chunks: int, unit: float, first: float, last: float) -> bool:
    limit = most * (1 + 1e-12)
    if limit < chunks * unit + max(first, last, 0.0):
        return False
    return (limit - first) // unit + (limit - last) // unit + (stages - 2) * (limit // unit) >= blocks
