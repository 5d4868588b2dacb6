"""Measured collectives on one node -> curves, and the errors of curves and of the model without them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from distill_fit import Floats, rows

from cost_models.collectives import collective_seconds
from hardware_profiles.chip import Chip, Curve, LinkCurves
from hardware_profiles.cluster import Group

KINDS = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
}


def link_data(folder: Path, device: str) -> dict[tuple[str, int], tuple[Floats, Floats]]:
    """(kind, ranks) -> bytes and median seconds on one node."""
    found: dict[tuple[str, int], dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows(folder, "collectives_aiconfigurator.csv"):
        if row["device"] == device:
            key = (KINDS[row["op"].removesuffix("_fp16")], int(row["ranks"]))
            found[key][float(row["shape_or_bytes"])].append(float(row["value"]) * 1e-6)
    return {
        key: (np.array(sorted(sizes)), np.array([float(np.median(sizes[s])) for s in sorted(sizes)]))
        for key, sizes in found.items()
    }


def link_curves(data: dict[tuple[str, int], tuple[Floats, Floats]], speed: float, source: str, step: int) -> LinkCurves:
    """Every `step`-th measured size (powers of two) and the last: 1 to ship, 2 to be tested on those left out."""
    curves = []
    for (kind, ranks), (sizes, seconds) in sorted(data.items()):
        keep = sorted({*range(0, len(sizes), step), len(sizes) - 1})
        curves.append(
            Curve(
                kind=kind,
                ranks=ranks,
                bytes=tuple(float(sizes[i]) for i in keep),
                seconds=tuple(float(f"{seconds[i]:.4g}") for i in keep),
            )
        )
    return LinkCurves(gigabytes_per_second=speed, curves=tuple(curves), source=source)


def across_nodes(folder: Path) -> Iterator[tuple[str, Group, str, float, float]]:
    """(what, group, kind, bytes, seconds) of runs over several nodes, none of which any constant was fitted to."""
    for row in rows(folder, "collectives.csv"):
        if row["nodes"] == "4" and row["device"].startswith("B200 P6") and float(row["shape_or_bytes"]) >= 2**20:
            size = float(row["shape_or_bytes"])
            seconds = size * 2 * 31 / 32 / float(row["value"]) / 1e9
            yield "B200 on EFA, all_reduce", nodes_of(32, 4, 900e9, "efa"), "all_reduce", size, seconds
    for row in rows(folder, "simai_bw_ratio.csv"):
        ranks, nodes = int(row["ranks"]), int(row["nodes"])
        if nodes > 1 and row["op"].endswith("NIC-bound"):
            size = float(row["shape_or_bytes"])
            seconds = size * (ranks - 1) / ranks / (400e9 * float(row["value"]))
            what = f"H100-class, {'to 16' if nodes <= 16 else 'over 16'} nodes, all_gather"
            yield what, nodes_of(ranks, nodes, 450e9, "roce"), "all_gather", size, seconds


def nodes_of(ranks: int, nodes: int, intra: float, kind: Any = "infiniband") -> Group:
    """Nodes with 50 GB/s of network a device."""
    return Group(
        size=ranks,
        nodes=nodes,
        ranks_per_node=ranks // nodes,
        intra_kind="nvswitch",
        intra_bytes_per_second=intra,
        intra_latency_seconds=2.5e-6,
        inter_kind=kind,
        inter_bytes_per_second=50e9,
        inter_latency_seconds=5e-6,
    )


def across_errors(folder: Path, chips: dict[str, Chip]) -> None:
    """Errors of the model over nodes, by what and size."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for what, group, kind, size, seconds in across_nodes(folder):
        error = collective_seconds(kind, size, group, chips[what[:4]]) / seconds - 1
        band = "1 to 64 MB" if size < 2**26 else "64 MB to 1 GB" if size < 2**30 else "1 GB and more"
        found[what, band].append(error)
    for (what, band), errors in sorted(found.items()):
        print(f"  {what}, {band}: {np.mean(np.abs(errors)):.1%}, bias {np.mean(errors):+.1%} ({len(errors)})")


def link_errors(title: str, chip: Chip, data: dict[tuple[str, int], tuple[Floats, Floats]], speed: float) -> None:
    """Errors of the curves on sizes left out, of the model alone, and of ranks left out (4 from 2 and 8)."""
    bare = chip.model_copy(update={"efficiency": chip.efficiency.model_copy(update={"links": ()})})
    without_four = chip.model_copy(
        update={
            "efficiency": chip.efficiency.model_copy(
                update={
                    "links": tuple(
                        link.model_copy(update={"curves": tuple(c for c in link.curves if c.ranks != 4)})
                        for link in chip.efficiency.links
                    )
                }
            )
        }
    )
    print(f"  {title}: mean absolute error below | above 1 MB")
    for kind in KINDS.values():
        parts = []
        for name, priced, ranks in (
            ("sizes left out", chip, 0),
            ("4 ranks left out", without_four, 4),
            ("model", bare, 0),
        ):
            below, above = [], []
            for (found, n), (sizes, seconds) in data.items():
                if found != kind or (ranks and n != ranks):
                    continue
                group = Group(
                    size=n,
                    ranks_per_node=n,
                    intra_kind="nvswitch",
                    intra_bytes_per_second=speed * 1e9,
                    intra_latency_seconds=2.5e-6,
                )
                error = np.abs(collective_seconds(kind, sizes, group, priced) / seconds - 1)
                chosen = np.arange(len(sizes)) % 2 == 1 if name == "sizes left out" else np.ones(len(sizes), bool)
                below += list(error[chosen & (sizes < 2**20)])
                above += list(error[chosen & (sizes >= 2**20)])
            parts.append(f"{name} {np.mean(below):5.1%} | {np.mean(above):5.1%}" if below else f"{name} -")
        print(f"    {kind:15} " + "   ".join(parts))
