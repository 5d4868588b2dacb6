"""Distil public measurements into the tables of `hardware_profiles/efficiency/`, and say how well they predict.

    python benchmarks/distill_tables.py DIR [--write]

DIR holds the CSV files of public measurements (device, op, shape_or_bytes, ranks, nodes, value, unit, source). Every table
is fitted on two thirds of the shapes and scored on the rest through the very functions that price a plan; with --write the
YAML files are replaced by tables fitted on all of them.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from distill_attention import (
    attention_data,
    attention_errors,
    attention_tables,
    published_attention,
    scaled,
    simumax_ratio,
)
from distill_fit import rows
from distill_gemm import extended, gemm_data, gemm_errors, gemm_table
from distill_links import across_errors, link_curves, link_data, link_errors

from hardware_profiles.chip import AttentionTable, Chip, Efficiency, GemmTable
from hardware_profiles.profile import load_chip

OUTPUT = Path(__file__).resolve().parent.parent / "hardware_profiles" / "efficiency"
AICONFIGURATOR = "ai-dynamo/aiconfigurator systems/data"
SIMUMAX = "MooreThreads/SimuMax configs/system"
LAYOUTS = {"forward": "_TN_", "dgrad": "_NN_", "wgrad": "_NT_out-fp32"}
FA2 = "FlashAttention-2 on H100 (arXiv 2307.08691 and 2407.08608, figures)"
FP8 = "deepseek-ai/DeepGEMM README (H800), Azure/AI-benchmarking-guide Azure_Results (H100, H200; cuBLASLt)"
FA3 = "cuDNN on H100 (FlashAttention-3 paper, arXiv 2407.08608, figures)"


def bare(name: str) -> Chip:
    """A chip without tables."""
    return load_chip(name).model_copy(update={"efficiency": Efficiency()})


def with_(chip: Chip, **changes: Any) -> Chip:
    return chip.model_copy(update={"efficiency": chip.efficiency.model_copy(update=changes)})


def gemm_set(
    title: str, chip: Chip, tables: dict[str, tuple[Any, str]], everything: bool, below: GemmTable | None = None
) -> tuple[GemmTable, ...]:
    """Fit each layout, print its held-out errors, and return the tables to ship (fitted on all shapes).

    `below` lends its shape to dims smaller than were measured.
    """

    def extend(table: GemmTable) -> GemmTable:
        return table if below is None else extended(table, below)

    final = []
    for layout, (data, source) in tables.items():
        trial = with_(chip, gemm=(extend(gemm_table(chip, data, layout, source, False)),))
        gemm_errors(f"{title} GEMM {layout}", trial, data, layout)
        final.append(extend(gemm_table(chip, data, layout, source, everything)))
    return tuple(final)


def layouts_by_ratio(forward: GemmTable, measured: tuple[GemmTable, ...], source: str) -> tuple[GemmTable, ...]:
    """Dgrad and wgrad of a chip measured forward only: another chip's ratio to its own forward, at each smallest dim."""
    own = {table.layout: table for table in measured}
    result = [forward]
    for layout in ("dgrad", "wgrad"):
        other, base = own[layout], own["forward"]
        at = np.log2(forward.min_dim)
        ratio = np.interp(at, np.log2(other.min_dim), other.fraction_of_peak)
        ratio = ratio / np.interp(at, np.log2(base.min_dim), base.fraction_of_peak)
        fractions = tuple(
            round(float(f * np.clip(r, 0.75, 1.0)), 3) for f, r in zip(forward.fraction_of_peak, ratio, strict=True)
        )
        result.append(forward.model_copy(update={"layout": layout, "fraction_of_peak": fractions, "source": source}))
    return tuple(result)


def pointwise(folder: Path, device: str, chip: Chip) -> dict[str, float]:
    """Median fraction of bandwidth of vLLM's kernels on 4 MB and more, launches taken off."""
    classes = {"membound_add": "add", "membound_mlp_act": "activation", "membound_input_layernorm": "norm"}
    found: dict[str, list[float]] = {kind: [] for kind in classes.values()}
    for row in rows(folder, "ops_vidur.csv"):
        kind = classes.get(row["op"])
        milliseconds = re.search(r"ms=([\d.e-]+)", row["source"])
        if kind and row["device"] == device and milliseconds and float(milliseconds[1]) > 0.02:
            seconds = float(milliseconds[1]) * 1e-3
            moved = float(row["value"]) * 1e9 * seconds
            found[kind].append(moved / (seconds - chip.launch_seconds) / chip.memory_bytes_per_second)
    return {kind: round(min(float(np.median(values)), 0.95), 2) for kind, values in found.items()}


