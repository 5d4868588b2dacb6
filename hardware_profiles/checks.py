"""What the fields of a cluster cannot say one by one: how they fit together."""

from __future__ import annotations

from collections.abc import Iterator

from hardware_profiles.cluster import Cluster, Fabric, NodeGroup


def contradictions(cluster: Cluster) -> list[str]:
    """One line for each, with the field, the figures and what is allowed; empty for a sound cluster."""
    nodes = sum(group.nodes for group in cluster.node_groups)
    found = [*_fabric(cluster.fabric, cluster, nodes), *_names(cluster)]
    for number, group in enumerate(cluster.node_groups):
        checks = (_nodes(group, nodes), _memory(group), _links(group), _switches(group))
        found += [f"node_groups.{number}.{line}" for check in checks for line in check]
    return found


def _names(cluster: Cluster) -> Iterator[str]:
    names = [group.name for group in cluster.node_groups]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"node_groups: two are named '{name}'"


def _nodes(group: NodeGroup, nodes: int) -> Iterator[str]:
    if group.spare >= group.nodes:
        yield f"spare: {group.spare} of {group.nodes} nodes are spare, so none is left"
    if nodes > 1 and group.nics is None:
        yield f"nics: missing, but the cluster has {nodes} nodes: say how they reach each other"


def _memory(group: NodeGroup) -> Iterator[str]:
    usable = group.usable_memory_gib
    if usable is not None and usable > group.chip.memory_gib:
        yield f"usable_memory_gib: {usable:g} is more than the {group.chip.memory_gib:g} GiB of {group.chip.name}"
    wanted = (usable or group.chip.memory_gib) * group.devices_per_node
    if group.intra.kind == "shared_memory" and wanted > group.host.memory_gib:
        yield (
            f"usable_memory_gib: {group.devices_per_node} devices * {wanted / group.devices_per_node:g} GiB = "
            f"{wanted:g} GiB, but the host that they share has {group.host.memory_gib:g} GiB"
        )


def _links(group: NodeGroup) -> Iterator[str]:
    links, devices, kind = group.intra.links, group.devices_per_node, group.intra.kind
    if links is None:
        if kind == "nvlink_mesh":
            yield "intra.links: missing, but intra.kind is nvlink_mesh"
    elif kind not in ("nvlink_mesh", "xgmi"):
        yield f"intra.links: only for nvlink_mesh and xgmi, but intra.kind is {kind}"
    elif len(links) != devices or any(len(row) != devices for row in links):
        yield f"intra.links: must be {devices} rows of {devices} numbers, one for each of devices_per_node"
    elif any(count < 0 for row in links for count in row):
        yield "intra.links: must have no negative numbers"
    else:
        unequal = [(a, b) for a in range(devices) for b in range(a) if links[a][b] != links[b][a]]
        for a, b in unequal[:1]:
            yield f"intra.links: must be symmetric, but {b} to {a} is {links[b][a]} and {a} to {b} is {links[a][b]}"
        for a in [device for device in range(devices) if links[device][device]][:1]:
            yield f"intra.links: device {a} is linked to itself"


def _switches(group: NodeGroup) -> Iterator[str]:
    intra, devices = group.intra, group.devices_per_node
    if intra.kind != "pcie":
        if intra.switch_groups is not None or intra.host_bridge_shared_by != 1:
            yield f"intra: switch_groups and host_bridge_shared_by are for pcie, but intra.kind is {intra.kind}"
        return
    listed = sorted(device for part in intra.switch_groups or () for device in part)
    if intra.switch_groups is not None and (len(listed) != devices or listed != list(range(devices))):
        yield f"intra.switch_groups: must name each of devices 0 to {devices - 1} once"
    if intra.host_bridge_shared_by > devices:
        yield f"intra.host_bridge_shared_by: {intra.host_bridge_shared_by} is more than the node's {devices} devices"


def _fabric(fabric: Fabric, cluster: Cluster, nodes: int) -> Iterator[str]:
    if fabric.kind == "single_node" and nodes > 1:
        yield f"fabric.kind: single_node, but there are {nodes} nodes"
    if fabric.kind in ("fat_tree", "rail_optimized") and fabric.nodes_per_leaf is None:
        yield f"fabric.nodes_per_leaf: missing, but fabric.kind is {fabric.kind}"
    if fabric.kind == "nvlink_domain":
        if fabric.nodes_per_domain is None:
            yield "fabric.nodes_per_domain: missing, but fabric.kind is nvlink_domain"
        if any(group.intra.kind != "nvswitch" for group in cluster.node_groups):
            yield "fabric.kind: nvlink_domain, so every node group's intra.kind must be nvswitch"
    elif fabric.nodes_per_domain is not None:
        yield f"fabric.nodes_per_domain: only for nvlink_domain, but fabric.kind is {fabric.kind}"
