"""A Timeline as a Chrome trace, which ui.perfetto.dev and chrome://tracing open.

Format: "Trace Event Format" (JSON object form): every event has name, ph, ts, pid, tid; times in microseconds.

    X  a span           process = pipeline rank, thread = stream
    C  bytes by part    one counter per rank, stacked
    s, f  an arrow      from a send to the action that waited for it
    M  names and order of processes and threads
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from autopar.documents.base import write_atomically
from autopar.documents.plan import Plan
from autopar.documents.timeline import Spans, Timeline

STREAMS = ("compute", "collective", "dp", "send")
_MEMORY_THREAD = len(STREAMS)
Event = dict[str, Any]


def write_trace(plan: Plan, timeline: Timeline, path: str | Path) -> None:
    """Write the trace as JSON; raises DocumentError if the place cannot be written."""
    write_atomically(path, json.dumps(chrome_trace(plan, timeline), separators=(",", ":")) + "\n")


def chrome_trace(plan: Plan, timeline: Timeline) -> dict[str, Any]:
    """The trace as a JSON object: `traceEvents`, and what it is of in `otherData`."""
    events = [*_names(plan), *_spans(timeline.spans), *_arrows(plan, timeline.spans), *_counters(timeline)]
    facts = {
        "plan": timeline.plan_hash,
        "model": plan.model.spec,
        "cluster": plan.cluster.name,
        "step_seconds": timeline.step_seconds,
        "seconds_by_part": timeline.seconds_by_part,
    }
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": facts}


def _names(plan: Plan) -> list[Event]:
    events: list[Event] = []
    for rank in range(plan.mesh.pp):
        events.append(_meta("process_name", rank, 0, {"name": f"pipeline rank {rank}"}))
        events.append(_meta("process_sort_index", rank, 0, {"sort_index": rank}))
        for thread, stream in enumerate(STREAMS):
            events.append(_meta("thread_name", rank, thread, {"name": stream}))
            events.append(_meta("thread_sort_index", rank, thread, {"sort_index": thread}))
    return events


def _meta(name: str, rank: int, thread: int, arguments: dict[str, Any]) -> Event:
    return {"name": name, "ph": "M", "ts": 0, "pid": rank, "tid": thread, "args": arguments}


def _microseconds(seconds: float) -> float:
    """Rounded to nanoseconds, so that spans that touch still touch."""
    return round(seconds * 1e6, 3)


def _spans(spans: Spans) -> list[Event]:
    columns = (spans.rank, spans.stream, spans.kind, spans.stage, spans.micro_batch, spans.start, spans.seconds)
    return [
        {
            "name": kind if micro_batch < 0 else f"{kind} {micro_batch}",
            "cat": kind,
            "ph": "X",
            "ts": _microseconds(start),
            "dur": round(_microseconds(start + seconds) - _microseconds(start), 3),
            "pid": rank,
            "tid": STREAMS.index(stream),
            "args": {"stage": stage, "micro_batch": micro_batch},
        }
        for rank, stream, kind, stage, micro_batch, start, seconds in zip(*columns, strict=True)
    ]


def _arrows(plan: Plan, spans: Spans) -> list[Event]:
    """From each send to the forward or backward that takes it in."""
    first: dict[tuple[bool, int, int], tuple[int, float]] = {}
    for i, kind in enumerate(spans.kind):
        # Recompute and overhead stand before the phase's own span, but only that span names the phase.
        if kind in ("forward", "backward"):
            first[kind == "backward", spans.stage[i], spans.micro_batch[i]] = (spans.rank[i], spans.start[i])
    events: list[Event] = []
    for i, kind in enumerate(spans.kind):
        if kind not in ("send_forward", "send_backward"):
            continue
        backward = kind == "send_backward"
        taker = first.get((backward, spans.stage[i] + (-1 if backward else 1), spans.micro_batch[i]))
        if taker is None:
            continue
        shared = {"name": kind, "cat": "send", "id": i}
        send = {"ph": "s", "ts": _microseconds(spans.start[i]), "pid": spans.rank[i], "tid": STREAMS.index("send")}
        take = {"ph": "f", "bp": "e", "ts": _microseconds(taker[1]), "pid": taker[0], "tid": STREAMS.index("compute")}
        events += ({**shared, **send}, {**shared, **take})
    return events


def _counters(timeline: Timeline) -> list[Event]:
    memory = timeline.memory
    names = [name for name, values in memory.parts.items() if any(values)]
    return [
        {
            "name": "device memory, bytes",
            "ph": "C",
            "ts": _microseconds(time),
            "pid": rank,
            "tid": _MEMORY_THREAD,
            "args": {name: memory.parts[name][i] for name in names},
        }
        for i, (rank, time) in enumerate(zip(memory.rank, memory.time, strict=True))
    ]
