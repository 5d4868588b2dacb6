"""What one pp rank costs in seconds and bytes, for a configuration: shared by bounds, stages and the finished plan.

memory    states (ZeRO) + in-flight micro-batches * kept bytes + workspace + communicators + context, plus the allocator's reserve
step      work per micro-batch, and what the rank does once a step: exposed gathers and reductions, optimizer
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autopar.planner.columns import Column
from autopar.planner.request import Request
from autopar.planner.space import Configuration
from cost_models.collectives import Kind, collective_seconds
from cost_models.compute import element_bytes, pointwise_seconds
from cost_models.executors import executor
from cost_models.in_flight import Schedule, in_flight_by_chunk
from cost_models.memory import (
    RESERVE_FRACTION,
    communicator_bytes,
    context_bytes,
    optimizer_traffic_bytes,
    state_bytes,
)
from cost_models.overlap import hides, overlap_fraction
from hardware_profiles.chip import Chip
from hardware_profiles.topology import Topology

WORKSPACE_BYTES = 64 * 2**20
"""Matmul workspace (cuBLAS keeps 32 MiB a handle on Hopper) and kernels' scratch."""

Known = dict[tuple[object, ...], float]
"""Prices already asked for: configurations of one search share most of theirs."""


@dataclass(frozen=True)
class Holding:
    """What a rank holds beside its blocks' kept activations."""

    parameters: float
    """Trainable elements after tp and ep."""
    frozen: float = 0.0
    largest_unit: float = 0.0
    """Elements of the largest unit that ZeRO gathers at once."""
    workspace: float = 0.0
    experts: float = 0.0
    """Of the trainable elements, those of experts: their states are divided over the ranks that hold the same experts."""
    scores: float = 0.0
    """Bytes of the model's output for one micro-batch, where the rank makes it."""


@dataclass(frozen=True)
class DataParallel:
    """Collectives over dp of one rank, seconds: one gather, one reduction, and how often each runs."""

    gather: float
    reduce: float
    gathers: Literal["never", "once", "each_action"]
    reduces: Literal["never", "once", "each_backward"]
    bare_share: float
    """Share of the first gather, and of the last reduction, that has nothing to hide behind: one unit's."""

    @property
    def exposed_ends(self) -> float:
        """Seconds of both."""
        return (self.gather + self.reduce) * self.bare_share


