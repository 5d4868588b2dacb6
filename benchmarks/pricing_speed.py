"""How long one plan takes to estimate, and to simulate, once its model is captured and its blocks are priced.

    python benchmarks/pricing_speed.py [--plans 200]

Goals: an estimate under 2 ms after warm-up, a simulation under 100 ms. Warm-up is one search of the same model: from then on
every degree of tp and every micro-batch has its price. An estimate is that of one plan whose blocks are given to stages: bytes
and recompute of every stage, its seconds, the step; *solve* finds the best stages as well, which is what a search does.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable

import autopar
from autopar.planner.case import Case, Model
from autopar.planner.request import Request
from autopar.planner.search import explore, ranked, search
from autopar.planner.space import configurations
from autopar.planner.stages import Answer
from autopar.simulator import simulate
from hardware_profiles.profile import load_cluster
from hardware_profiles.topology import Topology

CASES = (
    ("8B on 64 A100", "examples/llama3_8b.py", "a100x64", 512),
    ("405B on 16,384 H100", "examples/llama31_405b.py", "h100x16384", 2048),
    ("8x7B of experts on 64 A100", "examples/moe_8x7b.py", "a100x64", 512),
)
SIMULATED = (
    ("405B, pp 16, 1F1B", {"pp": 16, "tp": 8, "schedule": "1f1b"}),
    ("405B, pp 16, 4 chunks a rank", {"pp": 16, "tp": 8, "schedule": "interleaved", "virtual_stages": 2}),
)


def milliseconds(work: Callable[[], object]) -> float:
    """Wall milliseconds of one call."""
    started = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - started)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, default=200, help="configurations drawn for each model")
    options = parser.parse_args()
    print("| what | median, ms | nine of ten under, ms |\n|---|---:|---:|")
    for name, path, cluster, batch in CASES:
        estimated, solved = estimates(path, cluster, batch, options.plans)
        _row(f"estimate: {name}", estimated)
        _row(f"solve: {name}", solved)
    graph = autopar.capture("examples/llama31_405b.py", seq_len=8192)
    for name, fixed in SIMULATED:
        request = Request.parse(global_batch=2048, seq_len=8192, fixed=fixed, forbidden=())
        plan = search(graph, load_cluster("h100x16384"), request)
        simulate(plan)
        spans = len(simulate(plan).spans.rank)
        _row(f"simulate: {name} ({spans:,} spans)", [milliseconds(lambda plan=plan: simulate(plan)) for _ in range(7)])


def estimates(path: str, cluster_name: str, batch: int, plans: int) -> tuple[list[float], list[float]]:
    """Milliseconds to estimate, and to solve, each of `plans` configurations drawn from the search's own space."""
    graph = autopar.capture(path, seq_len=8192)
    cluster = load_cluster(cluster_name)
    topology = Topology(cluster, cluster.devices)
    chip = cluster.node_groups[0].chip
    request = Request.parse(global_batch=batch, seq_len=8192, fixed={}, forbidden=())
    model = Model(graph, topology, chip, chip.memory_bytes, request)
    explore(model, ranked(model), float("inf"))
    space = list(configurations(request, topology.devices, len(model.layers), model.prices.degrees()))
    drawn = random.Random(0).sample(space, min(plans, len(space)))
    estimated, solved = [], []
    for configuration in drawn:
        model.totals(configuration)
        answers: list[Answer | None] = []
        solved.append(milliseconds(lambda c=configuration, a=answers: a.append(Case(model, c).solve(float("inf")))))
        if (answer := answers[0]) is not None:
            estimated.append(milliseconds(lambda c=configuration, a=answer: estimate(Case(model, c), a.counts)))
    return estimated, solved


def estimate(case: Case, counts: tuple[int, ...]) -> float:
    """The step of a configuration whose stages hold so many blocks each; what a stage holds and recomputes is found anew."""
    stages = [case.equal_choice(stage, count) for stage, count in enumerate(counts)]
    assert all(stages), "a stage does not fit"
    return case.pipeline.step_seconds([s.chunks for s in stages if s], max(s.once for s in stages if s))


def _row(name: str, found: list[float]) -> None:
    print(f"| {name} | {statistics.median(found):.2f} | {sorted(found)[int(0.9 * (len(found) - 1))]:.2f} |")


if __name__ == "__main__":
    main()
