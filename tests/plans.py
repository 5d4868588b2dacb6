"""Small plans with a bill of one's choice, for tests of everything that reads a Plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autopar.documents.graph import ModelInfo
from autopar.documents.plan import (
    ActionCost,
    ChunkCost,
    ClusterRef,
    Mesh,
    Plan,
    Predicted,
    Schedule,
    ScheduleName,
    Stage,
    StageCost,
    Workload,
)

Seconds = float | ActionCost


def make_plan(
    pp: int = 4,
    m: int = 8,
    v: int = 1,
    schedule: ScheduleName = "1f1b",
    forward: Seconds | Sequence[Seconds] = 1.0,
    backward: Seconds | Sequence[Seconds] = 2.0,
    *,
    send: float = 0.0,
    activation: float | Sequence[float] = 0.0,
    gather: float = 0.0,
    reduce: float = 0.0,
    dp: int = 1,
    capacity: float = 0.0,
    **stage: Any,
) -> Plan:
    """A plan of one block per virtual stage.

    forward, backward, activation: one figure for all, or one per virtual stage (chunk * pp + rank); seconds may be a
    whole ActionCost. gather, reduce: dp seconds of every chunk. Further keywords are fields of every StageCost.
    """
    stages = pp * v
    forwards, backwards, kept = (_each(value, stages) for value in (forward, backward, activation))
    chunks = [
        ChunkCost(
            forward=_action(forwards[number]),
            backward=_action(backwards[number]),
            send_seconds=send if number < stages - 1 else 0.0,
            activation_bytes=kept[number],
            gather_seconds=gather,
            reduce_seconds=reduce,
        )
        for number in range(stages)
    ]
    return Plan(
        autopar_version="0",
        model=ModelInfo(spec="test", hash="0", parameters=0),
        cluster=ClusterRef(name="test", spec="test", devices=pp * dp, hash="0"),
        workload=Workload(global_batch=m * dp, seq_len=1),
        mesh=Mesh(pp=pp, dp_shard=dp),
        schedule=Schedule(name=schedule, virtual_stages=v, micro_batch=1, micro_batches=m),
        stages=tuple(
            Stage(chunks=tuple({"blocks": (chunk * pp + rank, chunk * pp + rank)} for chunk in range(v)))
            for rank in range(pp)
        ),
        costs=tuple(StageCost(chunks=tuple(chunks[rank::pp]), **stage) for rank in range(pp)),
        predicted=Predicted(
            step_seconds=0.0,
            step_seconds_low=0.0,
            step_seconds_high=0.0,
            tokens_per_second=0.0,
            mfu=0.0,
            bubble_fraction=0.0,
            seconds_by_part={},
            peak_bytes=(0.0,) * pp,
            capacity_bytes=(capacity,) * pp,
        ),
    )


def _each(value: Any, stages: int) -> list[Any]:
    values = list(value) if isinstance(value, Sequence) else [value] * stages
    assert len(values) == stages, f"{len(values)} figures for {stages} virtual stages"
    return values


def _action(seconds: Seconds) -> ActionCost:
    return seconds if isinstance(seconds, ActionCost) else ActionCost(compute_seconds=seconds)
