"""A published run under its stated plan, priced and simulated by the package itself.

What a row leaves open is settled by its executor's defaults; recompute and interleave, which no default settles, take the
cheapest choice that fits memory, and the row is marked `searched`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import ceil
from typing import cast

from runs_clusters import chip_of, topology_of
from runs_models import Architecture, graph_of, latent_ranks
from runs_table import Run, Skip

from autopar.documents.plan import Mesh, Plan, Schedule, StageCost
from autopar.errors import AutoparError
from autopar.planner.assemble import stage_costs
from autopar.planner.case import Case, Model
from autopar.planner.pricelist import PriceList
from autopar.planner.request import Kernels, Request
from autopar.planner.space import Configuration
from autopar.planner.stages import Answer
from autopar.simulator.engine import run as play
from autopar.simulator.memory import OUTSIDE_ALLOCATOR, memory
from autopar.simulator.replay import seconds_by_part
from cost_models.executors import Executor, executor
from cost_models.in_flight import Schedule as ScheduleName
from cost_models.uncertainty import interval
from hardware_profiles.chip import normal_dtype
from hardware_profiles.errors import ProfileError

UNLIMITED_BYTES = 1e18
"""Stated plans ran: they are priced whether they fit or not."""
MEMORY_TOLERANCE = 0.05
"""A choice counts as fitting where it exceeds the device by no more than the memory model may err."""
INTERLEAVES = (1, 2, 3, 4, 5, 6, 7, 8, 12)


@dataclass(frozen=True)
class Choice:
    """What a row may leave open."""

    recompute: str
    virtual_stages: int
    micro_batch: int


@dataclass(frozen=True)
class Scored:
    """A prediction beside what was measured."""

    run: Run
    seconds: float
    low: float
    high: float
    parts: dict[str, float]
    memory_bytes: float
    """As the row defines it: allocated, reserved, or all that the device shows."""
    device_bytes: float
    searched: bool
    choice: Choice
    executor: str
    breakdown: dict[str, float]
    """Bytes of the fullest stage, by kind."""


def predict(run: Run) -> Scored:
    """The prediction for a row. Raises Skip where it cannot be priced."""
    _refuse(run)
    habits = _executor(run)
    choices = list(_choices(run, habits))
    searched = len({(c.recompute, c.virtual_stages) for c in choices}) > 1
    found: list[Scored] = []
    reason = Skip("contradictory", "no choice is legal")
    for choice in choices:
        try:
            found.append(replace(_price(run, habits, choice), searched=searched))
        except Skip as skip:
            reason = skip
        except AutoparError as error:
            reason = Skip("refused", str(error).partition("\n")[0])
    if not found:
        raise reason
    capacity = chip_of(run).memory_bytes
    fitting = [one for one in found if one.device_bytes <= capacity * (1 + MEMORY_TOLERANCE)]
    return min(fitting, key=lambda one: one.seconds) if fitting else min(found, key=lambda one: one.device_bytes)


def _refuse(run: Run) -> None:
    if "lora" in run.task.lower():
        raise Skip("adapters", f"{run.task}: only adapters are trained")
    if run.experts and run.experts % run.ep:
        raise Skip("contradictory", f"ep({run.ep}) does not divide experts({run.experts})")
    if run.gpu.upper() == "MIXED":
        raise Skip("unlike devices", run.gpu)


def _executor(run: Run) -> Executor:
    try:
        found = executor(run.framework)
        return executor("torchtitan_async_tp") if run.async_tp and found.name == "torchtitan" else found
    except ProfileError:
        raise Skip("framework not known", run.framework) from None


def _choices(run: Run, habits: Executor) -> Iterator[Choice]:
    """What is stated, or every choice where it is not."""
    stated = run.recompute or habits.recompute
    recomputes = (stated,) if stated else ("none", "selective", "full")
    interleaves: tuple[int, ...] = (run.vp,) if run.vp else (1,)
    open_interleave = run.pp > 1 and not run.vp and "interleaved" in run.schedule
    if open_interleave:
        usual = (habits.virtual_stages,) if habits.virtual_stages else INTERLEAVES
        interleaves = tuple(v for v in usual if v > 1 and _divides(run.layers, run.pp * v))
    per_replica = run.global_batch // run.dp
    if run.micro_batch:
        sizes: tuple[int, ...] = (run.micro_batch,)
    elif run.pp > 1 and habits.micro_batches_from_stages:
        sizes = (max(1, per_replica // run.pp),)
    else:
        sizes = tuple(b for b in (1, 2, 4, 8) if per_replica % b == 0)
    for recompute, v, size in product(recomputes, interleaves, sizes):
        yield Choice(recompute, v, size)


def _divides(layers: int, chunks: int) -> bool:
    return layers % chunks == 0 or (layers + 2) % chunks == 0


def _price(run: Run, habits: Executor, choice: Choice) -> Scored:
    case, answer = _case(run, habits, choice)
    costs = stage_costs(case, answer)
    plan = _plan(case, costs)
    done = play(plan, {})
    parts = seconds_by_part(done)
    _, peaks = memory(costs, done)
    stage = max(range(len(costs)), key=lambda i: peaks[i])
    if "last rank" in run.memory_definition.lower():
        stage = len(costs) - 1
    low, high = interval(parts, case.model.chip)
    return Scored(
        run=run,
        seconds=done.step_seconds,
        low=low,
        high=high,
        parts=parts,
        memory_bytes=_as_defined(run.memory_definition, costs[stage], peaks[stage]),
        device_bytes=max(peaks),
        searched=False,
        choice=choice,
        executor=habits.name,
        breakdown=_breakdown(costs[stage], peaks[stage]),
    )


def _plan(case: Case, costs: tuple[StageCost, ...]) -> Plan:
    """As much of a Plan as the simulator reads."""
    c = case.c
    schedule = Schedule.model_validate(
        {
            "name": c.schedule,
            "virtual_stages": c.virtual_stages,
            "micro_batch": c.micro_batch,
            "micro_batches": c.micro_batches,
        }
    )
    mesh = Mesh(pp=c.pp, tp=c.tp, cp=c.cp, dp_shard=c.dp)
    return Plan.model_construct(mesh=mesh, schedule=schedule, costs=costs)


def _as_defined(definition: str, cost: StageCost, peak: float) -> float:
    """A stage's peak as the row's instrument shows it."""
    outside = sum(cost.memory.get(name, 0.0) for name in OUTSIDE_ALLOCATOR)
    words = definition.lower()
    if "alloc" in words:
        return (peak - outside) / (1 + cost.reserve_fraction)
    return peak - outside if "reserved" in words else peak


def _breakdown(cost: StageCost, peak: float) -> dict[str, float]:
    outside = sum(cost.memory.get(name, 0.0) for name in OUTSIDE_ALLOCATOR)
    allocated = (peak - outside) / (1 + cost.reserve_fraction)
    fixed = sum(cost.memory.values()) - outside
    return {**cost.memory, "activations": allocated - fixed, "reserve": allocated * cost.reserve_fraction}


def _case(run: Run, habits: Executor, choice: Choice) -> tuple[Case, Answer]:
    topology, chip = topology_of(run), chip_of(run)
    sp = run.tp > 1 and (habits.sequence_parallel if run.sp is None else run.sp)
    micro_batches = ceil(run.global_batch / (run.dp * choice.micro_batch))
    schedule: ScheduleName = "1f1b"
    if choice.virtual_stages > 1 and run.pp > 1:
        schedule = "interleaved"
        rounds = max(1, micro_batches // run.pp)
        if micro_batches % rounds:
            raise Skip("schedule", f"{micro_batches} micro-batches do not divide into {rounds} rounds")
    elif "gpipe" in run.schedule:
        schedule = "gpipe"
    configuration = Configuration(
        pp=run.pp,
        tp=run.tp,
        sp=sp,
        dp=run.dp,
        micro_batch=choice.micro_batch,
        micro_batches=micro_batches,
        schedule=schedule,
        virtual_stages=choice.virtual_stages if schedule == "interleaved" else 1,
        zero=_zero(run, habits),
        cp=run.cp,
        ep=run.ep,
        etp=_etp(run, habits),
        zero_group=run.zero_group,
    )
    request = Request(
        global_batch=run.dp * choice.micro_batch * micro_batches,
        seq_len=run.seq_len,
        dtype=_dtype(run),
        kernels=cast(Kernels, run.kernels or (_dtype(run) == "fp8" and habits.fp8_kernels) or habits.kernels),
        fixed={"recompute": choice.recompute, "micro_batch": choice.micro_batch, "tp": run.tp, "sp": int(sp)},
        memory_margin=0.0,
        executor=habits.name,
    )
    graph = graph_of(_architecture(run, habits))
    model = Model(graph, topology, chip, UNLIMITED_BYTES, request)
    _divide(model.prices, run.tp, sp, graph.class_counts)
    case = Case(model, configuration)
    return case, Answer(_blocks(run, configuration), 1.0)


def _etp(run: Run, habits: Executor) -> int:
    return run.etp or (run.tp if habits.experts_over_tp else 1)


def _zero(run: Run, habits: Executor) -> int:
    replicas = run.dp * run.cp
    return 0 if replicas == 1 else habits.zero if run.zero is None else run.zero


def _dtype(run: Run) -> str:
    try:
        return normal_dtype(run.dtype)
    except KeyError:
        raise Skip("dtype not known", run.dtype) from None


def _architecture(run: Run, habits: Executor) -> Architecture:
    fused = run.flash if run.flash is not None else habits.attention == "flash"
    pad = 128 * run.tp
    return Architecture(
        layers=run.layers,
        hidden=run.hidden,
        heads=run.heads,
        kv_heads=run.kv_heads,
        head_dim=run.head_dim,
        ffn=run.ffn,
        gated=run.gated,
        vocabulary=ceil(run.vocabulary / pad) * pad,
        seq_len=run.seq_len,
        fused_attention=fused,
        dropout=0.0 if fused else 0.1,
        experts=run.experts,
        topk=run.topk,
        expert_ffn=run.moe_ffn or run.ffn,
        shared_ffn=run.shared_ffn,
        latent=latent_ranks(run.model),
        wide_rotary=habits.wide_rotary,
        repeats_keys=habits.repeats_keys,
        fused_projections=habits.fused_projections,
        composite_norm=habits.composite_norm,
    )


_DIVIDED: dict[tuple[tuple[int, ...], int, bool, int], PriceList] = {}
"""Divisions depend on the classes alone: rows that share them share their solution."""


def _divide(prices: PriceList, tp: int, sp: bool, classes: dict[str, int]) -> None:
    """Make the divisions that a price list needs, once per set of classes. Raises Skip where there are none."""
    if tp == 1:
        return
    key = (tuple(id(prices.graph.class_by_name[name]) for name in classes), tp, sp, prices.request.seq_len)
    if key not in _DIVIDED:
        prices.degrees()
        _DIVIDED[key] = prices
    prices.share_divisions(_DIVIDED[key])
    if not all(prices.has_division(name, tp, sp) for name in classes):
        raise Skip("no division", f"the model has no division by tp={tp}")


def _blocks(run: Run, c: Configuration) -> tuple[int, ...]:
    """Blocks of each stage: as the row states its partition, else even; what is left over goes to middle stages.

    Where layers do not divide by the chunks but two more would, embedding and head stand for a layer each (Megatron's
    `account_for_embedding_in_pipeline_split` and its kin).
    """
    stated = re.search(r"layer partition \[([\d, ]+)\] \(units", run.words)
    if stated:
        bounds = [min(max(int(bound) - FIRST_UNITS, 0), run.layers) for bound in stated.group(1).split(",")]
        counts = tuple(end - start for start, end in zip(bounds, bounds[1:], strict=False))
        if len(counts) == c.pp and sum(counts) == run.layers:
            return counts
    chunks = c.pp * c.virtual_stages
    if chunks > run.layers:
        raise Skip("contradictory", f"pp({c.pp}) * vp({c.virtual_stages}) = {chunks} chunks, but {run.layers} layers")
    if run.layers % chunks and (run.layers + 2) % chunks == 0 and c.pp > 1:
        each = (run.layers + 2) // c.pp
        return (each - 1, *(each,) * (c.pp - 2), each - 1)
    each, more = divmod(run.layers, c.pp)
    first = (c.pp - more) // 2
    return tuple(each + (first <= stage < first + more) for stage in range(c.pp))


FIRST_UNITS = 2
"""Units of DeepSpeed's pipelined GPT before its first layer: the embedding and a reshape."""
