"""L3: all configurations in the order of a lower bound, stages solved until the bound excludes the rest.

    1. enumerate the space (`space.configurations`)
    2. bound each: perfect balance, cheapest recompute, exposed collectives (`bounds`)
    3. in rising order solve the stages (`stages`), until a bound reaches the best step found

What is left unsolved is excluded by its bound: the answer is optimal for the stated estimate over the stated space. A time
limit or Ctrl-C ends the search early with the best so far and the gap that remains.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from autopar.documents.graph import Graph
from autopar.documents.plan import Certificate, Plan
from autopar.errors import NoPlanFits, RequestError
from autopar.planner.assemble import assemble
from autopar.planner.bounds import Ranked
from autopar.planner.case import Case, Model, Shortfall
from autopar.planner.edges import why_uncut
from autopar.planner.request import Request
from autopar.planner.solver import solver_name
from autopar.planner.space import Configuration, Offer, Prefix, prefixes
from autopar.planner.stages import Answer
from autopar.planner.targets import TARGETS
from autopar.pricing import expert_atoms
from hardware_profiles.chip import GIB
from hardware_profiles.cluster import Cluster, Nics
from hardware_profiles.topology import Topology

SECONDS_PER_WAY_OUT = 5.0
SECONDS_PER_ALTERNATIVE = 1.0
ALTERNATIVES = 4
"""Near plans shown beside the best: the best of as many other meshes."""
ALTERNATIVE_WITHIN = 0.02
"""They say why other meshes lose: a fiftieth more or less does not change that, and its proof takes most of the time."""


@dataclass
class Found:
    """What a search has seen so far."""

    best: tuple[Case, Answer] | None = None
    others: dict[tuple[int, ...], tuple[Case, Answer]] = field(default_factory=dict)
    """Degrees -> the best of that mesh, for a few meshes."""
    solved: int = 0
    infeasible: int = 0
    bound: float = float("inf")
    """Least bound of what is not yet solved."""
    interrupted: str = ""

    @property
    def limit(self) -> float:
        """The step to beat."""
        return self.best[1].step_seconds if self.best else float("inf")


def search(graph: Graph, cluster: Cluster, request: Request) -> Plan:
    """The best plan. Raises RequestError for a contradictory request, NoPlanFits when nothing fits the devices."""
    started = time.perf_counter()
    model = open_model(graph, cluster, request)
    cases = ranked(model)
    found = explore(model, cases, started + (request.time_limit or float("inf")))
    if found.best is None:
        raise NoPlanFits(explain_no_fit(model, cluster, cases, found))
    if not found.interrupted:
        with suppress(KeyboardInterrupt):  # what was proven stands; only the comparison is left short
            add_alternatives(model, cases, found)
    return assemble(model, cluster, found.best, list(found.others.values()), certificate(model, cases, found, started))


def open_model(graph: Graph, cluster: Cluster, request: Request) -> Model:
    """The shared part of a search. Raises RequestError where the devices are not there or not alike."""
    devices = request.devices or cluster.devices
    if devices > cluster.devices:
        raise RequestError(f"--devices {devices}: {cluster.name} has {cluster.devices}")
    used = []
    left = devices
    for group in cluster.node_groups:
        if left > 0:
            used.append(group)
        left -= group.devices
    # Unlike devices share work evenly in this version, so the slowest and the smallest set the pace.
    chip = min((group.chip for group in used), key=lambda chip: chip.peak_flops(request.dtype))
    capacity = min(group.usable_memory_bytes for group in used)
    model = Model(graph, Topology(cluster, devices), chip, capacity, request)
    if request.moe_imbalance > 1 and not model.prices.expert_count:
        raise RequestError(
            f"moe imbalance {request.moe_imbalance:g}: {graph.model.spec} has no routed experts computed as grouped products; "
            "leave it at 1"
        )
    return model


def ranked(model: Model) -> Ranked:
    """Every configuration with its bound, least first. Raises RequestError where what is fixed leaves none."""
    offer = Offer(
        devices=model.topology.devices,
        blocks=len(model.layers),
        tp_degrees=model.prices.degrees(),
        is_equal=model.is_equal,
        experts=model.prices.expert_count,
        is_divisible_by_cp=model.is_divisible_by_cp,
        is_cut=model.request.target != "run" or why_uncut(model.graph) is None,
        reach=model.topology.devices_in_reach,
    )
    return Ranked(model, offer, prefixes(model.request, offer))


def explore(model: Model, cases: Ranked, deadline: float, within: float = 0.0) -> Found:
    """Solve in order until the bounds exclude the rest, the deadline passes, or the user interrupts.

    The best found is at most `within` (a fraction) slower than the best there is.
    """
    found = Found()
    try:
        for bound, configuration in cases:
            found.bound = bound
            if bound * (1 + within) >= found.limit:
                break
            if time.perf_counter() > deadline:
                found.interrupted = "time limit"
                break
            _solve(Case(model, configuration), found, within)
    except KeyboardInterrupt:
        found.interrupted = "interrupted"
        if found.best is None:
            raise
    return found


def _solve(case: Case, found: Found, within: float) -> None:
    if case.surely_too_large > 0:
        found.infeasible += 1
        return
    found.solved += 1
    answer = case.solve(found.limit / (1 + within), within)
    if answer is not None and answer.step_seconds < found.limit:
        found.best = (case, answer)


def add_alternatives(model: Model, cases: Ranked, found: Found) -> None:
    """Search a few other meshes on their own, the most promising by bound first, to say why the best of each loses."""
    assert found.best is not None
    seen = {_mesh(found.best[0].c)}
    for _, c in cases:
        if len(found.others) >= ALTERNATIVES:
            return
        mesh = _mesh(c)
        if mesh not in seen:
            seen.add(mesh)
            own = cases.only(partial(_is_of, mesh))
            best = explore(model, own, time.perf_counter() + SECONDS_PER_ALTERNATIVE, ALTERNATIVE_WITHIN)
            if best.best is not None and not best.interrupted:
                found.others[mesh] = best.best


def _mesh(c: Configuration | Prefix) -> tuple[int, ...]:
    tp, _, cp, ep, etp = c.inside
    return (c.pp, tp, c.dp, cp, ep, etp)


def _is_of(mesh: tuple[int, ...], prefix: Prefix) -> bool:
    return _mesh(prefix) == mesh


def certificate(model: Model, cases: Ranked, found: Found, started: float) -> Certificate:
    """What was proven."""
    bound = min(found.bound, found.limit) if found.interrupted else found.limit
    values = list(cases.configurations())
    names = ("pp", "tp", "sp", "cp", "ep", "dp", "micro_batch", "schedule", "virtual_stages", "zero")
    space: dict[str, object] = {name: sorted({getattr(c, name) for c in values}) for name in names}
    space["target"] = model.request.target
    space["recompute"] = list(model.modes)
    space["tp_limit"] = space["cp_times_tp_limit"] = model.topology.devices_in_reach
    space["stages"] = "any split of the blocks" + (
        "; interleaved: chunks of a stage equal but for one block, one recompute entry for them"
        if model.is_equal
        else "; stages of several classes: one recompute entry for each class"
    )
    if found.interrupted:
        space["stopped"] = found.interrupted
    return Certificate(
        objective="estimate",
        space=space,
        enumerated=len(values),
        excluded_by_bound=0 if found.interrupted else len(values) - found.solved - found.infeasible,
        solved=found.solved,
        infeasible=found.infeasible,
        bound_seconds=bound,
        gap=max(0.0, found.limit / bound - 1),
        solver=f"dynamic programme, {solver_name()}",
        search_seconds=time.perf_counter() - started,
    )


def explain_no_fit(model: Model, cluster: Cluster, cases: Ranked, found: Found) -> str:
    """The smallest excess over all configurations, its stage and term, and one way out that was verified to fit."""
    if found.interrupted:
        return f"no plan was found within the {found.interrupted}; give it more time"
    least = smallest_shortfall(model, cases)
    name = model.graph.model.spec
    where = f"stage {least.stage} lacks {max(least.excess_bytes, 0) / GIB:.2f} GiB, most of it held by {least.term}"
    tried = f"{len(cases):,} configurations on {model.topology.devices} devices of {cluster.name}"
    way = way_out(model.graph, cluster, model.request)
    return f"{name} does not fit: at best (of {tried}) {where}. {way}"


def smallest_shortfall(model: Model, cases: Ranked) -> Shortfall:
    """The least excess of all configurations; what states alone exceed bounds each from below, so few are worked out."""
    least: Shortfall | None = None
    for case in sorted((Case(model, c) for c in cases.configurations()), key=lambda case: case.surely_too_large):
        if least is not None and case.surely_too_large >= least.excess_bytes:
            break
        own = case.shortfall()
        if least is None or own.excess_bytes < least.excess_bytes:
            least = own
    assert least is not None
    return least


def way_out(graph: Graph, cluster: Cluster, request: Request) -> str:
    """The first change of the request, cheapest first, under which a plan was found."""
    for said, changed, machine in _ways(graph, cluster, request):
        try:
            model = open_model(graph, machine, changed)
            if explore(model, ranked(model), time.perf_counter() + SECONDS_PER_WAY_OUT).best is not None:
                return f"A way out that fits: {said}"
        except (RequestError, NoPlanFits):
            continue
    return "No single change tried (recompute, ZeRO, fewer restrictions, up to 64 times the devices, shorter sequences) fits"


def _ways(graph: Graph, cluster: Cluster, request: Request) -> list[tuple[str, Request, Cluster]]:
    ways: list[tuple[str, Request, Cluster]] = []
    for key in ("recompute", "zero", "micro_batch"):
        if key in request.fixed or key in request.forbidden:
            fixed = {name: value for name, value in request.fixed.items() if name != key}
            rest = tuple(name for name in request.forbidden if name != key)
            ways.append((f"leave {key} to the planner", replace(request, fixed=fixed, forbidden=rest), cluster))
    if request.fixed or request.forbidden:
        ways.append(("fix and forbid nothing", replace(request, fixed={}, forbidden=()), cluster))
    free = replace(request, fixed={}, forbidden=())
    if request.target == "run" and any(map(expert_atoms, graph.block_classes)):
        said = "--target megatron, which spreads experts over ep"
        ways.append((said, replace(free, target="megatron", executor=TARGETS["megatron"].executor), cluster))
    for seq in (request.seq_len // 2, request.seq_len // 4):
        if seq >= 1:
            ways.append((f"--seq-len {seq}", replace(request, seq_len=seq), cluster))
    for times in (2, 4, 8, 16, 32, 64):
        more = _more_nodes(cluster, times)
        devices = (request.devices or cluster.devices) * times
        if free.global_batch % times == 0 or free.global_batch >= devices:
            ways.append((f"{devices} devices of this kind", replace(free, devices=devices), more))
    return ways


def _more_nodes(cluster: Cluster, times: int) -> Cluster:
    """The cluster with more nodes; a lone node is given a network like its own links' tenth, which memory does not depend on."""
    groups = tuple(
        group.model_copy(update={"nodes": group.nodes * times, "nics": group.nics or _PLAIN_NICS})
        for group in cluster.node_groups
    )
    fabric = cluster.fabric
    if fabric.kind == "single_node":
        fabric = fabric.model_copy(update={"kind": "flat"})
    return cluster.model_copy(update={"node_groups": groups, "fabric": fabric})


_PLAIN_NICS = Nics(count=1, gigabits_per_second=100, kind="ethernet")
