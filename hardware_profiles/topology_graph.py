"""The cluster as a networkx graph: devices are integers, everything else is named.

    device -- node switch (NVLink, xGMI, PCIe) or direct link -- device
    device -- nodeN/nicK -- leafN -- spine -- ...

Bandwidths are those of one edge, each direction. A device's edge to its node's ports carries its own share of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import networkx

from hardware_profiles.cluster import NodeGroup

if TYPE_CHECKING:
    from hardware_profiles.topology import Topology


def build_graph(topology: Topology) -> networkx.Graph[Any]:
    """The graph of all devices that the topology uses."""
    graph: networkx.Graph[Any] = networkx.Graph()
    cluster = topology.cluster
    nodes: dict[int, list[int]] = {}
    groups: dict[int, NodeGroup] = {}
    for device in range(topology.devices):
        place = topology.place(device)
        nodes.setdefault(place.node, []).append(device)
        groups[place.node] = cluster.node_groups[place.group]
    for node, devices in nodes.items():
        _add_node(graph, node, devices, groups[node])
        if cluster.fabric.kind == "nvlink_domain" and cluster.fabric.nodes_per_domain:
            bandwidth = groups[node].intra.gigabytes_per_second * 1e9 * len(devices)
            _edge(graph, f"node{node}", f"domain{node // cluster.fabric.nodes_per_domain}", bandwidth, 0.0)
        if len(nodes) > 1:
            _add_network(graph, topology, node, devices, groups[node])
    return graph


def path_bytes_per_second(graph: networkx.Graph[Any], first: int, second: int) -> float:
    """The narrowest edge of the widest path between two devices."""
    tree = networkx.maximum_spanning_tree(graph, weight="bytes_per_second")
    path = networkx.shortest_path(tree, first, second)
    return float(min(graph[a][b]["bytes_per_second"] for a, b in zip(path, path[1:], strict=False)))


def _add_node(graph: networkx.Graph[Any], node: int, devices: list[int], group: NodeGroup) -> None:
    intra = group.intra
    bandwidth, latency = intra.gigabytes_per_second * 1e9, intra.latency_us * 1e-6
    if intra.kind in ("nvswitch", "shared_memory"):
        for device in devices:
            _edge(graph, device, f"node{node}", bandwidth, latency / 2)
        return
    if intra.kind == "pcie":
        bridge = f"node{node}"
        for local, device in enumerate(devices):
            switch = _switch_of(group, local)
            if switch is not None and intra.peer_to_peer:
                _edge(graph, device, f"{bridge}/switch{switch}", bandwidth, latency / 2)
                _edge(graph, f"{bridge}/switch{switch}", bridge, bandwidth / intra.host_bridge_shared_by, latency / 2)
            else:
                _edge(graph, device, bridge, bandwidth / intra.host_bridge_shared_by, latency / 2)
        return
    for a, first in enumerate(devices):
        for b, second in enumerate(devices[:a]):
            links = intra.links[a][b] * bandwidth if intra.links else bandwidth / max(1, group.devices_per_node - 1)
            if links:
                _edge(graph, first, second, links, latency)


def _switch_of(group: NodeGroup, local: int) -> int | None:
    if group.intra.switch_groups is None:
        return 0 if group.intra.peer_to_peer else None
    return next(number for number, part in enumerate(group.intra.switch_groups) if local in part)


def _add_network(
    graph: networkx.Graph[Any], topology: Topology, node: int, devices: list[int], group: NodeGroup
) -> None:
    fabric, nics = topology.cluster.fabric, group.nics
    assert nics is not None
    port = nics.gigabits_per_second * 1e9 / 8
    leaf = f"leaf{node // fabric.nodes_per_leaf}" if fabric.nodes_per_leaf else "leaf0"
    for local, device in enumerate(devices):
        nic = f"node{node}/nic{local * nics.count // group.devices_per_node % nics.count}"
        _edge(graph, device, nic, nics.count * port / group.devices_per_node, 0.0)
        _edge(graph, nic, leaf, port, nics.latency_us * 1e-6 / 2)
    per_leaf = (fabric.nodes_per_leaf or 1) * nics.count * port
    up = per_leaf / fabric.leaf_oversubscription / fabric.spine_oversubscription
    _edge(graph, leaf, "spine", up, fabric.hop_latency_us * 1e-6)


def _edge(graph: networkx.Graph[Any], first: object, second: object, bytes_per_second: float, seconds: float) -> None:
    graph.add_edge(first, second, bytes_per_second=bytes_per_second, seconds=seconds)
