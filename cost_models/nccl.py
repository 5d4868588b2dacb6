"""A model of NCCL: latency and bandwidth of each algorithm and protocol, the fastest of which it runs.

    t = base_p + hops_intra * a_p + hops_inter * b_p + S * factor / bandwidth_p          p in LL, LL128, Simple

    ring   hops (n - 1) per pass, of which (k - 1) between nodes; all_reduce takes two passes
           bus factor (n-1)/n per pass; bandwidth min(intra, g * NIC): g rings leave a node through its g ports
           inside a node the ranks' own piece, S/n, is passed through once more (`OWN_PIECE`)
    tree   all_reduce: hops 2 ((g - 1) intra + log2(k) inter)
    NVLS   all_reduce inside one NVSwitch: the switch reduces, S crosses each port once up and once down
    NVLS tree, SHARP   the same across nodes, through the ports in a tree, or reduced by the network's switches

n ranks, k nodes, g ranks per node, S the full buffer. Structure and latencies are those of NCCL's own tuner (public in
`src/graph/tuning.cc`, NVIDIA/nccl; its table for H100 to 256 devices has this form); fractions of
bandwidth are fitted to measured runs (`benchmarks/distill_tables.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from cost_models.tables import Array
from hardware_profiles.chip import Chip
from hardware_profiles.cluster import Group

REFERENCE_INTRA_SECONDS = 2.5e-6
REFERENCE_INTER_SECONDS = 5.0e-6
"""The latencies of links for which the hops below hold; others scale them."""
WITHOUT_PEER_TO_PEER = 0.42
"""Fraction of what PCIe devices reach of each other that is left through host memory: pairs of A40 move 20 GB/s, both ways
together, of 31.5 each way (NVIDIA/nccl-tests issue 74), 0.32 of the port where `Simple` has 0.76."""


@dataclass(frozen=True)
class Protocol:
    """Microseconds and fractions of bandwidth of one wire protocol; tree figures apart from the ring's."""

    base: float
    intra_hop: float
    inter_hop: float
    tree_base: float
    tree_intra_hop: float
    tree_inter_hop: float
    intra_fraction: float
    tree_intra_fraction: float
    inter_fraction: float
    most: float = math.inf
    """Bytes per second of the whole group beyond which it does not go between nodes."""


INSIDE = {
    "LL": Protocol(4.6, 0.8, 0.0, 4.8, 0.6, 0.0, 0.16, 0.08, 1.0),
    "LL128": Protocol(8.0, 1.1, 0.0, 8.0, 1.0, 0.0, 0.45, 0.22, 1.0),
    "Simple": Protocol(12.0, 3.0, 0.0, 12.0, 3.0, 0.0, 0.76, 0.39, 1.0),
}
"""On one node: fitted to measured A100, H100 and B200 nodes."""
INSIDE_MESH = INSIDE | {"Simple": replace(INSIDE["Simple"], intra_fraction=0.9)}
"""Links without a switch: read off two V100 (VIA-Research/vTrain), and right within 6 % for 3, 4 and 6 to 8 of them."""
ACROSS = {
    "LL": Protocol(6.6, 1.0, 2.7, 6.8, 0.6, 5.0, 0.16, 0.04, 0.5, 21e9),
    "LL128": Protocol(14.0, 1.9, 4.0, 14.0, 1.25, 8.5, 0.66, 0.22, 0.92),
    "Simple": Protocol(8.4, 3.4, 14.0, 8.4, 4.0, 14.0, 0.80, 0.27, 0.93),
}
"""Over several nodes: NCCL's own figures for Hopper."""
SOCKETS = 0.5
"""Share of an Ethernet port that NCCL's TCP sockets reach, every byte going through host memory: 1.5 to 2 GB/s of 4 untuned
(NVIDIA/nccl issue 209), 0.8 of 100 Gb/s at best (GTC 2024, S62129)."""
OWN_PIECE = 0.4
"""What copying a rank's own piece costs against passing one on: two ranks reach 0.71-0.76 of the bus bandwidth of
eight, four 0.91-0.95, alike on A100, H100 and B200, in all_gather, reduce_scatter and (with two passes) all_reduce."""
NVLS_BASE_SECONDS = 28e-6
NVLS_FRACTION = 0.57
"""Full buffer per second over the port's bandwidth: 0.58-0.60 on H100 and H200, 0.52-0.53 on B200, 5 to 8 ranks."""
NVLS_FEWEST_RANKS = 5
NVLS_TREE_FRACTION = {2: 0.66, 3: 0.40}
TREE_FRACTION = {2: 0.75, 3: 0.40}
"""Full buffer per second over a node's ports, on two nodes and on more."""
SHARP_FRACTION = 0.62


