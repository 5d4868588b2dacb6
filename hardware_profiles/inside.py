"""The links inside a node, as a set of its devices sees them when all others are as busy.

    nvswitch, shared_memory    every device has its full bandwidth, whoever else takes part
    nvlink_mesh                as many rings as the links among the devices hold (`hardware_profiles.mesh`)
    xgmi                       a full mesh unless links are given: k devices use k - 1 of a device's n - 1 links
    pcie                       full below one switch; beyond it the path to the host is shared

Devices of a mesh that no ring of links joins talk through the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hardware_profiles.cluster import NodeGroup
from hardware_profiles.mesh import rings


class Inside(NamedTuple):
    """The fields of `hardware_profiles.cluster.Group` that the node decides."""

    intra_kind: str
    intra_bytes_per_second: float
    intra_latency_seconds: float
    peer_to_peer: bool


def inside_a_node(group: NodeGroup, devices: Sequence[int]) -> Inside:
    """What at least two devices of one node see; `devices` are their numbers in it."""
    intra = group.intra
    full = intra.gigabytes_per_second * 1e9
    latency = intra.latency_us * 1e-6
    if intra.links is not None:
        linked = rings(intra.links, tuple(sorted(devices))) * full
        return Inside(intra.kind, linked, latency, intra.peer_to_peer) if linked else _through_host(group)
    if intra.kind == "xgmi":
        full *= (len(devices) - 1) / max(1, group.devices_per_node - 1)
    elif intra.kind == "pcie":
        full /= _sharing(group, devices)
    return Inside(intra.kind, full, latency, intra.peer_to_peer)


def _through_host(group: NodeGroup) -> Inside:
    host = group.host.to_device_gigabytes_per_second * 1e9 / group.host.shared_by_devices
    return Inside("pcie", host, group.intra.latency_us * 1e-6, False)


def _sharing(group: NodeGroup, devices: Sequence[int]) -> float:
    """How many flows share the path to the host, which every step takes without peer-to-peer."""
    shared_by = group.intra.host_bridge_shared_by
    if not group.intra.peer_to_peer:
        return shared_by
    below = [len(set(part) & set(devices)) for part in group.intra.switch_groups or ()]
    touched = [count for count in below if count]
    return max(1.0, shared_by / min(touched)) if len(touched) > 1 else 1.0
