"""What a group of devices sees of the cluster: bandwidth and latency, for any set of ranks.

Two ways to the same figures. `Topology.graph` is the cluster as a networkx graph: devices, switches, network ports,
leaves and spine with the bandwidth of every edge. `Topology.group` answers from counts alone, so that a group of 16,384
costs little; tests load the graph's edges with every ring of every replica and compare.

A *unit* is a node, or all nodes below one NVLink switch (`nvlink_domain`). All replicas of an axis run at once, so

    a device's share of its node's ports     p = count * port / devices                           (`port_share`)
    a ring leaves a unit through the ports of its g members there, so the narrowest unit sets g p
    below one leaf lie u units of a group: only one exit of the ring passes the uplinks, which hold 1/o of the ports of
    a full leaf, so with a fraction f of its nodes in use it is slowed by max(1, o f / u)         (`_uplink_slowdown`)
    of k members below one PCIe switch, one passes the path to the host that s devices share: max(1, s / k)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from math import gcd, lcm
from typing import TYPE_CHECKING, Any, NamedTuple

from hardware_profiles.cluster import Cluster, Curve, Group, NodeGroup
from hardware_profiles.errors import ProfileError
from hardware_profiles.inside import inside_a_node

if TYPE_CHECKING:
    import networkx

UNIFORM = ("nvswitch", "shared_memory")
"""Inside a node of these kinds every device sees the same."""


class Place(NamedTuple):
    """Where a device is: node group, node (counted over all groups), and its number in the node."""

    group: int
    node: int
    local: int


class Unit(NamedTuple):
    """A node, or the nodes below one NVLink switch: node group, and number counted over all groups."""

    group: int
    number: int


Members = Mapping[Unit, Sequence[int]]
"""Unit -> the numbers that a group's devices have in it."""


