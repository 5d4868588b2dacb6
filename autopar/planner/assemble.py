"""From the chosen configuration and its stages to the Plan: blocks, placements, recompute, the priced bill, the prediction."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autopar.documents.plan import (
    PARTS,
    ActionCost,
    Alternative,
    Certificate,
    ChunkCost,
    ClusterRef,
    Collective,
    Mesh,
    Plan,
    Predicted,
    Recompute,
    Schedule,
    Stage,
    StageCost,
    Workload,
)
from autopar.planner.bills import Holding
from autopar.planner.case import Case, Model
from autopar.planner.estimate import StageChoice, chunk_sizes
from autopar.planner.notes import not_runnable, notes, numerics
from autopar.planner.placements import conversions, loss_is_parallel, placements, shares
from autopar.planner.stages import Answer
from autopar.pricing import RecomputePrice
from autopar.version import __version__
from cost_models.memory import RESERVE_FRACTION, activation_peak, context_bytes
from cost_models.uncertainty import interval
from hardware_profiles.cluster import Cluster

Chosen = tuple[Case, Answer]


def assemble(model: Model, cluster: Cluster, best: Chosen, others: Sequence[Chosen], certificate: Certificate) -> Plan:
    """The Plan of the best configuration; of the `others` the nearest are kept as alternatives."""
    case, answer = best
    request, c = model.request, case.c
    stages = _Stages(case, answer)
    costs = tuple(stages.cost(stage) for stage in range(c.pp))
    parts = stages.parts(answer.step_seconds)
    low, high = interval(parts, model.chip)
    tokens = request.global_batch * request.seq_len
    flops = model.graph.flops("model", request.global_batch, request.seq_len)
    devices = model.topology.devices
    return Plan(
        autopar_version=__version__,
        model=model.graph.model,
        cluster=ClusterRef(name=cluster.name, spec=cluster.name, devices=devices, hash=cluster.hash),
        workload=Workload(
            global_batch=request.global_batch,
            seq_len=request.seq_len,
            dtype=request.dtype,
            optimizer=request.optimizer,
            kernels=request.kernels,
        ),
        mesh=_mesh(case),
        schedule=_schedule(case),
        stages=tuple(Stage(chunks=stages.chunks(stage), zero=c.zero) for stage in range(c.pp)),
        recompute=tuple(stages.recompute()),
        placements=placements(model, c),
        shares=shares(model, c),
        conversions=conversions(model, c),
        options={
            "sp": c.sp,
            "loss_parallel": loss_is_parallel(model, c),
            "memory_margin": request.memory_margin,
            "fixed": ",".join(f"{key}={value}" for key, value in request.fixed.items()),
            "forbidden": ",".join(request.forbidden),
            "target": request.target,
            **({"moe_imbalance": request.moe_imbalance} if model.prices.expert_count else {}),
        },
        costs=costs,
        predicted=Predicted(
            step_seconds=answer.step_seconds,
            step_seconds_low=low,
            step_seconds_high=high,
            tokens_per_second=tokens / answer.step_seconds,
            mfu=flops / answer.step_seconds / devices / model.chip.peak_flops(request.dtype),
            bubble_fraction=parts["bubble"] / answer.step_seconds,
            seconds_by_part=parts,
            peak_bytes=tuple(stages.peak_bytes(stage) for stage in range(c.pp)),
            capacity_bytes=(model.capacity,) * c.pp,
        ),
        certificate=certificate,
        alternatives=tuple(_alternatives(best, others)),
        export_only=not_runnable(case) is not None,
        numerics=tuple(numerics(case)),
        notes=tuple(notes(case)),
    )


def stage_costs(case: Case, answer: Answer) -> tuple[StageCost, ...]:
    """The priced bill of every stage of a case whose blocks are given to stages: what a simulation needs."""
    stages = _Stages(case, answer)
    return tuple(stages.cost(stage) for stage in range(case.c.pp))


def _mesh(case: Case) -> Mesh:
    c = case.c
    replicate, shard = (c.dp, 1) if c.zero == 0 else (1, c.dp)
    etp = c.etp if case.model.prices.expert_count else 1
    return Mesh(pp=c.pp, dp_replicate=replicate, dp_shard=shard, cp=c.cp, tp=c.tp, ep=c.ep, etp=etp)


def _schedule(case: Case) -> Schedule:
    c = case.c
    return Schedule.model_validate(
        {
            "name": c.schedule,
            "virtual_stages": c.virtual_stages,
            "micro_batch": c.micro_batch,
            "micro_batches": c.micro_batches,
        }
    )


def _alternatives(best: Chosen, others: Sequence[Chosen], most: int = 4) -> Iterator[Alternative]:
    own = _Stages(*best)
    parts = own.parts(best[1].step_seconds)
    nearest = sorted((other for other in others if other[1] is not best[1]), key=lambda other: other[1].step_seconds)
    for case, answer in nearest[:most]:
        stages = _Stages(case, answer)
        theirs = stages.parts(answer.step_seconds)
        loses = {name: theirs[name] - parts[name] for name in PARTS if theirs[name] - parts[name] > 1e-9}
        yield Alternative(
            mesh=_mesh(case),
            schedule=_schedule(case),
            zero=case.c.zero,
            recompute=stages.recompute_summary(),
            step_seconds=answer.step_seconds,
            peak_bytes=tuple(stages.peak_bytes(stage) for stage in range(case.c.pp)),
            loses_by=dict(sorted(loses.items(), key=lambda item: -item[1])),
        )


class _Stages:
    """The stages of a solved case: which blocks, with which recompute entry each."""

    def __init__(self, case: Case, answer: Answer) -> None:
        self.case, self.answer = case, answer
        self.layers = case.model.layers
        self.runs = self._runs()
        self.entries: dict[int, int] = {}
        """Layer -> number of its entry in its class's menu."""
        for stage in range(case.c.pp):
            self._assign(stage)

    def _runs(self) -> list[list[tuple[int, int]]]:
        """Per stage, per chunk: the layers first..end-1."""
        v, p = self.case.c.virtual_stages, self.case.c.pp
        runs: list[list[tuple[int, int]]] = [[] for _ in range(p)]
        sizes = [chunk_sizes(count, self.case.pipeline, stage) for stage, count in enumerate(self.answer.counts)]
        first = 0
        for chunk in range(v):
            for stage in range(p):
                end = first + sizes[stage][chunk]
                runs[stage].append((first, end))
                first = end
        return runs

    def choice(self, stage: int) -> StageChoice:
        """The stage's priced choice."""
        if self.case.model.is_equal:
            found = self.case.equal_choice(stage, self.answer.counts[stage])
        else:
            found = self.case.choice(stage, *self.runs[stage][0])
        assert found is not None
        return found

    def _assign(self, stage: int) -> None:
        """Entries by the mix, leanest first."""
        left = {
            name: [number for number, count in enumerate(mix) for _ in range(count)]
            for name, mix in self.choice(stage).mix
        }
        for first, end in self.runs[stage]:
            for layer in range(first, end):
                self.entries[layer] = left[self.layers[layer].block_class].pop()

    def chunks(self, stage: int) -> tuple[dict[str, tuple[int, int]], ...]:
        """Chain -> [first, last] block of each chunk."""
        found = []
        for first, end in self.runs[stage]:
            chunk: dict[str, tuple[int, int]] = {}
            for layer in self.layers[first:end]:
                low, high = chunk.get(layer.chain, (layer.number, layer.number))
                chunk[layer.chain] = (min(low, layer.number), max(high, layer.number))
            found.append(chunk)
        return tuple(found)

    def recompute(self) -> Iterator[Recompute]:
        """Consecutive blocks of a stage with equal entries."""
        for stage, runs in enumerate(self.runs):
            for first, end in runs:
                start = first
                for layer in range(first, end + 1):
                    if layer == end or not self._alike(start, layer):
                        yield self._recompute(stage, start, layer - 1)
                        start = layer

    def _alike(self, first: int, second: int) -> bool:
        one, other = self.layers[first], self.layers[second]
        same = one.chain == other.chain and one.block_class == other.block_class
        return same and self.entries[first] == self.entries[second]

    def _recompute(self, stage: int, first: int, last: int) -> Recompute:
        name, option = self.option(first)
        blocks = (self.layers[first].number, self.layers[last].number)
        return Recompute(
            stage=stage, chain=self.layers[first].chain, blocks=blocks, mode=option.mode, option=name, keep=option.keep
        )

    def option(self, layer: int) -> tuple[str, RecomputePrice]:
        """Name and price of a block's recompute entry."""
        column = self.case.column(self.layers[layer].block_class)
        name = column.menu.names[self.entries[layer]]
        return name, column.price.recompute[name]

    def recompute_summary(self) -> str:
        """``full 20, none 12``."""
        counts: dict[str, int] = {}
        for layer in range(len(self.layers)):
            name = self.option(layer)[0]
            counts[name] = counts.get(name, 0) + 1
        return (
            next(iter(counts)) if len(counts) == 1 else ", ".join(f"{name} {count}" for name, count in counts.items())
        )

    # The bill.

    def cost(self, stage: int) -> StageCost:
        """Everything priced that a simulation needs."""
        case, bills = self.case, self.case.bills
        held = self._held(stage)
        dp = bills.data_parallel(held)
        outputs = bills.kept_outputs(held)
        memory = bills.states(held) | {"workspace": bills.static(held) - sum(bills.states(held).values()) - outputs}
        memory |= {"outputs": outputs} if outputs else {}
        memory |= {"communicators": bills.communicators, "context": context_bytes(case.model.chip)}
        chunks = []
        for chunk, (first, end) in enumerate(self.runs[stage]):
            share = (
                sum(self._parameters(layer) for layer in range(first, end)) / held.parameters
                if held.parameters
                else 0.0
            )
            is_last = chunk * case.c.pp + stage == case.c.pp * case.c.virtual_stages - 1
            output = 0.0 if is_last else case.column(self.layers[end - 1].block_class).price.output_bytes
            output += case.carried[end - 1] if case.c.pp > 1 and not is_last else 0.0
            chunks.append(
                ChunkCost(
                    forward=self._action(first, end, "forward"),
                    backward=self._action(first, end, "backward"),
                    send_bytes=output if case.c.pp > 1 else 0.0,
                    send_seconds=bills.send_seconds(output) if output else 0.0,
                    activation_bytes=self._kept(first, end),
                    gather_seconds=dp.gather * share,
                    reduce_seconds=dp.reduce * share,
                )
            )
        return StageCost(
            chunks=tuple(chunks),
            optimizer_seconds=bills.optimizer_seconds(held),
            gathers=dp.gathers,
            reduces="each_backward" if dp.reduces == "each_backward" else "once",
            dp_overlap=bills.overlap,
            dp_exposed_seconds=dp.exposed_ends,
            memory=memory,
            reserve_fraction=RESERVE_FRACTION,
        )

    def _held(self, stage: int) -> Holding:
        counts: dict[str, int] = {}
        ends: list[str] = []
        for first, end in self.runs[stage]:
            for layer in self.layers[first:end]:
                counts[layer.block_class] = counts.get(layer.block_class, 0) + 1
                ends += [*layer.before, *layer.after]
        return self.case.held(counts, ends)

    def _names(self, layer: int) -> tuple[str, ...]:
        found = self.layers[layer]
        return (*found.before, found.block_class, *found.after)

    def _parameters(self, layer: int) -> float:
        return sum(self.case.column(name).price.parameter_elements for name in self._names(layer))

    def _kept(self, first: int, end: int) -> float:
        total = 0.0
        for layer in range(first, end):
            total += self.option(layer)[1].saved_bytes
            total += sum(
                self.case.column(name).menu.saved_bytes[0]
                for name in (*self.layers[layer].before, *self.layers[layer].after)
            )
        return float(total)

    def _action(self, first: int, end: int, phase: str) -> ActionCost:
        compute = recompute = overhead = 0.0
        collectives: list[Collective] = []
        for layer in range(first, end):
            for name in self._names(layer):
                price = self.case.column(name).price
                compute += price.forward_seconds if phase == "forward" else price.backward_seconds
                overhead += price.forward_overhead_seconds if phase == "forward" else price.backward_overhead_seconds
                collectives += price.forward_collectives if phase == "forward" else price.backward_collectives
            if phase == "backward":
                option = self.option(layer)[1]
                recompute += option.seconds
                overhead += option.overhead_seconds
                collectives += option.collectives
        return ActionCost(
            compute_seconds=compute,
            recompute_seconds=recompute,
            overhead_seconds=overhead,
            collectives=_merged(collectives),
        )

    def peak_bytes(self, stage: int) -> float:
        """Closed form: what never changes, and the kept activations of all micro-batches in flight."""
        c, bills = self.case.c, self.case.bills
        chunks = [self._kept(*run) for run in self.runs[stage]]
        kept = activation_peak(_schedule(self.case).name, stage, c.pp, c.micro_batches, chunks)
        return (bills.static(self._held(stage)) + kept) * (1 + RESERVE_FRACTION) + bills.outside

    def parts(self, step_seconds: float) -> dict[str, float]:
        """Mean over ranks of each part; what is left of the step is bubble."""
        c = self.case.c
        parts = dict.fromkeys(PARTS, 0.0)
        for stage in range(c.pp):
            for first, end in self.runs[stage]:
                for phase in ("forward", "backward"):
                    action = self._action(first, end, phase)
                    parts["compute"] += action.compute_seconds * c.micro_batches
                    parts["recompute"] += action.recompute_seconds * c.micro_batches
                    parts["overhead"] += action.overhead_seconds * c.micro_batches
                    for item in action.collectives:
                        parts[item.axis] += item.seconds * (1 - item.overlap) * c.micro_batches
            choice, held = self.choice(stage), self._held(stage)
            work = sum(
                self._action(first, end, phase).seconds
                for first, end in self.runs[stage]
                for phase in ("forward", "backward")
            )
            update = self.case.bills.optimizer_seconds(held)
            parts["optimizer"] += update
            parts["dp"] += max(0.0, choice.work - work) * c.micro_batches + choice.once - update
        parts = {name: seconds / c.pp for name, seconds in parts.items()}
        parts["bubble"] = max(0.0, step_seconds - sum(parts.values()))
        return parts


def _merged(collectives: Sequence[Collective]) -> tuple[Collective, ...]:
    """Collectives of one axis, kind and overlap as one entry."""
    groups: dict[tuple[str, str, float], list[Collective]] = {}
    for item in collectives:
        groups.setdefault((item.axis, item.kind, item.overlap), []).append(item)
    merged = []
    for items in groups.values():
        count = sum(item.count for item in items)
        moved = sum(item.bytes * item.count for item in items) / count
        seconds = sum(item.seconds for item in items)
        merged.append(items[0].model_copy(update={"count": count, "bytes": moved, "seconds": seconds}))
    return tuple(merged)
