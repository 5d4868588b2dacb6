"""L2: which blocks each stage holds.

    step = (m - 1/v) g(sum_c max_i W_ic) + (1/v) sum_ic W_ic + max_i E_i + 2 (p v - 1) s + stalls

W_ic: seconds of chunk c of stage i per micro-batch (forward, backward, recompute, exposed collectives, embedding and head
included): stages take their chunks in step, p micro-batches each, so every chunk waits for its slowest stage. E_i: once a
step (exposed gradient reduction and parameter gather, optimizer); s: a send; m micro-batches, v chunks per stage. For equal
stages without sends this is the closed form of 1F1B and of the interleaved schedule (Narayanan et al., arXiv 2104.04473).
Sends have a stream of their own, forward and gradient in turn, so that

    1F1B          g(W) = W, stalls = 2 s (m - 1 - ceil((m - 1) / p))
    GPipe         g(W) = max(f W, s) + max((1 - f) W, s), stalls = 0        f: the forward's share of W
    interleaved   g(W) = max(W, 2 v s), stalls = 0

1F1B stalls because a stage i may run only p - i micro-batches ahead of their gradients: a way down n stages and back takes n
actions and 2 (n - 1) sends and lets n more micro-batches in; the longest path goes whole ways and one of what is left.
Interleaved stages run further ahead, which hides sends until they fill the link.

`solve_equal`: blocks of one class: the pattern ILP, y[i, k] = 1 where stage i takes k blocks. `solve_any`: contiguous
intervals of unlike blocks: an exact search over thresholds on W and E with a dynamic programme inside. Both minimise
exactly `step`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil

import numpy as np
import pulp

from autopar.planner.solver import solve
from cost_models.in_flight import Schedule


@dataclass(frozen=True)
class StageChoice:
    """A stage with given blocks: seconds of each chunk per micro-batch, seconds per step, and the recompute mix."""

    chunks: tuple[float, ...]
    once: float
    mix: tuple[tuple[str, tuple[int, ...]], ...]
    """Class -> how many of its blocks take each entry of the class's menu."""

    @property
    def work(self) -> float:
        """Seconds per micro-batch, all chunks together."""
        return sum(self.chunks)


@dataclass(frozen=True)
class Answer:
    """Blocks per stage in order, and the step they take."""

    counts: tuple[int, ...]
    step_seconds: float


@dataclass(frozen=True)
class Pipeline:
    """The numbers of a configuration that the objective needs."""

    stages: int
    micro_batches: int
    virtual_stages: int
    send_seconds: float
    schedule: Schedule = "1f1b"
    forward_share: float = 1 / 3
    """Of a stage's work."""

    @property
    def rounds(self) -> float:
        """How often the busiest stage's pace counts beside the sum."""
        return self.micro_batches - 1 / self.virtual_stages

    @property
    def sends_seconds(self) -> float:
        """Sends that nothing hides: the first micro-batch down all chunks, the last gradient back, 1F1B's stalls."""
        fill = self.stages * self.virtual_stages - 1
        more = self.micro_batches - 1
        stalls = more - ceil(more / self.stages) if self.schedule == "1f1b" else 0
        return 2 * (fill + stalls) * self.send_seconds

    @cached_property
    def pace_lines(self) -> tuple[tuple[float, float], ...]:
        """(slope, constant) whose largest value at W is the pace g(W)."""
        s, f = self.send_seconds, self.forward_share
        if s == 0 or self.schedule == "1f1b":
            return ((1.0, 0.0),)
        if self.schedule == "gpipe":
            return ((1.0, 0.0), (f, s), (1 - f, s), (0.0, 2 * s))
        return ((1.0, 0.0), (0.0, 2 * self.virtual_stages * s))

    def pace(self, work: float, least: bool = False) -> float:
        """Seconds per micro-batch at which a pipeline runs whose busiest stage takes `work`; `least`: or its link, not both."""
        return max(slope * work + constant for slope, constant in self.pace_lines if not least or slope in (0, 1))

    def step_seconds(self, stages: Sequence[Sequence[float]], once: float) -> float:
        """The objective, from seconds of each stage's chunks and the longest that a stage spends once a step."""
        slowest = sum(max(chunk) for chunk in zip(*stages, strict=True))
        total = sum(sum(chunks) for chunks in stages)
        return self.rounds * self.pace(slowest) + total / self.virtual_stages + once + self.sends_seconds

    def most_work(self, limit: float, least_total: float) -> float:
        """W beyond which no stage may go if the step is to stay below `limit`; `least_total` bounds sum W from below."""
        free = limit - least_total / self.virtual_stages - self.sends_seconds
        if self.rounds == 0:
            return float("inf")
        pace = free / self.rounds
        if any(slope == 0 and constant > pace for slope, constant in self.pace_lines):
            return 0.0
        return min((pace - constant) / slope for slope, constant in self.pace_lines if slope > 0)


