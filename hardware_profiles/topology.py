"""What a group of devices sees of the cluster: bandwidth and latency, for any set of ranks.

Two ways to the same figures. `Topology.graph` is the cluster as a networkx graph: devices, switches, network ports,
leaves and spine with the bandwidth of every edge. `Topology.group` answers for a group from counts alone, so that a
group of 16,384 costs little; tests hold it against the graph.

A network port is shared by the devices of its node when all replicas of an axis run at once: per device
``count * port / devices``. Of `k` members below one leaf, neighbours in a ring leave it once, so an oversubscription `o`
slows the group by ``max(1, o / k)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from hardware_profiles.cluster import Cluster, Curve, Group, NodeGroup
from hardware_profiles.errors import ProfileError

if TYPE_CHECKING:
    import networkx

POSITIONS_TRIED = 16
PCIE_BESIDE_NVLINK_BYTES_PER_SECOND = 12e9
"""Two devices without a link between them talk through the host."""


class Place(NamedTuple):
    """Where a device is: node group, node (counted over all groups), and its number in the node."""

    group: int
    node: int
    local: int


class Topology:
    """Answers for sets of devices; uses the first `devices` of the cluster, whole nodes first, in listed order."""

    def __init__(self, cluster: Cluster, devices: int | None = None) -> None:
        self.cluster = cluster
        self.devices = devices or cluster.devices
        if self.devices > cluster.devices:
            raise ProfileError(f"{self.devices} devices wanted, but {cluster.name} has {cluster.devices}")
        self._strided: dict[tuple[int, int], Group] = {}
        self._starts: list[tuple[int, int]] = []
        first = node = 0
        for group in cluster.node_groups:
            self._starts.append((first, node))
            first += group.devices
            node += group.nodes - group.spare

    def place(self, device: int) -> Place:
        """Where a device is. Raises IndexError outside the cluster."""
        if not 0 <= device < self.cluster.devices:
            raise IndexError(device)
        number = max(i for i, (first, _) in enumerate(self._starts) if first <= device)
        first, node = self._starts[number]
        per_node = self.cluster.node_groups[number].devices_per_node
        return Place(number, node + (device - first) // per_node, (device - first) % per_node)

    def strided(self, size: int, stride: int) -> Group:
        """The group {0, stride, 2 stride, ...} of `size` devices, where it lies worst, all its replicas running at once."""
        key = (size, stride)
        if key not in self._strided:
            span = size * stride
            groups = max(1, self.devices // span) if span else 1
            bases = [block * span + offset for block in range(groups) for offset in range(stride)]
            step = max(1, len(bases) // POSITIONS_TRIED)
            tried = [self.group(range(base, base + span, stride)) for base in self._distinct(bases[::step])]
            self._strided[key] = max(tried, key=_slowness)
        return self._strided[key]

    def _distinct(self, bases: list[int]) -> list[int]:
        """Bases that lie differently in their node: of equal nodes one stands for all."""
        if len(self.cluster.node_groups) > 1:
            return bases
        per_node = self.cluster.node_groups[0].devices_per_node
        per_leaf = per_node * (self.cluster.fabric.nodes_per_leaf or 1)
        period = per_leaf if self.cluster.fabric.nodes_per_leaf else per_node
        return list({base % period: base for base in reversed(bases)}.values())

    def point_to_point(self, first: int, second: int) -> Group:
        """The two devices of a send."""
        return self.group((first, second))

    def group(self, ranks: Sequence[int]) -> Group:
        """What a collective over these devices sees."""
        by_node = self._by_domain(ranks)
        kinds = [self.cluster.node_groups[number] for number in {group for group, _ in by_node}]
        ranks_per_node = max(len(members) for members in by_node.values())
        common: dict[str, Any] = {
            "size": len(ranks),
            "nodes": len(by_node),
            "ranks_per_node": ranks_per_node,
            "chip": kinds[0].chip.name,
            "curves": self._curves(len(ranks), len(by_node)),
        }
        if ranks_per_node > 1:
            common |= self._intra({(group, *members) for (group, _), members in by_node.items() if len(members) > 1})
        if len(by_node) > 1:
            common |= self._inter(kinds, by_node)
        return Group.model_construct(**common)

    def _by_domain(self, ranks: Sequence[int]) -> dict[tuple[int, int], list[int]]:
        """(node group, node) -> the devices' numbers in it; nodes that share one NVLink switch count as one."""
        per_domain = self.cluster.fabric.nodes_per_domain if self.cluster.fabric.kind == "nvlink_domain" else None
        found: dict[tuple[int, int], list[int]] = {}
        if len(self.cluster.node_groups) == 1:
            per_node = self.cluster.node_groups[0].devices_per_node * (per_domain or 1)
            for rank in ranks:
                found.setdefault((0, rank // per_node), []).append(rank % per_node)
            return found
        for rank in ranks:
            place = self.place(rank)
            found.setdefault((place.group, place.node // (per_domain or 1)), []).append(place.local)
        return found

    def _curves(self, size: int, nodes: int) -> tuple[Curve, ...]:
        return tuple(curve for curve in self.cluster.curves if curve.ranks == size and curve.nodes == nodes)

    def _intra(self, sets: set[tuple[int, ...]]) -> dict[str, Any]:
        """`sets`: (node group, devices in one node), each kind once."""
        slowest = min(sorted(sets), key=self._intra_bytes_per_second)
        intra = self.cluster.node_groups[slowest[0]].intra
        return {
            "intra_kind": intra.kind,
            "intra_bytes_per_second": self._intra_bytes_per_second(slowest),
            "intra_latency_seconds": intra.latency_us * 1e-6,
            "peer_to_peer": intra.peer_to_peer,
        }

    def _intra_bytes_per_second(self, members: tuple[int, ...]) -> float:
        group, devices = self.cluster.node_groups[members[0]], members[1:]
        full = group.intra.gigabytes_per_second * 1e9
        match group.intra.kind:
            case "nvlink_mesh":
                return _mesh_bytes_per_second(group, devices) or PCIE_BESIDE_NVLINK_BYTES_PER_SECOND
            case "xgmi":
                # Links go to single peers: a part of the node uses its part of them.
                return full * (len(devices) - 1) / max(1, group.devices_per_node - 1)
            case "pcie":
                crosses = not group.intra.peer_to_peer or not _below_one_switch(group, devices)
                return full / (group.intra.host_bridge_shared_by if crosses else 1)
            case _:
                return full

    def _inter(self, kinds: list[NodeGroup], by_node: dict[tuple[int, int], list[int]]) -> dict[str, Any]:
        fabric = self.cluster.fabric
        slowest = min(kinds, key=nic_bytes_per_second_per_device)
        assert slowest.nics is not None
        leaves: dict[int, int] = {}
        for (_, node), members in by_node.items():
            leaf = node // (fabric.nodes_per_leaf or len(by_node) + node + 1)
            leaves[leaf] = leaves.get(leaf, 0) + len(members)
        slowdown, hops = 1.0, 1
        if len(leaves) > 1:
            fewest = min(leaves.values())
            slowdown = max(1.0, fabric.leaf_oversubscription * fabric.spine_oversubscription / fewest)
            hops = 3
        return {
            "inter_kind": slowest.nics.kind,
            "inter_bytes_per_second": nic_bytes_per_second_per_device(slowest) / slowdown,
            "inter_latency_seconds": (slowest.nics.latency_us + hops * fabric.hop_latency_us) * 1e-6,
            "in_network_reduction": fabric.in_network_reduction,
        }

    @cached_property
    def graph(self) -> networkx.Graph[Any]:
        """Devices (integers) and switches (names) with `bytes_per_second` and `seconds` (latency) on every edge."""
        from hardware_profiles.topology_graph import build_graph

        return build_graph(self)


def nic_bytes_per_second_per_device(group: NodeGroup) -> float:
    """A device's share of its node's network ports, each direction."""
    if group.nics is None:
        return 0.0
    return group.nics.count * group.nics.gigabits_per_second * 1e9 / 8 / group.devices_per_node


def _below_one_switch(group: NodeGroup, devices: Sequence[int]) -> bool:
    parts = group.intra.switch_groups
    return parts is None or any(set(devices) <= set(part) for part in parts)


def _mesh_bytes_per_second(group: NodeGroup, devices: Sequence[int]) -> float:
    """Each direction, per device: its links inside the set; 0 where some device has none."""
    links = group.intra.links
    assert links is not None
    fewest = min(sum(links[device][other] for other in devices) for device in devices)
    return fewest * group.intra.gigabytes_per_second * 1e9


def _slowness(group: Group) -> tuple[float, float]:
    """Orders groups of one size by how slow a large collective over them is."""
    inter = 1 / group.inter_bytes_per_second / group.ranks_per_node if group.nodes > 1 else 0.0
    intra = 1 / group.intra_bytes_per_second if group.ranks_per_node > 1 else 0.0
    return (inter + intra, group.inter_latency_seconds + group.intra_latency_seconds)
