"""How long collectives take between the ranks of this machine, by size."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist

from hardware_profiles.chip import Curve

BYTES = (1024, 16 * 1024, 128 * 1024, 1024 * 1024, 8 * 1024 * 1024)
REPEATS = {1024: 30, 16 * 1024: 20, 128 * 1024: 15, 1024 * 1024: 8, 8 * 1024 * 1024: 4}
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")


def measure_links(device: torch.device, groups: dict[int, dist.ProcessGroup], repeats: float) -> list[Curve]:
    """A curve for each kind of collective and size of group; all groups of one size run at once.

    `groups` maps a size to this rank's group of it; `repeats` multiplies the usual count.
    """
    found = []
    for size, group in groups.items():
        for kind in KINDS:
            if kind == "send" and size != 2:
                continue
            seconds = [
                _seconds(kind, bytes_, group, device, max(3, int(REPEATS[bytes_] * repeats))) for bytes_ in BYTES
            ]
            found.append(Curve(kind=kind, ranks=size, bytes=BYTES, seconds=tuple(seconds)))
    return found


def _seconds(kind: str, bytes_: int, group: dist.ProcessGroup, device: torch.device, repeats: int) -> float:
    call = _collective(kind, bytes_, group, device)
    call()
    times = []
    for _ in range(repeats):
        dist.barrier()
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return fmean(times)


def _collective(kind: str, bytes_: int, group: dist.ProcessGroup, device: torch.device) -> Callable[[], Any]:
    """A call whose full buffer (gathered, or before reduction) holds `bytes_`."""
    size = group.size()
    full = torch.zeros(bytes_ // 4 // size * size, device=device)
    part = torch.zeros(full.numel() // size, device=device)
    if kind == "all_reduce":
        return lambda: dist.all_reduce(full, group=group)
    if kind == "all_gather":
        return lambda: dist.all_gather_single(full, part, group=group)
    if kind == "reduce_scatter":
        return lambda: dist.reduce_scatter_single(part, full, group=group)
    if kind == "all_to_all":
        other = torch.zeros_like(full)
        return lambda: dist.all_to_all_single(other, full, group=group)
    return lambda: _pass_on(full, group)


def _pass_on(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Rank 0 sends, rank 1 receives."""
    if group.rank() == 0:
        dist.send(tensor, group=group, group_dst=1)
    else:
        dist.recv(tensor, group=group, group_src=0)
