"""L0: the divisions of a block class worth pricing, and how a plan writes them down.

Each division is the optimum of the integer programme in `division_ilp` for some degree and link. Degrees that allow the
same operators to be divided share one solution, so the list is short and free of sizes; which degrees each allows is asked
of `pricing.divides`. The search re-prices this list and never solves here again.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from autopar.documents.graph import BlockClass, Graph
from autopar.documents.plan import Conversion, SegmentPlacement, SiteRef
from autopar.planner.division_ilp import Problem, Regime
from autopar.pricing.degrees import divides
from autopar.pricing.division import REPLICATE, Boundary, Division

DEGREES = (2, 4, 8, 16, 32, 64)
LINKS = ((1e14, 1e-8), (2.5e10, 1e-5))
"""Bytes per second and latency in seconds. Nearly free links: everything that can be divided is, with the fewest
collectives, which is what memory asks for; and one network port, where it pays to leave small operators whole."""


def divisions(graph: Graph, class_name: str, boundary: Boundary, degrees: Iterable[int] = DEGREES) -> list[Division]:
    """Divisions of a class over tp for a boundary placement, the undivided one first where the boundary is whole.

    `degrees` are those the search will ask for; a division that suits none of them is not looked for.
    """
    found = [undivided(graph, class_name)] if boundary == "replicate" else []
    problem = Problem(graph, class_name, boundary)
    seen: set[frozenset[tuple[int, int]]] = set()
    for degree in sorted(set(degrees) - {1}):
        pattern = problem.pattern(degree)
        if pattern in seen:
            continue
        seen.add(pattern)
        for bandwidth, latency in LINKS:
            division = problem.solve(Regime(degree, bandwidth, latency_seconds=latency))
            if division is not None and division not in found and (boundary == "sequence" or not division.trivial):
                found.append(division)
    return found


def division_by_degree(
    graph: Graph,
    class_name: str,
    boundary: Boundary,
    degrees: Iterable[int],
    seq_len: int,
    may_stay_whole: bool = False,
) -> dict[int, Division]:
    """Degree -> the division that divides most, for the degrees that have one at this sequence length.

    Degrees that leave everything whole are left out, except where that is allowed (a small embedding or head).
    """
    problem = Problem(graph, class_name, boundary)
    by_pattern: dict[frozenset[tuple[int, int]], Division | None] = {}
    found: dict[int, Division] = {}
    bandwidth, latency = LINKS[0]
    for degree in degrees:
        pattern = problem.pattern(degree)
        if pattern not in by_pattern:
            by_pattern[pattern] = problem.solve(Regime(degree, bandwidth, latency_seconds=latency))
        division = by_pattern[pattern]
        if division is None or not divides(graph, division, degree, seq=seq_len):
            continue
        if may_stay_whole or _stores_divided(graph, division):
            found[degree] = division
    return found


def _stores_divided(graph: Graph, division: Division) -> bool:
    """Whether most of a class's parameters are stored divided: what tp is for."""
    sizes = graph.sizes()
    tensors = graph.class_by_name[division.block_class].tensor_by_id
    parameters = [p for p in graph.class_by_name[division.block_class].parameters if p.tensor is not None]
    whole = sum(p.elements for p in parameters if not division.placements[p.tensor or 0].divided)
    total = sum(tensors[p.tensor or 0].elements(sizes) for p in parameters)
    return whole < total / 2


def undivided(graph: Graph, class_name: str) -> Division:
    """Everything whole on every rank: the only division at degree 1."""
    forward = [op for op in graph.class_by_name[class_name].operators if op.phase == "forward"]
    block_class = graph.class_by_name[class_name]
    tensors = {tensor for op in forward for tensor in (*op.reads, *op.writes)} | set(block_class.inputs)
    tensors |= {parameter.tensor for parameter in block_class.parameters if parameter.tensor is not None}
    choices: dict[int, str | None] = {op.id: None for op in forward}
    return Division(class_name, "tp", "replicate", choices, dict.fromkeys(sorted(tensors), REPLICATE))


def allowed_degrees(graph: Graph, division: Division, degrees: Iterable[int], seq: int | None = None) -> list[int]:
    """Those of `degrees` that a division can have at a sequence length; degree 1 always."""
    return [degree for degree in degrees if degree == 1 or divides(graph, division, degree, seq=seq)]


def plan_placements(graph: Graph, division: Division) -> dict[str, str | SegmentPlacement]:
    """Parameter (its name within the block) -> ``Replicate``, ``Shard(d)`` or segments."""
    block_class = graph.class_by_name[division.block_class]
    return {
        parameter.name: "Replicate"
        if parameter.tensor is None
        else _placement(graph, block_class, division, parameter.tensor)
        for parameter in block_class.parameters
    }


def _placement(graph: Graph, block_class: BlockClass, division: Division, number: int) -> str | SegmentPlacement:
    placement, tensor = division.placements[number], block_class.tensor_by_id[number]
    if not placement.divided:
        return "Replicate"
    sizes = graph.sizes()
    if placement.dim in tensor.segments:
        parts = tuple(prod(sizes[atom] for atom in part) for part in tensor.segments[placement.dim])
        return SegmentPlacement(dim=placement.dim, segments=parts)
    dim = tensor.dims[placement.dim]
    outer = prod(sizes[atom] for atom in dim[: placement.atom])
    if outer > 1:
        inner = prod(sizes[atom] for atom in dim[placement.atom :])
        return SegmentPlacement(dim=placement.dim, segments=(inner,) * outer)
    return f"Shard({placement.dim})"


def plan_conversions(division: Division, prefix: str = "") -> tuple[Conversion, ...]:
    """A division's conversions as a plan writes them; `prefix` is the block's name, ``layers.*`` for a chain."""
    return tuple(
        Conversion(
            site=SiteRef(
                module=".".join(part for part in (prefix, item.site.module) if part),
                where=item.site.where,
                argument=item.site.argument,
            ),
            axis=division.axis,
            forward=item.kind,
            dim=item.dim,
        )
        for item in division.conversions
    )
