"""The text of ``autopar profiles``: one line for each built-in, or every figure of one with its source."""

from __future__ import annotations

from pathlib import Path

from hardware_profiles.chip import Chip
from hardware_profiles.cluster import Cluster
from hardware_profiles.errors import ProfileError
from hardware_profiles.pages import chip_page, cluster_page
from hardware_profiles.profile import chip_names, cluster_names, load_chip, load_cluster
from hardware_profiles.schema import did_you_mean


def describe_all() -> str:
    """Every built-in cluster and chip, a line each."""
    clusters = [_cluster_row(load_cluster(name)) for name in cluster_names()]
    clusters.sort(key=lambda row: (row[2], int(row[1].replace(",", ""))))
    chips = [_chip_row(load_chip(name)) for name in chip_names()]
    return "\n".join(
        ["clusters", *_table(["name", "devices", "chip", "inside a node", "between nodes"], clusters), "", "chips"]
        + _table(["name", "vendor", "memory", "bandwidth", "bf16 or fp16 (dense)", "links each way"], chips)
    )


def describe_one(name: str) -> str:
    """Every figure of a cluster or chip, with its source. Raises ProfileError for an unknown name."""
    if name.removesuffix(".yaml") in chip_names():
        return "\n".join(chip_page(load_chip(name)))
    known = [*cluster_names(), *chip_names()]
    if name.removesuffix(".yaml") not in known and not Path(name).exists() and len(Path(name).parts) <= 1:
        raise ProfileError(
            f"no cluster or chip named '{name}'{did_you_mean(name, known)}; `autopar profiles` lists them"
        )
    cluster = load_cluster(name)
    chips = {group.chip.name: group.chip for group in cluster.node_groups}
    return "\n".join([*cluster_page(cluster), *(line for chip in chips.values() for line in ["", *chip_page(chip)])])


def _cluster_row(cluster: Cluster) -> list[str]:
    group = cluster.node_groups[0]
    nodes = sum(item.nodes - item.spare for item in cluster.node_groups)
    intra = f"{group.devices_per_node} by {group.intra.kind} {group.intra.gigabytes_per_second:g} GB/s"
    inter = (
        f"{group.nics.count} x {group.nics.gigabits_per_second:g} Gb/s {group.nics.kind}"
        if group.nics and nodes > 1
        else "-"
    )
    return [cluster.name, f"{cluster.devices:,}", group.chip.name, intra, inter]


def _chip_row(chip: Chip) -> list[str]:
    rate = chip.teraflops.get("bf16", chip.teraflops.get("fp16", 0.0))
    return [
        chip.name,
        chip.vendor,
        f"{chip.memory_gib:g} GiB",
        f"{chip.memory_gigabytes_per_second:g} GB/s",
        f"{rate:g} TFLOP/s",
        f"{chip.link.kind} {chip.link.gigabytes_per_second:g} GB/s",
    ]


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [head, *rows]
    ]
