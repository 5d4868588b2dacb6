"""Two exact ways to the same stages, and the chunks of one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.planner.estimate import Pipeline, StageChoice, chunk_sizes
from autopar.planner.stages import by_programme, by_thresholds


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


@given(st.integers(2, 6), st.integers(2, 6), st.integers(0, 30), st.data())
def test_chunks_of_a_stage_differ_by_one_block_at_most_and_keep_them_all(p, v, more, data):
    blocks, stage = v + more, data.draw(st.integers(0, p - 1))
    sizes = chunk_sizes(blocks, Pipeline(p, p, v, 0.0, "interleaved"), stage)
    assert len(sizes) == v
    assert sum(sizes) == blocks
    assert max(sizes) - min(sizes) <= 1