def simumax(folder: Path, device: str) -> dict[str, tuple[Any, str]]:
    data = [row for row in rows(folder, "matmul_simumax.csv") if row["device"] == device]
    return {
        layout: (gemm_data(data, lambda op, mark=mark: mark in op), f"{SIMUMAX}, {device}, training GEMM {mark[1:3]}")
        for layout, mark in LAYOUTS.items()
    }


def sweep(folder: Path, *names: str) -> Any:
    data = [row for name in names for row in rows(folder, f"matmul_aiconfigurator_{name}.csv")]
    return gemm_data(data, lambda op: True)


def ampere_pcie(folder: Path) -> dict[str, Any]:
    chip = bare("a100-80gb-pcie")
    sxm = gemm_table(bare("a100-80gb-sxm"), sweep(folder, "a100_sxm_sglang"), "forward", "", True)
    gemm = gemm_set("A100 PCIe", chip, simumax(folder, "A100-PCIe-80G"), True, sxm)
    attention = ampere_attention(folder, bare("a100-80gb-sxm"), quiet=True)
    slower = [scaled(table, 0.9, table.source + "; x 0.9 for 300 W") for table in attention]
    classes = {"copy": 0.91, "embedding": 0.55, "loss": 0.81} | pointwise(folder, "A100", bare("a100-80gb-sxm"))
    return ship(gemm=gemm, attention=slower, pointwise=classes)


def ampere_attention(folder: Path, chip: Chip, quiet: bool = False) -> list[AttentionTable]:
    found = attention_data(folder, "a100_sxm")
    source = f"{AICONFIGURATOR}/a100_sxm/attention (FlashAttention-2)"
    if not quiet:
        attention_errors(with_(chip, attention=tuple(attention_tables(chip, found, source, False))), found)
    forward = attention_tables(chip, found, source, True)
    ratio = simumax_ratio(folder, "A100-PCIe-80G")
    text = f"forward x {ratio:.2f}, the ratio measured by {SIMUMAX}/a100_pcie.json"
    return forward + [scaled(table, ratio, text, phase="backward") for table in forward]


def ampere(folder: Path) -> dict[str, Any]:
    chip = bare("a100-80gb-sxm")
    data = (sweep(folder, "a100_sxm_sglang"), f"{AICONFIGURATOR}/a100_sxm/gemm/sglang")
    forward = gemm_set("A100 SXM", chip, {"forward": data}, True)[0]
    pcie = tuple(
        gemm_table(bare("a100-80gb-pcie"), d, layout, s, True)
        for layout, (d, s) in simumax(folder, "A100-PCIe-80G").items()
    )
    gemm = layouts_by_ratio(forward, pcie, f"forward x ratio of layouts in {SIMUMAX}/a100_pcie.json")
    classes = {"copy": 0.86, "embedding": 0.55, "loss": 0.81} | pointwise(folder, "A100", chip)
    return ship(
        gemm=gemm,
        attention=ampere_attention(folder, chip),
        pointwise=classes,
        sustained=0.91,
        links=links(folder, chip, "A100", "a100_sxm", 300),
    )


def hopper(folder: Path) -> dict[str, Any]:
    chip = bare("h100-80gb-sxm")
    data = (sweep(folder, "h100_sxm_vllm", "h200_sxm_vllm"), f"{AICONFIGURATOR}/h100_sxm and h200_sxm/gemm/vllm")
    forward = gemm_set("H100 and H200", chip, {"forward": data}, True)[0]
    gemm_errors("H100 only, GEMM forward", with_(chip, gemm=(forward,)), sweep(folder, "h100_sxm_vllm"), "forward")
    b200 = tuple(gemm_table(bare("b200"), d, layout, s, True) for layout, (d, s) in simumax(folder, "B200-SXM").items())
    gemm = layouts_by_ratio(forward, b200, f"forward x ratio of layouts in {SIMUMAX}/b200_bf16_ceperm.json")
    gemm = (*gemm, fp8_table(folder, chip, forward))
    published = [
        table
        for prefix, source in (("FA2", FA2), ("cuDNN", FA3))
        for table in published_attention(folder, "H100-SXM5-80G", chip, prefix, source)
        if table.causal or table.head_dim == 128
    ]
    found = attention_data(folder, "h100_sxm")
    attention_errors(with_(chip, attention=tuple(attention_tables(chip, found, "", False))), found)
    classes = {"copy": 0.87, "embedding": 0.55, "loss": 0.60} | pointwise(folder, "H100", chip)
    return ship(
        gemm=gemm,
        attention=published,
        pointwise=classes,
        sustained=0.77,
        links=links(folder, chip, "H100", "h100_sxm", 450),
    )


