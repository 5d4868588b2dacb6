"""How far collectives are off on sizes, rank counts and machines that their model was not fitted to.

    python benchmarks/collective_accuracy.py DIR [--page docs/costs.md]

DIR holds CSV files of public measurements (device, op, shape_or_bytes, ranks, nodes, value, unit, source).

    sizes     curves of every second measured size, read at those between
    ranks     the curves of one rank count taken away, its times read from those of the others
    machines  measured elsewhere, by others, and in no fit
    tuner     NCCL's own estimates for H100 nodes: another model, a cross-check and not a measurement
"""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from distill_fit import Floats, rows
from distill_links import across_nodes, link_curves, link_data, nodes_of

from cost_models.collectives import bus_factor, collective_seconds
from hardware_profiles.chip import Chip, LinkCurves
from hardware_profiles.cluster import Group
from hardware_profiles.profile import load_chip, load_cluster
from hardware_profiles.topology import Topology

SWEPT = {
    "a100-80gb-sxm": ("a100_sxm", 300.0),
    "h100-80gb-sxm": ("h100_sxm", 450.0),
    "b200": ("b200_sxm", 900.0),
}
"""Chips whose curves ship: their name in the sweep, and the GB/s of their link."""
ELSEWHERE = {
    "A100-DGX": "a100-80gb-sxm",
    "A100-SXM (vTrain)": "a100-80gb-sxm",
    "A100-SXM-80G NVLink3": "a100-80gb-sxm",
    "B200 P6-B200 NVLink5": "b200",
    "H100-DGX": "h100-80gb-sxm",
    "H200-SXM NVLink4": "h200",
    "V100 (vTrain)": "v100-32gb-sxm",
}
"""One node of these, measured by others. Two-node runs whose network is not stated are left out."""
CUBE_MESH = "V100 (vTrain)"
"""Devices of different links: the group is what the profile of a DGX-1V says of neighbours."""
FITTED = ("H100-DGX", "send")
"""What the constants of a send were read off."""
BANDS = (("below 1 MB", 0.0, 2.0**20), ("1 to 64 MB", 2.0**20, 2.0**26), ("64 MB and more", 2.0**26, np.inf))
LATENCY, NIC, NVLINK = 2.5e-6, 50e9, 450e9
TUNED = 2.0 ** np.arange(10, 34)
MARKS = ("<!-- collectives -->", "<!-- end of collectives -->")


@dataclass(frozen=True)
class Trial:
    """Measured times of one collective on one group, none of which the chip given has seen."""

    held_out: str
    what: str
    kind: str
    chip: Chip
    group: Group
    bytes: Floats
    seconds: Floats

    def errors(self) -> Floats:
        """Predicted over measured, less one."""
        return np.asarray(collective_seconds(self.kind, self.bytes, self.group, self.chip) / self.seconds - 1)


def one_node(ranks: int, gigabytes_per_second: float) -> Group:
    return Group(
        size=ranks,
        ranks_per_node=ranks,
        intra_kind="nvswitch",
        intra_bytes_per_second=gigabytes_per_second * 1e9,
        intra_latency_seconds=LATENCY,
    )


def sizes_and_ranks(folder: Path) -> Iterator[Trial]:
    """The sweeps that curves come from, with part of each kept from them."""
    for name, (device, speed) in SWEPT.items():
        data = link_data(folder, device)
        half, whole = (link_curves(data, speed, "", step) for step in (2, 1))
        for (kind, ranks), (sizes, seconds) in sorted(data.items()):
            between = np.arange(len(sizes)) % 2 == 1
            between[-1] = False
            group = one_node(ranks, speed)
            yield Trial("sizes", name, kind, _with(name, half), group, sizes[between], seconds[between])
            others = tuple(curve for curve in whole.curves if curve.ranks != ranks)
            without = _with(name, whole.model_copy(update={"curves": others}))
            yield Trial("ranks", name, kind, without, group, sizes, seconds)


def _with(name: str, link: LinkCurves) -> Chip:
    chip = load_chip(name)
    return chip.model_copy(update={"efficiency": chip.efficiency.model_copy(update={"links": (link,)})})


