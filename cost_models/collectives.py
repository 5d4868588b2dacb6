"""How long a collective takes over a group of devices.

`bytes_` is the full buffer: what an all-gather ends with, what a reduce-scatter starts from, what an all-reduce or
all-to-all holds, what a send carries. With n devices, r of them on each of k nodes, S bytes:

    ring          steps * latency + f * S / B            f = 2 (n-1)/n for all-reduce, (n-1)/n for the other three
    tree          2 (r-1) a_intra + 2 log2(k) a_inter + S-proportional part of the ring (NCCL's double tree)
    hierarchical  reduce-scatter inside, all-reduce across on S/r, all-gather inside, pipelined: the slower part counts
    switch        in-switch reduction (NVLS): every device sends and receives S once: all-reduce S / B

The fastest that the group allows is taken. Small messages run below the link's rate: B(S) = B * S / (S + S_half).
Constants are fits to public nccl-tests figures; docs/costs.md has their errors.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from hardware_profiles.chip import Chip
from hardware_profiles.cluster import Curve, Group

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]

BASE_SECONDS = 6e-6
"""Launch and synchronisation of one collective on a device."""
STEP_SHARE = 0.35
"""A ring step's latency relative to the link's one-way latency (protocols LL and LL128 overlap steps)."""
LINK_FRACTION = {"nvswitch": 0.78, "nvlink_mesh": 0.80, "xgmi": 0.75, "pcie": 0.85, "shared_memory": 1.0, "none": 1.0}
"""Share of the links' raw rate that large messages reach."""
PORT_FRACTION = {"infiniband": 0.92, "roce": 0.88, "omnipath": 0.80, "efa": 0.80, "ethernet": 0.75, "none": 1.0}
HALF_RATE_BYTES = {"intra": 1.0e6, "inter": 2.0e6}
"""Bytes per device at which half the large-message rate is reached."""
SWITCH_REDUCTION_CHIPS = ("h100", "h200", "h800", "h20", "b200", "b300", "gb200", "gb300")
"""Chips on switches that reduce (NVLink SHARP, from the third NVSwitch generation)."""


def collective_seconds(kind: Kind, bytes_: ArrayLike, group: Group, chip: Chip) -> Any:
    """Seconds of one collective; 0 for a group of one. `bytes_` may be an array."""
    size = np.asarray(bytes_, dtype=float)
    if group.size <= 1:
        return _plain(np.zeros_like(size))
    measured = next((curve for curve in group.curves if curve.kind == kind), None)
    if measured is not None:
        return _plain(_from_curve(measured, size))
    if kind == "send":
        return _plain(_send(size, group))
    seconds = _within_node(kind, size, group, chip) if group.nodes == 1 else _across_nodes(kind, size, group, chip)
    return _plain(np.where(size > 0, BASE_SECONDS + seconds, 0.0))


def ring_factor(kind: Kind, size: int) -> float:
    """Bytes each device moves over the full buffer's bytes (nccl-tests' bus factors)."""
    return {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}[kind] * (size - 1) / size


def _send(size: Any, group: Group) -> Any:
    if group.nodes > 1:
        return BASE_SECONDS + group.inter_latency_seconds + size / _port_rate(size, group)
    return BASE_SECONDS + group.intra_latency_seconds + size / _link_rate(size, group)


def _within_node(kind: Kind, size: Any, group: Group, chip: Chip) -> Any:
    n = group.ranks_per_node
    if group.intra_kind == "shared_memory" and kind == "reduce_scatter":
        kind = "all_reduce"  # gloo reduces the whole buffer everywhere and keeps a part
    steps = (2 if kind == "all_reduce" else 1) * (n - 1)
    each = size / n
    ring = steps * group.intra_latency_seconds * STEP_SHARE + ring_factor(kind, n) * size / _link_rate(each, group)
    if kind == "all_reduce" and group.intra_kind == "nvswitch" and n > 2 and _reduces_in_switch(chip):
        switch = 2 * group.intra_latency_seconds + size / _link_rate(each, group)
        return np.minimum(ring, switch)
    return ring


def _across_nodes(kind: Kind, size: Any, group: Group, chip: Chip) -> Any:
    r, k = group.ranks_per_node, group.nodes
    if kind == "all_to_all":
        outside = (k - 1) / k * size / _port_rate(size / group.size, group)
        inside = (r - 1) / group.size * size / _link_rate(size / group.size, group) if r > 1 else 0.0
        return np.maximum(outside, inside) + (k - 1) * group.inter_latency_seconds * STEP_SHARE
    times = 2.0 if kind == "all_reduce" else 1.0
    across = times * (k - 1) / k * size / r / _port_rate(size / r / k, group)
    inside = times * (r - 1) / r * size / _link_rate(size / group.size, group) if r > 1 else np.zeros_like(size)
    # Chunks pass through both parts one after another, so the slower one sets the pace and the other adds its first chunk.
    pace = np.maximum(across, inside) + np.minimum(across, inside) / max(2, k)
    ring_steps = times * (k - 1)
    tree_steps = times * np.log2(k) + 1
    latency = group.inter_latency_seconds * (
        min(ring_steps, tree_steps) if kind == "all_reduce" else ring_steps * STEP_SHARE
    )
    return pace + latency + times * (r - 1) * group.intra_latency_seconds * STEP_SHARE


def _reduces_in_switch(chip: Chip) -> bool:
    return chip.name.startswith(SWITCH_REDUCTION_CHIPS)


def _link_rate(each: Any, group: Group) -> Any:
    rate = group.intra_bytes_per_second * LINK_FRACTION[group.intra_kind]
    if not group.peer_to_peer:
        rate /= 2  # through host memory: written, then read
    return rate * _ramp(each, HALF_RATE_BYTES["intra"] * rate / 300e9)


def _port_rate(each: Any, group: Group) -> Any:
    rate = group.inter_bytes_per_second * PORT_FRACTION[group.inter_kind]
    return rate * _ramp(each, HALF_RATE_BYTES["inter"] * rate / 25e9 / 8)


def _ramp(each: Any, half: float) -> Any:
    return np.maximum(each, 1.0) / (np.maximum(each, 1.0) + half)


def _from_curve(curve: Curve, size: Any) -> Any:
    """Log-log interpolation; beyond the last point at its rate, below the first its time."""
    seconds = np.exp(np.interp(np.log(np.maximum(size, 1.0)), np.log(curve.bytes), np.log(curve.seconds)))
    beyond = size / curve.bytes[-1] * curve.seconds[-1]
    return np.where(size > curve.bytes[-1], beyond, np.where(size > 0, seconds, 0.0))


def _plain(value: Any) -> Any:
    return float(value) if np.ndim(value) == 0 else value