class Bills:
    """Prices ranks of one configuration."""

    def __init__(
        self,
        configuration: Configuration,
        request: Request,
        topology: Topology,
        chip: Chip,
        capacity: float,
        known: Known,
    ) -> None:
        self.c, self.request, self.topology, self.chip = configuration, request, topology, chip
        self.capacity, self.known = capacity, known
        self.executor = executor(request.executor)
        self.overlap = overlap_fraction("dp", request.executor, chip) if hides(chip) else 0.0

    def most_in_flight(self, stage: int) -> tuple[int, ...]:
        """Most micro-batches that each chunk has in flight, at whichever moment."""
        c = self.c
        counts = _in_flight(c.schedule, stage, c.pp, c.micro_batches, c.virtual_stages)
        return tuple(int(count) for count in counts.max(axis=0))

    def weight(self, stage: int, sizes: tuple[int, ...]) -> float:
        """Kept micro-batches per block at the fullest moment, of a stage whose chunks hold `sizes` blocks that keep alike."""
        c = self.c
        return _fullest(c.schedule, stage, c.pp, c.micro_batches, sizes) / sum(sizes)

    @cached_property
    def outside(self) -> float:
        """Context and communicators, bytes."""
        return self.communicators + context_bytes(self.chip)

    @cached_property
    def communicators(self) -> float:
        """Bytes of the groups that a rank joins."""
        groups = sum(size > 1 for size in (self.c.pp, self.c.replicas, self.c.tp, self.c.ep))
        return communicator_bytes(self.chip, groups)

    @property
    def allocatable(self) -> float:
        """Bytes the allocator may hand out on one device after margin, context, communicators and its own reserve."""
        free = self.capacity * (1 - self.request.memory_margin) - self.outside
        return free / (1 + RESERVE_FRACTION)

    def states(self, holding: Holding) -> dict[str, float]:
        """Parameters, gradients, optimizer states and gathered units, bytes."""
        if holding.experts and self.c.zero:
            return self._states_with_experts(holding)
        rates = self._rates(self.c.shards)
        amounts = (holding.parameters, holding.largest_unit, holding.frozen)
        return {name: sum(map(operator.mul, rate, amounts)) for name, rate in rates.items()}

    def _states_with_experts(self, holding: Holding) -> dict[str, float]:
        shared = (holding.parameters - holding.experts, holding.largest_unit, holding.frozen)
        pairs = zip(self._rates(self.c.shards).items(), self._rates(self.c.expert_replicas).values(), strict=True)
        return {name: sum(map(operator.mul, rate, shared)) + own[0] * holding.experts for (name, rate), own in pairs}

    def _rates(self, shards: int) -> dict[str, tuple[float, ...]]:
        return _state_rates(
            self.request.optimizer,
            self.request.dtype,
            self.c.zero,
            shards,
            self.c.pp > 1,
            self.c.micro_batches > 1,
            self.executor.name,
        )

    def static(self, holding: Holding) -> float:
        """Allocated bytes that do not follow the schedule."""
        return sum(self.states(holding).values()) + holding.workspace + WORKSPACE_BYTES + self.kept_outputs(holding)

    def kept_outputs(self, holding: Holding) -> float:
        """Bytes of outputs that a pipeline's last stage keeps until the step ends."""
        return holding.scores * self.c.micro_batches * self.executor.kept_outputs if self.c.pp > 1 else 0.0

    def optimizer_seconds(self, held: Holding) -> float:
        """One update of the rank's share."""
        share = held.parameters
        if self.c.zero:
            share = (held.parameters - held.experts) / self.c.shards + held.experts / self.c.expert_replicas
        key = ("optimizer", share)
        if key not in self.known:
            moved = optimizer_traffic_bytes(share, self.request.optimizer, self.request.dtype)
            self.known[key] = float(pointwise_seconds(self.chip, moved, "optimizer"))
        return self.known[key]

    def data_parallel(self, held: Holding) -> DataParallel:
        """Gathers and reductions of a rank, in units of about its largest; experts over the ranks that hold the same ones."""
        if self.c.replicas == 1 and self.c.expert_replicas == 1:
            return DataParallel(0.0, 0.0, "never", "never", 0.0)
        each = self.c.zero == 3 and self.c.pp == 1
        gathers: Literal["never", "once", "each_action"] = (
            "never" if self.c.zero == 0 else "each_action" if each else "once"
        )
        # Zero 2 over several micro-batches keeps whole gradients and reduces after the last (`cost_models.memory.held_as`).
        late = self.c.zero < 2 or self.c.pp > 1 or (self.c.zero == 2 and self.c.micro_batches > 1)
        share = held.largest_unit / held.parameters if held.parameters and self.executor.ends_exposed else 0.0
        gathered = max(element_bytes(self.request.dtype), 2.0)
        reduced = self.executor.gradient_bytes(self.request.dtype)
        gather = self._over_replicas("all_gather", held, gathered, self.c.shards) if self.c.zero else 0.0
        whole = self.c.zero == 1 and self.executor.bf16_all_reduces and self.request.dtype == "bf16"
        kind: Kind = "reduce_scatter" if self.c.zero and not whole else "all_reduce"
        reduce = self._over_replicas(kind, held, reduced, self.c.replicas)
        if self.c.zero in (1, 2):
            gather += self.executor.broadcast_seconds * self.c.shards
        return DataParallel(gather, reduce, gathers, "once" if late else "each_backward", min(share, 1.0))

    def _over_replicas(self, kind: Kind, held: Holding, width: float, ranks: int) -> float:
        """Seconds to move `width` bytes of every element over `ranks`; experts that ep spreads, over replicas of their own."""
        experts = held.experts if self.c.ep * self.c.etp != self.c.tp else 0.0
        units = max(1.0, held.parameters / held.largest_unit) if held.largest_unit else 1.0
        parts = (held.parameters - experts, ranks, self.c.tp), (experts, self.c.expert_replicas, self.c.ep * self.c.etp)
        return sum(
            self._dp_seconds(kind, elements * width, units, own, stride)
            for elements, own, stride in parts
            if elements and own > 1
        )

    def _dp_seconds(self, kind: Kind, bytes_: float, units: float, ranks: int, stride: int) -> float:
        """Seconds of collectives that move `bytes_` together, one for each unit (fully_shard) or for each bucket.

        Never less than one that moves them all.
        """
        by_unit = self.c.zero and self.executor.gathers_units
        pieces = units if by_unit else max(1.0, bytes_ / self.executor.bucket_bytes)
        key = (kind, bytes_, pieces, ranks, stride)
        if key not in self.known:
            group = self.topology.strided(ranks, stride)
            whole, piece = collective_seconds(kind, np.array([bytes_, bytes_ / pieces]), group, self.chip)
            self.known[key] = max(float(whole), pieces * float(piece))
        return self.known[key]

    def send_seconds(self, bytes_: float) -> float:
        """A hidden state to the next stage, where that is slowest."""
        if self.c.pp == 1:
            return 0.0
        stride = self.c.replicas * self.c.tp
        key = ("send", bytes_, stride, self.c.tp, self.c.sp)
        if key not in self.known:
            group = self.topology.neighbours(stride)
            scattered = self.executor.scatters_sends and self.c.tp > 1 and not self.c.sp
            seconds = float(collective_seconds("send", bytes_ / self.c.tp if scattered else bytes_, group, self.chip))
            if scattered:
                own = self.topology.strided(self.c.tp, 1)
                seconds += float(collective_seconds("all_gather", bytes_, own, self.chip))
            self.known[key] = seconds + self.executor.send_seconds
        return self.known[key]

    def per_micro_batch(self, forward: float, backward: float, dp: DataParallel) -> float:
        """Seconds of one forward and one backward, with what of the collectives in each does not hide behind it."""
        seconds = forward + backward
        gather = dp.gather if dp.gathers == "each_action" else 0.0
        reduce = dp.reduce if dp.reduces == "each_backward" else 0.0
        # A backward's gathers and reductions share its compute and the network.
        return seconds + self._exposed(gather, forward) + self._exposed(gather + reduce, backward)

    def once(self, forward: float, backward: float, dp: DataParallel, held: Holding) -> float:
        """Seconds that a rank spends once a step: exposed gathers and reductions, the update."""
        seconds = self.optimizer_seconds(held)
        if dp.gathers == "once":
            seconds += self._with_end(dp.gather, dp.bare_share, forward)
        elif dp.gathers == "each_action":
            seconds += dp.gather * dp.bare_share
        if dp.reduces == "once":
            seconds += self._with_end(dp.reduce, dp.bare_share, backward)
        elif dp.reduces == "each_backward":
            seconds += dp.reduce * dp.bare_share
        return seconds

    def _with_end(self, seconds: float, bare_share: float, beside: float) -> float:
        """The first or last unit of a collective stands bare; of the rest what does not hide."""
        bare = seconds * bare_share
        return bare + self._exposed(seconds - bare, beside)

    def _exposed(self, seconds: float, beside: float) -> float:
        """What of a collective does not hide behind `beside` seconds of compute."""
        return max(seconds * (1 - self.overlap), seconds - beside)


