"""parallelize(model, plan) -> TrainStep: a global batch in, its loss out, everything the plan says in between.

    stage -> tp placements and conversions -> recompute -> ZeRO -> schedule -> gradients -> clip -> optimizer

The order matters: recompute wraps a block's forward inside its hooks, fully_shard hooks around both, a stage's entry and exit
around all of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrize import ParametrizationList

from autopar.documents.plan import Plan
from autopar.errors import PlanMismatch, RequestError
from autopar.runtime.batch import Dims, in_dtype, micro_batches
from autopar.runtime.gradients import Gradients, Held
from autopar.runtime.initial import Values, fill, materialise
from autopar.runtime.loss import LossMeter, UserLoss, VocabularyParallel
from autopar.runtime.mesh import DP, Ranks, build_mesh
from autopar.runtime.optimizer import BuildOptimizer, Optimizer, compute_dtype
from autopar.runtime.probe import probe
from autopar.runtime.recompute import apply_recompute, only_planned
from autopar.runtime.shard import lay_out, shard
from autopar.runtime.stage import Pieces, StageModule, cuts, split, whole
from autopar.runtime.zero import DataParallel, is_sharded

TIMEOUT = timedelta(minutes=10)


def parallelize(
    model: nn.Module,
    plan: Plan,
    loss: UserLoss | None = None,
    build_optimizer: BuildOptimizer | None = None,
    clip_norm: float | None = None,
    *,
    device: torch.device | str | None = None,
    batch_dims: Dims | None = None,
    initial: Values | None = None,
    timeout: timedelta = TIMEOUT,
) -> TrainStep:
    """A training step that carries out a plan over the default process group; every rank gives the same whole model.

    The model is divided in place, so it is the step's afterwards. A pipeline is built at the first batch, whose shapes it needs.
    Where the model's parameters are on meta, `initial` gives their whole values by name, of which a rank keeps its part.
    Raises PlanMismatch where model or world are not the plan's, RequestError for what is not carried out.
    """
    _require_same_size(model, plan, initial)
    place = torch.device(device) if device is not None else default_device()
    ranks = build_mesh(plan, place, timeout)
    step = TrainStep(model, plan, ranks, loss, build_optimizer, clip_norm, batch_dims, initial)
    if plan.mesh.pp == 1:
        step.build(None)
    return step


def _require_same_size(model: nn.Module, plan: Plan, initial: Values | None) -> None:
    """Whether structure agrees too is for those to check who can capture the model."""
    if initial is None and any(parameter.is_meta for parameter in model.parameters()):
        raise RequestError("the model is on meta, without values; build it on the CPU: each rank keeps its part only")
    elements = sum(parameter.numel() for parameter in model.parameters())
    if plan.model.parameters not in (0, elements):
        raise PlanMismatch(
            f"the plan was made for {plan.model.spec} with {plan.model.parameters:,} parameters, but this model has "
            f"{elements:,}; plan again for this model"
        )


def default_device() -> torch.device:
    """The GPU of this process where the process group runs on NCCL, else the CPU."""
    if dist.is_initialized() and dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


class TrainStep:
    """One training step of a plan on this rank: ``loss = step(global_batch)``, clipping and update included."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        ranks: Ranks,
        loss: UserLoss | None,
        build_optimizer: BuildOptimizer | None,
        clip_norm: float | None,
        batch_dims: Dims | None,
        initial: Values | None = None,
    ) -> None:
        self.plan, self.ranks, self.clip_norm, self.batch_dims = plan, ranks, clip_norm, batch_dims
        self.meter = LossMeter(loss, plan.schedule.micro_batches)
        self.grad_norm = 0.0
        self.seconds_by_part: dict[str, float] = {}
        """Of the last step on this rank, where it can be told."""
        self.stages: list[StageModule] = []
        self.parallel: list[DataParallel] = []
        self._build_optimizer, self._initial = build_optimizer, initial
        self.dtype = compute_dtype(plan.workload.dtype)
        self._model: nn.Module | None = cast(model, self.dtype)

    # Building.

    @property
    def is_built(self) -> bool:
        """Whether stages and optimizer exist."""
        return self._model is None

    def build(self, batch: Any) -> None:
        """Divide the model and build the optimizer; a pipeline needs a global batch to learn shapes from."""
        assert self._model is not None, "built once"
        model, plan, ranks = self._model, self.plan, self.ranks
        layouts = lay_out(model, plan)
        hidden, pieces = self._pieces(model, batch)
        self._model = None
        held: list[Held] = []
        for chunk, part in enumerate(pieces):
            shard(part, layouts, plan, ranks)
            part.model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(ranks.device))
            number = chunk * plan.mesh.pp + ranks["pp"]
            entries = [entry for entry in plan.recompute if entry.stage == ranks["pp"]]
            apply_recompute(part.blocks, entries)
            stage = StageModule(part, self.meter, self._loss_context, self.dtype, around_model=self.meter.loss is None)
            zero = plan.stages[ranks["pp"]].zero
            if not is_sharded(zero, ranks):
                materialise(stage, ranks.device)
            parallel = DataParallel(stage, part.blocks.values(), zero, ranks)
            materialise(stage, ranks.device)
            stage.attach()
            self.stages.append(stage)
            self.parallel.append(parallel)
            own = [(p, layouts[part.names[name.removeprefix("model.")]]) for name, p in stage.named_parameters()]
            if self._initial is not None:
                fill(own, self._initial, ranks.sizes["tp"], ranks["tp"])
            held += [Held(p, layout, number, isinstance(p, DTensor)) for p, layout in own if p.requires_grad]
        self.gradients = Gradients(held, ranks)
        self.optimizer = Optimizer([item.parameter for item in held], self._build_optimizer)
        self._run = self._pipeline(hidden) if hidden is not None else self._accumulate

    def _pieces(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor | None, list[Pieces]]:
        """What this rank holds, and the hidden state that crosses stages (on meta)."""
        if self.plan.mesh.pp == 1:
            return None, [whole(model, self.plan)]
        own = cuts(self.plan, model)[self.ranks["pp"]]
        inputs = micro_batches(batch, self.plan, self.ranks, self.batch_dims)[0]
        found = probe(model, own[0].chain, in_dtype(inputs, self.dtype))
        return found.hidden, [split(model, cut, found, self.ranks.device) for cut in own]

    def _loss_context(self) -> Any:
        group = self.ranks.group("tp")
        return (
            VocabularyParallel(group) if group is not None and self.plan.options.get("loss_parallel") else nullcontext()
        )

    def _pipeline(self, hidden: torch.Tensor) -> Callable[[], None]:
        """A function that runs the plan's schedule once over the stages' micro-batches."""
        plan, count = self.plan, self.plan.schedule.micro_batches
        total = plan.mesh.pp * plan.schedule.virtual_stages
        # Between sites of sequence parallelism a hidden state is a part: then torch learns the shapes at the first step.
        known = None if plan.options.get("sp") else hidden.requires_grad_()
        stages = []
        for stage in self.stages:
            number = stages_number(stage, self.stages, plan, self.ranks)
            takes: Any = () if number == 0 else known
            gives: Any = hidden.new_empty(()).requires_grad_() if number == total - 1 else known
            shapes = {} if known is None else {"input_args": takes, "output_args": gives}
            group = self.ranks.group("pp")
            stages.append(PipelineStage(stage, number, total, self.ranks.device, group=group, **shapes))
        options: dict[str, Any] = {
            "n_microbatches": count,
            "loss_fn": lambda output, target: output,
            "scale_grads": False,
        }
        if plan.schedule.name == "interleaved":
            schedule: Any = ScheduleInterleaved1F1B(stages, **options)
        else:
            schedule = (ScheduleGPipe if plan.schedule.name == "gpipe" else Schedule1F1B)(stages[0], **options)
        numbers = torch.arange(count)
        target = numbers.double() if any(stage.is_last for stage in stages) else None

        def run() -> None:
            losses: list[torch.Tensor] | None = [] if target is not None else None
            schedule.step(number=numbers, target=target, losses=losses, return_outputs=False)

        return run

    # Running.

    def __call__(self, batch: Any) -> float:
        """Train on a global batch, the same on every rank; returns its loss."""
        if not self.is_built:
            self.build(batch)
        parts = micro_batches(batch, self.plan, self.ranks, self.batch_dims)
        self.meter.parts = {}
        for stage in self.stages:
            if not stage.training:
                stage.train()
            stage.micro_batches = dict(enumerate(parts))
        for parallel in self.parallel:
            parallel.begin(len(parts))
        with self._timed("forward and backward"), only_planned():
            self._run()
        for stage in self.stages:
            stage.micro_batches = {}
        with self._timed("gradients"):
            for parallel in self.parallel:
                parallel.finish()
            self.gradients.complete()
            loss = self._norm_and_clip()
        with self._timed("optimizer"):
            self.optimizer.step()
        return loss

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        """Only where operators have run when they return: on a GPU nothing is waited for, so nothing is timed."""
        start = time.perf_counter()
        yield
        if self.ranks.device.type == "cpu":
            self.seconds_by_part[part] = time.perf_counter() - start

    def _accumulate(self) -> None:
        """Without a pipeline: forward and backward of each micro-batch."""
        stage, parallel = self.stages[0], self.parallel[0]
        count = self.plan.schedule.micro_batches
        for number in range(count):
            parallel.before_backward(is_last=number == count - 1)
            stage(number=torch.tensor(number)).backward()

    def _norm_and_clip(self) -> float:
        """One sum over the world gives the loss, its denominator and the norm; gradients are scaled once."""
        answers = self.ranks["tp"] == 0 and bool(self.meter.parts)
        totals, counts = self.meter.sums() if answers else (0.0, 0.0)
        sums = torch.tensor([totals, counts, self.gradients.squares()], dtype=torch.float64, device=self.ranks.device)
        if dist.is_initialized():
            dist.all_reduce(sums)
        totals, counts, squares = sums.tolist()
        factor = self.ranks.size(*DP) * self.plan.schedule.micro_batches / counts
        self.grad_norm = math.sqrt(squares) * factor
        if self.clip_norm is not None:
            factor *= min(1.0, self.clip_norm / (self.grad_norm + 1e-6))
        self.gradients.scale(factor)
        return float(totals / counts)


def stages_number(stage: StageModule, stages: list[StageModule], plan: Plan, ranks: Ranks) -> int:
    """The number of a virtual stage among all."""
    return stages.index(stage) * plan.mesh.pp + ranks["pp"]


def cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The model's floating parameters in a dtype, and the buffers that kernels read beside them (running statistics).

    Of 16 bits, other buffers keep what precision they have: tables of positions need it.
    """
    beside: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, ParametrizationList):
            beside.update(module.modules())
        elif any(parameter is not None for parameter in module._parameters.values()):
            beside.add(module)
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point() and (dtype.itemsize > 2 or module in beside):
                module._buffers[name] = buffer.to(dtype)
    return model
