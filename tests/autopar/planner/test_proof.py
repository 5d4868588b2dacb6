"""The search under tight memory on up to eight devices: optimal, never below a bound, and never worse for having more."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from autopar.planner.bills import Holding
from autopar.planner.bounds import least_busiest
from autopar.planner.case import Case, Model
from autopar.planner.search import explore, ranked
from autopar.planner.space import Configuration, Inside
from cost_models.memory import held_as
from hardware_profiles.topology import Topology
from tests.autopar.planner.test_brute_force import (
    CHIP,
    CLUSTER,
    brute_force,
    graph_of,
    instance,
    model_of,
    random_price,
)

HIDDEN_BYTES = 1e7


def splits(blocks: int, stages: int, step: int = 1):
    for cuts in itertools.combinations(range(step, blocks, step), stages - 1):
        yield tuple(b - a for a, b in itertools.pairwise((0, *cuts, blocks)))


@pytest.mark.parametrize("seed", range(40))
def test_the_least_busiest_stage_is_the_least_of_all_splits(seed):
    rng = np.random.default_rng(3000 + seed)
    blocks, stages, chunks = int(rng.integers(3, 13)), int(rng.integers(2, 5)), int(rng.integers(1, 3))
    works = np.ones(blocks)
    works[0] += rng.uniform(0, 4)
    works[-1] += rng.uniform(0, 4)
    sums = [
        max(works[a:b].sum() for a, b in itertools.pairwise(np.cumsum((0, *counts))))
        for counts in splits(blocks, stages, chunks)
        if blocks % chunks == 0
    ]
    if sums:
        assert least_busiest(works.tolist(), stages, chunks) <= min(sums) * (1 + 1e-9)
        if chunks == 1:
            assert least_busiest(works.tolist(), stages, chunks) == pytest.approx(min(sums))


def tight_instance(seed: int):
    """Up to eight devices, pipelines only or free, memory near the least that fits, so that mixes of entries decide."""
    rng = np.random.default_rng(50_000 + seed)
    problem = instance(seed)
    devices = int(rng.choice([2, 3, 4, 6, 8]))
    blocks = int(rng.integers(max(2, min(devices, 5)), 7))
    classes = ("a",) * blocks if seed % 2 else tuple("ab"[int(i >= blocks // 2)] for i in range(blocks))
    tps = (1, 2) if devices % 2 == 0 else (1,)
    batch = devices * int(rng.choice([1, 2]))
    prices = {}
    for name in ("a", "b", "start", "end"):
        work, kept, parameters = rng.uniform(0.5, 2), rng.uniform(10, 40), rng.uniform(0.05, 0.3) * 1e9
        for tp, micro_batch in itertools.product(tps, range(1, batch + 1)):
            prices[name, Inside(tp, etp=tp), micro_batch] = random_price(
                rng, name, work, kept, parameters, tp, micro_batch, HIDDEN_BYTES
            )
    fixed = {"dp": 1, "tp": 1} if devices <= blocks and rng.integers(2) else {}
    return dataclasses.replace(
        problem, classes=classes, devices=devices, batch=batch, prices=prices, tps=tps, fixed=fixed
    )


@pytest.mark.parametrize("start", range(0, 60, 15))
def test_the_search_finds_the_optimum_under_tight_memory(start):
    for seed in range(start, start + 15):
        problem = tight_instance(seed)
        model = model_of(problem)
        found = explore(model, ranked(model), float("inf"))
        assert found.limit == pytest.approx(brute_force(problem), rel=1e-9), seed


def test_the_instances_ask_for_what_they_should():
    """A proof over easy instances proves little: mixes of entries, uneven stages and every schedule must win somewhere."""
    seen = set()
    for seed in range(60):
        model = model_of(tight_instance(seed))
        best = explore(model, ranked(model), float("inf")).best
        if best is None:
            seen.add("nothing fits")
            continue
        case, answer = best
        seen |= {case.c.schedule if case.c.pp > 1 else "no pipeline"}
        seen |= {"uneven stages"} if len(set(answer.counts)) > 1 else set()
        if model.is_equal:
            mixes = [dict(case.equal_choice(i, k).mix)["a"] for i, k in enumerate(answer.counts)]
            seen |= {"mix"} if any(sum(n > 0 for n in mix) > 1 for mix in mixes) else set()
    assert seen >= {"1f1b", "interleaved", "no pipeline", "uneven stages", "mix"}


@pytest.mark.parametrize("seed", range(60))
def test_no_bound_exceeds_the_solved_step_under_tight_memory(seed):
    model = model_of(tight_instance(seed))
    for bound, configuration in ranked(model):
        answer = Case(model, configuration).solve(float("inf"))
        if answer is not None:
            assert bound <= answer.step_seconds * (1 + 1e-12)


# More of anything.


def best_step(problem, cluster=CLUSTER) -> float:
    model = model_of(problem)
    moved = Model(graph_of(problem), Topology(cluster, problem.devices), CHIP, problem.capacity, model.request)
    moved.prices = problem
    return explore(moved, ranked(moved), float("inf")).limit


def with_links(factor: float):
    group = CLUSTER.node_groups[0]
    intra = group.intra.model_copy(update={"gigabytes_per_second": group.intra.gigabytes_per_second * factor})
    return CLUSTER.model_copy(update={"node_groups": (group.model_copy(update={"intra": intra}),)})


@pytest.mark.parametrize("factor", [1.3, 2.0, 10.0])
@pytest.mark.parametrize("seed", range(0, 45, 3))
def test_more_bandwidth_never_makes_the_plan_slower(seed, factor):
    problem = tight_instance(seed)
    assert best_step(problem, with_links(factor)) <= best_step(problem) * (1 + 1e-12)


@pytest.mark.parametrize("factor", [1.01, 1.2, 2.0, 8.0])
@pytest.mark.parametrize("seed", range(0, 45, 3))
def test_more_memory_never_makes_the_plan_slower(seed, factor):
    problem = tight_instance(seed)
    more = dataclasses.replace(problem, capacity=problem.capacity * factor)
    assert best_step(more) <= best_step(problem) * (1 + 1e-12)


@pytest.mark.parametrize("seed", range(40))
def test_twice_the_devices_never_make_the_plan_slower(seed):
    # All devices are used, so this holds where compute outweighs what more replicas must reduce: so it is here, by far.
    problem = tight_instance(seed)
    rest = problem.devices if problem.devices <= 4 else 4
    fewer = dataclasses.replace(problem, devices=rest, batch=8, fixed={}, tps=(1,), prices=dense_prices(seed))
    if rest == 3:
        fewer = dataclasses.replace(fewer, batch=12)
    assert best_step(dataclasses.replace(fewer, devices=2 * rest)) <= best_step(fewer) * (1 + 1e-12)


def dense_prices(seed):
    """Seconds and bytes in proportion to the micro-batch: a half takes half."""
    rng = np.random.default_rng(seed)
    prices = {}
    for name in ("a", "b", "start", "end"):
        one = random_price(
            rng, name, rng.uniform(0.5, 2), rng.uniform(2, 20), rng.uniform(0.05, 0.3) * 1e9, 1, 1, HIDDEN_BYTES
        )
        for micro_batch in range(1, 13):
            menu = {
                key: dataclasses.replace(
                    option, saved_bytes=option.saved_bytes * micro_batch, seconds=option.seconds * micro_batch
                )
                for key, option in one.recompute.items()
            }
            prices[name, Inside(), micro_batch] = dataclasses.replace(
                one,
                forward_seconds=one.forward_seconds * micro_batch,
                backward_seconds=one.backward_seconds * micro_batch,
                output_bytes=one.output_bytes * micro_batch,
                recompute=menu,
            )
    return prices


@pytest.mark.parametrize(
    ("zero", "micro_batches", "said"),
    [
        (1, 4, "once"),
        (2, 1, "each_backward"),
        (2, 4, "once"),
        (3, 1, "each_backward"),
        (3, 4, "each_backward"),
    ],
)
def test_gradients_held_whole_are_reduced_once_a_step(zero, micro_batches, said):
    # Seconds and bytes tell one story: who keeps whole gradients over the micro-batches has not reduced them yet.
    problem = dataclasses.replace(tight_instance(1), devices=4, batch=4 * micro_batches, fixed={}, tps=(1,))
    model = model_of(problem)
    configuration = Configuration(1, 1, False, 4, 1, micro_batches, "1f1b", 1, zero)
    bills = Case(model, configuration).bills
    whole = held_as("autopar", "gradient", zero, pipelined=False, accumulating=micro_batches > 1) < 2
    assert bills.data_parallel(Holding(1e9, largest_unit=1e8)).reduces == said == ("once" if whole else "each_backward")
