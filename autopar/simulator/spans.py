"""The run as spans: parallel arrays, sorted by rank, then start, then stream."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from autopar.documents.timeline import Spans
from autopar.simulator.engine import Rank, Run, Transfer

STREAMS = ("compute", "collective", "dp", "send")
KINDS = (
    "forward", "backward", "recompute", "tp", "cp", "ep", "pp", "dp", "gather", "reduce",
    "send_forward", "send_backward", "optimizer", "overhead",
)  # fmt: skip
_STREAM = {name: number for number, name in enumerate(STREAMS)}
_KIND = {name: number for number, name in enumerate(KINDS)}
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(slots=True)
class _Columns:
    """Blocks of rows, column by column: rank, stream, kind, stage, micro_batch; start, seconds."""

    whole: list[Ints] = field(default_factory=list)
    real: list[Floats] = field(default_factory=list)

    def add(
        self, rank: int, stream: str, kind: str | list[str], stage: int | list[int], micro_batch: Ints | list[int],
        start: Floats | list[float], seconds: float | list[float],
    ) -> None:  # fmt: skip
        kinds = _KIND[kind] if isinstance(kind, str) else [_KIND[name] for name in kind]
        whole = np.empty((5, len(start)), dtype=np.int64)
        whole[0], whole[1], whole[2], whole[3], whole[4] = rank, _STREAM[stream], kinds, stage, micro_batch
        real = np.empty((2, len(start)))
        real[0], real[1] = start, seconds
        self.whole.append(whole)
        self.real.append(real)


def spans(run: Run, pp: int) -> Spans:
    """All spans of the run."""
    columns = _Columns()
    for rank in run.ranks:
        _actions(columns, rank, pp)
        _transfers(columns, rank.number, "dp", rank.dp)
        _transfers(columns, rank.number, "send", rank.sends)
        if rank.optimizer_seconds > 0:
            columns.add(
                rank.number, "compute", "optimizer", rank.number, [-1], [rank.optimizer_start], rank.optimizer_seconds
            )
    return _sorted(columns)


def _actions(columns: _Columns, rank: Rank, pp: int) -> None:
    """Every piece of every action, all micro-batches of a (chunk, phase) at once."""
    begins = np.array(rank.begins)
    order = np.array(rank.order, dtype=np.int64).reshape(-1, 3)
    for chunk, phases in enumerate(rank.tasks):
        for backward, task in enumerate(phases):
            chosen = np.flatnonzero((order[:, 0] == backward) & (order[:, 1] == chunk))
            for piece in task.pieces:
                start = begins[chosen] + piece.offset
                stage, micro_batch = chunk * pp + rank.number, order[chosen, 2]
                columns.add(rank.number, piece.stream, piece.kind, stage, micro_batch, start, piece.seconds)


def _transfers(columns: _Columns, rank: int, stream: str, done: Transfer) -> None:
    columns.add(rank, stream, done.kind, done.stage, done.micro_batch, done.start, done.seconds)


def _sorted(columns: _Columns) -> Spans:
    whole, real = np.concatenate(columns.whole, axis=1), np.concatenate(columns.real, axis=1)
    rows = np.lexsort((whole[1], real[0], whole[0]))
    rank, stream, kind, stage, micro_batch = whole[:, rows]
    start, seconds = real[:, rows]
    # The arrays have the right types and lengths by construction: no second look at every element.
    return Spans.model_construct(
        rank=tuple(rank.tolist()),
        stream=tuple([STREAMS[number] for number in stream.tolist()]),
        kind=tuple([KINDS[number] for number in kind.tolist()]),
        stage=tuple(stage.tolist()),
        micro_batch=tuple(micro_batch.tolist()),
        start=tuple(start.tolist()),
        seconds=tuple(seconds.tolist()),
    )