@cache
def _state_rates(
    optimizer: str, dtype: str, zero: int, shards: int, pipelined: bool, accumulating: bool, executor_name: str
) -> dict[str, tuple[float, ...]]:
    """Bytes for each trained element, each of the largest unit, each frozen one: `state_bytes` is linear in the three."""
    found = state_bytes(
        np.array([1.0, 0.0, 0.0]),
        largest_unit=np.array([0.0, 1.0, 0.0]),
        frozen=np.array([0.0, 0.0, 1.0]),
        optimizer=optimizer,
        dtype=dtype,
        zero=zero,
        shards=shards,
        pipelined=pipelined,
        accumulating=accumulating,
        executor=executor_name,
    )
    return {
        "parameters": _rates(found.parameters),
        "gradients": _rates(found.gradients),
        "states": _rates(found.states),
        "gathered": _rates(found.gathered),
    }


def _rates(values: ArrayLike) -> tuple[float, ...]:
    return tuple(np.broadcast_to(np.asarray(values, dtype=np.float64), 3).tolist())


@cache
def _in_flight(schedule: Schedule, stage: int, stages: int, m: int, v: int) -> NDArray[np.int64]:
    return in_flight_by_chunk(schedule, stage, stages, m, v)


@cache
def _fullest(schedule: Schedule, stage: int, stages: int, m: int, sizes: tuple[int, ...]) -> int:
    """Blocks kept, each once per micro-batch, at the fullest moment."""
    return int((_in_flight(schedule, stage, stages, m, len(sizes)) @ np.array(sizes)).max())


def holding(columns: Sequence[tuple[Column, int]]) -> Holding:
    """What a rank holds: columns with how often each occurs on it."""
    parameters = sum(column.price.parameter_elements * count for column, count in columns)
    frozen = sum(column.price.frozen_elements * count for column, count in columns)
    units = [column.price.parameter_elements for column, count in columns if count]
    spaces = [column.price.workspace_bytes for column, count in columns if count]
    experts = sum(column.price.expert_elements * count for column, count in columns)
    scores = max((column.price.scores_bytes for column, count in columns if count), default=0.0)
    return Holding(parameters, frozen, max(units, default=0.0), max(spaces, default=0.0), experts, scores)