def fp8_table(folder: Path, chip: Chip, below: GemmTable) -> GemmTable:
    """fp8 products of Hopper: all run in the forward's layout (its tensor cores take no other), so one table serves."""
    data = [row for name in ("matmul_fp8_h800", "azure_benchmarks") for row in rows(folder, f"{name}.csv")]
    # an odd n is off the 16 bytes that fp8 products need
    data = [
        row for row in data if row["device"][:4] in ("H800", "H100", "H200") and "n2145" not in row["shape_or_bytes"]
    ]
    found = gemm_data(data, lambda op: op.startswith("gemm_fp8"))
    knots = (128, 256, 512, 1024, 2048, 4096, 8192)
    trial, final = (
        extended(gemm_table(chip, found, "any", FP8, everything, "fp8", knots), below) for everything in (False, True)
    )
    gemm_errors("H100, H200 and H800 GEMM fp8", with_(chip, gemm=(trial,)), found, "forward", "fp8")
    # Azure's loops warm up 10,000 times and DeepGEMM's agree with them: much of the power limit is in them already
    return final.model_copy(update={"sustained": 0.85})


def blackwell(folder: Path) -> dict[str, Any]:
    chip = bare("b200")
    inference = gemm_table(chip, sweep(folder, "b200_sxm_vllm"), "forward", "", True)
    gemm = gemm_set("B200 training", chip, simumax(folder, "B200-SXM"), True, inference)
    gemm_errors(
        "B200 inference sweep read with the training table",
        with_(chip, gemm=gemm),
        sweep(folder, "b200_sxm_vllm"),
        "forward",
    )
    found = {key: item for key, item in attention_data(folder, "b200_sxm").items() if key[2] in (64, 128)}
    source = f"{AICONFIGURATOR}/b200_sxm/attention"
    attention_errors(with_(chip, attention=tuple(attention_tables(chip, found, source, False))), found)
    forward = attention_tables(chip, found, source, True)
    ratio = simumax_ratio(folder, "B200-SXM")
    text = f"forward x {ratio:.2f}, the ratio measured by {SIMUMAX}/b200_bf16_ceperm.json"
    backward = [scaled(table, ratio, text, phase="backward") for table in forward]
    classes = {"copy": 0.67, "add": 0.67, "activation": 0.60, "norm": 0.45, "loss": 0.32, "embedding": 0.40}
    return ship(
        gemm=gemm, attention=forward + backward, pointwise=classes, links=links(folder, chip, "B200", "b200_sxm", 900)
    )


def links(folder: Path, chip: Chip, title: str, device: str, speed: float) -> list[Any]:
    data = link_data(folder, device)
    source = f"{AICONFIGURATOR}/{device}/comm/nccl (one node, medians)"
    link_errors(f"{title} collectives", with_(chip, links=(link_curves(data, speed, source, 2),)), data, speed)
    return [link_curves(data, speed, source, 1)]


def ship(**fields: Any) -> dict[str, Any]:
    """The YAML's content: an `Efficiency`, validated, without its defaults."""
    return {"efficiency": Efficiency(**fields).model_dump(exclude_defaults=True, mode="json")}


GENERATIONS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "ampere_pcie": ampere_pcie,
    "ampere": ampere,
    "hopper": hopper,
    "blackwell": blackwell,
}


class _Flow(yaml.SafeDumper):
    """Lists of numbers on one line."""


def _sequence(dumper: yaml.SafeDumper, data: list[Any]) -> yaml.Node:
    numbers = all(isinstance(item, (int, float)) for item in data)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=numbers)


_Flow.add_representer(list, _sequence)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folder", type=Path, help="folder of the measurements' CSV files")
    parser.add_argument("--write", action="store_true", help="replace the YAML files")
    arguments = parser.parse_args()
    print("across nodes (no constant was fitted to these)")
    across_errors(arguments.folder, {"B200": bare("b200"), "H100": bare("h100-80gb-sxm")})
    for name, distil in GENERATIONS.items():
        print(name)
        content = distil(arguments.folder)
        if arguments.write:
            text = yaml.dump(content, Dumper=_Flow, sort_keys=False, width=118, allow_unicode=True)
            header = "# Written by benchmarks/distill_tables.py from public measurements; errors in docs/costs.md.\n"
            (OUTPUT / f"{name}.yaml").write_text(header + text)


if __name__ == "__main__":
    main()