def chunk_sizes(blocks: int, pipeline: Pipeline, stage: int) -> tuple[int, ...]:
    """Blocks of each chunk of a stage: equal but for one; the larger ones are the last, which keep fewest micro-batches.

    On the last stage the very last is larger only if all others are, since the head stands in it.
    """
    v = pipeline.virtual_stages
    size, larger = divmod(blocks, v)
    spared = int(v > 1 and stage == pipeline.stages - 1)
    return (size,) * (v - larger - spared) + (size + 1,) * larger + (size,) * spared


def solve_equal(
    pipeline: Pipeline, blocks: int, choice: Callable[[int, int], StageChoice | None], most_work: float
) -> Answer | None:
    """Counts per stage for `blocks` equal blocks, one or more a chunk; None where no stage assignment fits.

    `choice(stage, k)` is None where k blocks do not fit the stage. `most_work` cuts stages that could not win.
    """
    table = _columns(pipeline.stages, blocks, choice, most_work, pipeline.virtual_stages)
    if table is None:
        return None
    if pipeline.stages == 1:
        return (
            Answer((blocks,), pipeline.step_seconds([table[0][blocks].chunks], table[0][blocks].once))
            if blocks in table[0]
            else None
        )
    table = _competitive(pipeline, blocks, table)
    if table is None:
        return None
    problem = pulp.LpProblem("stages", pulp.LpMinimize)
    pace, latest = (pulp.LpVariable(name, lowBound=0) for name in ("pace", "latest"))
    slowest = [pulp.LpVariable(f"slowest_{c}", lowBound=0) for c in range(pipeline.virtual_stages)]
    take = {(i, k): pulp.LpVariable(f"y_{i}_{k}", cat="Binary") for i, column in enumerate(table) for k in column}
    v = pipeline.virtual_stages
    objective = [(take[i, k], table[i][k].work / v) for i, k in take]
    problem += pulp.LpAffineExpression([*objective, (pace, pipeline.rounds), (latest, 1)])
    for slope, constant in pipeline.pace_lines:
        problem += pulp.LpAffineExpression([(chunk, slope) for chunk in slowest], constant) <= pace
    for i, column in enumerate(table):
        problem += pulp.LpAffineExpression([(take[i, k], 1) for k in column]) == 1
        for c, chunk in enumerate(slowest):
            problem += pulp.LpAffineExpression([(take[i, k], column[k].chunks[c]) for k in column]) <= chunk
        problem += pulp.LpAffineExpression([(take[i, k], column[k].once) for k in column]) <= latest
    problem += pulp.LpAffineExpression([(take[i, k], k) for i, k in take]) == blocks
    if solve(problem).status != "optimal":
        return None
    counts = tuple(max(column, key=lambda k: take[i, k].value() or 0.0) for i, column in enumerate(table))
    # Solvers read and write a few digits: the step is worked out again from the table.
    chosen = [table[i][k] for i, k in enumerate(counts)]
    return Answer(counts, _step_seconds(pipeline, chosen))


def _step_seconds(pipeline: Pipeline, chosen: Sequence[StageChoice]) -> float:
    return pipeline.step_seconds([choice.chunks for choice in chosen], max(choice.once for choice in chosen))


def _columns(
    stages: int, blocks: int, choice: Callable[[int, int], StageChoice | None], most_work: float, least: int
) -> list[dict[int, StageChoice]] | None:
    """Per stage, k -> choice; work grows with k, so a stage's list ends at the first that is too slow or too large."""
    table = []
    for stage in range(stages):
        column: dict[int, StageChoice] = {}
        for k in range(least, blocks - least * (stages - 1) + 1):
            found = choice(stage, k)
            if found is None or found.work > most_work:
                break
            column[k] = found
        if not column:
            return None
        table.append(column)
    return table


def _competitive(
    pipeline: Pipeline, blocks: int, table: list[dict[int, StageChoice]]
) -> list[dict[int, StageChoice]] | None:
    """The columns that an optimum may use: those no slower than a good answer allows, with room for all blocks.

    The good answer: the least W under which all blocks find room, stages filled up to it. What is cut cannot be optimal.
    """
    works = sorted({choice.work for column in table for choice in column.values()})
    low, high = 0, len(works) - 1
    if _room(table, works[high]) < blocks:
        return None
    while low < high:
        middle = (low + high) // 2
        if _room(table, works[middle]) < blocks:
            low = middle + 1
        else:
            high = middle
    counts = [max(k for k, choice in column.items() if choice.work <= works[low]) for column in table]
    while sum(counts) > blocks:
        slowest = max((i for i, k in enumerate(counts) if k - 1 in table[i]), key=lambda i: table[i][counts[i]].work)
        counts[slowest] -= 1
    chosen = [column[k] for column, k in zip(table, counts, strict=True)]
    good = _step_seconds(pipeline, chosen)
    least = sum(min(choice.work for choice in column.values()) for column in table)
    # Work per block is the same on every stage but for recompute, so the total is at least what the leanest blocks cost.
    each = min(
        (column[k].work - column[k - 1].work for column in table for k in column if k - 1 in column), default=0.0
    )
    least += each * (blocks - sum(min(column) for column in table))
    most = pipeline.most_work(good, least) * (1 + 1e-9)
    kept = [{k: choice for k, choice in column.items() if choice.work <= most} for column in table]
    largest = [max(column) for column in kept]
    spare = sum(largest) - blocks
    return [{k: choice for k, choice in column.items() if k >= max(column) - spare} for column in kept]


