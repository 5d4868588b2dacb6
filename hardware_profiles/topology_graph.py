"""The cluster as a networkx graph: devices are integers, everything else is named.

    device -- nodeN -- domainD                       the NVLink switch of a node, and of the nodes that share one
    device -- nodeN/switchS -- nodeN                 PCIe; nodeN is then the host, through which peers meet
    device -- device                                 links of a mesh
    device -- nodeN/nicK -- leafL (/railK) -- spine  the network

Every edge holds `bytes_per_second` each direction and `seconds` of latency; an edge is as wide as the hardware, so that
sharing shows as several flows on one edge.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import networkx

from hardware_profiles.cluster import Fabric, Nics, NodeGroup

if TYPE_CHECKING:
    from hardware_profiles.topology import Topology

Edge = tuple[object, object, dict[str, float]]


def build_graph(topology: Topology) -> networkx.Graph[Any]:
    """The graph of all devices that the topology uses."""
    graph: networkx.Graph[Any] = networkx.Graph()
    fabric, nodes = topology.cluster.fabric, list(_nodes(topology))
    for node, group, devices in nodes:
        graph.add_edges_from(_inside(node, devices, group))
        if topology.nodes_per_unit > 1:
            width = group.intra.gigabytes_per_second * 1e9 * len(devices)
            graph.add_edges_from([_edge(f"node{node}", f"domain{node // topology.nodes_per_unit}", width, 0.0)])
        if len(nodes) > 1 and group.nics is not None:
            graph.add_edges_from(_network(fabric, group.nics, node, devices, group.devices_per_node))
    return graph


def _nodes(topology: Topology) -> Iterator[tuple[int, NodeGroup, range]]:
    """Node number, its group, its devices in use."""
    first = node = 0
    for group in topology.cluster.node_groups:
        for _ in range(group.nodes - group.spare):
            last = min(first + group.devices_per_node, topology.devices)
            if last > first:
                yield node, group, range(first, last)
            first, node = first + group.devices_per_node, node + 1


def _inside(node: int, devices: range, group: NodeGroup) -> Iterator[Edge]:
    intra = group.intra
    width, latency = intra.gigabytes_per_second * 1e9, intra.latency_us * 1e-6
    if intra.links is not None or intra.kind == "xgmi":
        for a, first in enumerate(devices):
            for b, second in enumerate(devices[:a]):
                links = intra.links[a][b] if intra.links else 1 / max(1, group.devices_per_node - 1)
                if links:
                    yield _edge(first, second, links * width, latency)
    elif intra.kind == "pcie":
        yield from _pcie(node, devices, group)
    else:
        for device in devices:
            yield _edge(device, f"node{node}", width, latency / 2)


def _pcie(node: int, devices: range, group: NodeGroup) -> Iterator[Edge]:
    """Devices hang on switches, switches on the host by a path as wide as one device's."""
    intra = group.intra
    width, latency = intra.gigabytes_per_second * 1e9, intra.latency_us * 1e-6
    for local, device in enumerate(devices):
        if intra.switch_groups:
            switch = next(number for number, part in enumerate(intra.switch_groups) if local in part)
        else:
            switch = 0 if intra.peer_to_peer else local // intra.host_bridge_shared_by
        yield _edge(device, f"node{node}/switch{switch}", width, latency / 2)
        uplink = width * (len(intra.switch_groups[switch]) / intra.host_bridge_shared_by if intra.switch_groups else 1)
        yield _edge(f"node{node}/switch{switch}", f"node{node}", uplink, latency / 2)


def _network(fabric: Fabric, nics: Nics, node: int, devices: range, per_node: int) -> Iterator[Edge]:
    port = nics.gigabits_per_second * 1e9 / 8
    leaf = f"leaf{node // fabric.nodes_per_leaf if fabric.nodes_per_leaf else 0}"
    rails = fabric.kind == "rail_optimized" and nics.rail_aligned
    uplink = (fabric.nodes_per_leaf or 1) * port * (1 if rails else nics.count)
    uplink /= fabric.leaf_oversubscription * fabric.spine_oversubscription
    for local, device in enumerate(devices):
        for number in ports_of(local, nics.count, per_node):
            nic, above = f"node{node}/nic{number}", f"{leaf}/rail{number}" if rails else leaf
            yield _edge(device, nic, port, 0.0)
            yield _edge(nic, above, port, nics.latency_us * 1e-6 / 2)
            if fabric.nodes_per_leaf:
                yield _edge(above, "spine", uplink, fabric.hop_latency_us * 1e-6)


def ports_of(local: int, ports: int, devices: int) -> range:
    """The node's ports next to one of its devices: at least one, several where there are more ports than devices."""
    first = local * ports // devices
    return range(first, max(first + 1, (local + 1) * ports // devices))


def _edge(first: object, second: object, bytes_per_second: float, seconds: float) -> Edge:
    return first, second, {"bytes_per_second": bytes_per_second, "seconds": seconds}
