"""What groups of ranks see, against brute force on the graph and published figures."""

from __future__ import annotations

from collections import Counter, defaultdict
from math import lcm

import networkx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hardware_profiles.cluster import Cluster, Fabric, Host, Intra, Nics, NodeGroup
from hardware_profiles.errors import ProfileError
from hardware_profiles.profile import load_chip, load_cluster
from hardware_profiles.topology import Topology
from hardware_profiles.topology_graph import ports_of

CHIP = load_chip("a100-80gb-sxm")
HOST = Host(memory_gib=512, cores=64, to_device_gigabytes_per_second=24, shared_by_devices=2)
NVSWITCH = Intra(kind="nvswitch", gigabytes_per_second=300)


def cluster(
    nodes: int = 4,
    devices: int = 8,
    nics: int = 8,
    intra: Intra = NVSWITCH,
    fabric: Fabric | None = None,
    *more: NodeGroup,
) -> Cluster:
    ports = Nics(count=nics, gigabits_per_second=200, kind="infiniband")
    group = NodeGroup(name="a", nodes=nodes, chip=CHIP, devices_per_node=devices, intra=intra, nics=ports, host=HOST)
    fabric = fabric or Fabric(kind="flat")
    return Cluster(name="test", source="test", node_groups=(group, *more), fabric=fabric)


def fat_tree(nodes_per_leaf: int, oversubscription: float, kind: str = "fat_tree") -> Fabric:
    return Fabric(kind=kind, nodes_per_leaf=nodes_per_leaf, leaf_oversubscription=oversubscription)


# ---- brute force: every ring of every replica as flows over the graph's edges


def replicas(topology: Topology, size: int, stride: int) -> list[range]:
    span = size * stride
    starts = [start + offset for start in range(0, topology.devices - span + 1, span) for offset in range(stride)]
    return [range(start, start + span, stride) for start in starts]


def flows_between_nodes(topology: Topology, ranks: range) -> Counter:
    """Load on each directed edge when the group's rings carry one byte per second in all.

    Rings take turns at the members of each node, evenly: ring r leaves and enters a node at its member r, counted round.
    """
    nodes: dict[int, list[int]] = defaultdict(list)
    for rank in ranks:
        nodes[topology.place(rank).node].append(rank)
    load: Counter = Counter()
    if len(nodes) == 1:
        return load
    rings = lcm(*(len(members) for members in nodes.values()))
    order = list(nodes.values())
    for ring in range(rings):
        for here, there in zip(order, order[1:] + order[:1], strict=True):
            route(topology, here[ring % len(here)], there[ring % len(there)], 1 / rings, load)
    return load


def route(topology: Topology, first: int, second: int, share: float, load: Counter) -> None:
    """Over the sender's ports and the receiver's, evenly, and the shortest way between."""
    ends = [(rank, port) for rank in (first, second) for port in ports(topology, rank)]
    senders = [port for rank, port in ends if rank == first]
    receivers = [port for rank, port in ends if rank == second]
    for number, sender in enumerate(senders):
        receiver = receivers[number % len(receivers)]
        path = [first, *networkx.shortest_path(topology.graph, sender, receiver), second]
        for edge in zip(path, path[1:], strict=False):
            load[edge] += share / len(senders)


def ports(topology: Topology, rank: int) -> list[str]:
    place = topology.place(rank)
    group = topology.cluster.node_groups[place.group]
    return [f"node{place.node}/nic{n}" for n in ports_of(place.local, group.nics.count, group.devices_per_node)]


def slowest_replica(topology: Topology, size: int, stride: int) -> float:
    """Bytes per second that leave a node for the slowest group, all replicas sharing edges in equal parts."""
    loads = [flows_between_nodes(topology, ranks) for ranks in replicas(topology, size, stride)]
    total = sum(loads, Counter())
    edge = topology.graph.get_edge_data
    rates = [min(edge(*e)["bytes_per_second"] / total[e] for e in load) for load in loads if load]
    return min(rates)


def fits(small: int, large: int) -> bool:
    return small % large == 0 or large % small == 0


