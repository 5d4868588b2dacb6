"""Clusters of published runs: the chip that a row names, as many nodes as it used, the network it states.

Where a row states no network, the usual one of the chip's reference systems is taken (`USUAL_GIGABITS`).
"""

from __future__ import annotations

import re
from functools import cache
from typing import Literal

from runs_table import Run, Skip

from hardware_profiles.chip import Chip
from hardware_profiles.cluster import Cluster, Fabric, Host, Nics, NodeGroup
from hardware_profiles.profile import load_chip
from hardware_profiles.topology import Topology

CHIPS = {
    "T4": "t4",
    "V100": "v100-32gb-sxm",
    "A100": "a100-80gb-sxm",
    "A100-80GB": "a100-80gb-sxm",
    "A100-40GB": "a100-40gb-sxm",
    "A800": "a800-80gb-sxm",
    "H100": "h100-80gb-sxm",
    "H200": "h200",
    "H20": "h20",
    "H800": "h800-80gb-sxm",
    "B200": "b200",
    "B300": "b300",
    "GB200": "gb200",
    "GB300": "gb300",
    "MI300X": "mi300x",
    "L40S": "l40s",
}
"""A row's name of a chip -> its profile."""
VARIANTS = ((r"H100 9[0-9](?:/\d+)?GB", "h100-96gb-500w"),)
"""What prose says of a part that its name does not: memory and power limit."""
USUAL_GIGABITS = {
    "T4": 12.5,
    "V100": 100.0,
    "A100": 200.0,
    "A800": 200.0,
    "H": 400.0,
    "B": 400.0,
    "GB": 400.0,
    "MI": 400.0,
    "L": 100.0,
}
"""Gigabits per second of network per device in reference systems (DGX, HGX, NVL72, SuperPOD); the longest prefix counts."""
NVL72_NODES = 18
NetworkKind = Literal["infiniband", "roce", "ethernet", "omnipath", "efa"]
NETWORKS: tuple[tuple[str, NetworkKind], ...] = (
    ("omni-path", "omnipath"), ("roce", "roce"), ("efa", "efa"), ("aws g4dn", "ethernet"), ("aws", "efa"),
    ("ethernet", "ethernet"),
)  # fmt: skip
"""Words of a row -> its network; small AWS instances have no GPUDirect, and NCCL uses sockets unless told otherwise."""


def _domain(nodes: int) -> int:
    """Nodes of a job in one NVLink domain: schedulers hand out whole blocks of 16 where a job divides into such."""
    return nodes if nodes <= NVL72_NODES else 16 if nodes % 16 == 0 else NVL72_NODES


def chip_of(run: Run) -> Chip:
    """The profile of a row's chip. Raises Skip for one that is not known."""
    name = run.gpu.upper()
    for pattern, variant in VARIANTS:
        if name == "H100" and re.search(pattern, run.words):
            return _chip(variant)
    if name not in CHIPS:
        raise Skip("chip not known", run.gpu or "none stated")
    return _chip(CHIPS[name])


@cache
def _chip(name: str) -> Chip:
    return load_chip(name)


def topology_of(run: Run) -> Topology:
    """The row's cluster, all of it in use."""
    chip = chip_of(run)
    gigabits = run.gigabits_per_gpu or _usual(run.gpu.upper())
    words = run.words.lower()
    kind = next((kind for word, kind in NETWORKS if word in words), "infiniband")
    return _topology(chip.name, run.gpus, min(run.gpus_per_node, run.gpus), gigabits, kind)


def _usual(gpu: str) -> float:
    return USUAL_GIGABITS[max((prefix for prefix in USUAL_GIGABITS if gpu.startswith(prefix)), key=len)]


@cache
def _topology(chip_name: str, gpus: int, per_node: int, gigabits: float, kind: NetworkKind) -> Topology:
    chip = _chip(chip_name)
    domain = chip.name.startswith("gb")
    if gpus % per_node:
        raise Skip("contradictory", f"gpus({gpus}) is not a multiple of gpus_per_node({per_node})")
    intra: dict[str, object] = {"latency_us": 2.0 if domain else 2.5}
    if chip.link.kind == "none" or chip.link.kind == "pcie":
        intra |= {
            "kind": "pcie",
            "gigabytes_per_second": chip.link.gigabytes_per_second,
            "peer_to_peer": kind not in ("efa", "ethernet"),
        }
    nodes = NodeGroup.model_validate(
        {
            "name": "nodes",
            "nodes": gpus // per_node,
            "chip": chip,
            "devices_per_node": per_node,
            "intra": intra,
            "nics": Nics(count=per_node, gigabits_per_second=gigabits, kind=kind),
            "host": Host(memory_gib=1024, cores=96, to_device_gigabytes_per_second=25),
        }
    )
    fabric = Fabric(kind="nvlink_domain", nodes_per_domain=_domain(gpus // per_node)) if domain else Fabric(kind="flat")
    fabric = Fabric(kind="single_node") if gpus == per_node else fabric
    cluster = Cluster(name=f"{chip.name} x {gpus}", source="the run's own row", node_groups=(nodes,), fabric=fabric)
    return Topology(cluster, gpus)
