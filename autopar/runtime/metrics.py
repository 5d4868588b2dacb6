"""What a run writes: JSON lines, the first about the run, then one for each step."""

from __future__ import annotations

import json
import platform
import resource
import socket
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autopar.documents.plan import Plan
from autopar.runtime.mesh import AXES, Ranks


def header(plan: Plan, ranks: Ranks, **more: Any) -> dict[str, Any]:
    """The first line: the mesh is read off the groups as built, not off the plan. Every rank takes part."""
    hosts: list[Any] = [None] * _world()
    _gather(hosts, socket.gethostname())
    mesh = {axis: group.size() if (group := ranks.group(axis)) is not None else 1 for axis in AXES}
    return {
        "plan_hash": plan.hash,
        "world": _world(),
        "mesh": mesh,
        "torch": torch.__version__,
        "hosts": sorted(set(hosts)),
        "device": ranks.device.type,
        "backend": dist.get_backend() if dist.is_initialized() else "none",
        "python": platform.python_version(),
        **more,
    }


def step_line(
    number: int,
    loss: float,
    grad_norm: float,
    seconds: float,
    seconds_by_part: dict[str, float],
    plan: Plan,
    ranks: Ranks,
) -> dict[str, Any]:
    """The line of one step; `number` counts from 1. Parts are means over ranks. Every rank takes part."""
    own = torch.tensor([peak_bytes(ranks.device), *seconds_by_part.values()], dtype=torch.float64, device=ranks.device)
    every = [torch.empty_like(own) for _ in range(_world())]
    if dist.is_initialized():
        dist.all_gather(every, own)
    else:
        every = [own]
    table = torch.stack(every).cpu()
    tokens = plan.workload.tokens
    return {
        "step": number,
        "loss": loss,
        "grad_norm": grad_norm,
        "seconds": seconds,
        "seconds_by_part": dict(zip(seconds_by_part, table.mean(dim=0).tolist()[1:], strict=True)),
        "tokens_per_second": tokens / seconds,
        "peak_bytes": [int(peak) for peak in table[:, 0].tolist()],
    }


def peak_bytes(device: torch.device) -> int:
    """Most bytes this rank held so far: of the device's allocator, or on a CPU of the whole process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Lines:
    """Writes lines as they come; a run that resumes goes on in the same file."""

    def __init__(self, path: str | Path | None, append: bool = False) -> None:
        self.path = Path(path) if path is not None else None
        if self.path is not None and not append:
            self.path.write_text("", encoding="utf-8")

    def write(self, line: dict[str, Any]) -> None:
        """One line, there at once for whoever follows the file."""
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(line) + "\n")


def _world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _gather(into: list[Any], value: Any) -> None:
    if dist.is_initialized():
        dist.all_gather_object(into, value)
    else:
        into[0] = value
