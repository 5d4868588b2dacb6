"""Two exact ways to the same stages, and the chunks of one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.planner.estimate import Pipeline, StageChoice, chunk_sizes
from autopar.planner.stages import by_enumeration, by_programme, by_thresholds, solve_equal


@pytest.mark.parametrize("seed", range(30))
def test_the_integer_programme_and_the_dynamic_programme_find_the_same_step(seed):
    rng = np.random.default_rng(seed)
    p, blocks = int(rng.integers(2, 6)), int(rng.integers(6, 20))
    schedule = str(rng.choice(["1f1b", "gpipe"]))
    pipeline = Pipeline(p, int(rng.integers(p, 20)), 1, float(rng.choice([0, 0.5, 3])), schedule)
    table = []
    for _ in range(p):
        work, once, slope = np.cumsum(rng.uniform(0.5, 1.5, blocks)), rng.uniform(0, 5), rng.uniform(0, 2)
        table.append(
            {k: StageChoice((float(work[k - 1]),), float(once + slope * k), ()) for k in range(1, blocks - p + 2)}
        )
    one, other = by_programme(pipeline, blocks, table), by_thresholds(pipeline, blocks, table)
    assert one is not None
    assert other is not None
    assert one.step_seconds == pytest.approx(other.step_seconds, rel=1e-9)


def chunked_table(rng, p, v, blocks):
    """Stages of v chunks: work by chunk in the sizes that `chunk_sizes` says, seconds once a step that grow with the blocks."""
    pipeline = Pipeline(p, p * int(rng.integers(1, 5)), v, float(rng.choice([0, 0.1, 1])), "interleaved")
    table = []
    for stage in range(p):
        each, once, slope = float(rng.uniform(0.9, 1.3)), float(rng.uniform(0, 2)), float(rng.uniform(0, 1))
        head = float(rng.uniform(0, 2)) if stage == p - 1 else 0.0
        table.append(
            {
                k: StageChoice(
                    tuple(each * size + head * (c == v - 1) for c, size in enumerate(chunk_sizes(k, pipeline, stage))),
                    once + slope * k,
                    (),
                )
                for k in range(v, blocks - v * (p - 1) + 1)
            }
        )
    return pipeline, table


@pytest.mark.parametrize("seed", range(20))
def test_enumeration_and_the_integer_programme_find_the_same_chunks(seed):
    rng = np.random.default_rng(seed)
    p, v = int(rng.integers(2, 4)), int(rng.integers(2, 4))
    blocks = p * v + int(rng.integers(0, 7))
    pipeline, table = chunked_table(rng, p, v, blocks)
    one, other = by_programme(pipeline, blocks, table), by_enumeration(pipeline, blocks, table)
    assert one is not None
    assert other is not None
    assert one.step_seconds == pytest.approx(other.step_seconds, rel=1e-9)


@pytest.mark.parametrize("within", [0.0, 0.02, 0.3])
@pytest.mark.parametrize("seed", range(20))
def test_counts_are_within_what_was_asked_of_the_best(seed, within):
    rng = np.random.default_rng(seed)
    p, v = int(rng.integers(2, 4)), int(rng.integers(1, 4))
    blocks = p * v + int(rng.integers(0, 7))
    pipeline, table = chunked_table(rng, p, v, blocks)
    found = solve_equal(pipeline, blocks, lambda stage, k: table[stage].get(k), float("inf"), within)
    best = by_enumeration(pipeline, blocks, table)
    assert found is not None
    assert best is not None
    assert best.step_seconds * (1 - 1e-12) <= found.step_seconds <= best.step_seconds * (1 + within + 1e-9)


@given(st.integers(2, 6), st.integers(2, 6), st.integers(0, 30), st.data())
def test_chunks_of_a_stage_differ_by_one_block_at_most_and_keep_them_all(p, v, more, data):
    blocks, stage = v + more, data.draw(st.integers(0, p - 1))
    sizes = chunk_sizes(blocks, Pipeline(p, p, v, 0.0, "interleaved"), stage)
    assert len(sizes) == v
    assert sum(sizes) == blocks
    assert max(sizes) - min(sizes) <= 1
