"""The search against an independent brute force over everything: degrees, batches, schedules, splits, recompute mixes.

The brute force enumerates with loops of its own and writes the estimate and the memory rule again from their docstrings
(`autopar.planner.estimate`, `autopar.planner.bills`); of the planner it uses nothing but the answer. Collectives and state bytes
come from `cost_models`, whose own tests hold them against published figures.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass

import numpy as np
import pytest

from autopar.documents.graph import BlockClass, Captured, Chain, Graph, ModelInfo, Run
from autopar.planner.bills import WORKSPACE_BYTES
from autopar.planner.case import Case, Model
from autopar.planner.request import Request
from autopar.planner.search import explore, ranked
from autopar.planner.space import Inside
from autopar.pricing import BlockPrice, RecomputePrice
from cost_models.collectives import collective_seconds
from cost_models.compute import pointwise_seconds
from cost_models.in_flight import in_flight_by_chunk
from cost_models.memory import (
    RESERVE_FRACTION,
    communicator_bytes,
    context_bytes,
    optimizer_traffic_bytes,
    state_bytes,
)
from cost_models.overlap import overlap_fraction
from hardware_profiles.profile import load_cluster
from hardware_profiles.topology import Topology

CLUSTER = load_cluster("h100x8")
CHIP = CLUSTER.node_groups[0].chip
GIB = 2**30
SEQ_LEN = 16


@dataclass
class Instance:
    """A small random problem."""

    classes: tuple[str, ...]
    devices: int
    batch: int
    capacity: float
    prices: dict[tuple[str, Inside, int], BlockPrice]
    tps: tuple[int, ...]
    fixed: dict[str, int]
    target: str = "run"
    expert_count: int = 0

    def price(self, name, inside, micro_batch):
        return self.prices[name, inside, micro_batch]

    def degrees(self):
        return dict.fromkeys(self.tps, (False,))


def instance(seed: int) -> Instance:
    rng = np.random.default_rng(seed)
    mixed = bool(rng.integers(2))
    blocks = int(rng.integers(2, 6))
    classes = tuple("ab"[int(mixed and rng.integers(2))] for _ in range(blocks))
    devices = int(rng.choice([1, 2, 3, 4]))
    # Beside NVLink pipelines seldom win: half of the problems are left with nothing else.
    fixed = {"dp": 1, "tp": 1} if rng.integers(2) and devices <= blocks else {}
    batch = int(rng.choice([2, 4, 6, 8])) * (3 if devices == 3 else 1)
    tps = (1, 2) if devices % 2 == 0 else (1,)
    prices = {}
    hidden = 10 ** rng.uniform(7, 12.3)  # sends from nothing to several forwards
    for name in ("a", "b", "start", "end"):
        work, kept, parameters = rng.uniform(0.5, 2), rng.uniform(2, 25), rng.uniform(0.05, 0.5) * 1e9
        for tp in tps:
            for micro_batch in range(1, batch + 1):
                price = random_price(rng, name, work, kept, parameters, tp, micro_batch, hidden)
                prices[name, Inside(tp, etp=tp), micro_batch] = price
    return Instance(classes, devices, batch, float(rng.uniform(12, 70)) * GIB, prices, tps, fixed)


def instance_with_experts(seed: int) -> Instance:
    """Experts, most of the parameters, over ep and etp, and sequences over cp: what each costs is drawn anew."""
    rng = np.random.default_rng(70_000 + seed)
    devices, experts = int(rng.choice([2, 4, 6, 8])), int(rng.choice([2, 4, 6]))
    batch = devices * int(rng.choice([1, 2]))
    classes = tuple("ab"[int(seed % 2 and rng.integers(2))] for _ in range(int(rng.integers(2, 5))))
    prices = {}
    for name in ("a", "b", "start", "end"):
        work, kept, parameters = rng.uniform(0.5, 2), rng.uniform(2, 25), rng.uniform(0.05, 0.5) * 1e9
        share = rng.uniform(0.5, 0.95) if name in ("a", "b") else 0.0
        for tp, cp, ep in itertools.product((1, 2), (1, 2, 4, 8), (1, 2, 3, 4, 6)):
            for etp, micro_batch in itertools.product({1, tp}, range(1, batch + 1)):
                own = share * parameters / (ep * etp)
                price = random_price(rng, name, work, kept, parameters, tp * cp, micro_batch, 1e8)
                prices[name, Inside(tp, False, cp, ep, etp), micro_batch] = dataclasses.replace(
                    price, parameter_elements=(1 - share) * parameters / tp + own, expert_elements=own
                )
    capacity = float(rng.uniform(10, 40)) * GIB
    return Instance(classes, devices, batch, capacity, prices, (1, 2), {}, "torchtitan", experts)


def random_price(rng, name, work, kept, parameters, tp, micro_batch, hidden) -> BlockPrice:
    forward = work * micro_batch / tp * rng.uniform(1, 1.2)
    saved = kept * GIB * micro_batch / tp / 4
    menu = {"none": RecomputePrice("none", (), saved, 0.0)}
    if name in ("a", "b"):
        menu["selective"] = RecomputePrice(
            "selective", (), saved * rng.uniform(0.3, 0.8), forward * rng.uniform(0.05, 0.4)
        )
        menu["full"] = RecomputePrice("full", (), saved * rng.uniform(0.02, 0.2), forward)
    return BlockPrice(
        forward_seconds=forward,
        backward_seconds=2 * forward,
        forward_overhead_seconds=0.0,
        backward_overhead_seconds=float(rng.uniform(0, 0.01)),
        forward_collectives=(),
        backward_collectives=(),
        recompute=menu,
        parameter_elements=parameters / tp,
        workspace_bytes=float(rng.uniform(0, 1)) * GIB,
        output_bytes=float(micro_batch * hidden),
    )


def graph_of(problem: Instance) -> Graph:
    runs = []
    for name, group in itertools.groupby(problem.classes):
        count = len(list(group))
        runs.append(Run(block_class=name, first=sum(run.count for run in runs), count=count))
    modules = tuple(f"layers.{i}" for i in range(len(problem.classes)))
    chain = Chain(name="layers", modules=modules, runs=tuple(runs), prologue="start", epilogue="end")
    names = dict.fromkeys((*problem.classes, "start", "end"))
    return Graph(
        model=ModelInfo(spec="random", hash="0", parameters=1),
        captured=Captured(batch=1, seq=1),
        indices=(),
        block_classes=tuple(BlockClass(name=name, tensors=(), operators=()) for name in names),
        chains=(chain,),
    )


def model_of(problem: Instance) -> Model:
    request = Request.parse(
        global_batch=problem.batch, seq_len=SEQ_LEN, fixed=problem.fixed, forbidden=(), target=problem.target
    )
    request = dataclasses.replace(request, executor="autopar")
    model = Model(graph_of(problem), Topology(CLUSTER, problem.devices), CHIP, problem.capacity, request)
    model.prices = problem  # type: ignore[assignment]
    return model


# The brute force.


def brute_force(problem: Instance) -> float:
    best = float("inf")
    blocks = len(problem.classes)
    zeros = (0, 1, 2, 3) if problem.target == "run" else (0, 2, 3)  # torchtitan: plain replicas or fully_shard
    for inside, pp in itertools.product(insides(problem), range(1, blocks + 1)):
        if problem.devices % (inside.tp * inside.cp * pp):
            continue
        dp = problem.devices // (inside.tp * inside.cp * pp)
        if problem.batch % dp or problem.fixed.get("tp", inside.tp) != inside.tp or problem.fixed.get("dp", dp) != dp:
            continue
        if (dp * inside.cp * inside.tp) % (inside.ep * inside.etp):
            continue
        for micro_batch in range(1, problem.batch // dp + 1):
            if (problem.batch // dp) % micro_batch:
                continue
            m = problem.batch // dp // micro_batch
            for schedule, v in schedules(problem, pp, m):
                for zero in zeros if dp > 1 else (0,):
                    best = min(best, best_split(problem, pp, inside, dp, micro_batch, m, schedule, v, zero))
    return best


def insides(problem):
    """Ep divides the experts, cp twice the sequence, both together with tp at most a node's devices."""
    for tp in problem.tps:
        if not problem.expert_count:
            yield Inside(tp, etp=tp)
            continue
        for cp, ep in itertools.product(range(1, 9), range(1, problem.expert_count + 1)):
            if SEQ_LEN % (2 * cp) == 0 and tp * cp <= 8 and problem.expert_count % ep == 0:
                for etp in {1, tp}:
                    yield Inside(tp, False, cp, ep, etp)


