"""What must hold of every search and every plan, whatever the numbers."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import autopar
from autopar.documents import Graph
from autopar.documents.plan import PARTS
from autopar.legality import Choices, problems
from autopar.planner.case import Case
from autopar.planner.request import Request
from autopar.planner.search import explore, ranked, search
from autopar.planner.space import Offer, configurations
from autopar.simulator import simulate
from hardware_profiles.profile import load_cluster
from tests.autopar.planner.test_brute_force import instance, model_of

GRAPH = Graph.load("tests/fixtures/graph.json")


def best(problem) -> float:
    model = model_of(problem)
    return explore(model, ranked(model), float("inf")).limit


@given(st.integers(0, 10_000), st.floats(1, 4))
@settings(max_examples=25, deadline=None)
def test_more_memory_never_makes_the_best_step_slower(seed, factor):
    problem = instance(seed)
    assert best(dataclasses.replace(problem, capacity=problem.capacity * factor)) <= best(problem) * (1 + 1e-12)


@given(st.integers(0, 10_000))
@settings(max_examples=25, deadline=None)
def test_more_choices_never_make_the_best_step_slower(seed):
    problem = instance(seed)
    assert best(problem) <= best(dataclasses.replace(problem, tps=(1,))) * (1 + 1e-12)


@given(
    st.sampled_from(["h100x8", "a100x16", "rtx4090x8", "v100x8", "local-cpu-x8", "gb200x72"]),
    st.integers(1, 8),
    st.sampled_from([8, 12, 24]),
    st.sampled_from(["adamw", "sgd", "adam8bit"]),
)
@settings(max_examples=25, deadline=None)
def test_every_plan_is_legal_adds_up_and_fits(cluster, devices, batch, optimizer):
    request = Request.parse(global_batch=batch, seq_len=8, fixed={}, forbidden=(), devices=devices, optimizer=optimizer)
    try:
        plan = search(GRAPH, load_cluster(cluster), request)
    except autopar.RequestError as error:
        assert "global_batch" in str(error)
        return
    mesh, schedule = plan.mesh, plan.schedule
    choices = Choices(
        devices=devices,
        global_batch=batch,
        blocks=4,
        pp=mesh.pp,
        dp=mesh.dp,
        tp=mesh.tp,
        micro_batch=schedule.micro_batch,
        schedule=schedule.name,
        virtual_stages=schedule.virtual_stages,
        zero=plan.stages[0].zero,
    )
    assert not list(problems(choices))
    blocks = sorted(
        n for stage in plan.stages for chunk in stage.chunks for a, b in chunk.values() for n in range(a, b + 1)
    )
    assert blocks == [0, 1, 2, 3]
    line = simulate(plan)
    assert set(line.seconds_by_part) == set(PARTS)
    assert sum(line.seconds_by_part.values()) == pytest.approx(line.step_seconds)
    assert all(peak <= capacity for peak, capacity in zip(line.peak_bytes, plan.predicted.capacity_bytes, strict=True))


@pytest.mark.parametrize(
    ("fixed", "within"),
    [
        ({}, 0.03),
        ({"pp": 4, "schedule": "1f1b"}, 0.01),
        ({"pp": 2, "schedule": "gpipe"}, 0.01),
        ({"pp": 4, "schedule": "interleaved"}, 0.05),
    ],
)
def test_the_estimate_is_close_to_the_simulator(fixed, within):
    graph = autopar.capture("examples/llama3_8b.py")
    plan = search(
        graph, load_cluster("h100x512"), Request.parse(global_batch=512, seq_len=2048, fixed=fixed, forbidden=())
    )
    assert plan.predicted.step_seconds == pytest.approx(simulate(plan).step_seconds, rel=within)


def test_the_closed_form_peak_bounds_the_simulated_one_closely():
    graph = autopar.capture("examples/llama3_8b.py")
    for fixed in ({}, {"pp": 4, "schedule": "1f1b"}, {"pp": 2, "schedule": "interleaved", "virtual_stages": 2}):
        plan = search(
            graph, load_cluster("a100x64"), Request.parse(global_batch=512, seq_len=2048, fixed=fixed, forbidden=())
        )
        for bound, peak in zip(plan.predicted.peak_bytes, simulate(plan).peak_bytes, strict=True):
            assert peak <= bound * (1 + 1e-9) <= peak * 1.05


@pytest.mark.parametrize(
    "fixed",
    [
        {},
        {"pp": 4, "schedule": "interleaved", "virtual_stages": 2},
        {"pp": 2, "schedule": "gpipe", "recompute": "full"},
        {"pp": 8, "tp": 2, "schedule": "1f1b", "zero": 0},
        {"pp": 1, "tp": 8, "zero": 3, "micro_batch": 2},
        {"pp": 1, "tp": 1, "zero": 2, "recompute": "selective"},
    ],
    ids=str,
)
def test_the_memory_table_of_an_explanation_adds_up_to_the_peak(fixed):
    graph = autopar.capture("examples/llama3_8b.py")
    plan = search(
        graph, load_cluster("a100x64"), Request.parse(global_batch=512, seq_len=2048, fixed=fixed, forbidden=())
    )
    table = autopar.explain(plan).split("memory by stage, GiB\n")[1].splitlines()[1:]
    for row in table:
        stage, *parts, total = (float(cell) for cell in row.split())
        assert sum(parts) == pytest.approx(total, abs=0.006 * len(parts))
        assert total == pytest.approx(plan.predicted.peak_bytes[int(stage)] / 2**30, abs=0.006)


def test_an_interrupted_search_gives_the_best_so_far_with_its_gap(monkeypatch):
    answers = []
    solve = Case.solve

    def interrupted(self, limit, within=0.0):
        if len(answers) == 2:
            raise KeyboardInterrupt
        answer = solve(self, limit)
        answers.extend([answer] if answer else [])
        return answer

    monkeypatch.setattr(Case, "solve", interrupted)
    graph = autopar.capture("examples/llama31_70b.py")
    plan = search(graph, load_cluster("h100x64"), Request.parse(global_batch=512, seq_len=8192, fixed={}, forbidden=()))
    assert plan.certificate.space["stopped"] == "interrupted"
    assert plan.certificate.gap > 0
    assert plan.certificate.bound_seconds < plan.predicted.step_seconds


def test_blocks_that_do_not_divide_by_the_chunks_are_interleaved_all_the_same():
    graph = autopar.capture("examples/llama31_405b.py")  # 126 blocks
    fixed = {"tp": 8, "pp": 16, "schedule": "interleaved", "virtual_stages": 4}
    plan = search(
        graph, load_cluster("h100x16384"), Request.parse(global_batch=2048, seq_len=8192, fixed=fixed, forbidden=())
    )
    sizes = [[b - a + 1 for chunk in stage.chunks for a, b in chunk.values()] for stage in plan.stages]
    assert sum(map(sum, sizes)) == 126
    assert all(max(each) - min(each) <= 1 for each in sizes)
    assert plan.predicted.step_seconds == pytest.approx(simulate(plan).step_seconds, rel=0.03)


def test_unlike_blocks_are_not_interleaved_and_a_request_for_it_says_why():
    offer = Offer(devices=4, blocks=8, tp_degrees={1: (False,)}, is_equal=False)
    request = Request.parse(global_batch=8, seq_len=8, fixed={}, forbidden=())
    assert {c.schedule for c in configurations(request, offer)} == {"1f1b", "gpipe"}
    fixed = Request.parse(global_batch=8, seq_len=8, fixed={"schedule": "interleaved"}, forbidden=())
    with pytest.raises(autopar.RequestError, match="blocks differ"):
        configurations(fixed, offer)


@pytest.mark.parametrize("gigabits", [25.0, 5.0])
def test_on_a_slow_network_the_estimate_knows_what_sends_cost(gigabits):
    cluster = load_cluster("a100x64")
    (group,) = cluster.node_groups
    assert group.nics is not None
    nics = group.nics.model_copy(update={"count": 1, "gigabits_per_second": gigabits})
    slow = cluster.model_copy(update={"node_groups": (group.model_copy(update={"nics": nics}),)})
    graph = autopar.capture("examples/llama3_8b.py")
    plan = search(graph, slow, Request.parse(global_batch=64, seq_len=4096, fixed={}, forbidden=()))
    assert plan.predicted.step_seconds == pytest.approx(simulate(plan).step_seconds, rel=0.05)
