"""L0 as an integer programme: the cheapest division of one block class over one axis.

    x[relation, row] in {0, 1}                                      one row per operator group or site
    sum over rows x = 1                                             for every relation
    sum of x over rows with value p (first relation)
      = sum of x over rows with value p (each further relation)     for every version and placement p
    minimise sum cost * x

Costs: an operator's seconds forward and backward, by roofline, over t where it divides a dim; a site's conversion and
its adjoint, `latency + factor * bytes / bandwidth`. Sizes only weigh alternatives here: `pricing` prices what comes out.
"""

from __future__ import annotations

from dataclasses import dataclass

import pulp

from autopar.documents.graph import Graph, Operator
from autopar.planner.relations import Relation, Row, collapse, flatten
from autopar.planner.solver import solve
from autopar.pricing.degrees import fits
from autopar.pricing.division import (
    PASS_PARTIAL,
    REPLICATE,
    Boundary,
    Division,
    Placement,
    SiteConversion,
    backward_collective,
    forward_collective,
)
from autopar.pricing.kinds import kind_of
from autopar.pricing.options import VOCABULARY, Facts, Option, facts_of, options_of
from autopar.pricing.versions import Edge, Version, Versions, versions_of

COMPUTE_BYTES = 2
MICRO_BATCHES = 32
"""A usual number a step."""
VOLUME = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}
"""Bytes through a rank's link per byte of the full buffer, times (t - 1) / t."""


@dataclass(frozen=True)
class Regime:
    """Under which rates a division is looked for. Degree in ranks, rates in FLOP/s and bytes/s, latency in seconds."""

    degree: int
    link_bytes_per_second: float
    flops_per_second: float = 4e14
    memory_bytes_per_second: float = 2e12
    latency_seconds: float = 1e-5


@dataclass(frozen=True)
class Chosen:
    """A leaf of a solution: how an operator runs, or what a site converts."""

    operator: int = -1
    option: Option | None = None
    conversion: SiteConversion | None = None


