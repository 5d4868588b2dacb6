"""The estimate of a step against the events of each schedule, played here by a recurrence of its own.

The recurrence knows three things: a stage does its actions in the schedule's order, an action starts when its input is there,
and a stage's sends leave one after another.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.planner.estimate import Pipeline, chunk_sizes


def order(schedule, rank, p, m, v) -> list[tuple[bool, int, int]]:
    """(is backward, chunk, micro-batch) of a rank, as arXiv 2104.04473 figures 3 and 4 draw them."""

    def nth(k, backward):
        chunk = (k // p) % v
        return backward, (v - 1 - chunk if backward else chunk), k // (p * v) * p + k % p

    if schedule != "interleaved":
        forwards, backwards = [(False, 0, i) for i in range(m)], [(True, 0, i) for i in range(m)]
        warm = m if schedule == "gpipe" else min(m, p - 1 - rank)
    else:
        forwards, backwards = [nth(k, False) for k in range(m * v)], [nth(k, True) for k in range(m * v)]
        warm = min(m * v, 2 * (p - rank - 1) + (v - 1) * p)
    steady = [action for pair in zip(forwards[warm:], backwards, strict=False) for action in pair]
    return forwards[:warm] + steady + backwards[len(forwards) - warm :]


def played(schedule, forward, backward, p, m, v, send) -> float:
    """The step's end; `forward`, `backward`: seconds of each virtual stage, chunk * p + rank."""
    todo = [order(schedule, rank, p, m, v) for rank in range(p)]
    ready = {(False, 0, i): 0.0 for i in range(m)}
    free, port, at, last = [0.0] * p, [0.0] * p, [0] * p, p * v - 1
    while any(at[rank] < len(todo[rank]) for rank in range(p)):
        moved = False
        for rank in range(p):
            while at[rank] < len(todo[rank]):
                is_backward, chunk, i = todo[rank][at[rank]]
                stage = chunk * p + rank
                if (is_backward, stage, i) not in ready:
                    break
                begin = max(free[rank], ready[is_backward, stage, i])
                end = free[rank] = begin + (backward if is_backward else forward)[stage]
                if not is_backward and stage == last:
                    ready[True, stage, i] = end
                elif 0 <= (target := stage + (-1 if is_backward else 1)) <= last:
                    port[rank] = max(port[rank], end) + send
                    ready[is_backward, target, i] = port[rank]
                at[rank] += 1
                moved = True
        assert moved, "deadlock"
    return max(free)


def estimate(schedule, forward, backward, p, m, v, send) -> float:
    stages = [[f + b for f, b in zip(forward[rank::p], backward[rank::p], strict=True)] for rank in range(p)]
    share = sum(forward) / (sum(forward) + sum(backward))
    return Pipeline(p, m, v, send, schedule, share).step_seconds(stages, 0.0)


@given(st.integers(2, 8), st.integers(1, 24), st.floats(0, 1))
@settings(max_examples=80, deadline=None)
def test_1f1b_of_equal_stages_is_exact_while_sends_take_no_longer_than_a_forward(p, rounds, send):
    m = p - 1 + rounds
    case = ("1f1b", [1.0] * p, [2.0] * p, p, m, 1, send)
    assert estimate(*case) == pytest.approx(played(*case), rel=1e-9)


@given(st.integers(2, 8), st.integers(1, 24), st.floats(0, 12), st.lists(st.floats(1, 2), min_size=8, max_size=8))
@settings(max_examples=80, deadline=None)
def test_gpipe_is_exact_for_stages_with_one_ratio_of_backward_to_forward(p, m, send, sizes):
    case = ("gpipe", sizes[:p], [2 * size for size in sizes[:p]], p, m, 1, send)
    assert estimate(*case) == pytest.approx(played(*case), rel=1e-9)


@given(st.integers(2, 6), st.integers(2, 4), st.integers(1, 5), st.floats(0, 1))
@settings(max_examples=60, deadline=None)
def test_interleaving_of_equal_chunks_is_within_5_percent_while_sends_take_no_longer_than_a_forward(p, v, rounds, send):
    case = ("interleaved", [1.0] * p * v, [2.0] * p * v, p, p * rounds, v, send)
    assert estimate(*case) == pytest.approx(played(*case), rel=0.05)


@pytest.mark.parametrize(
    ("schedule", "low", "high", "mean"), [("1f1b", -0.02, 0.09, 0.035), ("interleaved", -0.02, 0.1, 0.04)]
)
def test_the_estimate_of_unequal_stages_stays_close_to_the_events(schedule, low, high, mean):
    rng = np.random.default_rng(7)
    errors = []
    for _ in range(150):
        p, v = int(rng.integers(2, 8)), int(rng.integers(2, 5)) if schedule == "interleaved" else 1
        sizes = np.tile(rng.uniform(1, 1.3, p), v)
        case = (
            schedule,
            list(sizes),
            list(2 * sizes),
            p,
            p * int(rng.integers(1, 8)),
            v,
            float(rng.choice([0, 0.2, 1])),
        )
        errors.append(estimate(*case) / played(*case) - 1)
    assert low <= min(errors)
    assert max(errors) <= high
    assert abs(float(np.mean(errors))) <= mean


def test_chunks_that_differ_by_a_block_beside_a_heavy_head_are_estimated_closely():
    rng = np.random.default_rng(11)
    errors = []
    for _ in range(150):
        p, v = int(rng.integers(2, 8)), int(rng.integers(2, 6))
        pipeline = Pipeline(p, p * int(rng.integers(1, 6)), v, 0.0, "interleaved")
        sizes = [chunk_sizes(int(rng.integers(v, 4 * v)), pipeline, rank) for rank in range(p)]
        forward = [float(sizes[rank][chunk]) for chunk in range(v) for rank in range(p)]
        forward[-1] += float(rng.uniform(0, 3))
        case = ("interleaved", forward, [2 * f for f in forward], p, pipeline.micro_batches, v, 0.0)
        errors.append(estimate(*case) / played(*case) - 1)
    assert min(errors) >= -0.04
    assert max(errors) <= 0.11
    assert abs(float(np.mean(errors))) <= 0.025
