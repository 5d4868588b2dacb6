"""Stages and estimates against brute force, and against a pipeline that is played out event by event.

Nothing here uses the planner's own formula for the expected value: the objective is written again from the docstring of
`autopar.planner.stages`, and the events follow the recurrence "an action starts when its rank is free and its input is
there" (Narayanan et al., arXiv 2104.04473, figures 3 and 4).
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from autopar.planner.bounds import by_bound, least_busiest
from autopar.planner.case import Case, Model
from autopar.planner.search import explore, ranked
from autopar.planner.space import Configuration, configurations
from autopar.planner.stages import Pipeline, StageChoice, solve_any, solve_equal
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

GIB = 2**30


def objective(pipeline: Pipeline, works, onces) -> float:
    m, v, p = pipeline.micro_batches, pipeline.virtual_stages, pipeline.stages
    return (m - 1 / v) * max(works) + sum(works) / v + max(onces) + 2 * (p * v - 1) * pipeline.send_seconds


def splits(blocks: int, stages: int, step: int = 1):
    for cuts in itertools.combinations(range(step, blocks, step), stages - 1):
        yield tuple(b - a for a, b in itertools.pairwise((0, *cuts, blocks)))


# Stages alone.


def random_pipeline(rng, scale) -> Pipeline:
    stages = int(rng.integers(1, 5))
    v = int(rng.integers(1, 3)) if stages > 1 else 1
    m = stages * int(rng.integers(1, 5)) if v > 1 else int(rng.integers(1, 12))
    return Pipeline(stages, m, v, float(rng.uniform(0, 0.1)) * scale)


def equal_table(rng, pipeline, blocks, scale):
    """Work and bytes grow with the blocks; recompute makes work bend upwards; some stages hold few."""
    table = {}
    for stage in range(pipeline.stages):
        end = rng.uniform(0, 2) if stage in (0, pipeline.stages - 1) else 0.0
        most, once = int(rng.integers(1, blocks + 1)), rng.uniform(0, 1)
        bend, knee = rng.uniform(0, 0.5), int(rng.integers(1, blocks + 1))
        for k in range(1, most + 1):
            work = end + k + bend * max(0, k - knee)
            table[stage, k] = StageChoice(work * scale, (once + rng.uniform(0, 3) * (k > 2)) * scale, ())
    return table


@pytest.mark.parametrize("scale", [1.0, 1e-4], ids=["seconds", "tenths of milliseconds"])
@pytest.mark.parametrize("seed", range(60))
def test_stages_of_equal_blocks_are_the_best_of_all_splits(seed, scale):
    rng = np.random.default_rng(seed)
    pipeline, blocks = random_pipeline(rng, scale), int(rng.integers(4, 13))
    table = equal_table(rng, pipeline, blocks, scale)
    steps = [
        objective(
            pipeline, [table[i, k].work for i, k in enumerate(counts)], [table[i, k].once for i, k in enumerate(counts)]
        )
        for counts in splits(blocks, pipeline.stages, pipeline.virtual_stages)
        if blocks % pipeline.virtual_stages == 0 and all((i, k) in table for i, k in enumerate(counts))
    ]
    found = solve_equal(pipeline, blocks, lambda i, k: table.get((i, k)), float("inf"), pipeline.virtual_stages)
    if not steps:
        assert found is None
        return
    assert found is not None
    assert found.step_seconds == pytest.approx(min(steps), rel=1e-9)
    assert sum(found.counts) == blocks


@pytest.mark.parametrize("seed", range(60))
def test_intervals_of_unlike_blocks_are_the_best_of_all_splits(seed):
    rng = np.random.default_rng(1000 + seed)
    pipeline, blocks = random_pipeline(rng, 1.0), int(rng.integers(4, 11))
    pipeline = dataclasses.replace(pipeline, virtual_stages=1)
    each, once = rng.uniform(0.1, 3, blocks), rng.uniform(0, 4, (pipeline.stages, blocks + 1, blocks + 1))
    room = rng.integers(2, blocks + 1, pipeline.stages)

    def choice(stage, first, end):
        if end - first > room[stage]:
            return None
        return StageChoice(float(each[first:end].sum() + 0.1 * stage), float(once[stage, first, end]), ())

    steps = []
    for counts in splits(blocks, pipeline.stages):
        bounds = np.cumsum((0, *counts))
        chosen = [choice(i, a, b) for i, (a, b) in enumerate(itertools.pairwise(bounds))]
        if None not in chosen:
            steps.append(objective(pipeline, [c.work for c in chosen], [c.once for c in chosen]))
    found = solve_any(pipeline, blocks, choice, float("inf"))
    if not steps:
        assert found is None
        return
    assert found is not None
    assert found.step_seconds == pytest.approx(min(steps), rel=1e-9)


@pytest.mark.parametrize("seed", range(40))
def test_both_stage_solvers_agree_on_equal_blocks(seed):
    rng = np.random.default_rng(2000 + seed)
    pipeline, blocks = dataclasses.replace(random_pipeline(rng, 1.0), virtual_stages=1), int(rng.integers(4, 16))
    table = equal_table(rng, pipeline, blocks, 1.0)
    equal = solve_equal(pipeline, blocks, lambda i, k: table.get((i, k)), float("inf"))
    unlike = solve_any(pipeline, blocks, lambda i, a, b: table.get((i, b - a)), float("inf"))
    assert (equal is None) == (unlike is None)
    if equal is not None:
        assert equal.step_seconds == pytest.approx(unlike.step_seconds, rel=1e-9)


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


# The whole search, on more devices and under tighter memory.


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
            prices[name, tp, micro_batch] = random_price(rng, name, work, kept, parameters, tp, micro_batch)
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
    space = configurations(model.request, model.topology.devices, len(model.layers), model.prices.degrees())
    for bound, configuration in by_bound(model, space):
        answer = Case(model, configuration).solve(float("inf"))
        if answer is not None:
            assert bound <= answer.step_seconds * (1 + 1e-12)


# The estimate against events.


def orders(schedule: str, stages: int, m: int):
    """Per rank, its actions in order: (phase, micro-batch)."""
    for rank in range(stages):
        warm_up = m if schedule == "gpipe" else min(m, stages - rank)
        forwards, backwards = [("F", i) for i in range(m)], [("B", i) for i in range(m)]
        order = forwards[:warm_up]
        for i in range(m):
            order.append(backwards[i])
            order += forwards[warm_up + i : warm_up + i + 1]
        yield order


def played(schedule: str, forwards, backwards, m: int, send: float) -> float:
    """Seconds until the last action of any rank, each played when its rank is free and its input has arrived."""
    stages, done = len(forwards), {}
    queues, free = [list(order) for order in orders(schedule, stages, m)], [0.0] * stages
    while any(queues):
        moved = False
        for rank, queue in enumerate(queues):
            while queue:
                phase, i = queue[0]
                source = rank - 1 if phase == "F" else rank + 1
                if 0 <= source < stages:
                    if (phase, i, source) not in done:
                        break
                    arrival = done[phase, i, source] + send
                else:
                    arrival = 0.0
                seconds = forwards[rank] if phase == "F" else backwards[rank]
                free[rank] = done[phase, i, rank] = max(free[rank], arrival) + seconds
                queue.pop(0)
                moved = True
        assert moved, "deadlock"
    return max(free)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("stages", "m"), [(1, 5), (2, 2), (2, 9), (4, 4), (4, 32), (8, 64)])
def test_for_equal_stages_the_estimate_is_what_is_played(schedule, stages, m):
    pipeline = Pipeline(stages, m, 1, 0.0)
    played_out = played(schedule, [1.0] * stages, [2.0] * stages, m, 0.0)
    assert pipeline.step_seconds([3.0] * stages, [0.0]) == pytest.approx(played_out, rel=1e-12)


@pytest.mark.parametrize("send", [0.001, 0.01, 0.05])
@pytest.mark.parametrize(("stages", "m"), [(2, 8), (4, 4), (4, 32), (8, 64)])
def test_sends_cost_at_most_two_a_micro_batch_more_than_the_estimate_says(stages, m, send):
    # The estimate counts the first way down and the last way up. 1F1B has no slack for those between: a neighbour waits.
    estimate = Pipeline(stages, m, 1, send).step_seconds([3.0] * stages, [0.0])
    seconds = played("1f1b", [1.0] * stages, [2.0] * stages, m, send)
    assert estimate * (1 - 1e-12) <= seconds <= estimate + 2 * m * send


def chosen_stages(seed):
    """Forward and backward seconds of the chosen plan's stages (pipelines only), with its case and answer."""
    model = model_of(dataclasses.replace(tight_instance(seed), capacity=60 * GIB))
    space = [case for case in ranked(model) if case[1].pp > 1 and case[1].schedule != "interleaved"]
    best = explore(model, space, float("inf")).best
    if best is None:
        return None
    case, answer = best
    forwards, backwards, first = [], [], 0
    for stage, count in enumerate(answer.counts):
        names = [layer.block_class for layer in model.layers[first : first + count]]
        forward = sum(case.column(name).forward for name in (*names, *case.ends_of(first, first + count)))
        choice = case.choice(stage, first, first + count) if not model.is_equal else case.equal_choice(stage, count)
        forwards.append(forward)
        backwards.append(choice.work - forward)
        first += count
    return case, answer, forwards, backwards


