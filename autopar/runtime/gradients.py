"""What gradients need between the last backward and the update: sums over copies and shares, the norm, clipping.

1. data-parallel averages (zero.py)
2. parameters that several pipeline stages hold (tied embeddings): summed over the stages
3. whole parameters of which each tp rank saw a share: summed over tp
4. |g|^2 = sum over the world of the squares that each rank answers for: every element of every parameter once
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from autopar.errors import RequestError
from autopar.runtime.mesh import Ranks
from autopar.runtime.shard import Layout
from autopar.runtime.zero import local_gradient


@dataclass
class Held:
    """A parameter that this rank holds (in part), of one virtual stage."""

    parameter: nn.Parameter
    layout: Layout
    stage: int
    is_sharded: bool
    """Divided over dp_shard."""


class Gradients:
    """The gradients of all parameters that this rank holds."""

    def __init__(self, held: list[Held], ranks: Ranks) -> None:
        self.held, self.ranks = held, ranks
        self.stages_of = self._stages_of()
        self.pipeline_groups = self._pipeline_groups()

    def _stages_of(self) -> dict[str, tuple[int, ...]]:
        """Name -> virtual stages that hold it."""
        own = [(item.layout.name, item.stage, item.is_sharded) for item in self.held]
        group = self.ranks.group("pp")
        everyone: list[list[tuple[str, int, bool]]] = [own]
        if group is not None:
            everyone = [[] for _ in range(group.size())]
            dist.all_gather_object(everyone, own, group=group)
        found: dict[str, set[int]] = {}
        stored: dict[str, bool] = {}
        for name, stage, is_sharded in (entry for entries in everyone for entry in entries):
            found.setdefault(name, set()).add(stage)
            if stored.setdefault(name, is_sharded) != is_sharded:
                raise RequestError(
                    f"{name} is held by stages {sorted(found[name])}, one of which divides states over dp (zero) and "
                    "another does not; give them the same zero"
                )
        return {name: tuple(sorted(stages)) for name, stages in found.items()}

    def _pipeline_groups(self) -> dict[tuple[int, ...], dist.ProcessGroup]:
        """Places on pp -> the group of this rank's line there, for each set of places that share parameters."""
        sets = {
            tuple(sorted({stage % self.ranks.sizes["pp"] for stage in stages})) for stages in self.stages_of.values()
        }
        found = {places: self.ranks.places_group("pp", places) for places in sorted(sets) if len(places) > 1}
        return {places: group for places, group in found.items() if group is not None}

    def complete(self) -> None:
        """Sum what other stages and tp ranks hold of each gradient."""
        self._sum_over_stages()
        group = self.ranks.group("tp")
        if group is not None:
            add_up([local_gradient(item.parameter) for item in self.held if item.layout.is_share], group)

    def _sum_over_stages(self) -> None:
        """Copies on this rank are added first, then over ranks, and every copy gets the sum."""
        own: dict[str, list[Held]] = {}
        for item in self.held:
            if len(self.stages_of[item.layout.name]) > 1:
                own.setdefault(item.layout.name, []).append(item)
        sums = {name: sum_of([local_gradient(item.parameter) for item in items]) for name, items in own.items()}
        for places, group in self.pipeline_groups.items():
            add_up([sums[name] for name in sorted(sums) if self._places(name) == places], group)
        for name, items in own.items():
            for item in items:
                local_gradient(item.parameter).copy_(sums[name])

    def _places(self, name: str) -> tuple[int, ...]:
        return tuple(sorted({stage % self.ranks.sizes["pp"] for stage in self.stages_of[name]}))

    def squares(self) -> float:
        """Sum of squares of the elements that this rank answers for."""
        parts = [local_gradient(item.parameter) for item in self.held if self._answers_for(item)]
        if not parts:
            return 0.0
        width = torch.promote_types(parts[0].dtype, torch.float32)
        return float(torch.stack(torch._foreach_norm(parts, 2, dtype=width)).double().square().sum())

    def _answers_for(self, item: Held) -> bool:
        at = self.ranks.coordinates
        first_of_tp = item.layout.is_divided or at["tp"] == 0
        first_of_dp = at["dp_replicate"] == 0 and (item.is_sharded or at["dp_shard"] == 0)
        return first_of_tp and first_of_dp and self.stages_of[item.layout.name][0] == item.stage

    def scale(self, factor: float) -> None:
        """Multiply every gradient."""
        if factor != 1.0:
            torch._foreach_mul_([local_gradient(item.parameter) for item in self.held], factor)


def sum_of(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The sum, in memory of its own."""
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total


def add_up(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Sum tensors over a group in place, as one flat message for each dtype."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for alike in by_dtype.values():
        flat = torch.cat([tensor.reshape(-1) for tensor in alike])
        dist.all_reduce(flat, group=group)
        for tensor, part in zip(alike, flat.split([tensor.numel() for tensor in alike]), strict=True):
            tensor.copy_(part.view_as(tensor))
