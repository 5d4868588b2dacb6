"""How fast a ring runs over links that go from device to device.

A ring of devices visits each once and comes back: a Hamiltonian cycle over the links among them. Several rings run at
once, each on its own share of the links, as NCCL's channels do, so a device's bandwidth is

    (rings that fit, no link direction carrying more than it has) x (bandwidth of one link)

In a full mesh of n devices with c links a pair all cycles taken evenly keep every port busy: c (n - 1). Elsewhere `rings`
packs cycles in halves of a link, widest first: a lower bound, which reaches the six of the hybrid cube mesh of eight V100
(every device has six links, so no packing has more).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

Links = tuple[tuple[int, ...], ...]

SHARES = 2
"""Rings are packed in halves of a link."""
MOST_DEVICES = 8
"""Beyond this many devices cycles are too many to list, and the fewest links of a device stand for the rings."""


@cache
def rings(links: Links, devices: tuple[int, ...]) -> float:
    """Rings over `devices` that run at once, each at the speed of one link; 0 where the links close no ring.

    Args:
        links: number of links between each pair of the node's devices.
        devices: the members, at least two.

    """
    among = [[links[a][b] for b in devices] for a in devices]
    fewest = min(sum(row) for row in among)
    if fewest == 0 or _full(among):
        return float(fewest)
    if len(devices) > MOST_DEVICES:
        return float(fewest) if _connected(among) else 0.0
    return _packed(among, fewest * SHARES) / SHARES


def _full(among: Sequence[Sequence[int]]) -> bool:
    """Whether every pair has as many links as every other."""
    return len({count for a, row in enumerate(among) for b, count in enumerate(row) if a != b}) == 1


def _packed(among: Sequence[Sequence[int]], most: int) -> int:
    """Cycles taken one by one, always the one whose tightest link has most left; at most `most`."""
    left = [[count * SHARES for count in row] for row in among]
    cycles = list(_cycles(among, [0]))
    taken = 0
    while cycles and taken < most:
        widest = max(cycles, key=lambda cycle: _room(left, cycle))
        if _room(left, widest)[0] == 0:
            break
        for a, b in _steps(widest):
            left[a][b] -= 1
        taken += 1
    return taken


def _cycles(among: Sequence[Sequence[int]], path: list[int]) -> Iterator[tuple[int, ...]]:
    """Every directed cycle through all devices, started at the first."""
    if len(path) == len(among):
        if among[path[-1]][path[0]]:
            yield tuple(path)
        return
    for device, count in enumerate(among[path[-1]]):
        if count and device not in path:
            yield from _cycles(among, [*path, device])


def _steps(cycle: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    return zip(cycle, cycle[1:] + cycle[:1], strict=True)


def _room(left: Sequence[Sequence[int]], cycle: tuple[int, ...]) -> tuple[int, int]:
    counts = [left[a][b] for a, b in _steps(cycle)]
    return min(counts), sum(counts)


def _connected(among: Sequence[Sequence[int]]) -> bool:
    seen, fresh = {0}, [0]
    while fresh:
        reached = {other for other, count in enumerate(among[fresh.pop()]) if count} - seen
        seen |= reached
        fresh += reached
    return len(seen) == len(among)