def schedules(problem, pp, m):
    if m >= pp:
        yield "1f1b", 1
    if pp > 1:
        yield "gpipe", 1
    if pp > 1 and m % pp == 0 and len(set(problem.classes)) == 1:
        for v in range(2, len(problem.classes) // pp + 1):
            yield "interleaved", v


def best_split(problem, pp, inside, dp, micro_batch, m, schedule, v, zero) -> float:
    blocks, best = len(problem.classes), float("inf")
    send = 0.0
    if pp > 1:
        hidden = problem.prices[problem.classes[0], inside, micro_batch].output_bytes
        machine, stride = Topology(CLUSTER, problem.devices), dp * inside.cp * inside.tp
        hops = [machine.point_to_point(first, first + stride) for first in range(problem.devices - stride)]
        send = max(collective_seconds("send", hidden, hop, CHIP) for hop in hops)
    for cuts in itertools.combinations(range(1, blocks), pp - 1):
        bounds = (0, *cuts, blocks)
        counts = [b - a for a, b in itertools.pairwise(bounds)]
        if min(counts) < v:
            continue
        works, onces = [], []
        for stage, (first, end) in enumerate(itertools.pairwise(bounds)):
            found = best_stage(problem, stage, first, end, pp, inside, dp, micro_batch, m, schedule, v, zero)
            if found is None:
                break
            works.append(found[0])
            onces.append(found[1])
        else:
            forward = forward_share(problem, inside, micro_batch)
            best = min(best, step_of(schedule, works, max(onces), pp, m, v, send, forward))
    return best


def forward_share(problem, inside, micro_batch) -> float:
    """Of all work at its cheapest recompute."""
    each = [problem.prices[name, inside, micro_batch] for name in (*problem.classes, "start", "end")]
    forward = sum(price.forward_seconds + price.forward_overhead_seconds for price in each)
    backward = sum(price.backward_seconds + price.backward_overhead_seconds for price in each)
    return forward / (forward + backward)


def step_of(schedule, works, once, pp, m, v, send, forward) -> float:
    """Every micro-batch at the pace of the busiest chunks, the others once, sends that nothing hides."""
    most = sum(max(work[chunk] for work in works) for chunk in range(v))
    total = sum(sum(work) for work in works)
    once += 2 * (pp * v - 1) * send
    if schedule == "interleaved":
        return m * max(most, 2 * v * send) + (total - max(most, 2 * v * send)) / v + once
    if schedule == "gpipe":
        return (m - 1) * (max(forward * most, send) + max((1 - forward) * most, send)) + total + once
    ways, left = divmod(m - 1, pp)
    return (m - 1) * most + total + once + 2 * send * (ways * (pp - 1) + max(left - 1, 0))


def chunks_of(count, v, is_last) -> list[int]:
    """Equal but for one block: larger ones at the end, on the last stage next to the head."""
    sizes = [count // v] * v
    for i in range(count % v):
        sizes[v - 1 - i - int(is_last)] += 1
    return sizes


def by_chunk(problem, names, ends, sizes, work, inside, micro_batch, is_last) -> list[float]:
    """A stage's work, chunk by chunk: one class of blocks where there are several chunks."""
    if len(sizes) == 1:
        return [work]
    prices = [problem.prices[name, inside, micro_batch] for name in ends]
    extra = sum(
        price.forward_seconds
        + price.forward_overhead_seconds
        + price.backward_seconds
        + price.backward_overhead_seconds
        for price in prices
    )
    works = [(work - extra) * size / len(names) for size in sizes]
    works[-1 if is_last else 0] += extra
    return works


def best_stage(problem, stage, first, end, pp, inside, dp, micro_batch, m, schedule, v, zero):
    """Work per micro-batch and seconds per step of the best recompute mix that fits, None where none does."""
    names = list(problem.classes[first:end])
    ends = (["start"] if stage == 0 else []) + (["end"] if stage == pp - 1 else [])
    each = [problem.prices[name, inside, micro_batch] for name in (*names, *ends)]
    parameters = sum(price.parameter_elements for price in each)
    unit = max(price.parameter_elements for price in each)
    experts = sum(price.expert_elements for price in each)
    replicas = dp * inside.cp
    sizes = chunks_of(len(names), v, stage == pp - 1)
    moments = in_flight_by_chunk(schedule, stage, pp, m, v)
    kept_blocks = max(sum(n * size for n, size in zip(moment, sizes, strict=True)) for moment in moments)
    flight = kept_blocks / len(names)
    shared, own = (
        state_bytes(
            elements,
            optimizer="adamw",
            dtype="bf16",
            zero=zero,
            shards=shards,
            pipelined=pp > 1,
            accumulating=m > 1,
            largest_unit=largest,
        ).total
        for elements, shards, largest in (
            (parameters - experts, replicas, unit),
            (experts, replicas * inside.tp // (inside.ep * inside.etp), 0.0),
        )
    )
    states = shared + own
    groups = sum(size > 1 for size in (pp, replicas, inside.tp, inside.ep))
    free = problem.capacity * 0.95 - communicator_bytes(CHIP, groups) - context_bytes(CHIP)
    budget = free / (1 + RESERVE_FRACTION) - states - WORKSPACE_BYTES - max(price.workspace_bytes for price in each)
    end_count = moments.max(axis=0)[v - 1 if stage == pp - 1 else 0]
    budget -= sum(problem.prices[name, inside, micro_batch].recompute["none"].saved_bytes for name in ends) * end_count
    least = None
    for pick in itertools.product(("none", "selective", "full"), repeat=len(names)):
        if len(set(names)) > 1 and any(
            len({p for p, n in zip(pick, names, strict=True) if n == name}) > 1 for name in set(names)
        ):
            continue  # several classes: one entry for each
        if v > 1 and len(set(pick)) > 1:
            continue  # interleaved: one entry for the stage
        chosen = [problem.prices[n, inside, micro_batch].recompute[p] for n, p in zip(names, pick, strict=True)]
        if sum(option.saved_bytes for option in chosen) * flight <= budget:
            extra = sum(option.seconds for option in chosen)
            least = extra if least is None else min(least, extra)
    if least is None:
        return None
    forward = sum(price.forward_seconds + price.forward_overhead_seconds for price in each)
    backward = sum(price.backward_seconds + price.backward_overhead_seconds for price in each) + least
    work, once = times(problem, forward, backward, parameters, experts, unit, pp, inside, replicas, zero, m)
    return by_chunk(problem, names, ends, sizes, work, inside, micro_batch, stage == pp - 1), once


def times(problem, forward, backward, parameters, experts, unit, pp, inside, replicas, zero, m):
    spread = inside.ep * inside.etp
    own_replicas = replicas * inside.tp // spread
    update_share = ((parameters - experts) / replicas + experts / own_replicas) if zero else parameters
    update = pointwise_seconds(CHIP, optimizer_traffic_bytes(update_share, "adamw", "bf16"), "optimizer")
    if replicas == own_replicas == 1:
        return forward + backward, update
    # Experts are reduced among the ranks that hold the same ones, and apart from the rest where those are other ranks.
    machine, parts = Topology(CLUSTER, problem.devices), [(parameters, replicas, inside.tp)]
    if spread != inside.tp:
        parts = [(parameters - experts, replicas, inside.tp), (experts, own_replicas, spread)]

    def several(kind, width):
        # fully_shard sends a unit at a time, torch's DDP 25 MiB of gradients
        seconds = 0.0
        for elements, size, stride in parts:
            if size > 1 and elements:
                whole = width * elements
                count = max(parameters / unit if zero else whole / (25 * 2**20), 1.0)
                group = machine.strided(size, stride)
                seconds += max(
                    collective_seconds(kind, bytes_, group, CHIP) * n
                    for bytes_, n in ((whole, 1.0), (whole / count, count))
                )
        return seconds

    gather = several("all_gather", 2) if zero else 0.0
    reduce = several("reduce_scatter" if zero else "all_reduce", 4)
    hidden = overlap_fraction("dp", chip=CHIP)

    def bare(seconds, beside):
        return max(seconds * (1 - hidden), seconds - beside)

    alone = unit / parameters
    work, once = forward + backward, update
    each_action = zero == 3 and pp == 1
    each_backward = pp == 1 and (zero == 3 or (zero == 2 and m == 1))
    work += bare(gather if each_action else 0.0, forward)
    work += bare((gather if each_action else 0.0) + (reduce if each_backward else 0.0), backward)
    if zero and not each_action:
        once += alone * gather + bare((1 - alone) * gather, forward)
    if not each_backward:
        once += alone * reduce + bare((1 - alone) * reduce, backward)
    once += alone * gather if each_action else 0.0
    once += alone * reduce if each_backward else 0.0
    return work, once


@pytest.mark.parametrize("start", range(0, 200, 20))
def test_the_search_finds_what_brute_force_finds(start):
    for seed in range(start, start + 20):
        problem = instance(seed)
        found = explore(model_of(problem), ranked(model_of(problem)), float("inf"))
        expected = brute_force(problem)
        assert found.limit == pytest.approx(expected, rel=1e-9), seed


@pytest.mark.parametrize("start", range(0, 30, 10))
def test_the_search_over_experts_and_sequences_finds_what_brute_force_finds(start):
    chosen = set()
    for seed in range(start, start + 10):
        problem = instance_with_experts(seed)
        found = explore(model_of(problem), ranked(model_of(problem)), float("inf"))
        assert found.limit == pytest.approx(brute_force(problem), rel=1e-9), seed
        if found.best is not None:
            chosen |= {(axis, getattr(found.best[0].c, axis) > 1) for axis in ("ep", "cp")}
    assert chosen == {("ep", True), ("ep", False), ("cp", True), ("cp", False)}  # else little was proven


@pytest.mark.parametrize("problem", [*map(instance, range(0, 60, 3)), *map(instance_with_experts, range(8))])
def test_no_bound_exceeds_the_step_it_bounds(problem):
    model = model_of(problem)
    last = 0.0
    for bound, configuration in ranked(model):
        assert bound >= last
        last = bound
        answer = Case(model, configuration).solve(float("inf"))
        if answer is not None:
            assert bound <= answer.step_seconds * (1 + 1e-12)
