"""Collectives over a group of ranks -> seconds.

A measured curve answers where there is one for the kind, the ranks and the nodes (log-log between its points, constant
below them, at the last points' bandwidth above); else `cost_models.nccl` models the library, or the ring below where
devices are processes of one host (gloo):

    all_gather   (n-1) a + (n-1)/n S/B          all_reduce   2(n-1) a + 2(n-1)/n S/B
    reduce_scatter is gloo's all_reduce of the whole buffer        all_to_all   (n-1) a + (n-1)/n S/B

S is the full buffer: gathered, or not yet reduced. A group's bandwidths already are what is left when all replicas
of the group run at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from cost_models import nccl
from cost_models.tables import Array, Seconds, interpolate_log, plain
from hardware_profiles.chip import Chip
from hardware_profiles.cluster import Curve, Group

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]
BUS_FACTORS = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}

SAME_LINK = 0.05
"""Relative difference in bandwidth up to which a measured link counts as the group's own."""


def bus_factor(kind: Kind, ranks: int) -> float:
    """Bytes that cross the slowest link per byte of the full buffer: 2(n-1)/n, (n-1)/n, or 1 for a send
    (nccl-tests).
    """
    return 1.0 if kind == "send" else BUS_FACTORS[kind] * (ranks - 1) / ranks


def collective_seconds(kind: Kind, bytes_: ArrayLike, group: Group, chip: Chip) -> Seconds:
    """Seconds of one collective.

    Args:
        kind: all_reduce, all_gather, reduce_scatter, all_to_all or send.
        bytes_: the full buffer of one rank's collective; a send's message. May be an array.
        group: what the ranks see (`hardware_profiles.topology`).
        chip: the device; its measured curves serve groups inside one node.

    Returns:
        Seconds, 0 for a group of one.

    """
    size = np.asarray(bytes_, dtype=np.float64)
    if group.size <= 1:
        return plain(size * 0.0)
    curve = _measured(kind, group, group.curves) or _measured(kind, group, _chip_curves(kind, group, chip))
    if curve is not None:
        seconds = curve_seconds(curve, size)
    elif group.intra_kind == "shared_memory":
        seconds = _shared_memory(kind, size, group)
    else:
        seconds = _modelled(kind, size, group, chip) * _correction(kind, size, group, chip)
    return plain(np.where(size > 0, seconds, 0.0))


def curve_seconds(curve: Curve, bytes_: Array) -> Array:
    """Read a measured curve; beyond its largest size time grows with the bandwidth between its last two points."""
    sizes, seconds = np.asarray(curve.bytes), np.asarray(curve.seconds)
    inside = interpolate_log(bytes_, curve.bytes, curve.seconds)
    slope = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2]) if len(sizes) > 1 else seconds[-1] / sizes[-1]
    beyond = seconds[-1] + np.maximum(bytes_ - sizes[-1], 0.0) * max(slope, seconds[-1] / sizes[-1] * 0.5)
    return np.asarray(np.where(bytes_ > sizes[-1], beyond, inside), dtype=np.float64)


def _measured(kind: str, group: Group, curves: Iterable[Curve]) -> Curve | None:
    for curve in curves:
        if (curve.kind, curve.ranks, curve.nodes) == (kind, group.size, group.nodes):
            return curve
    return None


def _correction(kind: Kind, size: Array, group: Group, chip: Chip) -> Array:
    """Measured over modelled time on the chip's own links: 1 where nothing like this group was measured.

    Rank counts between measured ones take the geometric mean, weighted in log2(ranks); beyond them the nearest. Where
    the switch reduces it is another algorithm: it is corrected by its own kind first.
    """
    reduced = kind == "all_reduce" and nccl.has_nvls(group, chip)
    curves = sorted(_chip_curves(kind, group, chip), key=lambda curve: curve.ranks)
    alike = [c for c in curves if (kind == "all_reduce" and nccl.has_nvls(_of_ranks(group, c.ranks), chip)) == reduced]
    curves = alike or curves
    if not curves:
        return np.ones_like(size)
    measured = np.log2([curve.ranks for curve in curves])
    ratios = []
    for curve in curves:
        same = _of_ranks(group, curve.ranks)
        ratios.append(np.log(curve_seconds(curve, size) / _modelled(kind, size, same, chip)))
    where = float(np.clip(np.log2(group.size), measured[0], measured[-1]))
    upper = int(np.searchsorted(measured, where))
    lower = max(upper - 1, 0)
    weight = 1.0 if upper == lower else (where - measured[lower]) / (measured[upper] - measured[lower])
    return np.asarray(np.exp(ratios[lower] * (1 - weight) + ratios[upper] * weight), dtype=np.float64)


def _of_ranks(group: Group, ranks: int) -> Group:
    """A group of so many ranks of the same node."""
    return group.model_copy(update={"size": ranks, "ranks_per_node": ranks})


def _chip_curves(kind: Kind, group: Group, chip: Chip) -> list[Curve]:
    if group.nodes > 1 or group.intra_kind != "nvswitch":
        return []
    speed = group.intra_bytes_per_second / 1e9
    return [
        curve
        for link in chip.efficiency.links
        for curve in link.curves
        if curve.kind == kind and abs(link.gigabytes_per_second / speed - 1) < SAME_LINK
    ]


def _modelled(kind: Kind, size: Array, group: Group, chip: Chip) -> Array:
    if kind == "send":
        return nccl.send_seconds(size, group)
    if kind == "all_to_all":
        return nccl.all_to_all_seconds(size, group)
    if kind == "all_gather":
        return nccl.ring_seconds(size, group, passes=1)
    whole = nccl.all_reduce_seconds(size, group, chip)
    if kind == "all_reduce":
        return whole
    # what reduces everything everywhere has also scattered it: over many nodes a tree beats the ring on small buffers
    return np.minimum(nccl.ring_seconds(size, group, passes=1), whole)


def _shared_memory(kind: Kind, size: Array, group: Group) -> Array:
    n = group.size
    kind = "all_reduce" if kind == "reduce_scatter" else kind
    bandwidth, latency = group.intra_bytes_per_second, group.intra_latency_seconds
    if group.nodes > 1:
        bandwidth = min(bandwidth, group.ranks_per_node * group.inter_bytes_per_second)
        latency = max(latency, group.inter_latency_seconds)
    steps = {"send": 1, "all_reduce": 2 * (n - 1)}.get(kind, n - 1)
    return np.asarray(steps * latency + size * (bus_factor(kind, n) / bandwidth), dtype=np.float64)
