"""The verbs, from capture to compare. Each wires workers together and imports them only when called."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from autopar.documents import Graph, Plan, Timeline
from autopar.documents.base import require_writable
from autopar.documents.graph import ModelInfo
from autopar.documents.run_lines import RunLines
from autopar.errors import DocumentError, NoPlanFits, PlanMismatch, RequestError
from hardware_profiles.cluster import Cluster

if TYPE_CHECKING:
    import torch

    from autopar.planner.request import Request
    from autopar.runtime.dry_run import DryRun
    from autopar.runtime.step import TrainStep
    from autopar.tracer import Source


def capture(model: Any, example_inputs: Any = None, *, seq_len: int | None = None, dtype: str = "bf16") -> Graph:
    """One training step of a model as a Graph, on meta tensors: no memory, no GPU.

    `model` is a spec (``model.py``, ``model.py:factory``, ``package.module:factory``, a Hugging Face ``config.json`` or
    its folder, a saved ``graph.json``), or a module or factory together with `example_inputs` (batch, seq) -> inputs.
    Raises CaptureError with module, operator and source line.
    """
    if isinstance(model, str | Path) and is_graph_file(model):
        return Graph.load(model)
    from autopar.tracer import capture as trace

    return trace(model, example_inputs, seq_len=seq_len, dtype=dtype)


def plan(
    model: Any,
    cluster: Cluster | str | Path,
    *,
    global_batch: int,
    seq_len: int | None = None,
    dtype: str = "bf16",
    optimizer: str = "adamw",
    kernels: str = "eager",
    objective: str = "time",
    fixed: Mapping[str, Any] | None = None,
    forbid: Sequence[str] = (),
    devices: int | None = None,
    time_limit: float | None = None,
    memory_margin: float = 0.05,
    moe_imbalance: float = 1.0,
    target: str = "run",
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """The best plan of the stated space for a model (or its Graph) on a cluster, simulated.

    Raises RequestError for a contradictory request, NoPlanFits when nothing fits, ProfileError, CaptureError.
    """
    from autopar.planner.request import Request

    machine = load_cluster(cluster)
    graph = model if isinstance(model, Graph) else capture(model, seq_len=seq_len, dtype=dtype)
    request = Request.parse(
        global_batch=global_batch,
        seq_len=graph.length(seq_len),
        dtype=dtype,
        optimizer=optimizer,
        kernels=kernels,
        objective=objective,
        fixed=dict(fixed or {}),
        forbidden=tuple(forbid),
        devices=devices,
        time_limit=time_limit,
        memory_margin=memory_margin,
        moe_imbalance=moe_imbalance,
        target=target,
    )
    runnable = model if isinstance(model, str | Path) and not is_graph_file(model) else None
    return with_simulated_figures(_search_with_dry_run(graph, machine, request, runnable))


def simulate(plan: Plan, *, slow: Mapping[int, float] | None = None) -> Timeline:
    """One step of the plan, event by event; `slow` maps a pp rank to the factor by which its compute is slower."""
    from autopar.simulator import simulate as replay

    return replay(plan, slow=slow)


def explain(plan: Plan, against: Plan | None = None) -> str:
    """Why this plan: what dominates, what each stage holds, the nearest alternatives; or how two plans differ.

    Raises PlanMismatch when `against` was made for another model or workload.
    """
    from autopar.planner.explain import compare_plans, explain_plan

    for one in filter(None, (plan, against)):
        problems = list(one.predicted.contradictions(one.mesh.pp))
        if problems:
            raise DocumentError(f"the plan for {one.model.spec} cannot be explained: {'; '.join(problems)}; plan again")
    if against is None:
        return explain_plan(plan)
    require_same_model(plan, against)
    return compare_plans(plan, against)


def parallelize(
    model: torch.nn.Module,
    plan: Plan,
    loss: Callable[..., Any] | None = None,
    build_optimizer: Callable[..., Any] | None = None,
    clip_norm: float | None = None,
) -> TrainStep:
    """A training step that carries out a plan over the default process group: ``loss = step(global_batch)``.

    Every rank gives the same whole model, which is divided in place, and the same global batches; clipping and the
    optimizer's update are part of the step. Raises PlanMismatch where model or world are not the plan's, RequestError
    for what is not carried out.
    """
    from autopar.runtime.step import parallelize as divide

    return divide(model, plan, loss, build_optimizer, clip_norm)


def run(
    plan: Plan,
    *,
    steps: int = 100,
    model: str | Path | None = None,
    nproc: int | None = None,
    seed: int = 0,
    clip_norm: float | None = None,
    checkpoint: str | Path | None = None,
    save_every: int | None = None,
    resume: bool = False,
    init_from: str | Path | None = None,
    initialise: Literal["auto", "whole", "parts"] = "auto",
    metrics: str | Path | None = None,
    timeout_seconds: float = 600.0,
    report: Callable[[dict[str, Any]], None] | None = None,
) -> RunLines:
    """Train the plan's model (or `model`, a spec of the same one) by the plan; returns what rank 0 saw.

    Under torchrun this process is one of the ranks, else all of them are started here. `report` is called on rank 0 with
    every line. Raises PlanMismatch for another model or number of ranks, RunFailed when a rank fails, CaptureError,
    RequestError, DocumentError (checkpoints).
    """
    from autopar.runtime.launch import run as launch
    from autopar.runtime.train import Recipe, RunOptions
    from autopar.tracer import open_source

    if checkpoint is not None:
        _require_folder(Path(checkpoint))
    source = open_source(model or plan.model.spec, None, plan.workload.seq_len)
    _require_planned_model(plan, source)
    recipe = Recipe(source.build, source.inputs, source.loss, source.build_optimizer, source.batches)
    options = RunOptions(
        steps=steps,
        seed=seed,
        clip_norm=clip_norm,
        checkpoint=Path(checkpoint) if checkpoint is not None else None,
        save_every=save_every,
        resume=resume,
        init_from=Path(init_from) if init_from is not None else None,
        initialise=initialise,
        metrics=Path(metrics) if metrics is not None else None,
        timeout=timedelta(seconds=timeout_seconds),
    )
    return RunLines.of(launch(plan, recipe, options, nproc, report))


def compare(plan: Plan, lines: RunLines | str | Path) -> str:
    """Predicted against measured, term by term. Raises PlanMismatch for the lines of another plan's run, DocumentError."""
    from autopar.report.comparison import comparison

    return comparison(plan, lines if isinstance(lines, RunLines) else RunLines.load(lines))


