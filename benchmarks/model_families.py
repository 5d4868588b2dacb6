"""What capture and division make of every family of models: the table of docs/families.md.

    python benchmarks/model_families.py [--configs DIR] [--only NAME ...] [--layers] [-o docs/families.md]

Without --configs, the small configurations of family_configs.py and the examples; DIR holds Hugging Face config.json files of
published models. For each: parameters, model FLOPs and bytes kept for backward of one sequence, seconds of a capture,
operators without a rule, blocks and classes, the division that the planner derives at tp 2 and 8, and whether the model's
own code accepts that division's local shapes on meta. --layers instead times captures against the number of layers.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from family_configs import SEQ, SMALL
from torch import nn

from autopar.documents import Graph
from autopar.errors import CaptureError
from autopar.planner.placements import conversions, loss_is_parallel, placements
from autopar.planner.pricelist import PriceList
from autopar.planner.request import Request
from autopar.runtime.dry_run import DryRun, dry_run
from autopar.tracer import capture, rehearsal
from hardware_profiles.profile import load_cluster
from hardware_profiles.topology import Topology

ROOT = Path(__file__).parents[1]
DEGREES = (2, 8)


@dataclass(frozen=True)
class Family:
    """A model to capture: what to call it, its spec, and the sequence length (None: the model's own)."""

    name: str
    spec: str
    seq_len: int | None = None


@dataclass
class Row:
    """What was found; `problem` says why there is no more."""

    name: str
    problem: str = ""
    graph: Graph | None = None
    seconds: float = 0.0
    divisions: dict[int, str] = field(default_factory=dict)


def families(configs: Path | None, folder: Path) -> Iterator[Family]:
    """Small configurations or those of a folder, then the examples."""
    if configs is None:
        for name, fields in SMALL.items():
            place = folder / name.replace(" ", "_")
            place.mkdir()
            (place / "config.json").write_text(json.dumps(fields))
            yield Family(name, str(place), SEQ)
    else:
        for path in sorted(configs.glob("*.json")):
            # A state-space model without its own kernels unrolls its sequence: a short one.
            unrolls = "mamba" in path.read_text() or "linear_attention" in path.read_text()
            yield Family(path.stem, str(path), 256 if unrolls else None)
    for path in sorted((ROOT / "examples").glob("*.py")):
        if "def build_model" in path.read_text():
            yield Family(f"examples/{path.name}", str(path))


def examine(family: Family) -> Row:
    """Capture a model twice (the second time is told: the first one imports), then divide it."""
    row = Row(family.name)
    try:
        for _ in range(2):
            gc.collect()
            started = time.perf_counter()
            row.graph = capture(family.spec, seq_len=family.seq_len)
            row.seconds = time.perf_counter() - started
    except CaptureError as error:
        row.problem = str(error).replace(family.spec, "").lstrip(": ")
        return row
    for degree in DEGREES:
        row.divisions[degree] = divided(family, row.graph, degree)
    return row


def divided(family: Family, graph: Graph, degree: int) -> str:
    """The division at a degree: with sequences divided between blocks where the model's code takes it, else without."""
    tried: list[str] = []
    for sp, loss_parallel, whole_prologue in product((True, False), (True, False), (False, True)):
        prices, offered = _prices(graph, degree, loss_parallel, whole_prologue)
        if sp in offered and (sp or not whole_prologue):
            model, c = (
                SimpleNamespace(graph=graph, prices=prices),
                SimpleNamespace(tp=degree, sp=sp, cp=1, ep=1, etp=degree),
            )
            if not loss_parallel and loss_is_parallel(model, c):
                continue
            result = _rehearsed(family, graph, model, c)
            if result.passed:
                return f"{_described(graph, prices, degree, sp)}; dry run passed{_patched(result)}"
            tried.append(_why(result.reason))
    if not tried:
        return "batch only: " + _undivided(graph, degree)
    return f"refused by the model's code: {tried[-1]}"


def _prices(graph: Graph, degree: int, loss_parallel: bool, whole_prologue: bool) -> tuple[PriceList, tuple[bool, ...]]:
    cluster = load_cluster("h100x8")
    request = Request.parse(global_batch=8, seq_len=graph.captured.seq, fixed={"tp": degree}, forbidden=())
    request = replace(request, loss_parallel=loss_parallel, whole_prologue=whole_prologue)
    prices = PriceList(graph, Topology(cluster), cluster.node_groups[0].chip, request)
    return prices, prices.degrees().get(degree, ())


def _rehearsed(family: Family, graph: Graph, model: Any, c: Any) -> DryRun:
    module, step = rehearsal(family.spec, graph.captured.seq)
    plan = SimpleNamespace(
        placements=placements(model, c),
        conversions=conversions(model, c),
        mesh=SimpleNamespace(tp=c.tp),
        schedule=SimpleNamespace(micro_batch=2),
        workload=SimpleNamespace(seq_len=graph.captured.seq),
    )
    return dry_run(module, step, plan)


def _described(graph: Graph, prices: PriceList, degree: int, sp: bool) -> str:
    """Share of the parameters that is divided, and the collectives of the commonest block each way."""
    whole = local = 0
    for name, count in graph.class_counts.items():
        division = prices.division(name, degree, sp)
        for parameter in graph.class_by_name[name].parameters:
            state = division.states.get(parameter.tensor) if parameter.tensor is not None else None
            whole += count * parameter.elements
            local += count * parameter.elements * (state is not None and state.kind == "S")
    division = prices.division(_commonest(graph), degree, sp)
    counts = Counter(item.forward for item in division.conversions if item.forward not in ("identity", "slice"))
    words = ", ".join(f"{count} {kind.replace('_', '-')}" for kind, count in sorted(counts.items()))
    return (
        f"{'sp, ' if sp else ''}{local / max(whole, 1):.0%} of parameters divided; a block: {words or 'no collective'}"
    )


def _commonest(graph: Graph) -> str:
    blocks = [(run.count, run.block_class) for chain in graph.chains for run in chain.runs]
    return max(blocks)[1] if blocks else graph.block_classes[0].name


def _undivided(graph: Graph, degree: int) -> str:
    """Which classes have no division."""
    from autopar.planner.sharding import divisions

    seq, found = graph.captured.seq, []
    for name in graph.class_counts:
        ends = any(name in (chain.prologue, chain.epilogue) for chain in graph.chains)
        if not any(divisions(graph, name, side, (degree,), seq, ends) for side in ("replicated", "sequence")):
            found.append(name)
    return f"no division of {', '.join(found[:3])}{' ...' if len(found) > 3 else ''}" if found else "no common boundary"


def _patched(result: DryRun) -> str:
    return (
        f" with local {', '.join(sorted({name.split('.')[-1] for name in result.patches}))}" if result.patches else ""
    )


def _why(reason: str) -> str:
    """The operator's complaint, without the advice."""
    text = reason.split("`): ")[-1].split(". If it runs")[0]
    return " ".join(text.split())[:110].replace("|", "/")


def cells(row: Row) -> list[str]:
    """One line of the table."""
    graph = row.graph
    if graph is None:
        return [row.name, *["-"] * 6, _why(row.problem), *["-"] * len(DEGREES)]
    sizes = graph.sizes(1, graph.captured.seq)
    kept = sum(n * graph.class_by_name[name].saved_bytes(sizes, 2) for name, n in graph.class_counts.items())
    without = sorted({note.message.split()[0].removeprefix("aten.") for note in graph.notes if note.kind == "no_rule"})
    chains = " + ".join(f"{chain.count}" for chain in graph.chains)
    return [
        row.name,
        f"{graph.captured.seq:,}",
        f"{graph.model.parameters:,}",
        f"{graph.flops('model', 1, graph.captured.seq):.4g}",
        f"{kept:.4g}",
        f"{row.seconds:.2f}",
        ", ".join(without) or "none",
        f"{chains} in {len({run.block_class for chain in graph.chains for run in chain.runs})}",
        *(row.divisions[degree] for degree in DEGREES),
    ]


HEADER = ["model", "tokens", "parameters", "FLOPs", "bytes kept", "capture s", "operators without a rule",
          "blocks in classes", *(f"tp {degree}" for degree in DEGREES)]  # fmt: skip


def table(rows: list[list[str]]) -> str:
    """Rows as Markdown."""
    lines = [HEADER, ["---"] * len(HEADER), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def layer_times(counts: tuple[int, ...] = (4, 10, 32, 100, 320, 1000)) -> str:
    """Seconds of a capture against the number of layers: the blocks of a small Llama."""
    lines = ["| layers | capture s | ms a further layer |", "|---:|---:|---:|"]
    before: tuple[int, float] | None = None
    with tempfile.TemporaryDirectory() as folder:
        for count in (counts[0], *counts):
            path = Path(folder) / "config.json"
            path.write_text(json.dumps(SMALL["Llama 3"] | {"num_hidden_layers": count}))
            started = time.perf_counter()
            capture(folder, seq_len=SEQ)
            seconds = time.perf_counter() - started
            if before is not None:
                further = f"{1000 * (seconds - before[1]) / (count - before[0]):.2f}" if count > before[0] else "-"
                lines.append(f"| {count:,} | {seconds:.2f} | {further} |")
            before = (count, seconds)
    return "\n".join(lines)


INTRODUCTION = """# Families of models

Made by `python benchmarks/model_families.py`. FLOPs: matmuls and convolutions of one sequence (or sample), forward and
backward, full attention. Bytes kept: what one sequence leaves for backward in bf16 without recompute. tp: the division that
the planner derives, and whether the model's own code ran on meta with its local shapes; *batch only* means that no index but
the batch can be divided.
"""


def main() -> None:
    """Examine every family and print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", type=Path)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--layers", action="store_true")
    parser.add_argument("-o", "--out", type=Path)
    options = parser.parse_args()
    nn.init.trunc_normal_(torch.empty(1))  # what torch imports at its first use is not the first model's time
    if options.layers:
        print(layer_times())
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for family in families(options.configs, Path(folder)):
            if not options.only or any(word in family.name for word in options.only):
                rows.append(cells(examine(family)))
                print(" | ".join(rows[-1]), flush=True)
                if options.out:
                    options.out.write_text(f"{INTRODUCTION}\n{table(rows)}\n")


if __name__ == "__main__":
    main()