def ring_seconds(bytes_: Array, group: Group, passes: int) -> Array:
    """One pass is an all_gather or a reduce_scatter, two an all_reduce."""
    return _least(_ring(bytes_, group, passes, protocol) for protocol in _protocols(group))


def all_reduce_seconds(bytes_: Array, group: Group, chip: Chip) -> Array:
    """The fastest of ring, tree, NVLS, NVLS tree and SHARP that the group has."""
    return _least(_all_reduces(bytes_, group, chip))


def all_to_all_seconds(bytes_: Array, group: Group) -> Array:
    """Each rank sends 1/n of its buffer to each other: inside the node over its links, beyond it through its share
    of NICs.

    Latencies across nodes are those measured on H100 (37 us on 2 nodes to 98 us on 16).
    """
    n, g, k = group.size, group.ranks_per_node, group.nodes
    own = OWN_PIECE if k == 1 else 0.0
    inside = bytes_ * ((g - 1 + own) / n) / (intra_bandwidth(group) * 0.72) if g > 1 else 0.0 * bytes_
    if k == 1:
        scale = _intra_scale(group)
        small = (7e-6 + 0.3e-6 * n) * scale + bytes_ * ((n - 1) / n) / (intra_bandwidth(group) * 0.16)
        return np.asarray(np.minimum(small, (16e-6 + 1.0e-6 * n) * scale + inside), dtype=np.float64)
    fraction = SOCKETS if group.inter_kind == "ethernet" else 0.9
    outside = bytes_ * ((n - g) / n) / (group.inter_bytes_per_second * fraction)
    latency = (30e-6 + 4.3e-6 * k) * group.inter_latency_seconds / REFERENCE_INTER_SECONDS
    return np.asarray(latency + np.maximum(inside, outside), dtype=np.float64)


def send_seconds(bytes_: Array, group: Group) -> Array:
    """One device to one other, alone on its port or with its share of the NICs.

    Inside a node: fitted to send_recv on a DGX H100 (microsoft/vidur), 2 KB to 64 MB.
    """
    if group.nodes > 1:
        latency = 8e-6 + 14e-6 * group.inter_latency_seconds / REFERENCE_INTER_SECONDS
        fraction = SOCKETS if group.inter_kind == "ethernet" else 0.9
        return np.asarray(latency + bytes_ / (group.inter_bytes_per_second * fraction), dtype=np.float64)
    seconds = 8e-6 * _intra_scale(group) + bytes_ / (0.8 * intra_bandwidth(group))
    return np.asarray(seconds, dtype=np.float64)


def intra_bandwidth(group: Group) -> float:
    """Bytes per second of one device inside the node, less without peer-to-peer."""
    bandwidth = group.intra_bytes_per_second
    return bandwidth if group.peer_to_peer else bandwidth * WITHOUT_PEER_TO_PEER


def _protocols(group: Group) -> list[Protocol]:
    """LL128 needs 128-byte stores that arrive whole: over NVLink, and over networks that keep the order.

    RoCE fabrics spread packets over paths: the measured ramps of H100-class nodes on one (aliyun/SimAI) are Simple's.
    """
    inside = group.ranks_per_node == 1 or group.intra_kind in ("nvswitch", "nvlink_mesh", "xgmi")
    across = group.nodes == 1 or group.inter_kind in ("infiniband", "omnipath")
    table = ACROSS if group.nodes > 1 else INSIDE_MESH if group.intra_kind == "nvlink_mesh" else INSIDE
    return [protocol for name, protocol in table.items() if (inside and across) or name != "LL128"]


