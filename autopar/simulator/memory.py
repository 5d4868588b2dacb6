"""Bytes on each rank's device over the step.

    allocated = what does not follow the schedule (StageCost.memory) + activations of every micro-batch in flight
    reserved  = allocated * (1 + reserve_fraction) + communicators + context

A micro-batch's activations live from the start of its forward to the end of its backward.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from autopar.documents.plan import StageCost
from autopar.documents.timeline import Memory
from autopar.simulator.engine import Rank, Run

OUTSIDE_ALLOCATOR = ("communicators", "context")
Floats = npt.NDArray[np.float64]


def memory(costs: tuple[StageCost, ...], run: Run) -> tuple[Memory, tuple[float, ...]]:
    """The memory curves of all ranks, one behind the other, and the peak of each, in bytes."""
    names = list(dict.fromkeys(name for cost in costs for name in cost.memory))
    ranks: list[int] = []
    times: list[float] = []
    parts: dict[str, list[float]] = {name: [] for name in (*names, "activations", "reserve")}
    peaks = []
    for rank, cost in zip(run.ranks, costs, strict=True):
        time, activations = _activations(rank, cost, run.step_seconds)
        fixed = sum(value for name, value in cost.memory.items() if name not in OUTSIDE_ALLOCATOR)
        reserve = (activations + fixed) * cost.reserve_fraction
        for name in names:
            parts[name] += [cost.memory.get(name, 0.0)] * len(time)
        parts["activations"] += activations.tolist()
        parts["reserve"] += reserve.tolist()
        ranks += [rank.number] * len(time)
        times += time.tolist()
        peaks.append(float(sum(cost.memory.values()) + (activations + reserve).max()))
    arrays = {name: tuple(values) for name, values in parts.items()}
    return Memory.model_construct(rank=tuple(ranks), time=tuple(times), parts=arrays), tuple(peaks)


def _activations(rank: Rank, cost: StageCost, step_seconds: float) -> tuple[Floats, Floats]:
    """Times of change and bytes of activations from then on; the first point is the step's start, the last its end."""
    size = [chunk.activation_bytes for chunk in cost.chunks]
    change = [-size[action.chunk] if action.backward else size[action.chunk] for action in rank.order]
    moments = zip(rank.order, rank.starts, rank.ends, strict=True)
    time = [end if action.backward else start for action, start, end in moments]
    curve = np.cumsum(np.array([0.0, *change, 0.0]))
    # Sums of unlike chunks leave rounding dust where all bytes have been given back.
    curve[np.abs(curve) < 1e-9 * max(size, default=0.0)] = 0.0
    return np.array([0.0, *time, step_seconds]), curve
