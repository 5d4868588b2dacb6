"""The Plan: how a model is divided over a cluster, what that is predicted to cost, and why it was chosen.

    devices      = pp * dp_replicate * dp_shard * cp * tp
    global_batch = micro_batch * micro_batches * dp_replicate * dp_shard

`ep` divides dp_shard * cp * tp and does not multiply; `etp` is tp inside experts. Virtual stage ``chunk * pp + stage``
runs chunk `chunk` of stage `stage`. `costs` is the priced bill of every stage: with it the plan can be simulated
without the model, the cluster's profile or torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from pydantic import model_validator

from autopar.documents.base import Amount, Count, Document
from autopar.documents.graph import ModelInfo
from hardware_profiles.schema import Schema

Axis = Literal["pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "etp"]
ScheduleName = Literal["gpipe", "1f1b", "interleaved"]
NOT_RUNNABLE = "not runnable by autopar run"
"""How the note of a plan begins that says why it is export_only."""

PARTS = ("compute", "recompute", "tp", "cp", "ep", "pp", "dp", "offload", "bubble", "optimizer", "overhead")


class ClusterRef(Schema):
    """Which cluster: `spec` is what the user typed, `hash` covers the figures."""

    name: str
    spec: str
    devices: Count
    """Devices the plan uses."""
    hash: str


class Workload(Schema):
    """What a step trains: `global_batch` sequences of `seq_len` tokens, or samples of a model without sequences (1)."""

    global_batch: Count
    seq_len: Count
    dtype: str = "bf16"
    optimizer: str = "adamw"
    kernels: Literal["eager", "compiled", "fused"] = "eager"

    @property
    def tokens(self) -> int:
        """Tokens of a step, or its samples."""
        return self.global_batch * self.seq_len

    @property
    def unit(self) -> str:
        """What `tokens` counts."""
        return "tokens" if self.seq_len > 1 else "samples"


class Mesh(Schema):
    """Degrees of the mesh axes."""

    pp: Count = 1
    dp_replicate: Count = 1
    dp_shard: Count = 1
    cp: Count = 1
    tp: Count = 1
    ep: Count = 1
    etp: Count = 1

    @property
    def dp(self) -> int:
        """Data-parallel degree: replicas of the batch dimension."""
        return self.dp_replicate * self.dp_shard

    @property
    def devices(self) -> int:
        """Devices of the mesh."""
        return self.pp * self.dp * self.cp * self.tp


class Schedule(Schema):
    """The pipeline schedule; `micro_batch` in sequences per data-parallel rank."""

    name: ScheduleName = "1f1b"
    virtual_stages: Count = 1
    micro_batch: Count
    micro_batches: Count


class Stage(Schema):
    """What one pp rank holds: per chunk, chain -> [first, last] block, inclusive, and its ZeRO stage (0-3).

    The chunk with a chain's first (last) block also holds that chain's prologue (epilogue).
    """

    chunks: tuple[dict[str, tuple[int, int]], ...]
    zero: Literal[0, 1, 2, 3] = 1


class Recompute(Schema):
    """Recompute of the blocks [first, last] of a chain; `keep` as in the graph's recompute menu."""

    stage: int
    chain: str
    blocks: tuple[int, int]
    mode: Literal["none", "selective", "full"]
    option: str = ""
    """Name of the menu's entry."""
    keep: tuple[str, ...] = ()


class Offload(Schema):
    """Part of a stage's bytes that lives in host memory."""

    stage: int
    what: Literal["optimizer", "activations", "parameters"]
    fraction: float


class SegmentPlacement(Schema):
    """A dim of unlike parts, each divided on its own (fused QKV)."""

    dim: int
    segments: tuple[int, ...]


class SiteRef(Schema):
    """A site by full module name; ``*`` stands for the block's number in a chain."""

    module: str
    where: Literal["input", "output", "attention"]
    argument: int = 0


class Conversion(Schema):
    """A collective at a site; its backward is the adjoint.

    `gradient` tells adjoints apart where the result is whole on every rank: each rank's gradient of it is only its own
    `share` (all_gather goes back as reduce_scatter, identity as all_reduce), or already the `whole` one (all_gather goes
    back as slice, all_reduce as identity).
    """

    site: SiteRef
    axis: Axis
    forward: Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "slice", "identity"]
    dim: int | None = None
    within: int | None = None
    """Where the batch stands outside what is divided, in one dim with it: how long that is for one of the batch, as it comes."""
    gradient: Literal["share", "whole"] | None = None