class Problem:
    """One block class under one boundary, solved again for every regime."""

    def __init__(self, graph: Graph, class_name: str, boundary: Boundary) -> None:
        self.facts: Facts = facts_of(graph, class_name, boundary)
        self.block_class = self.facts.block_class
        self.sizes = graph.sizes(1)
        hidden = self.facts.hidden_out if self.facts.hidden_in is None else self.facts.hidden_in
        self.hidden_dims = () if hidden is None else self.block_class.tensor_by_id[hidden].dims
        self.gathers_logits = class_name in {chain.epilogue for chain in graph.chains}
        """For a loss that every rank computes whole."""
        self.versions: Versions = versions_of(self.block_class)
        self.forward = [op for op in self.block_class.operators if op.phase == "forward"]
        self.options = {op.id: options_of(op, self.facts) for op in self.forward}
        self.work = {op.id: self._flops_and_bytes(op) for op in self.forward}

    def pattern(self, degree: int) -> frozenset[tuple[int, int]]:
        """Which options a degree allows: degrees of equal pattern have the same divisions on offer."""
        return frozenset(
            (op, number)
            for op, options in self.options.items()
            for number, option in enumerate(options)
            if self._allowed(option, degree)
        )

    def solve(self, regime: Regime) -> Division | None:
        """The cheapest division in a regime; None where the boundary cannot be reached (no site to gather at)."""
        relations = collapse(self.relations(regime))
        found = optimum(relations) if all(relation.rows for relation in relations) else None
        return None if found is None else self.division([leaf for chosen in found for leaf in flatten(chosen)])

    def relations(self, regime: Regime) -> list[Relation]:
        """Every relation before collapsing."""
        return [*self._operators(regime), *self._sites(regime), *self._boundary()]

    def _allowed(self, option: Option, degree: int) -> bool:
        if option.composite is not None and option.composite.name == VOCABULARY:
            return True
        tensors = self.block_class.tensor_by_id
        return all(
            fits(tensors[tensor], placement, self.sizes, degree, self.facts)
            for side in (option.reads, option.writes)
            for tensor, placement in side.items()
        )

    def _operators(self, regime: Regime) -> list[Relation]:
        relations = []
        for operator in self.forward:
            read = [self.versions.read[operator.id, tensor] for tensor in operator.reads]
            variables = tuple(dict.fromkeys([*read, *(Version(tensor) for tensor in operator.writes)]))
            rows = [
                Row(self._values(operator, option, variables), cost, Chosen(operator.id, option))
                for option in self.options[operator.id]
                if self._allowed(option, regime.degree)
                for cost in [self._seconds(operator, option, regime)]
            ]
            relations.append(Relation(variables, rows))
        return relations

    def _values(self, operator: Operator, option: Option, variables: tuple[Version, ...]) -> tuple[Placement, ...]:
        placed = {self.versions.read[operator.id, tensor]: value for tensor, value in option.reads.items()}
        placed.update((Version(tensor), value) for tensor, value in option.writes.items())
        return tuple(placed[variable] for variable in variables)

    def _seconds(self, operator: Operator, option: Option, regime: Regime) -> float:
        flops, moved = self.work[operator.id]
        share = regime.degree if option.dim is not None else 1
        # Backward does twice the work of forward (Narayanan et al. 2021, arXiv 2104.04473).
        local = 3 * max(flops / regime.flops_per_second, moved / regime.memory_bytes_per_second) / share
        inside = sum(self._collective(kind, self._bytes(tensor), regime) for _, kind, tensor in option.inside)
        return local + inside + self._partial_gradients(option, regime)

    def _partial_gradients(self, option: Option, regime: Regime) -> float:
        """A parameter read whole by ranks with different gradients: one all-reduce a step, over its micro-batches."""
        if option.choice is None or option.choice == PASS_PARTIAL:
            return 0.0
        held = [t for t, placement in option.reads.items() if t in self.facts.parameters and not placement.divided]
        seconds = sum(self._collective("all_reduce", self._bytes(tensor), regime) for tensor in held)
        return seconds / MICRO_BATCHES

    def _flops_and_bytes(self, operator: Operator) -> tuple[float, float]:
        flops = sum(term.value(self.sizes) for term in operator.executed_flops)
        if kind_of(operator) == "view":
            return flops, 0.0
        return flops, sum(self._bytes(tensor) for tensor in (*operator.reads, *operator.writes))

    def _bytes(self, tensor: int) -> float:
        """Bytes of a tensor; -1 stands for a buffer of a row's size, which only costs latency."""
        return self.block_class.tensor_by_id[tensor].bytes(self.sizes, COMPUTE_BYTES) if tensor >= 0 else 0.0

    def _collective(self, kind: str, bytes_: float, regime: Regime) -> float:
        travel = VOLUME[kind] * bytes_ * (regime.degree - 1) / regime.degree
        return regime.latency_seconds + travel / regime.link_bytes_per_second

    def _sites(self, regime: Regime) -> list[Relation]:
        wanted = self._wanted()
        relations = []
        for edge in self.versions.edges:
            tensor = self.block_class.tensor_by_id[edge.site.tensor]
            values = [p for p in wanted[tensor.id] if fits(tensor, p, self.sizes, regime.degree, self.facts)]
            rows = [
                row for source in values for target in values if (row := self._converted(edge, source, target, regime))
            ]
            relations.append(Relation((edge.parent, edge.child), rows, site=True))
        return relations

    def _converted(self, edge: Edge, source: Placement, target: Placement, regime: Regime) -> Row | None:
        if source == target:
            return Row((source, target), 0.0, None)
        if not self._convertible(edge.site.tensor, source, target):
            return None
        constant = edge.site.tensor in self.facts.constants
        kinds = [forward_collective(source, target), None if constant else backward_collective(source, target)]
        bytes_ = self._bytes(edge.site.tensor)
        cost = sum(self._collective(kind, bytes_, regime) for kind in kinds if kind is not None)
        conversion = SiteConversion(edge.site, source, target)
        return Row((source, target), cost, Chosen(conversion=conversion))

    def _convertible(self, tensor: int, source: Placement, target: Placement) -> bool:
        """The conversions that tensor parallelism uses: into and out of the boundary's placement; slices of inputs.

        All-to-alls belong to cp and ep, and a part of the hidden dim is nowhere worth a gather of its own. What was gathered
        is SHARED, so that an all-gather always comes back as a reduce-scatter; logits alone may be gathered whole, for
        a loss that every rank computes, and come back as a slice.
        """
        if tensor in self.facts.constants:
            return source == REPLICATE and target.divided
        shared_input = tensor in self.block_class.inputs and tensor != self.facts.hidden_in
        if source == REPLICATE:
            return target.kind == "shared" or self._on_sequence(tensor, target) or (target.divided and shared_input)
        if source.kind == "partial":
            return target == REPLICATE or self._on_sequence(tensor, target)
        if self._on_sequence(tensor, source):
            return target.kind == "shared"
        return self.gathers_logits and source.divided and target == REPLICATE

    def _on_sequence(self, tensor: int, placement: Placement) -> bool:
        """Whether a hidden state is divided on the sequence."""
        dims = self.block_class.tensor_by_id[tensor].dims
        if not placement.divided or (self.hidden_dims and dims[1:] != self.hidden_dims[1:]):
            return False
        return self.facts.follows[dims[placement.dim][placement.atom]] == "sequence"

    def _wanted(self) -> dict[int, list[Placement]]:
        """Every placement in which some operator writes or reads a tensor, or the boundary has it."""
        wanted: dict[int, dict[Placement, None]] = {tensor.id: {} for tensor in self.block_class.tensors}
        for options in self.options.values():
            for option in options:
                for side in (option.reads, option.writes):
                    for tensor, placement in side.items():
                        wanted[tensor][placement] = None
        for tensor, placement in self._fixed().items():
            wanted[tensor][placement] = None
        return {tensor: list(placements) for tensor, placements in wanted.items()}

    def _fixed(self) -> dict[int, Placement]:
        """Placements at the boundary: hidden states as the boundary says, all other inputs whole."""
        facts = self.facts
        from_whole = dict.fromkeys(self.block_class.inputs, REPLICATE)
        for tensor in (facts.hidden_in, *facts.carried, facts.hidden_out):
            if tensor is not None:
                from_whole[tensor] = facts.boundary_placement(tensor)
        return from_whole

    def _boundary(self) -> list[Relation]:
        relations = []
        for tensor, placement in self._fixed().items():
            leaving = tensor == self.facts.hidden_out and tensor not in self.block_class.inputs
            version = self.versions.leaving[tensor] if leaving else Version(tensor)
            relations.append(Relation((version,), [Row((placement,), 0.0, None)]))
        return relations

    def division(self, leaves: list[Chosen]) -> Division:
        """The division that the leaves of a solution describe."""
        choices: dict[int, str | None] = {}
        placements: dict[int, Placement] = {}
        conversions: list[SiteConversion] = []
        for leaf in leaves:
            if leaf.conversion is not None:
                conversions.append(leaf.conversion)
            elif leaf.option is not None:
                choices[leaf.operator] = leaf.option.choice
                placements.update(leaf.option.writes)
                for tensor, placement in leaf.option.reads.items():
                    if self.versions.read[leaf.operator, tensor].number == 0:
                        placements.setdefault(tensor, placement)
        for tensor, placement in self._fixed().items():
            if tensor != self.facts.hidden_out:
                placements[tensor] = placement
        for edge in self.versions.edges:
            placements.setdefault(edge.site.tensor, REPLICATE)
        order = {(edge.site.tensor, edge.site.module, edge.site.where): n for n, edge in enumerate(self.versions.edges)}
        conversions.sort(key=lambda c: order[c.site.tensor, c.site.module, c.site.where])
        return Division(
            self.block_class.name, "tp", self.facts.boundary, dict(sorted(choices.items())),
            dict(sorted(placements.items())), tuple(conversions),
        )  # fmt: skip


