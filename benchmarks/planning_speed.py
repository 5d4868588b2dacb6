"""How long capture and planning take, and how much memory: each command a process of its own, medians over runs.

    python benchmarks/planning_speed.py [--runs 5] [--markdown]

Goals: 405B captured in under 1 s and 1 GiB beyond imports; planned for 16,384 devices with a search under 5 s, the whole
command under its imports + 6 s and 2 GiB; 8B on 64 devices searched in under 1 s.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
MIB = 2**20

MEASURE = """
import json, resource, sys, time
def rss(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
started = time.perf_counter()
import torch, autopar, autopar.api, autopar.tracer, autopar.planner.search, autopar.simulator
imported, rss_imported = time.perf_counter() - started, rss()
"""

CAPTURE = """
started = time.perf_counter()
graph = autopar.capture({model!r}, seq_len={seq})
seconds = time.perf_counter() - started
print(json.dumps(dict(imports=imported, seconds=seconds, beyond_imports_mib=(rss() - rss_imported) / 2**20)))
"""

PLAN = """
started = time.perf_counter()
plan = autopar.plan({model!r}, {cluster!r}, global_batch={batch}, seq_len={seq})
seconds = time.perf_counter() - started
print(json.dumps(dict(imports=imported, seconds=seconds, search=plan.certificate.search_seconds, rss_mib=rss() / 2**20,
                      step_seconds=plan.predicted.step_seconds, enumerated=plan.certificate.enumerated,
                      solved=plan.certificate.solved)))
"""

CASES = {
    "capture 405B": (CAPTURE, {"model": "examples/llama31_405b.py", "seq": 8192}),
    "capture 8B": (CAPTURE, {"model": "examples/llama3_8b.py", "seq": 8192}),
    "plan 8B on a100x64": (
        PLAN,
        {"model": "examples/llama3_8b.py", "cluster": "a100x64", "batch": 512, "seq": 8192},
    ),
    "plan 405B on h100x16384": (
        PLAN,
        {"model": "examples/llama31_405b.py", "cluster": "h100x16384", "batch": 2048, "seq": 8192},
    ),
}


def measure(code: str, runs: int) -> dict[str, float]:
    """Median of each figure that the code prints, over `runs` fresh processes."""
    figures: list[dict[str, float]] = []
    for _ in range(runs):
        done = subprocess.run(
            [sys.executable, "-c", MEASURE + code], cwd=ROOT, capture_output=True, text=True, check=False
        )
        if done.returncode:
            sys.exit(done.stderr)
        figures.append(json.loads(done.stdout.splitlines()[-1]))
    return {name: statistics.median(run[name] for run in figures) for name in figures[0]}


def whole_command(model: str, cluster: str, batch: int, seq: int) -> float:
    """Wall seconds of the command line itself, imports and dry run included."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "autopar", "plan", model, "--cluster", cluster, "--global-batch", str(batch)]
        words += ["--seq-len", str(seq), "-o", f"{folder}/plan.json"]
        started = time.perf_counter()
        subprocess.run(words, cwd=ROOT, check=True, capture_output=True)
        return time.perf_counter() - started


def main() -> None:
    """Measure every case and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    print("| case | figure | median |\n|---|---|---:|")
    for name, (code, values) in CASES.items():
        for figure, value in measure(code.format(**values), options.runs).items():
            print(f"| {name} | {figure} | {value:.4g} |")
        if "cluster" in values:
            seconds = statistics.median(whole_command(**values) for _ in range(options.runs))
            print(f"| {name} | whole_command | {seconds:.4g} |")


if __name__ == "__main__":
    main()