@settings(max_examples=80, deadline=None)
@given(
    nodes=st.sampled_from([2, 4, 6]),
    devices=st.sampled_from([2, 4, 8]),
    ports=st.sampled_from([1, 2, 4, 8, 16]),
    leaf=st.sampled_from([None, 1, 2, 4]),
    over=st.sampled_from([1.0, 1.5, 2.0, 7.0]),
    kind=st.sampled_from(["fat_tree", "rail_optimized"]),
    data=st.data(),
)
def test_ports_and_uplinks_carry_what_a_group_is_promised(nodes, devices, ports, leaf, over, kind, data):
    """Exactly that much where groups lie evenly in nodes and leaves; never less elsewhere.

    With rails, groups that change the rail are left out: the graph does not hand over inside the node.
    """
    all_devices = nodes * devices
    size = data.draw(st.sampled_from([n for n in range(2, all_devices + 1) if all_devices % n == 0]))
    stride = data.draw(st.sampled_from([n for n in range(1, all_devices + 1) if all_devices % (n * size) == 0]))
    aligned = fits(stride, devices) and fits(size * stride, devices)
    fabric = fat_tree(leaf, over, kind if aligned else "fat_tree") if leaf else Fabric(kind="flat")
    topology = Topology(cluster(nodes, devices, ports, NVSWITCH, fabric))
    group = topology.strided(size, stride)
    if group.nodes == 1:
        return
    promised = group.inter_bytes_per_second * group.ranks_per_node
    carried = slowest_replica(topology, size, stride)
    assert promised <= carried * (1 + 1e-9)
    per_leaf = (leaf or nodes) * devices
    if aligned and nodes * devices % per_leaf == 0 and fits(size * stride, per_leaf) and fits(stride, per_leaf):
        assert promised == pytest.approx(carried)


@settings(max_examples=150, deadline=None)
@given(
    nodes=st.integers(1, 5),
    devices=st.integers(1, 9),
    leaf=st.integers(1, 4),
    size=st.integers(1, 24),
    stride=st.integers(1, 12),
)
def test_nodes_and_ranks_per_node_are_those_of_the_worst_replica_when_every_rank_is_counted(
    nodes, devices, leaf, size, stride
):
    topology = Topology(cluster(nodes, devices, devices, NVSWITCH, fat_tree(leaf, 3.0)))
    found = replicas(topology, size, stride)
    if not found:
        return
    group = topology.strided(size, stride)
    shapes = {shape(topology, ranks) for ranks in found}
    assert group.size == size
    assert (group.nodes, group.ranks_per_node) in shapes
    assert group.nodes == 1 if max(nodes for nodes, _ in shapes) == 1 else group.nodes > 1
    each = [topology.group(list(ranks)) for ranks in found]
    slowest = min((one.inter_bytes_per_second * one.ranks_per_node for one in each if one.nodes > 1), default=0.0)
    assert group.inter_bytes_per_second * group.ranks_per_node == pytest.approx(slowest)


def shape(topology: Topology, ranks: range) -> tuple[int, int]:
    counts = Counter(topology.place(rank).node for rank in ranks)
    return len(counts), max(counts.values())


@settings(max_examples=60, deadline=None)
@given(nodes=st.integers(2, 6), devices=st.integers(1, 8), ports=st.integers(1, 8), size=st.integers(2, 48))
def test_a_group_across_nodes_never_gets_the_speed_of_the_links_inside_one(nodes, devices, ports, size):
    topology = Topology(cluster(nodes, devices, ports))
    if not devices < size <= nodes * devices:
        return
    group = topology.strided(size, 1)
    assert group.nodes > 1
    assert 0 < group.inter_bytes_per_second <= ports * 25e9 / devices
    assert group.inter_kind == "infiniband"


# ---- shapes named one by one


def test_data_parallel_groups_with_one_rank_a_node_get_one_port_each():
    group = Topology(cluster(nodes=4)).strided(4, 8)
    assert (group.nodes, group.ranks_per_node, group.inter_bytes_per_second) == (4, 1, 25e9)
    assert group.intra_kind == "none"


