"""L2: which blocks each stage holds, so that the step of `estimate` is least. Every answer is exact.

One chunk a stage: thresholds on the largest W and the largest E, in rising order, with a dynamic programme for the least sum
inside; `solve_equal` for blocks of one class, `solve_any` for contiguous intervals of unlike ones. Several chunks a stage couple
through every chunk's slowest stage: `solve_equal` then tries the few counts that an optimum may have, or where they are many
solves the pattern ILP, y[i, k] = 1 where stage i takes k blocks. All find the same (tested).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import numpy as np
import pulp

from autopar.planner.estimate import Pipeline, StageChoice
from autopar.planner.solver import solve


@dataclass(frozen=True)
class Answer:
    """Blocks per stage in order, and the step they take."""

    counts: tuple[int, ...]
    step_seconds: float


def solve_equal(
    pipeline: Pipeline,
    blocks: int,
    choice: Callable[[int, int], StageChoice | None],
    most_work: float,
    within: float = 0.0,
) -> Answer | None:
    """Counts per stage for `blocks` equal blocks, one or more a chunk; None where no stage assignment fits.

    `choice(stage, k)` is None where k blocks do not fit the stage. `most_work` cuts stages that could not win. The step is
    at most `within` (a fraction) above the least.
    """
    table = _columns(pipeline.stages, blocks, choice, most_work, pipeline.virtual_stages)
    if table is None:
        return None
    busiest = _least_busiest(table, blocks)
    if busiest is None:
        return None
    total = _least_total(table, blocks)
    counts = _filled(table, blocks, busiest)
    good = Answer(counts, _step_seconds(pipeline, [column[k] for column, k in zip(table, counts, strict=True)]))
    once = max(min(choice.once for choice in column.values()) for column in table)
    if good.step_seconds <= pipeline.step_of(busiest, total, once) * (1 + within + 1e-12):
        return good
    table = _competitive(blocks, table, pipeline.most_work(good.step_seconds, total))
    if pipeline.virtual_stages == 1:
        return by_thresholds(pipeline, blocks, table)
    few = prod(len(column) for column in table) <= ENUMERATED
    return by_enumeration(pipeline, blocks, table) if few else by_programme(pipeline, blocks, table)


ENUMERATED = 500
"""Ways to choose counts, up to which trying them all takes less time than a solver needs to start."""

Table = list[dict[int, StageChoice]]
"""Per stage, number of blocks -> what they cost there."""


def by_thresholds(pipeline: Pipeline, blocks: int, table: Table) -> Answer | None:
    """The best counts where every stage has one chunk."""
    works = np.full((pipeline.stages, blocks + 1, blocks + 1), np.inf)
    onces = np.full_like(works, np.inf)
    for stage, column in enumerate(table):
        for k, choice in column.items():
            firsts = np.arange(blocks + 1 - k) if stage else np.array([0])
            works[stage, firsts, firsts + k], onces[stage, firsts, firsts + k] = choice.work, choice.once
    return _search_thresholds(pipeline, works, onces)


def by_enumeration(pipeline: Pipeline, blocks: int, table: Table) -> Answer | None:
    """The best counts of all, for any number of chunks."""
    ways = (counts for counts in product(*table) if sum(counts) == blocks)
    answers = (
        Answer(counts, _step_seconds(pipeline, [column[k] for column, k in zip(table, counts, strict=True)]))
        for counts in ways
    )
    return min(answers, key=lambda answer: answer.step_seconds, default=None)


def by_programme(pipeline: Pipeline, blocks: int, table: Table) -> Answer | None:
    """The best counts by the pattern ILP, for any number of chunks."""
    problem = pulp.LpProblem("stages", pulp.LpMinimize)
    pace, latest = (pulp.LpVariable(name, lowBound=0) for name in ("pace", "latest"))
    slowest = [pulp.LpVariable(f"slowest_{c}", lowBound=0) for c in range(pipeline.virtual_stages)]
    take = {(i, k): pulp.LpVariable(f"y_{i}_{k}", cat="Binary") for i, column in enumerate(table) for k in column}
    objective = [(take[i, k], table[i][k].work / pipeline.virtual_stages) for i, k in take]
    problem += pulp.LpAffineExpression([*objective, (pace, pipeline.rounds), (latest, 1)])
    for slope, constant in pipeline.pace_lines:
        problem += pulp.LpAffineExpression([(chunk, slope) for chunk in slowest], constant) <= pace
    for i, column in enumerate(table):
        problem += pulp.LpAffineExpression([(take[i, k], 1) for k in column]) == 1
        for c, chunk in enumerate(slowest):
            problem += pulp.LpAffineExpression([(take[i, k], column[k].chunks[c]) for k in column]) <= chunk
        problem += pulp.LpAffineExpression([(take[i, k], column[k].once) for k in column]) <= latest
    problem += pulp.LpAffineExpression([(take[i, k], k) for i, k in take]) == blocks
    for i in range(1, len(table)):
        if table[i] == table[i - 1]:
            # Stages that cost alike may change places: of two such, the first takes no fewer.
            both = [(take[i - 1, k], k) for k in table[i - 1]] + [(take[i, k], -k) for k in table[i]]
            problem += pulp.LpAffineExpression(both) >= 0
    if solve(problem).status != "optimal":
        return None
    counts = tuple(max(column, key=lambda k: take[i, k].value() or 0.0) for i, column in enumerate(table))
    # Solvers read and write a few digits: the step is worked out again from the table.
    return Answer(counts, _step_seconds(pipeline, [table[i][k] for i, k in enumerate(counts)]))


def _step_seconds(pipeline: Pipeline, chosen: Sequence[StageChoice]) -> float:
    return pipeline.step_seconds([choice.chunks for choice in chosen], max(choice.once for choice in chosen))


def _columns(
    stages: int, blocks: int, choice: Callable[[int, int], StageChoice | None], most_work: float, least: int
) -> Table | None:
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


def _filled(table: Table, blocks: int, busiest: float) -> tuple[int, ...]:
    """Good counts: stages filled up to the least W under which all blocks find room."""
    counts = [max(k for k, choice in column.items() if choice.work <= busiest) for column in table]
    while sum(counts) > blocks:
        slowest = max((i for i, k in enumerate(counts) if k - 1 in table[i]), key=lambda i: table[i][counts[i]].work)
        counts[slowest] -= 1
    return tuple(counts)


def _least_busiest(table: Table, blocks: int) -> float | None:
    """The least W of the busiest stage under which all blocks find room; None where they never do."""
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
    return works[low]


def _least_total(table: Table, blocks: int) -> float:
    """What all stages' W together is at least: of each the least, and the leanest blocks for the rest."""
    least = sum(min(choice.work for choice in column.values()) for column in table)
    # Work per block is the same on every stage but for recompute.
    each = min(
        (column[k].work - column[k - 1].work for column in table for k in column if k - 1 in column), default=0.0
    )
    return least + each * (blocks - sum(min(column) for column in table))


def _competitive(blocks: int, table: Table, most_work: float) -> Table:
    """The columns that an optimum may use: those no slower than a good answer's step allows, with room for all blocks."""
    most = most_work * (1 + 1e-9)
    kept = [{k: choice for k, choice in column.items() if choice.work <= most} for column in table]
    largest = [max(column) for column in kept]
    spare = sum(largest) - blocks
    return [{k: choice for k, choice in column.items() if k >= max(column) - spare} for column in kept]


def _room(table: Table, limit: float) -> int:
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