def machines(folder: Path) -> Iterator[Trial]:
    """Nodes and clusters of others, priced as shipped."""
    found: dict[tuple[str, str, int], list[tuple[float, float]]] = defaultdict(list)
    for file in ("collectives.csv", "collectives_vidur.csv", "allreduce_vtrain_lut.csv"):
        for row in rows(folder, file):
            kind = {"all_reduce": "all_reduce", "send_recv": "send"}.get(re.sub("_fp..$", "", row["op"]), "")
            if row["device"] in ELSEWHERE and row["nodes"] == "1" and kind and (row["device"], kind) != FITTED:
                size, value, ranks = float(row["shape_or_bytes"]), float(row["value"]), int(row["ranks"])
                seconds = value * 1e-6 if row["unit"] == "us" else size * bus_factor(kind, ranks) / value / 1e9
                found[row["device"], kind, ranks].append((size, seconds))
    for (device, kind, ranks), points in sorted(found.items()):
        chip = load_chip(ELSEWHERE[device])
        sizes, seconds = np.array(sorted(points)).T
        group = one_node(ranks, chip.link.gigabytes_per_second)
        if device == CUBE_MESH:
            group = Topology(load_cluster("v100x8")).group(range(ranks))
        yield Trial("machines", device, kind, chip, group, sizes, seconds)
    for what, group, kind, size, seconds_of_one in across_nodes(folder):
        chip = load_chip({"B200": "b200", "H100": "h100-80gb-sxm"}[what[:4]])
        yield Trial("machines", what.split(",")[0], kind, chip, group, np.array([size]), np.array([seconds_of_one]))


def tuner(folder: Path) -> Iterator[Trial]:
    """NCCL's estimate: the least of latency + bytes / bandwidth over its algorithms and protocols."""
    found: dict[tuple[str, int, int], dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows(folder, "nccl_tuning_h100.csv"):
        way, _, what = row["op"].rpartition("_")
        for prefix, kind in (("AG_RS_", "all_gather"), ("AR_", "all_reduce")):
            if way.startswith(prefix):
                found[kind, int(row["ranks"]), int(row["nodes"])][way][what] = float(row["value"])
    chip = load_chip("h100-80gb-sxm")
    for (kind, ranks, nodes), ways in sorted(found.items()):
        each = [way["latency"] * 1e-6 + TUNED / way["algbw"] / 1e9 for way in ways.values()]
        group = nodes_of(ranks, nodes, NVLINK)
        yield Trial("tuner", "NCCL on H100", kind, chip, group, TUNED, np.min(each, axis=0))


def table(trials: list[Trial]) -> str:
    """Median absolute error by what was held out, machine, operation, ranks and size."""
    cells: dict[tuple[str, ...], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for trial in trials:
        ranks, nodes = trial.group.size, trial.group.nodes
        where = f"{ranks}" if nodes == 1 else _band(ranks)
        errors = trial.errors()
        swept = trial.held_out in ("sizes", "ranks")
        key = (trial.held_out, "A100, H100, B200" if swept else trial.what, trial.kind, where)
        for band, least, most in BANDS:
            here = list(errors[(trial.bytes >= least) & (trial.bytes < most)])
            cells[key][band] += here
            cells[trial.held_out, "all", "", ""][band] += here
    order = ("sizes", "ranks", "machines", "tuner")
    lines = [
        "| held out | where | op | ranks | " + " | ".join(band for band, _, _ in BANDS) + " |",
        "|---|---|---|---|" + "---:|" * len(BANDS),
    ]
    for key in sorted(cells, key=lambda k: (order.index(k[0]), k[1] != "all", k[1:3], len(k[3]), k[3])):
        lines.append("| " + " | ".join([*key, *(_cell(cells[key][band]) for band, _, _ in BANDS)]) + " |")
    return "\n".join(lines)


def _band(ranks: int) -> str:
    for most in (16, 64, 256, 1024):
        if ranks <= most:
            return f"nodes, to {most}"
    return "nodes, more"


def _cell(errors: list[float]) -> str:
    """Median absolute error (median error, how many)."""
    if not errors:
        return "-"
    return f"{np.median(np.abs(errors)):.0%} ({np.median(errors):+.0%}, {len(errors)})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the measurements' CSV files")
    parser.add_argument("--page", type=Path, help="renew the table of this Markdown page")
    options = parser.parse_args()
    trials = [*sizes_and_ranks(options.folder), *machines(options.folder), *tuner(options.folder)]
    text = table(trials)
    print(text)
    if options.page:
        before, _, rest = options.page.read_text(encoding="utf-8").partition(MARKS[0])
        _, _, after = rest.partition(MARKS[1])
        options.page.write_text(f"{before}{MARKS[0]}\n{text}\n{MARKS[1]}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