class Topology:
    """Answers for sets of devices; uses the first `devices` of the cluster, whole nodes first, in listed order.

    Raises ProfileError where the cluster has fewer.
    """

    def __init__(self, cluster: Cluster, devices: int | None = None) -> None:
        self.cluster = cluster
        self.devices = cluster.devices if devices is None else devices
        if not 1 <= self.devices <= cluster.devices:
            raise ProfileError(f"{self.devices} devices wanted, but {cluster.name} has 1 to {cluster.devices}")
        domain = cluster.fabric.nodes_per_domain if cluster.fabric.kind == "nvlink_domain" else None
        self.nodes_per_unit = domain or 1
        self._strided: dict[tuple[int, int], Group] = {}
        self._neighbours: dict[int, Group] = {}
        self._starts: list[tuple[int, int]] = []
        first = node = 0
        for group in cluster.node_groups:
            self._starts.append((first, node))
            first += group.devices
            node += group.nodes - group.spare
        self.nodes = self.place(self.devices - 1).node + 1

    @property
    def devices_in_reach(self) -> int:
        """Devices that reach each other without the network: of one node, or of one NVLink domain."""
        per_node = min(group.devices_per_node for group in self.cluster.node_groups)
        return min(per_node * self.nodes_per_unit, self.devices)

    def place(self, device: int) -> Place:
        """Where a device is. Raises IndexError outside the cluster."""
        if not 0 <= device < self.cluster.devices:
            raise IndexError(f"device {device} of {self.cluster.devices}")
        number = max(i for i, (first, _) in enumerate(self._starts) if first <= device)
        first, node = self._starts[number]
        per_node = self.cluster.node_groups[number].devices_per_node
        return Place(number, node + (device - first) // per_node, (device - first) % per_node)

    def strided(self, size: int, stride: int) -> Group:
        """The group {0, stride, 2 stride, ...} of `size` devices, where it lies worst, all its replicas running at once.

        Rank r's replica starts at r - r % (size * stride) + r % stride, as in a mesh of ranks in row-major order. Raises
        ProfileError where the devices do not hold one.
        """
        if size < 1 or stride < 1 or (size - 1) * stride >= self.devices:
            raise ProfileError(
                f"{size} devices {stride} apart need {(max(size, 1) - 1) * stride + 1}, but there are {self.devices}"
            )
        key = (size, stride)
        if key not in self._strided:
            bases = self._unlike_bases(size, stride)
            replicas = [self.group(range(base, base + size * stride, stride)) for base in bases]
            self._strided[key] = max(replicas, key=_slowness)
        return self._strided[key]

    def _unlike_bases(self, size: int, stride: int) -> Iterable[int]:
        """First devices of the replicas that may see different things: of those placed alike in equal nodes, one."""
        span, groups = size * stride, self.cluster.node_groups
        blocks = max(1, self.devices // span)
        offsets: Iterable[int] = range(min(stride, self.devices - (size - 1) * stride))
        if len(groups) > 1:
            return [block * span + offset for block in range(blocks) for offset in offsets]
        unit = groups[0].devices_per_node * self.nodes_per_unit
        leaf = groups[0].devices_per_node * (self.cluster.fabric.nodes_per_leaf or 1)
        if groups[0].intra.kind in UNIFORM:
            if unit % span == 0 or (
                span % unit == 0 and leaf % span == 0 and (stride % unit == 0 or unit % stride == 0)
            ):
                return [0]
            if stride % unit == 0:
                offsets = range(0, stride, unit)
            elif unit % stride == 0 and span % unit == 0:
                offsets = [0]
        period = lcm(unit, leaf)
        blocks = min(blocks, period // gcd(span, period))
        unlike: dict[int, int] = {}
        for block in range(blocks):
            for offset in offsets:
                unlike.setdefault((block * span + offset) % period, block * span + offset)
        return unlike.values()

    def neighbours(self, stride: int) -> Group:
        """The two devices of the slowest send from one device to that `stride` further, all such sends running at once.

        Pipeline stages that follow one another; unlike `strided(2, stride)`, which pairs devices off, every device has both
        neighbours. Raises ProfileError where the devices do not hold two.
        """
        if not 1 <= stride < self.devices:
            raise ProfileError(f"2 devices {stride} apart need {stride + 1}, but there are {self.devices}")
        if stride not in self._neighbours:
            pairs = (self.point_to_point(first, first + stride) for first in self._unlike_firsts(stride))
            self._neighbours[stride] = max(pairs, key=_slowness)
        return self._neighbours[stride]

    def _unlike_firsts(self, stride: int) -> Iterable[int]:
        """First devices of the pairs `stride` apart that may see different things."""
        groups, firsts = self.cluster.node_groups, range(self.devices - stride)
        if len(groups) > 1:
            return firsts
        unit = groups[0].devices_per_node * self.nodes_per_unit
        leaf = groups[0].devices_per_node * (self.cluster.fabric.nodes_per_leaf or 1)
        if groups[0].intra.kind != "nvswitch":
            return firsts[: lcm(unit, leaf)]
        # Below an NVSwitch all that counts is which edge of a node or leaf lies between the two, if any.
        edges = (0, unit, leaf, self.devices // leaf * leaf)
        return {first for edge in edges if (first := max(0, edge - stride)) in firsts}

    def point_to_point(self, first: int, second: int) -> Group:
        """The two devices of a send."""
        return self.group((first, second))

    def group(self, ranks: Sequence[int]) -> Group:
        """What a collective over these devices sees, in any order. Raises IndexError outside the cluster."""
        members = self._members(ranks)
        groups = [self.cluster.node_groups[number] for number in sorted({unit.group for unit in members})]
        most = max(len(devices) for devices in members.values())
        seen: dict[str, Any] = {
            "size": len(ranks),
            "nodes": len(members),
            "ranks_per_node": most,
            "chip": min(groups, key=_chip_speed).chip.name,
            "curves": self._curves(len(ranks), len(members)),
        }
        if most > 1:
            seen |= self._intra(members)
        if len(members) > 1:
            seen |= self._inter(groups, members, most)
        return Group.model_construct(**seen)

    def _members(self, ranks: Sequence[int]) -> Members:
        ends = (ranks[0], ranks[-1]) if isinstance(ranks, range) and ranks else ranks
        if not ends or min(ends) < 0 or max(ends) >= self.cluster.devices:
            raise IndexError(f"ranks {ranks} of {self.cluster.devices} devices")
        if len(self.cluster.node_groups) == 1:
            return self._members_alike(ranks)
        found: dict[Unit, list[int]] = {}
        for rank in ranks:
            place = self.place(rank)
            per_node = self.cluster.node_groups[place.group].devices_per_node
            number, inside = divmod(place.node, self.nodes_per_unit)
            found.setdefault(Unit(place.group, number), []).append(inside * per_node + place.local)
        return found

    def _members_alike(self, ranks: Sequence[int]) -> Members:
        per_unit = self.cluster.node_groups[0].devices_per_node * self.nodes_per_unit
        if isinstance(ranks, range) and 0 < ranks.step < per_unit:
            return _slices(ranks, per_unit)
        found: dict[Unit, list[int]] = {}
        for rank in ranks:
            found.setdefault(Unit(0, rank // per_unit), []).append(rank % per_unit)
        return found

    def _curves(self, size: int, nodes: int) -> tuple[Curve, ...]:
        return tuple(curve for curve in self.cluster.curves if curve.ranks == size and curve.nodes == nodes)

    def _intra(self, members: Members) -> dict[str, Any]:
        """The slowest unit that holds several; equal ones are looked at once."""
        unlike = {(unit.group, *devices) for unit, devices in members.items() if len(devices) > 1}
        links = [inside_a_node(self.cluster.node_groups[number], devices) for number, *devices in sorted(unlike)]
        return min(links, key=lambda link: link.intra_bytes_per_second)._asdict()

    def _inter(self, groups: Sequence[NodeGroup], members: Members, most: int) -> dict[str, Any]:
        ports = min(
            len(devices) * port_share(self.cluster.node_groups[unit.group]) for unit, devices in members.items()
        )
        slowest = min(groups, key=port_share)
        assert slowest.nics is not None  # a cluster of several nodes has them: `hardware_profiles.checks`
        slowdown, hops = self._uplink_slowdown(members, groups)
        fabric = self.cluster.fabric
        return {
            "inter_kind": slowest.nics.kind,
            "inter_bytes_per_second": ports / most / slowdown,
            "inter_latency_seconds": (slowest.nics.latency_us + hops * fabric.hop_latency_us) * 1e-6,
            "in_network_reduction": fabric.in_network_reduction,
        }

    def _uplink_slowdown(self, members: Members, groups: Sequence[NodeGroup]) -> tuple[float, int]:
        """(slowdown, switches passed): one where all lie below one leaf, three where the spine is between them."""
        fabric = self.cluster.fabric
        if fabric.nodes_per_leaf is None:
            return 1.0, 1
        below = Counter(unit.number * self.nodes_per_unit // fabric.nodes_per_leaf for unit in members)
        changes_rail = self._changes_rail(members, groups)
        if len(below) == 1 and not changes_rail:
            return 1.0, 1
        oversubscription = fabric.leaf_oversubscription * fabric.spine_oversubscription
        load = max(self._filled(leaf) / (1 if changes_rail else count) for leaf, count in below.items())
        return max(1.0, oversubscription * load), 3

    def _filled(self, leaf: int) -> float:
        """Nodes in use below a leaf, of those that its uplinks are made for."""
        per_leaf = self.cluster.fabric.nodes_per_leaf or 1
        return min(per_leaf, self.nodes - leaf * per_leaf) / per_leaf

    def _changes_rail(self, members: Members, groups: Sequence[NodeGroup]) -> bool:
        """Each rail has leaves of its own. Devices below one NVSwitch hand over to the one on the right rail (NCCL's PXN)."""
        if self.cluster.fabric.kind != "rail_optimized" or all(group.intra.kind == "nvswitch" for group in groups):
            return False
        if not all(group.nics and group.nics.rail_aligned for group in groups):
            return False
        rails = {
            frozenset(rail_of(self.cluster.node_groups[unit.group], local) for local in devices)
            for unit, devices in members.items()
        }
        return len(rails) > 1

    @cached_property
    def graph(self) -> networkx.Graph[Any]:
        """Devices (integers) and switches (names) with `bytes_per_second` and `seconds` (latency) on every edge."""
        from hardware_profiles.topology_graph import build_graph

        return build_graph(self)


def port_share(group: NodeGroup) -> float:
    """A device's share of its node's network ports, bytes per second each direction; 0 without ports."""
    if group.nics is None:
        return 0.0
    return group.nics.count * group.nics.gigabits_per_second * 1e9 / 8 / group.devices_per_node


def rail_of(group: NodeGroup, local: int) -> int:
    """The first port next to a device, which is the rail that it hangs on."""
    return local * group.nics.count // group.devices_per_node if group.nics else 0


def _slices(ranks: range, per_unit: int) -> dict[Unit, range]:
    """The members of each unit of ranks a constant step apart, without a look at each rank."""
    found: dict[Unit, range] = {}
    at = 0
    while at < len(ranks):
        number, first = divmod(ranks[at], per_unit)
        count = min(len(ranks) - at, (per_unit - 1 - first) // ranks.step + 1)
        found[Unit(0, number)] = range(first, first + (count - 1) * ranks.step + 1, ranks.step)
        at += count
    return found


def _chip_speed(group: NodeGroup) -> float:
    return group.chip.peak_flops("bf16")


def _slowness(group: Group) -> tuple[float, int, float]:
    """Orders groups of one size by how slow a ring over them is, then by nodes and latency."""
    inter = 1 / group.inter_bytes_per_second / group.ranks_per_node if group.nodes > 1 else 0.0
    intra = 1 / group.intra_bytes_per_second if group.ranks_per_node > 1 else 0.0
    return max(inter, intra), group.nodes, group.inter_latency_seconds + group.intra_latency_seconds
