"""Every plan of a small model on two pinned ranks of this machine: priced, then run, turn by turn.

    python benchmarks/local_plans.py [--rounds 15] [--json out.json]

The machine is calibrated first, under the same pinning. All plans train in one process group; a round gives each one step,
in an order drawn anew, so that what else the machine does falls on all alike. Printed: each plan's predicted step and its
measured median with quartiles, the median error, the rank correlation (Spearman), and the regret of the planner's own choice:
how much slower it is than the best measured plan.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import islice, product
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist

import autopar
from autopar.documents import Graph, Plan
from autopar.errors import NoPlanFits, RequestError
from autopar.runtime.launch import on_ranks
from autopar.tracer import open_source
from hardware_profiles.cluster import Cluster

MODEL = Path(__file__).parents[1] / "examples" / "tiny_llama.py"
RANKS, BATCH, SEQ = 2, 16, 64
WARM_UP = 3
TIMEOUT = timedelta(minutes=9)
MESHES = [{"pp": 1, "tp": 1, "dp": 2}, {"pp": 1, "tp": 2, "dp": 1}, {"pp": 2, "tp": 1, "dp": 1}]
FREE = {
    "micro_batch": (2, 4, 8, 16),
    "zero": (0, 1, 2, 3),
    "schedule": ("1f1b", "gpipe", "interleaved"),
    "recompute": ("none", "full"),
    "sp": (0, 1),
}


def pinned(world: int, work: Callable[[int], Any], timeout: timedelta) -> list[Any]:
    """As on_ranks, each rank kept to a core of its own."""
    cores = sorted(os.sched_getaffinity(0))

    def on_own_core(rank: int) -> Any:
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
        return work(rank)

    return on_ranks(world, on_own_core, timeout)


def every_plan(graph: Graph, cluster: Cluster) -> list[Plan]:
    """One plan for each distinct configuration that the space allows."""
    found: dict[str, Plan] = {}
    for mesh, values in product(MESHES, product(*FREE.values())):
        fixed = mesh | dict(zip(FREE, values, strict=True))
        if mesh["pp"] == 1:
            if fixed["schedule"] != "1f1b":
                continue
            del fixed["schedule"]
        elif fixed["schedule"] == "interleaved":
            fixed["virtual_stages"] = 2
        try:
            plan = autopar.plan(graph, cluster, global_batch=BATCH, dtype="fp32", fixed=fixed)
        except (RequestError, NoPlanFits):
            continue
        found.setdefault(name_of(plan), plan)
    return list(found.values())


def measured(plans: list[Plan], rounds: int) -> list[list[float]]:
    """Seconds of each plan in each round, on this rank."""
    source = open_source(MODEL, None, SEQ)
    data = list(islice(source.batches(BATCH, SEQ, 0), rounds + WARM_UP))
    steps = []
    for plan in plans:
        torch.manual_seed(0)
        steps.append(autopar.parallelize(source.build(), plan, source.loss, source.build_optimizer))
    seconds: list[list[float]] = [[] for _ in plans]
    draw = random.Random(0)
    for number, batch in enumerate(data):
        order = list(range(len(plans)))
        draw.shuffle(order)
        for index in order:
            dist.barrier()
            start = time.perf_counter()
            steps[index](batch)
            if number >= WARM_UP:
                seconds[index].append(time.perf_counter() - start)
    return seconds


def ranks_of(values: list[float]) -> list[float]:
    """Places of values in order; equal ones share their mean place."""
    ordered = sorted(values)
    return [(ordered.index(value) + len(ordered) - 1 - ordered[::-1].index(value)) / 2 for value in values]


def spearman(first: list[float], second: list[float]) -> float:
    """Rank correlation: Pearson's of the places."""
    a, b = ranks_of(first), ranks_of(second)
    middle = (len(a) - 1) / 2
    both = sum((x - middle) * (y - middle) for x, y in zip(a, b, strict=True))
    return both / (sum((x - middle) ** 2 for x in a) * sum((y - middle) ** 2 for y in b)) ** 0.5


def name_of(plan: Plan) -> str:
    """A plan in one line."""
    mesh, schedule = plan.mesh, plan.schedule
    mode = max((entry.mode for entry in plan.recompute), default="none", key=("none", "selective", "full").index)
    parts = [f"pp={mesh.pp} tp={mesh.tp} dp={mesh.dp_shard * mesh.dp_replicate} zero={plan.stages[0].zero}"]
    parts.append(f"micro_batch={schedule.micro_batch}")
    parts += (
        [schedule.name] * (mesh.pp > 1)
        + ["sp"] * bool(plan.options.get("sp"))
        + [f"recompute={mode}"] * (mode != "none")
    )
    return " ".join(parts)


def main() -> None:
    """Calibrate, plan, run, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    cluster = autopar.calibrate(RANKS, quick=True, start=pinned)
    graph = autopar.capture(MODEL, seq_len=SEQ)
    plans = every_plan(graph, cluster)
    chosen = autopar.plan(graph, cluster, global_batch=BATCH, dtype="fp32")
    chosen = {name_of(plan): plan for plan in plans}.get(name_of(chosen), chosen)
    plans += [chosen] * (chosen not in plans)
    by_rank = pinned(RANKS, lambda rank: measured(plans, options.rounds), TIMEOUT)
    rows = []
    for number, plan in enumerate(plans):
        took = [max(turn) for turn in zip(*(rank[number] for rank in by_rank), strict=True)]
        low, _, high = quantiles(took, n=4)
        predicted = plan.predicted
        inside = predicted.step_seconds_low <= median(took) <= predicted.step_seconds_high
        rows.append((plan, predicted.step_seconds, median(took), low, high, inside))
    rows.sort(key=lambda row: row[2])
    print("| plan | predicted, ms | measured, ms (quartiles) | error |\n|---|---:|---:|---:|")
    for plan, predicted_seconds, took_seconds, low, high, _ in rows:
        mark = " **chosen**" if plan.hash == chosen.hash else ""
        print(
            f"| {name_of(plan)}{mark} | {predicted_seconds * 1e3:.1f} | {took_seconds * 1e3:.1f} ({low * 1e3:.1f} to "
            f"{high * 1e3:.1f}) | {predicted_seconds / took_seconds - 1:+.1%} |"
        )
    errors = [abs(row[1] / row[2] - 1) for row in rows]
    regret = next(row[2] for row in rows if row[0].hash == chosen.hash) / rows[0][2] - 1
    summary = {
        "plans": len(rows),
        "median_abs_error": median(errors),
        "rank_correlation": spearman([row[1] for row in rows], [row[2] for row in rows]),
        "regret": regret,
        "within_interval": sum(row[5] for row in rows) / len(rows),
        "spread": median((row[4] - row[3]) / row[2] for row in rows),
    }
    print()
    for name, value in summary.items():
        print(f"{name}: {value:.3g}")
    if options.json:
        detail = [{"plan": name_of(row[0]), "predicted_seconds": row[1], "measured_seconds": row[2]} for row in rows]
        Path(options.json).write_text(json.dumps({**summary, "rows": detail}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