def _room(table: list[dict[int, StageChoice]], limit: float) -> int:
    """Most blocks that fit with every stage's work at most `limit`; none where a stage can take no block."""
    total = 0
    for column in table:
        fitting = [k for k, choice in column.items() if choice.work <= limit]
        if not fitting:
            return -1
        total += max(fitting)
    return total


def solve_any(
    pipeline: Pipeline, blocks: int, choice: Callable[[int, int, int], StageChoice | None], most_work: float
) -> Answer | None:
    """Counts per stage for a sequence of unlike blocks; ``choice(stage, first, end)`` holds blocks first..end-1."""
    p = pipeline.stages
    works = np.full((p, blocks + 1, blocks + 1), np.inf)
    onces = np.full_like(works, np.inf)
    for stage in range(p):
        for first in range(stage, blocks - (p - 1 - stage)):
            if stage == 0 and first:
                break
            for end in range(first + 1, blocks - (p - 1 - stage) + 1):
                found = choice(stage, first, end)
                if found is None or found.work > most_work:
                    break
                works[stage, first, end], onces[stage, first, end] = found.work, found.once
    return _search_thresholds(pipeline, works, onces)


def _search_thresholds(pipeline: Pipeline, works: np.ndarray, onces: np.ndarray) -> Answer | None:
    """Exact: of the answers whose largest E is at most e, the best in W and sum; then a smaller e, until none can win."""
    best: Answer | None = None
    limit = np.inf
    while True:
        allowed = np.where(onces <= limit, works, np.inf)
        found = _best_work(pipeline, allowed)
        if found is None:
            return best
        path, value = found
        latest = max(onces[i, a, b] for i, (a, b) in enumerate(path))
        step = value + latest + pipeline.sends_seconds
        if best is None or step < best.step_seconds:
            best = Answer(tuple(b - a for a, b in path), step)
        smaller = onces[(onces < latest) & np.isfinite(onces)]
        if not smaller.size or value + smaller.min() + pipeline.sends_seconds >= best.step_seconds:
            return best
        limit = smaller.max()


def _best_work(pipeline: Pipeline, works: np.ndarray) -> tuple[list[tuple[int, int]], float] | None:
    """Least ``(m - 1/v) g(max W) + sum W / v``: thresholds on max W in rising order, until the sum cannot make up for them."""
    v = pipeline.virtual_stages
    least = _path(works, np.inf)
    if least is None:
        return None
    values = np.unique(works[np.isfinite(works)])
    low, high = 0, len(values) - 1
    while low < high:
        middle = (low + high) // 2
        if _path(works, values[middle]) is None:
            low = middle + 1
        else:
            high = middle
    best: tuple[list[tuple[int, int]], float] | None = None
    for threshold in values[low:]:
        if best is not None and pipeline.rounds * pipeline.pace(float(threshold)) + least[1] / v >= best[1]:
            break
        found = _path(works, threshold)
        assert found is not None
        path, total = found
        slowest = max(works[i, a, b] for i, (a, b) in enumerate(path))
        value = pipeline.rounds * pipeline.pace(float(slowest)) + total / v
        if best is None or value < best[1]:
            best = (path, float(value))
    return best


def _path(works: np.ndarray, threshold: float) -> tuple[list[tuple[int, int]], float] | None:
    """Least sum of W over contiguous intervals with every W at most the threshold."""
    stages, size, _ = works.shape
    cost = np.full(size, np.inf)
    cost[0] = 0.0
    back = []
    for stage in range(stages):
        total = cost[:, None] + np.where(works[stage] <= threshold, works[stage], np.inf)
        back.append(np.argmin(total, axis=0))
        cost = total.min(axis=0)
    if not np.isfinite(cost[-1]):
        return None
    path, end = [], size - 1
    for stage in reversed(range(stages)):
        first = int(back[stage][end])
        path.append((first, end))
        end = first
    return path[::-1], float(cost[-1])