@pytest.mark.parametrize("seed", range(40))
def test_the_estimate_of_a_chosen_plan_encloses_what_is_played(seed):
    found = chosen_stages(seed)
    if found is None:
        return
    case, answer, forwards, backwards = found
    works = [f + b for f, b in zip(forwards, backwards, strict=True)]
    m = case.c.micro_batches
    seconds = played(case.c.schedule, forwards, backwards, m, 0.0)
    estimate = (m - 1) * max(works) + sum(works)
    assert 0 <= answer.step_seconds - objective(case.pipeline, works, [0.0]) <= answer.step_seconds / 4
    # The busiest rank works m times, after the forwards before it and before the backwards before it.
    for rank, work in enumerate(works):
        assert estimate >= (m * work + sum(forwards[:rank]) + sum(backwards[:rank])) * (1 - 1e-12)
    # At most the idle work of unlike stages is counted too much, never more than 2 % too little.
    spread = sum(max(works) - work for work in works)
    assert seconds * 0.98 <= estimate <= seconds + spread + 1e-9 * seconds


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
        one = random_price(rng, name, rng.uniform(0.5, 2), rng.uniform(2, 20), rng.uniform(0.05, 0.3) * 1e9, 1, 1)
        for micro_batch in range(1, 13):
            menu = {
                key: dataclasses.replace(
                    option, saved_bytes=option.saved_bytes * micro_batch, seconds=option.seconds * micro_batch
                )
                for key, option in one.recompute.items()
            }
            prices[name, 1, micro_batch] = dataclasses.replace(
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
    assert bills.data_parallel(1e9, 1e8).reduces == said == ("once" if whole else "each_backward")
