"""A lower bound for every configuration, from sums alone: tens of thousands in a second.

    step >= (m - 1/v) g(max(A, W*)) + p A / v + sends + U + b D
    step >= (m - 1/v - 1) max(A, W*) + p A / v + sends + U + D
    step >= m A                                                            of all schedules, chunks and ZeRO stages at once

A: work of all layers over p, with the share of dp collectives that nothing hides (in the last line, without); W*: the least
that the busiest stage can have when blocks are whole, one or more a chunk; g and sends as in `estimate`. Of an average stage,
U: the update; D: what it gathers and reduces once a step, of which a share b hides behind nothing and the rest behind one
forward and one backward at most. Recompute counts at the cheapest entry of its menu. Every term is at most what the stages'
own objective has (`estimate.Pipeline`).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from autopar.planner.bills import Bills, Holding
from autopar.planner.case import Case, Model, Totals
from autopar.planner.estimate import Pipeline
from autopar.planner.space import Configuration, Offer, Prefix, expand

ROUNDING = 1e-9
"""A prefix comes before its configurations also where their bounds are equal."""


class Ranked:
    """Every configuration with its bound, least first, of equal ones the simpler first.

    Configurations of a prefix are bounded one by one only when the prefix's own bound comes up.
    """

    def __init__(self, model: Model, offer: Offer, prefixes: Sequence[Prefix], bounds: _Bounds | None = None) -> None:
        self.model, self.offer, self.prefixes = model, offer, prefixes
        self._bounds = bounds or _Bounds(model)

    def __len__(self) -> int:
        return sum(1 for _ in self.configurations())

    def configurations(self) -> Iterator[Configuration]:
        """In no order."""
        for prefix in self.prefixes:
            yield from expand(self.model.request, self.offer, prefix)

    def __iter__(self) -> Iterator[tuple[float, Configuration]]:
        heap: list[tuple[float, tuple[int, ...], int, Prefix | Configuration]] = [
            (self._bounds.least(prefix), (), number, prefix) for number, prefix in enumerate(self.prefixes)
        ]
        heapq.heapify(heap)
        count = len(heap)
        while heap:
            bound, _, _, found = heapq.heappop(heap)
            if isinstance(found, Configuration):
                yield bound, found
                continue
            for c in expand(self.model.request, self.offer, found):
                count += 1
                heapq.heappush(heap, (self._bounds.seconds(c), _simplicity(c), count, c))

    def only(self, wanted: Callable[[Prefix], bool]) -> Ranked:
        """Those of some prefixes."""
        return Ranked(self.model, self.offer, [p for p in self.prefixes if wanted(p)], self._bounds)


def _simplicity(c: Configuration) -> tuple[int, ...]:
    """Fewer axes, less pipeline, less tensor parallelism, fewer chunks, 1F1B before GPipe, lower ZeRO."""
    gpipe = int(c.schedule == "gpipe")
    return (c.cp, c.ep, c.pp, c.tp, c.virtual_stages, gpipe, c.zero, int(c.sp), c.micro_batch, -c.etp)


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
        self.busiest: dict[tuple[object, ...], float] = {}
        self.terms: dict[tuple[object, ...], _DataParallel] = {}
        self.sends: dict[tuple[object, ...], float] = {}
        self.known: dict[Configuration, float] = {}

    def least(self, prefix: Prefix) -> float:
        """The bound of all configurations of a prefix."""
        work = self.model.totals(prefix.inside, prefix.micro_batch).work
        return prefix.micro_batches * work / prefix.pp * (1 - ROUNDING)

    def seconds(self, c: Configuration) -> float:
        """The bound of one configuration."""
        if c not in self.known:
            self.known[c] = self._seconds(c)
        return self.known[c]

    def _seconds(self, c: Configuration) -> float:
        totals, dp = self.model.totals(c.inside, c.micro_batch), self._data_parallel(c)
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
        key = (c.pp, c.inside, c.dp, c.zero, c.micro_batches > 1)
        if key not in self.terms:
            bills: Bills = Case(self.model, c).bills
            totals = self.model.totals(c.inside, c.micro_batch)
            each = Holding(totals.parameters / c.pp, experts=totals.experts / c.pp)
            dp = bills.data_parallel(each)
            per_action = 2 * dp.gather if dp.gathers == "each_action" else 0.0
            per_action += dp.reduce if dp.reduces == "each_backward" else 0.0
            per_step = (dp.gather if dp.gathers == "once" else 0.0) + (dp.reduce if dp.reduces == "once" else 0.0)
            self.terms[key] = _DataParallel(per_action, per_step, bills.optimizer_seconds(each), 1 - bills.overlap)
        return self.terms[key]

    def _send(self, c: Configuration) -> float:
        key = (c.inside, c.micro_batch, c.dp, min(c.pp, 2))
        if key not in self.sends:
            self.sends[key] = Case(self.model, c).pipeline.send_seconds
        return self.sends[key]

    def _busiest(self, c: Configuration, totals: Totals) -> float:
        key = (c.inside, c.micro_batch, c.pp, c.virtual_stages)
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
