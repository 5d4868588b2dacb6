"""Measured collectives on one node -> curves, and the errors of curves and of the model without them."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

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
