"""How many micro-batches a pipeline rank holds between their forward and their backward.

    GPipe         m
    1F1B          min(m, p - i)                                              (PipeDream-Flush, arXiv 2104.04473)
    interleaved   min(m v, w + 1) chunks, w = 2 (p - i - 1) + (v - 1) r      warm-up forwards; r micro-batches a round

In the interleaved schedule (Megatron-LM, the same paper; torch's `ScheduleInterleaved1F1B`) a rank walks its v
chunks in rounds of r = m / max(1, m // p) micro-batches, forward through chunks 0..v-1 and backward through v-1..0.
On the first rank w + 1 chunks of 1/v of a stage are 1 + (p - 1)/(p v) times what 1F1B holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Schedule = Literal["gpipe", "1f1b", "interleaved"]


def in_flight(
    schedule: Schedule, stage: int, stages: int, micro_batches: int, virtual_stages: int = 1
) -> tuple[int, ...]:
    """Micro-batches that each chunk of a rank keeps at the moment when it keeps most in all.

    Args:
        schedule: gpipe, 1f1b or interleaved.
        stage: the rank's place in the pipeline, from 0.
        stages: ranks of the pipeline.
        micro_batches: per step.
        virtual_stages: chunks per rank.

    """
    return tuple(int(count) for count in in_flight_by_chunk(schedule, stage, stages, micro_batches, virtual_stages)[-1])


def in_flight_by_chunk(
    schedule: Schedule, stage: int, stages: int, micro_batches: int, virtual_stages: int = 1
) -> NDArray[np.int64]:
    """Chunks in flight, [moments, virtual_stages]: one row for each moment that may be the fullest (before a
    backward).
    """
    if schedule != "interleaved":
        most = micro_batches if schedule == "gpipe" else min(micro_batches, stages - stage)
        return np.full((1, virtual_stages), most, dtype=np.int64)
    total = micro_batches * virtual_stages
    most = min(total, _warm_up(stage, stages, micro_batches, virtual_stages) + 1)
    size = _round(stages, micro_batches)
    order = (np.arange(total) // size) % virtual_stages
    forward = np.cumsum(order[:, None] == np.arange(virtual_stages), axis=0)
    backward = np.cumsum((virtual_stages - 1 - order)[:, None] == np.arange(virtual_stages), axis=0)
    before = np.vstack([np.zeros((1, virtual_stages), dtype=np.int64), backward])
    moments = np.arange(total - most + 1)
    return np.unique(forward[most - 1 + moments] - before[moments], axis=0).astype(np.int64)


def activation_peak(
    schedule: Schedule, stage: int, stages: int, micro_batches: int, chunk_bytes: Sequence[float]
) -> float:
    """The most activation bytes that a rank holds, its chunks keeping `chunk_bytes` each per micro-batch."""
    counts = in_flight_by_chunk(schedule, stage, stages, micro_batches, len(chunk_bytes))
    return float((counts @ np.asarray(chunk_bytes, dtype=np.float64)).max())


def _round(stages: int, micro_batches: int) -> int:
    return micro_batches // max(1, micro_batches // stages)


def _warm_up(stage: int, stages: int, micro_batches: int, virtual_stages: int) -> int:
    return 2 * (stages - stage - 1) + (virtual_stages - 1) * _round(stages, micro_batches)
