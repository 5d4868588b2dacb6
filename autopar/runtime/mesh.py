"""The mesh of a Plan over the ranks of a process group.

    rank = sum over axes of coordinate(axis) * product of the degrees of the axes inside it      (rank_order, outermost first)

Groups are made line by line, only along axes that divide anything, all when the mesh is built, each with the timeout: a rank that
fails must not leave the others waiting for ever.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import product
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar.documents.plan import NOT_RUNNABLE, Plan
from autopar.errors import PlanMismatch, RequestError
from autopar.legality import beyond_runtime

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
DP = ("dp_replicate", "dp_shard")


@dataclass
class Ranks:
    """Where this process stands: its coordinate on every axis and the group of ranks that differ from it on that axis only."""

    sizes: Mapping[str, int]
    order: tuple[str, ...]
    rank: int
    device: torch.device
    timeout: timedelta
    groups: dict[tuple[str, ...], dist.ProcessGroup | None] = field(default_factory=dict)

    @property
    def coordinates(self) -> dict[str, int]:
        """Axis -> this rank's place on it."""
        return coordinates(self.rank, self.order, self.sizes)

    def __getitem__(self, axis: str) -> int:
        return self.coordinates[axis]

    def size(self, *axes: str) -> int:
        """Ranks along some axes."""
        return prod(self.sizes[axis] for axis in axes)

    def line(self, *axes: str, fixed: Mapping[str, int] | None = None) -> list[int]:
        """Ranks that differ from this one along `axes` only, in their order; `fixed` replaces other coordinates."""
        at = self.coordinates | dict(fixed or {})
        along = [axis for axis in self.order if axis in axes]
        ranges = [range(self.sizes[axis]) for axis in along]
        return [self._rank_at(at | dict(zip(along, place, strict=True))) for place in product(*ranges)]

    def _rank_at(self, at: Mapping[str, int]) -> int:
        rank = 0
        for axis in self.order:
            rank = rank * self.sizes[axis] + at[axis]
        return rank

    def group(self, *axes: str) -> dist.ProcessGroup | None:
        """The group along some axes; None where that is this rank alone."""
        used = tuple(axis for axis in axes if self.sizes[axis] > 1)
        if not used:
            return None
        if used not in self.groups:
            self.groups[used] = self._along(used)
        return self.groups[used]

    def _along(
        self, axes: Sequence[str], places: Mapping[str, Sequence[int]] | None = None
    ) -> dist.ProcessGroup | None:
        """Make the group of every line along some axes (at some places of them); returns this rank's own, if it stands there.

        All ranks make all groups, in one order: torch tells groups apart by counting.
        """
        own = None
        for start in range(prod(self.sizes.values())):
            at = coordinates(start, self.order, self.sizes)
            if any(at[axis] for axis in axes):
                continue
            along = [axis for axis in self.order if axis in axes]
            ranges = [(places or {}).get(axis, range(self.sizes[axis])) for axis in along]
            members = [self._rank_at(at | dict(zip(along, place, strict=True))) for place in product(*ranges)]
            group = dist.new_group(members, timeout=self.timeout)
            own = group if self.rank in members else own
        return own

    def places_group(self, axis: str, places: Sequence[int]) -> dist.ProcessGroup | None:
        """The group of this rank's line at some places of an axis; None where it stands elsewhere. All ranks call it."""
        return self._along([axis], {axis: places})

    def shard_mesh(self) -> DeviceMesh:
        """The mesh that fully_shard takes: dp_shard, within dp_replicate where that divides too."""
        shard = self.group("dp_shard")
        replicate = self.group("dp_replicate")
        assert shard is not None, "nothing to shard over"
        if replicate is None:
            return DeviceMesh.from_group(shard, self.device.type, mesh_dim_names=("dp_shard",))
        lines = [self.line("dp_shard", fixed={"dp_replicate": place}) for place in range(self.sizes["dp_replicate"])]
        return DeviceMesh.from_group([replicate, shard], self.device.type, torch.tensor(lines), mesh_dim_names=DP)


def coordinates(rank: int, order: Sequence[str], sizes: Mapping[str, int]) -> dict[str, int]:
    """A rank's place on every axis."""
    found = {}
    for axis in reversed(order):
        rank, found[axis] = divmod(rank, sizes[axis])
    return found


def build_mesh(plan: Plan, device: torch.device, timeout: timedelta) -> Ranks:
    """The plan's mesh over the default process group.

    Raises PlanMismatch for another world size, RequestError for axes that are not carried out.
    """
    sizes = {axis: int(getattr(plan.mesh, axis)) for axis in AXES}
    require_runnable(plan)
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world != plan.mesh.devices:
        named = " * ".join(f"{axis}({size})" for axis, size in sizes.items() if size > 1) or "one rank"
        raise PlanMismatch(
            f"the plan is for {plan.mesh.devices} ranks ({named}), but {world} were started; start {plan.mesh.devices} "
            "(--nproc, torchrun --nproc-per-node), or plan again for what there is"
        )
    rank = dist.get_rank() if dist.is_initialized() else 0
    ranks = Ranks(sizes, plan.rank_order, rank, device, timeout)
    for axes in (("pp",), ("tp",), ("dp_shard",), ("dp_replicate",), DP):
        ranks.group(*axes)
    return ranks


def require_runnable(plan: Plan) -> None:
    """Raise RequestError for a plan that this runtime does not carry out, naming what is not."""
    mesh = plan.mesh
    beyond = beyond_runtime(mesh.cp, mesh.ep, mesh.tp if mesh.etp == 1 else mesh.etp, mesh.tp)
    if beyond:
        raise RequestError(f"autopar run does not carry out {beyond}; plan again with --fix cp=1,ep=1")
    if plan.export_only:
        why = next((note for note in plan.notes if note.startswith(NOT_RUNNABLE)), "the plan is marked export_only")
        raise RequestError(f"{why}; plan again with --target run and without --fix of what it names")
    if plan.offload:
        raise RequestError("the plan offloads to host memory, which this runtime does not carry out; plan without it")
    if sorted(plan.rank_order) != sorted(AXES):
        raise PlanMismatch(f"rank_order is {plan.rank_order}, expected an order of {AXES}")