def _ring(bytes_: Array, group: Group, passes: int, protocol: Protocol) -> Array:
    n, k, g = group.size, group.nodes, group.ranks_per_node
    inter_hops = passes * (k - 1)
    intra_hops = passes * (n - 1) - inter_hops
    latency = protocol.base + intra_hops * protocol.intra_hop * _intra_scale(group)
    latency += inter_hops * protocol.inter_hop * _inter_scale(group)
    bandwidth = intra_bandwidth(group) * protocol.intra_fraction if g > 1 else math.inf
    own = OWN_PIECE if k == 1 and group.intra_kind != "nvlink_mesh" else 0.0
    if k > 1:
        bandwidth = min(bandwidth, _ports(group, protocol))
    return np.asarray(latency * 1e-6 + bytes_ * ((passes * (n - 1) + own) / n / bandwidth), dtype=np.float64)


def _all_reduces(bytes_: Array, group: Group, chip: Chip) -> Iterator[Array]:
    k, g = group.nodes, group.ranks_per_node
    nvls = has_nvls(group, chip)
    yield ring_seconds(bytes_, group, passes=2)
    for protocol in _protocols(group):
        yield _tree(bytes_, group, protocol)
    if nvls and k == 1:
        yield NVLS_BASE_SECONDS * _intra_scale(group) + bytes_ / (intra_bandwidth(group) * NVLS_FRACTION)
    across = NVLS_BASE_SECONDS * _intra_scale(group) + math.log2(max(k, 2)) * 28e-6 * _inter_scale(group)
    if nvls and k > 1:
        ports = g * group.inter_bytes_per_second * NVLS_TREE_FRACTION[min(k, 3)]
        yield across + bytes_ / min(ports, intra_bandwidth(group) * NVLS_FRACTION)
    if group.in_network_reduction and k > 1:
        ports = g * group.inter_bytes_per_second * SHARP_FRACTION
        yield across + bytes_ / min(ports, intra_bandwidth(group) * NVLS_FRACTION if g > 1 else ports)


def has_nvls(group: Group, chip: Chip) -> bool:
    """Whether the switch reduces: NVSwitch of Hopper and later, and enough ranks of a node for it to be chosen."""
    return group.intra_kind == "nvswitch" and "fp8" in chip.teraflops and group.ranks_per_node >= NVLS_FEWEST_RANKS


def _tree(bytes_: Array, group: Group, protocol: Protocol) -> Array:
    k, g = group.nodes, group.ranks_per_node
    latency = protocol.tree_base + 2 * (g - 1) * protocol.tree_intra_hop * _intra_scale(group)
    latency += 2 * math.ceil(math.log2(k)) * protocol.tree_inter_hop * _inter_scale(group)
    bandwidth = intra_bandwidth(group) * protocol.tree_intra_fraction if g > 1 else math.inf
    if k > 1:
        bandwidth = min(bandwidth, _ports(group, protocol) * TREE_FRACTION[min(k, 3)])
    return np.asarray(latency * 1e-6 + bytes_ / bandwidth, dtype=np.float64)


def _ports(group: Group, protocol: Protocol) -> float:
    """Bytes per second that leave a node for this group, all its ranks together."""
    fraction = min(protocol.inter_fraction, SOCKETS) if group.inter_kind == "ethernet" else protocol.inter_fraction
    return min(group.ranks_per_node * group.inter_bytes_per_second * fraction, protocol.most)


def _intra_scale(group: Group) -> float:
    return 1.0 if group.ranks_per_node == 1 else group.intra_latency_seconds / REFERENCE_INTRA_SECONDS


def _inter_scale(group: Group) -> float:
    return group.inter_latency_seconds / REFERENCE_INTER_SECONDS


def _least(times: Iterator[Array]) -> Array:
    first = next(times)
    for other in times:
        first = np.minimum(first, other)
    return first
