"""How parameters, gradients and optimizer states are stored over the data-parallel ranks.

    zero  parameters        gradients                                states
    0     whole             summed once after the last backward      whole
    1     gathered a step   whole until the last backward            divided over dp_shard
    2     gathered a step   divided after each backward              divided
    3     gathered a block  divided after each backward              divided

1 to 3 are fully_shard, which averages over ranks; under a pipeline it holds whole gradients until the step's end and keeps
parameters gathered, whatever the stage. 0 is an all-reduce of flat buckets that overlaps the last backward; a single number,
which cannot be divided, is reduced so at every stage. Both leave the average over ranks.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from autopar.runtime.mesh import DP, Ranks

BUCKET_BYTES = 25 * 2**20
FIRST_BUCKET_BYTES = 2**20
"""Small, so that the first message leaves while most of backward is still to come."""


def is_sharded(zero: int, ranks: Ranks) -> bool:
    """Whether a stage's storage is divided at all."""
    return zero > 0 and ranks.size("dp_shard") > 1


class DataParallel:
    """The data-parallel side of one stage."""

    def __init__(self, stage: nn.Module, blocks: Iterable[nn.Module], zero: int, ranks: Ranks) -> None:
        self.stage, self.zero, self.ranks = stage, zero, ranks
        self.degree = ranks.size(*DP)
        self.is_sharded = is_sharded(zero, ranks)
        self.reducer: BucketReducer | None = None
        reduced = {p for p in stage.parameters() if not self.is_sharded or p.dim() == 0}
        if self.is_sharded:
            mesh = ranks.shard_mesh()
            for block in blocks:
                fully_shard(block, mesh=mesh, reshard_after_forward=zero == 3, ignored_params=reduced)
            fully_shard(stage, mesh=mesh, reshard_after_forward=False, ignored_params=reduced)
        trained = [p for p in stage.parameters() if p in reduced and p.requires_grad]
        if self.degree > 1 and trained:
            group = ranks.group(*DP)
            assert group is not None
            self.reducer = BucketReducer(trained, group)

    def begin(self, backwards: int) -> None:
        """Before the first of a step's backwards."""
        if self.reducer is not None:
            self.reducer.begin(backwards)

    def before_backward(self, is_last: bool) -> None:
        """Say whether the coming backward is the last of the step. Not for pipelines, whose stages say it themselves."""
        if isinstance(self.stage, FSDPModule):
            self.stage.set_requires_gradient_sync(is_last or self.zero >= 2)
            self.stage.set_is_last_backward(is_last)
            self.stage.set_reshard_after_backward(is_last or self.zero == 3)
        if self.reducer is not None and is_last:
            self.reducer.arm()

    def finish(self) -> None:
        """After the last backward: gradients are the average over ranks."""
        if self.reducer is not None:
            self.reducer.finish()


class BucketReducer:
    """Averages gradients over a group in flat buckets, filled in the reverse order of parameters as backward makes them.

    A step's end leaves gradients as views of their bucket. Where a step has several backwards they are so from the first and
    add up there; of a single one, each bucket's are put together when it leaves, which takes one pass less.
    """

    def __init__(self, parameters: list[nn.Parameter], group: dist.ProcessGroup) -> None:
        self.group = group
        self.buckets = list(_buckets(parameters))
        self.bucket_of = {parameter: number for number, bucket in enumerate(self.buckets) for parameter in bucket}
        self.flat = [bucket[0].new_empty(sum(parameter.numel() for parameter in bucket)) for bucket in self.buckets]
        self.views = [
            [part.view_as(p) for p, part in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True)]
            for bucket, flat in zip(self.buckets, self.flat, strict=True)
        ]
        self.are_views = False
        self.armed = False
        self.missing: list[int] = []
        self.flying: list[dist.Work | None] = []
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._ready)

    def begin(self, backwards: int) -> None:
        """Before the first of a step's backwards: no gradients where it is the only one, else zeros in their buckets."""
        self.are_views = backwards > 1
        for bucket, flat, views in zip(self.buckets, self.flat, self.views, strict=True):
            if self.are_views:
                flat.zero_()
            for parameter, view in zip(bucket, views, strict=True):
                parameter.grad = view if self.are_views else None

    def arm(self) -> None:
        """The coming backward is the last: send each bucket as soon as its gradients are there, in order."""
        self.armed, self.missing, self.flying = True, [len(bucket) for bucket in self.buckets], []

    def _ready(self, parameter: torch.Tensor) -> None:
        if self.armed:
            self.missing[self.bucket_of[parameter]] -= 1
            while len(self.flying) < len(self.buckets) and self.missing[len(self.flying)] == 0:
                self._send()

    def _send(self) -> None:
        number = len(self.flying)
        flat, bucket, views = self.flat[number], self.buckets[number], self.views[number]
        if not self.are_views:
            torch.cat([_gradient(parameter).reshape(-1) for parameter in bucket], out=flat)
        for parameter, view in zip(bucket, views, strict=True):
            if self.are_views and parameter.grad is not view:
                # Someone put another gradient in its place: fully_shard does, of parameters beside its own, the first time.
                view.copy_(_gradient(parameter))
            parameter.grad = view
        flat /= self.group.size()
        self.flying.append(dist.all_reduce(flat, group=self.group, async_op=True))

    def finish(self) -> None:
        """Send what is left and wait: gradients are averages."""
        while len(self.flying) < len(self.buckets):
            self._send()
        for work in self.flying:
            if work is not None:
                work.wait()
        self.armed, self.flying = False, []


def _buckets(parameters: list[nn.Parameter]) -> Iterable[list[nn.Parameter]]:
    """Buckets of one dtype, closed by the parameter that fills BUCKET_BYTES; the first of them smaller."""
    bucket: list[nn.Parameter] = []
    filled, enough = 0, FIRST_BUCKET_BYTES
    for parameter in reversed(parameters):
        if bucket and (filled >= enough or bucket[-1].dtype != parameter.dtype):
            yield bucket
            bucket, filled, enough = [], 0, BUCKET_BYTES
        bucket.append(parameter)
        filled += parameter.numel() * parameter.element_size()
    if bucket:
        yield bucket


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    """The gradient; zeros where the parameter took no part."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """The part of a gradient that this rank holds; zeros where the parameter took no part."""
    return local(_gradient(parameter))
