"""Bytes over the step: closed-form peaks and conservation."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from autopar.simulator import simulate
from autopar.simulator.schedules import in_flight, orders
from tests.autopar.simulator.test_simulator import any_plan
from tests.plans import make_plan


@pytest.mark.parametrize(("pp", "m"), [(1, 3), (2, 2), (4, 8), (8, 8)])
def test_1f1b_peaks_with_p_minus_i_micro_batches(pp, m):
    line = simulate(make_plan(pp, m, activation=100.0, memory={"parameters": 7.0}))
    assert line.peak_bytes == tuple(7.0 + 100.0 * min(m, pp - i) for i in range(pp))


def test_gpipe_peaks_with_every_micro_batch():
    assert simulate(make_plan(4, 6, schedule="gpipe", activation=100.0)).peak_bytes == (600.0,) * 4


def test_the_allocators_reserve_spares_context_and_communicators():
    memory = {"parameters": 50.0, "communicators": 30.0, "context": 20.0}
    line = simulate(make_plan(1, 4, activation=10.0, memory=memory, reserve_fraction=0.1))
    assert line.peak_bytes == (pytest.approx((50 + 10) * 1.1 + 50),)


@pytest.mark.parametrize(("pp", "m", "v"), [(2, 4, 2), (4, 16, 2), (4, 16, 4)])
def test_equal_chunks_peak_with_the_warm_up_and_one_more(pp, m, v):
    """Narayanan et al. 2021: rank i warms up with (v - 1) p + 2 (p - 1 - i) forwards, then runs one more."""
    line = simulate(make_plan(pp, m, v, "interleaved", activation=100.0))
    warm_up = [min(v * m - 1, (v - 1) * pp + 2 * (pp - 1 - i)) for i in range(pp)]
    assert line.peak_bytes == tuple(100.0 * (forwards + 1) for forwards in warm_up)


@settings(max_examples=30, deadline=None)
@given(any_plan())
def test_every_chunk_at_its_own_most_bounds_the_peak_from_above(plan):
    schedule = plan.schedule
    lists = orders(schedule.name, plan.mesh.pp, schedule.micro_batches, schedule.virtual_stages)
    for order, cost, peak in zip(lists, plan.costs, simulate(plan).peak_bytes, strict=True):
        kept = sum(cost.chunks[chunk].activation_bytes * most for chunk, most in in_flight(order).items())
        assert peak <= ((kept + cost.memory["parameters"]) * 1.1 + cost.memory["context"]) * (1 + 1e-12)


@settings(max_examples=40, deadline=None)
@given(any_plan())
def test_every_byte_of_activations_is_given_back(plan):
    memory = simulate(plan).memory
    ends = {}
    for rank, kept in zip(memory.rank, memory.parts["activations"], strict=True):
        assert kept >= 0.0
        ends[rank] = kept
    assert ends == dict.fromkeys(range(plan.mesh.pp), 0.0)


@settings(max_examples=40, deadline=None)
@given(any_plan())
def test_the_peak_is_the_highest_point_of_the_curve(plan):
    line = simulate(plan)
    totals = [sum(values) for values in zip(*line.memory.parts.values(), strict=True)]
    for rank, peak in enumerate(line.peak_bytes):
        assert peak == pytest.approx(max(t for r, t in zip(line.memory.rank, totals, strict=True) if r == rank))
    assert all(0.0 <= time <= line.step_seconds for time in line.memory.time)