class Collective(Schema):
    """Collectives of one kind on one axis within an action: `seconds` is the sum over `count` of them.

    `overlap` is the fraction that can hide behind the action's own compute; `bytes` is the full buffer of one.
    """

    axis: Axis
    kind: Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]
    count: int
    bytes: Amount
    seconds: Amount
    overlap: Amount = 0.0


class ActionCost(Schema):
    """One forward or backward of one chunk for one micro-batch, on one rank, alone on its machine."""

    compute_seconds: Amount
    recompute_seconds: Amount = 0.0
    overhead_seconds: Amount = 0.0
    """Host and launch time that the device waits for."""
    collectives: tuple[Collective, ...] = ()

    @property
    def exposed_seconds(self) -> float:
        """Collective seconds that cannot hide behind this action's compute."""
        return sum(item.seconds * (1 - item.overlap) for item in self.collectives)

    @property
    def seconds(self) -> float:
        """Time on the compute stream."""
        return self.compute_seconds + self.recompute_seconds + self.overhead_seconds + self.exposed_seconds


class ChunkCost(Schema):
    """A chunk's actions, what it sends on, and its bytes.

    `gather_seconds` and `reduce_seconds` are the dp collectives of the chunk's parameters: how often they run follows
    from the stage's ZeRO value (see `StageCost`).
    """

    forward: ActionCost
    backward: ActionCost
    send_seconds: Amount = 0.0
    """Hidden state to the next virtual stage, one micro-batch (0 for the last); its gradient costs the same back."""
    send_bytes: Amount = 0.0
    activation_bytes: Amount = 0.0
    """Kept from forward to backward, per micro-batch in flight."""
    gather_seconds: Amount = 0.0
    """One all-gather of the chunk's parameters over dp_shard."""
    reduce_seconds: Amount = 0.0
    """One reduction of the chunk's gradients over dp."""


class StageCost(Schema):
    """The bill of one pp rank.

    `gathers`: parameters are gathered never (zero 0), once a step (zero 1-2, and zero 3 under a pipeline, which keeps
    them), or before each forward and each backward. `reduces`: gradients are reduced once after the last backward of a
    chunk, or after each backward. `dp_overlap` is the fraction of these that can hide behind compute, but the first
    gather and the last reduction cannot: `dp_exposed_seconds` in all, part of the chunks' seconds.
    """

    chunks: tuple[ChunkCost, ...]
    optimizer_seconds: Amount = 0.0
    gathers: Literal["never", "once", "each_action"] = "never"
    reduces: Literal["never", "once", "each_backward"] = "once"
    dp_overlap: Amount = 0.0
    dp_exposed_seconds: Amount = 0.0
    memory: dict[str, Amount] = {}
    """Bytes that do not follow the schedule, by name.

    parameters, gradients, states, gathered, workspace, logits, communicators, context.
    """
    reserve_fraction: Amount = 0.0
    """What the allocator holds beyond what is allocated, a fraction of it (communicators and context lie outside)."""


class Predicted(Schema):
    """What the plan is expected to do. Seconds by part are means over ranks and add up to the step."""

    step_seconds: float
    step_seconds_low: float
    step_seconds_high: float
    tokens_per_second: float
    mfu: float
    bubble_fraction: float
    seconds_by_part: dict[str, float]
    peak_bytes: tuple[float, ...]
    capacity_bytes: tuple[float, ...]

    def contradictions(self, stages: int) -> Iterator[str]:
        """What is missing: every stage and every part has its figure."""
        if not self.step_seconds > 0:
            yield f"predicted.step_seconds is {self.step_seconds}, expected a time above 0"
        if not len(self.peak_bytes) == len(self.capacity_bytes) == stages:
            lengths = f"{len(self.peak_bytes)} peak_bytes and {len(self.capacity_bytes)} capacity_bytes"
            yield f"predicted has {lengths}, but pp is {stages}"
        if set(self.seconds_by_part) != set(PARTS):
            yield f"predicted.seconds_by_part has {sorted(self.seconds_by_part)}, expected {sorted(PARTS)}"