def test_two_whole_nodes_are_eight_ranks_a_node_with_a_port_each():
    group = Topology(cluster(nodes=2)).strided(16, 1)
    assert (group.nodes, group.ranks_per_node, group.inter_bytes_per_second) == (2, 8, 25e9)


@pytest.mark.parametrize(("ports", "each"), [(1, 25e9 / 8), (2, 25e9 / 4), (4, 12.5e9), (8, 25e9), (32, 100e9)])
def test_devices_share_the_ports_of_their_node(ports, each):
    assert Topology(cluster(nics=ports)).strided(4, 8).inter_bytes_per_second == each


@pytest.mark.parametrize("size", [3, 5, 6, 7])
def test_a_degree_that_does_not_divide_the_node_crosses_it_somewhere(size):
    group = Topology(cluster(nodes=3)).strided(size, 1)
    assert group.nodes == 2
    alone = min(min(8 * node - start, start + size - 8 * node) for node in (1, 2) for start in range(0, 24, size)
                if start < 8 * node < start + size <= 24)  # fmt: skip
    assert group.inter_bytes_per_second * group.ranks_per_node == alone * 25e9


@pytest.mark.parametrize("devices", [1, 2, 3, 5, 6, 7, 12, 24])
def test_any_number_of_devices_is_taken_node_by_node(devices):
    topology = Topology(cluster(nodes=3), devices)
    assert topology.devices == devices
    assert topology.strided(devices, 1).nodes == -(-devices // 8)


def test_more_devices_than_there_are_is_refused_with_both_numbers():
    with pytest.raises(ProfileError, match="33 devices wanted, but test has 1 to 32"):
        Topology(cluster(nodes=4), 33)
    with pytest.raises(ProfileError, match="0 devices"):
        Topology(cluster(nodes=4), 0)
    with pytest.raises(ProfileError, match="29, but there are 8"):
        Topology(cluster(nodes=1)).strided(8, 4)


def test_spare_nodes_are_not_numbered():
    base = cluster(nodes=4)
    group = base.node_groups[0].model_copy(update={"spare": 1})
    spared = base.model_copy(update={"node_groups": (group,)})
    assert Topology(spared).devices == 24


# ---- leaves and spine


def test_pods_of_llama3_are_seven_times_oversubscribed_between_but_not_within():
    """arXiv 2407.21783, 3.3.1: 3,072 GPUs a pod at full bisection, 1:7 between pods."""
    topology = Topology(load_cluster("h100x16384"))
    assert topology.group([0, 8]).inter_bytes_per_second == 50e9
    assert topology.group([0, 3072]).inter_bytes_per_second == pytest.approx(50e9 / 7)
    assert topology.group([0, 3072]).inter_latency_seconds > topology.group([0, 8]).inter_latency_seconds


def test_a_ring_of_whole_nodes_still_pays_the_oversubscription():
    """Eight ranks a node do not make the uplinks wider: each of them has its own share only."""
    fabric = fat_tree(1, 4.0)
    assert Topology(cluster(2, 8, 8, NVSWITCH, fabric)).strided(16, 1).inter_bytes_per_second == 25e9 / 4


def test_a_ring_leaves_a_leaf_once_however_many_nodes_it_has_there():
    fabric = fat_tree(4, 4.0)
    assert Topology(cluster(8, 8, 8, NVSWITCH, fabric)).strided(8, 8).inter_bytes_per_second == 25e9


def test_the_worst_replica_is_the_one_that_crosses_leaves():
    """Three nodes each: the first lie below one leaf, the second have one node there and two below the next."""
    fabric = fat_tree(4, 4.0)
    topology = Topology(cluster(6, 8, 8, NVSWITCH, fabric))
    assert topology.group([0, 8, 16]).inter_bytes_per_second == 25e9
    assert topology.strided(3, 8).inter_bytes_per_second == 25e9 / 4


def test_the_uplinks_of_a_leaf_with_half_its_nodes_are_shared_by_half_as_many():
    topology = Topology(cluster(6, 8, 8, NVSWITCH, fat_tree(4, 4.0)))
    assert topology.group([0, 8, 32]).inter_bytes_per_second == 25e9 / 2


def test_without_an_nvswitch_a_send_to_another_rail_passes_the_spine():
    intra = Intra(kind="pcie", gigabytes_per_second=24)
    topology = Topology(cluster(4, 8, 8, intra, fat_tree(4, 2.0, "rail_optimized")))
    same, other = topology.point_to_point(0, 8), topology.point_to_point(7, 8)
    assert same.inter_bytes_per_second == 2 * other.inter_bytes_per_second
    assert same.inter_latency_seconds < other.inter_latency_seconds


def test_an_nvlink_domain_is_one_node_to_its_72_devices():
    """GB200 NVL72 datasheet: 18 nodes of 4 in one NVLink domain."""
    topology = Topology(load_cluster("gb200x72"))
    group = topology.strided(72, 1)
    assert (group.nodes, group.ranks_per_node, group.intra_bytes_per_second) == (1, 72, 900e9)
    assert topology.graph.degree("domain0") == 18


# ---- inside a node


def test_the_cube_mesh_of_eight_v100_has_six_rings_of_25_gigabytes_per_second():
    """NVIDIA DGX-1V whitepaper: six NVLinks of 25 GB/s each way a GPU."""
    group = Topology(load_cluster("v100x8")).strided(8, 1)
    assert (group.intra_kind, group.intra_bytes_per_second) == ("nvlink_mesh", 150e9)


def test_neighbours_on_one_link_and_on_two():
    topology = Topology(load_cluster("v100x8"))
    assert topology.group([0, 1]).intra_bytes_per_second == 25e9
    assert topology.group([0, 3]).intra_bytes_per_second == 50e9
    assert topology.strided(2, 1).intra_bytes_per_second == 25e9


def test_devices_without_a_ring_of_links_talk_through_the_host():
    group = Topology(load_cluster("v100x8")).group([0, 5])
    assert (group.intra_kind, group.peer_to_peer, group.intra_bytes_per_second) == ("pcie", False, 6e9)


def test_half_a_full_mesh_uses_three_of_seven_links():
    """AMD MI300X platform: seven xGMI links of 64 GB/s each way."""
    topology = Topology(load_cluster("mi300xx8"))
    assert topology.strided(8, 1).intra_bytes_per_second == pytest.approx(448e9)
    assert topology.strided(4, 1).intra_bytes_per_second == pytest.approx(192e9)
    assert topology.strided(2, 1).intra_bytes_per_second == pytest.approx(64e9)


def test_below_one_pcie_switch_nobody_shares():
    topology = Topology(load_cluster("l40sx8"))
    assert topology.strided(4, 1).intra_bytes_per_second == 25e9


def test_pairs_over_the_host_bridge_share_it_and_one_ring_over_all_passes_it_once():
    topology = Topology(load_cluster("l40sx8"))
    assert topology.strided(2, 4).intra_bytes_per_second == 25e9 / 4
    assert topology.strided(8, 1).intra_bytes_per_second == 25e9


def test_without_peer_to_peer_every_step_takes_the_shared_path_to_the_host():
    group = Topology(load_cluster("rtx4090x8")).strided(2, 1)
    assert (group.peer_to_peer, group.intra_bytes_per_second) == (False, 24e9 / 4)


@pytest.mark.parametrize("peer_to_peer", [True, False])
@pytest.mark.parametrize("shared_by", [1, 2, 4])
@pytest.mark.parametrize(("size", "stride"), [(2, 1), (2, 4), (4, 1), (4, 2), (8, 1)])
def test_pcie_carries_what_a_group_is_promised(peer_to_peer, shared_by, size, stride):
    """Every ring of every replica over the graph; without peer-to-peer each step is routed through the host."""
    groups = ((0, 1, 2, 3), (4, 5, 6, 7)) if peer_to_peer else None
    intra = Intra(kind="pcie", gigabytes_per_second=24, peer_to_peer=peer_to_peer, host_bridge_shared_by=shared_by,
                  switch_groups=groups)  # fmt: skip
    topology = Topology(cluster(1, 8, 8, intra))
    load: Counter = Counter()
    for ranks in replicas(topology, size, stride):
        for here, there in zip(ranks, [*ranks[1:], ranks[0]], strict=True):
            path = networkx.shortest_path(topology.graph, here, there)
            if not peer_to_peer:
                up, down = (networkx.shortest_path(topology.graph, end, "node0") for end in (here, there))
                path = [*up, *down[::-1][1:]]
            load.update(zip(path, path[1:], strict=False))
    carried = min(topology.graph.edges[edge]["bytes_per_second"] / flows for edge, flows in load.items())
    assert topology.strided(size, stride).intra_bytes_per_second == pytest.approx(carried)


# ---- unlike nodes


def test_a_group_over_unlike_nodes_sees_the_slower_of_each():
    slow = NodeGroup(
        name="b", nodes=1, chip=load_chip("t4"), devices_per_node=4, host=HOST,
        intra=Intra(kind="pcie", gigabytes_per_second=12, peer_to_peer=False),
        nics=Nics(count=1, gigabits_per_second=50, kind="ethernet"),
    )  # fmt: skip
    topology = Topology(cluster(1, 8, 8, NVSWITCH, None, slow))
    assert topology.devices == 12
    assert topology.place(8) == (1, 1, 0)
    group = topology.strided(12, 1)
    assert (group.nodes, group.ranks_per_node, group.chip) == (2, 8, "t4")
    assert (group.intra_kind, group.intra_bytes_per_second, group.inter_kind) == ("pcie", 12e9, "ethernet")
    assert group.inter_bytes_per_second * 8 == 50e9 / 8
    assert topology.strided(4, 1).intra_kind == "pcie"


# ---- the graph


@pytest.mark.parametrize("name", ["a100x16", "v100x8", "l40sx8", "rtx4090x8", "mi300xx8", "gb200x72", "local-cpu-x4"])
def test_the_graph_joins_all_devices_and_every_edge_has_both_figures(name):
    topology = Topology(load_cluster(name))
    devices = [node for node in topology.graph if isinstance(node, int)]
    assert sorted(devices) == list(range(topology.devices))
    assert networkx.is_connected(topology.graph)
    assert all(edge["bytes_per_second"] > 0 and edge["seconds"] >= 0 for *_, edge in topology.graph.edges(data=True))


def test_a_device_hangs_on_as_much_nvlink_as_its_datasheet_says():
    graph = Topology(load_cluster("v100x8")).graph
    assert sum(graph[0][other]["bytes_per_second"] for other in graph[0]) == 150e9


def test_the_largest_cluster_answers_from_counts_without_its_graph():
    topology = Topology(load_cluster("h100x16384"))
    assert topology.strided(16384, 1).ranks_per_node == 8
    assert topology.strided(2048, 8).nodes == 2048
    assert "graph" not in vars(topology)
    assert topology.strided(2048, 8) is topology.strided(2048, 8)


def test_stages_that_follow_one_another_see_their_slowest_hop():
    # Stages of 4 devices in nodes of 8: every second hop leaves the node.
    assert Topology(load_cluster("a100x64")).strided(2, 4).nodes == 1
    assert Topology(load_cluster("a100x64")).neighbours(4).nodes == 2


@pytest.mark.parametrize("name", ["a100x64", "h100x64", "h100x512", "l40sx8", "mi300xx8", "gb200x72"])
@pytest.mark.parametrize("stride", [1, 3, 4, 7])
def test_no_hop_is_slower_than_the_neighbours_answer(name, stride):
    topology = Topology(load_cluster(name))
    slowest = topology.neighbours(stride)
    for first in range(topology.devices - stride):
        hop = topology.point_to_point(first, first + stride)
        assert hop.nodes <= slowest.nodes
        if hop.nodes == slowest.nodes > 1:
            assert hop.inter_bytes_per_second >= slowest.inter_bytes_per_second