def calibrate(
    ranks: int | None = None,
    *,
    quick: bool = False,
    start: Callable[..., list[Any]] | None = None,
    report: Callable[[str], None] | None = None,
) -> Cluster:
    """Measure this machine: its cluster profile, found on `ranks` processes at once (default: its GPUs, else its cores).

    `start(world, work, timeout)` gives what `work(rank)` returns on each rank; default: ranks forked here.
    """
    from autopar.calibrator import Probe, probe_inputs
    from autopar.calibrator import calibrate as measure
    from autopar.runtime.launch import on_ranks

    operators = _kernels(capture(Probe, probe_inputs, seq_len=8, dtype="fp32"))
    return measure(start or on_ranks, operators, ranks, quick=quick, report=report)


def _kernels(graph: Graph) -> int:
    """Operators of a whole training step that are no views."""
    from autopar.pricing.work import kind_of

    return sum(
        count * sum(kind_of(operator) != "view" for operator in graph.class_by_name[name].operators)
        for name, count in graph.class_counts.items()
    )


def _require_folder(path: Path) -> None:
    """Raise DocumentError where checkpoints cannot be kept, before hours are spent on what they shall hold."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DocumentError(f"{path}: checkpoints cannot be kept there: {error.strerror}; give a folder") from None
    require_writable(path / "progress.json")


def _require_planned_model(plan: Plan, source: Source) -> None:
    """Every rank would find the same: under torchrun the first looks, for all."""
    from autopar.tracer import identify

    if os.environ.get("RANK", "0") == "0":
        require_same_model(plan, identify(source))


def require_same_model(plan: Plan, other: Plan | Graph | ModelInfo) -> None:
    """Raise PlanMismatch naming what differs between the model a plan was made for and another one."""
    made, given = plan.model, other if isinstance(other, ModelInfo) else other.model
    if made.hash == given.hash:
        return
    differs = (
        [f"parameters {made.parameters:,} against {given.parameters:,}"] if made.parameters != given.parameters else []
    )
    differs.append(f"structure {made.hash} against {given.hash}")
    raise PlanMismatch(
        f"the plan was made for {made.spec}, not for {given.spec}: {'; '.join(differs)}; plan again for this model"
    )


def with_simulated_figures(plan: Plan) -> Plan:
    """The plan with the simulator's figures as its prediction; the certificate keeps the planner's objective."""
    line = simulate(plan)
    predicted = plan.predicted
    ratio = line.step_seconds / predicted.step_seconds
    return plan.model_copy(
        update={
            "predicted": predicted.model_copy(
                update={
                    "step_seconds": line.step_seconds,
                    "step_seconds_low": predicted.step_seconds_low * ratio,
                    "step_seconds_high": predicted.step_seconds_high * ratio,
                    "tokens_per_second": predicted.tokens_per_second / ratio,
                    "mfu": predicted.mfu / ratio,
                    "bubble_fraction": line.seconds_by_part["bubble"] / line.step_seconds,
                    "seconds_by_part": line.seconds_by_part,
                    "peak_bytes": line.peak_bytes,
                }
            )
        }
    )


def load_cluster(cluster: Cluster | str | Path) -> Cluster:
    """A cluster from its built-in name, its file, or itself."""
    if isinstance(cluster, Cluster):
        return cluster
    from hardware_profiles.profile import load_cluster as load

    return load(str(cluster))


def is_graph_file(spec: str | Path) -> bool:
    """Whether a model spec names a saved Graph."""
    path = Path(spec)
    if path.suffix != ".json" or not path.is_file():
        return False
    with path.open(encoding="utf-8", errors="replace") as stream:
        return '"autopar-graph/' in stream.read(4096)


def dry_run(plan: Plan, model: str | Path) -> DryRun:
    """Whether the model's own code accepts the plan's local shapes and stages: one step on meta, no process group.

    Raises RequestError for a plan that the runtime does not carry out.
    """
    from autopar.runtime.dry_run import cannot_cut
    from autopar.runtime.dry_run import dry_run as rehearse
    from autopar.runtime.mesh import require_runnable
    from autopar.tracer import example_batch, rehearsal

    require_runnable(plan)
    workload = plan.workload
    module, step = rehearsal(model, workload.seq_len, workload.dtype)
    result = rehearse(module, step, plan)
    if result.passed and plan.mesh.pp > 1:
        inputs = example_batch(model, plan.schedule.micro_batch, workload.seq_len, workload.dtype)
        reason = cannot_cut(module, plan, inputs)
        return replace(result, passed=not reason, reason=reason, in_pipeline=bool(reason))
    return result


def _search_with_dry_run(graph: Graph, machine: Cluster, request: Request, model: str | Path | None) -> Plan:
    """Plan; where the model's code refuses the plan's local shapes or stages, plan again, giving up as little as helps.

    In this order: a loss over divided logits, sequences divided before the first block, sp, the division of the module whose
    code refused (a few), that tp degree; for stages, pp.
    """
    from autopar.planner.search import search

    refused: dict[tuple[int, bool], str] = {}
    left_whole: dict[tuple[int, str], str] = {}
    uncut = ""
    while True:
        try:
            found = search(graph, machine, request.without(tuple(refused)))
        except (RequestError, NoPlanFits) as error:
            if not refused and not left_whole:
                raise
            rest = str(error) if isinstance(error, NoPlanFits) else "nothing else of what was asked is left"
            raise type(error)("\n".join(dict.fromkeys([*refused.values(), *left_whole.values(), rest]))) from None
        if model is None or found.export_only:
            return found
        result = dry_run(found, model)
        if result.passed:
            notes = [*_left_out(refused), *([f"pp is left out: {uncut}"] if uncut else [])]
            notes += [f"tp={tp}: {module} stays whole: {why}" for (tp, module), why in left_whole.items()
                      if tp == found.mesh.tp]  # fmt: skip
            return _passed(found, result, notes)
        if result.in_pipeline:
            if "pp" in request.fixed:
                raise PlanMismatch(result.reason)
            request, uncut = replace(request, forbidden=(*request.forbidden, "pp")), result.reason
            continue
        tp, sp = found.mesh.tp, bool(found.options["sp"])
        reason = f"the model's code does not accept the plan's local shapes (tp={found.mesh.tp}): {result.reason}"
        if tp == 1:
            raise PlanMismatch(reason)
        kept = [module for degree, module in request.whole_modules if degree == tp]
        if result.in_loss and request.loss_parallel:
            request = replace(request, loss_parallel=False)
        elif sp and not request.whole_prologue:
            request = replace(request, whole_prologue=True)
        elif (not sp or "sp" in request.fixed) and _may_stay_whole(graph, result.module, kept):
            request = replace(request, whole_modules=(*request.whole_modules, (tp, result.module)))
            left_whole[tp, result.module] = reason
        else:
            refused[tp, sp] = reason


MOST_WHOLE = 4
"""Modules that may stay whole at a tp degree."""


def _may_stay_whole(graph: Graph, module: str, kept: Sequence[str]) -> bool:
    """Whether keeping one more module of a block whole may help."""
    inside = any(module.startswith(f"{block}.") for chain in graph.chains for block in chain.modules)
    return inside and module not in kept and len(kept) < MOST_WHOLE


def _left_out(refused: Mapping[tuple[int, bool], str]) -> list[str]:
    return [f"tp={tp} sp={int(sp)} is left out: {reason}" for (tp, sp), reason in refused.items()]


def _passed(plan: Plan, result: DryRun, notes: Sequence[str]) -> Plan:
    """The plan with what the dry run found."""
    options = plan.options | ({"local_attributes": ",".join(result.patches)} if result.patches else {})
    return plan.model_copy(update={"dry_run": "passed", "options": options, "notes": (*plan.notes, *notes)})