class Certificate(Schema):
    """What was proven: optimal for the stated objective over the stated space."""

    objective: Literal["estimate", "simulated"]
    space: dict[str, Any]
    enumerated: int
    excluded_by_bound: int
    solved: int
    infeasible: int
    bound_seconds: float
    gap: float
    solver: str
    search_seconds: float


class Alternative(Schema):
    """A near plan and the terms in which it loses."""

    mesh: Mesh
    schedule: Schedule
    zero: int
    recompute: str
    step_seconds: float
    peak_bytes: tuple[float, ...]
    loses_by: dict[str, float]


class Plan(Document):
    """A division of a model over a cluster, with its bill and its certificate."""

    kind: ClassVar[str] = "plan"
    version: ClassVar[int] = 1

    format: str = "autopar-plan/1"
    autopar_version: str
    model: ModelInfo
    cluster: ClusterRef
    workload: Workload
    mesh: Mesh
    rank_order: tuple[str, ...] = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    """Mesh axes, outermost first; consecutive ranks differ along the last."""
    schedule: Schedule
    stages: tuple[Stage, ...]
    recompute: tuple[Recompute, ...] = ()
    offload: tuple[Offload, ...] = ()
    placements: dict[str, dict[str, str | SegmentPlacement]] = {}
    """Parameter -> axis -> Replicate, Shard(d) or segments; ``*`` in a name: the block's number in its chain."""
    shares: dict[str, Literal["gradient", "value"]] = {}
    """Whole parameters of which each tp rank sees only its share, by name with ``*``.

    gradient: ranks' gradients are to be summed (a norm over a part of the sequence). value: the parameter is added to a
    partial sum, so each rank adds a tp-th of it, and gradients are to be summed as well (the bias of a row-wise linear).
    """
    conversions: tuple[Conversion, ...] = ()
    options: dict[str, bool | int | float | str] = {}
    """E.g. sp (sequence parallel between sites), memory_margin."""
    costs: tuple[StageCost, ...]
    predicted: Predicted
    certificate: Certificate | None = None
    alternatives: tuple[Alternative, ...] = ()
    dry_run: Literal["passed", "not_run"] = "not_run"
    export_only: bool = False
    numerics: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _adds_up(self) -> Plan:
        mesh, schedule = self.mesh, self.schedule
        if mesh.devices != self.cluster.devices:
            raise ValueError(
                f"pp({mesh.pp}) * dp_replicate({mesh.dp_replicate}) * dp_shard({mesh.dp_shard}) * cp({mesh.cp}) * "
                f"tp({mesh.tp}) = {mesh.devices}, but the plan uses {self.cluster.devices} devices"
            )
        batch = schedule.micro_batch * schedule.micro_batches * mesh.dp
        if batch != self.workload.global_batch:
            raise ValueError(
                f"micro_batch({schedule.micro_batch}) * micro_batches({schedule.micro_batches}) * dp({mesh.dp}) = "
                f"{batch}, but global_batch is {self.workload.global_batch}"
            )
        if len(self.stages) != mesh.pp or len(self.costs) != mesh.pp:
            raise ValueError(f"{len(self.stages)} stages and {len(self.costs)} costs, but pp is {mesh.pp}")
        for number, (stage, cost) in enumerate(zip(self.stages, self.costs, strict=True)):
            if not len(stage.chunks) == len(cost.chunks) == schedule.virtual_stages:
                raise ValueError(
                    f"stage {number} has {len(stage.chunks)} chunks and {len(cost.chunks)} priced ones, "
                    f"but virtual_stages is {schedule.virtual_stages}"
                )
        return self

    @property
    def hash(self) -> str:
        """A short digest of what the plan does and costs, not of what was said about it.

        Left out: `predicted`, `certificate`, `alternatives`, `dry_run`, `notes` and the writing version, so that the
        digest is the same before and after simulation, dry run or a second search that finds the same plan.
        """
        said = {"predicted", "certificate", "alternatives", "dry_run", "notes", "autopar_version"}
        return hashlib.sha256(self.model_dump_json(exclude=said).encode()).hexdigest()[:16]