def optimum(relations: list[Relation]) -> list[object] | None:
    """The choices of every relation in the cheapest assignment, rows agreeing on shared versions; None: there is none."""
    problem = pulp.LpProblem("division", pulp.LpMinimize)
    rows: list[list[pulp.LpVariable]] = []
    for number, relation in enumerate(relations):
        rows.append([problem.add_variable(f"x{number}_{index}", cat="Binary") for index in range(len(relation.rows))])
    costs = [
        (variable, row.cost * 1e6)
        for relation, variables in zip(relations, rows, strict=True)
        for row, variable in zip(relation.rows, variables, strict=True)
    ]
    problem += pulp.LpAffineExpression(costs)
    for variables in rows:
        problem += pulp.LpAffineExpression([(variable, 1) for variable in variables]) == 1
    for first, other in _agreements(relations, rows):
        problem += pulp.LpAffineExpression([*((v, 1) for v in first), *((v, -1) for v in other)]) == 0
    if solve(problem).status != "optimal":
        return None
    return [
        max(zip(relation.rows, variables, strict=True), key=lambda pair: pair[1].varValue)[0].chosen
        for relation, variables in zip(relations, rows, strict=True)
    ]


def _agreements(
    relations: list[Relation], rows: list[list[pulp.LpVariable]]
) -> list[tuple[list[pulp.LpVariable], list[pulp.LpVariable]]]:
    """Per version and placement: the rows of its first relation that have it, those of each further one."""
    by_value: dict[Version, list[dict[Placement, list[pulp.LpVariable]]]] = {}
    for relation, variables in zip(relations, rows, strict=True):
        for place, version in enumerate(relation.variables):
            having: dict[Placement, list[pulp.LpVariable]] = {}
            for row, variable in zip(relation.rows, variables, strict=True):
                having.setdefault(row.values[place], []).append(variable)
            by_value.setdefault(version, []).append(having)
    pairs = []
    for first, *others in by_value.values():
        for other in others:
            for placement in sorted({*first, *other}):
                pairs.append((first.get(placement, []), other.get(placement, [])))
    return pairs
