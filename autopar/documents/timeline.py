"""The Timeline: every operation of one training step with its stream, and memory over time.

Bulk numbers are parallel arrays: span i is ``(rank[i], stream[i], kind[i], ...)``. Times in seconds from the start.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import model_validator

from autopar.documents.base import Document
from hardware_profiles.schema import Schema


class Spans(Schema):
    """Operations; `rank` is the pp rank (one replica stands for all), `micro_batch` is -1 where none applies.

    Streams: compute, collective (tp, cp, ep inside a stage), dp, send. Kinds: forward, backward, recompute, tp, cp, ep,
    gather, reduce, send_forward, send_backward, optimizer, overhead.
    """

    rank: tuple[int, ...] = ()
    stream: tuple[str, ...] = ()
    kind: tuple[str, ...] = ()
    stage: tuple[int, ...] = ()
    """Virtual stage."""
    micro_batch: tuple[int, ...] = ()
    start: tuple[float, ...] = ()
    seconds: tuple[float, ...] = ()

    @model_validator(mode="after")
    def _same_length(self) -> Spans:
        lengths = {name: len(getattr(self, name)) for name in type(self).model_fields}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"arrays differ in length: {lengths}")
        return self


class Memory(Schema):
    """Bytes on a rank's device after each change; `parts` maps each part's name to its array."""

    rank: tuple[int, ...] = ()
    time: tuple[float, ...] = ()
    parts: dict[str, tuple[float, ...]] = {}

    @model_validator(mode="after")
    def _same_length(self) -> Memory:
        lengths = {len(self.rank), len(self.time), *(len(values) for values in self.parts.values())}
        if len(lengths) > 1:
            raise ValueError(f"arrays differ in length: {sorted(lengths)}")
        return self


class Timeline(Document):
    """One simulated step."""

    kind: ClassVar[str] = "timeline"
    version: ClassVar[int] = 1

    format: str = "autopar-timeline/1"
    plan_hash: str
    step_seconds: float
    seconds_by_part: dict[str, float]
    """Mean over ranks; the keys of `autopar.documents.plan.PARTS`; they add up to the step."""
    peak_bytes: tuple[float, ...]
    """Per pp rank."""
    spans: Spans = Spans()
    memory: Memory = Memory()
