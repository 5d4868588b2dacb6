"""Whether a graph read from a file refers only to what is in it: an edited or damaged file is refused, not planned."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autopar.documents.graph import BlockClass, Chain, Graph, LocalDim, Term


def contradictions(graph: Graph, dtypes: Iterable[str]) -> Iterator[str]:
    """Every reference to what is not there, as ``place: what is wrong``."""
    atoms = {atom.id for atom in graph.indices}
    names = {item.name for item in graph.block_classes}
    for chain in graph.chains:
        yield from _of_chain(chain, names)
    for item in graph.block_classes:
        yield from (f"block class {item.name}: {problem}" for problem in _of_class(item, atoms, set(dtypes)))
        if all(option.name != "none" for option in item.recompute):
            yield f"block class {item.name}: recompute has no entry 'none'"


def _of_chain(chain: Chain, names: set[str]) -> Iterator[str]:
    ends = (name for name in (chain.prologue, chain.epilogue) if name is not None)
    for name in sorted({*ends, *(run.block_class for run in chain.runs)} - names):
        yield f"chain {chain.name}: no block class is named {name!r}"
    held: list[int] = []
    for run in chain.runs:
        held += (run.first, run.first + run.count)
    if held[:1] != [0] or held[-1] != chain.count or held[1:-1:2] != held[2::2] or held != sorted(held):
        yield f"chain {chain.name}: its runs do not cover its {chain.count} blocks one after the other"


def _of_class(item: BlockClass, atoms: set[int], dtypes: set[str]) -> Iterator[str]:
    shapes = {tensor.id: tensor.dims for tensor in item.tensors}
    operators = {operator.id for operator in item.operators}
    for tensor in item.tensors:
        yield from _missing(f"tensor {tensor.id}", "atom", tensor.atoms, atoms)
        if tensor.dtype not in dtypes:
            yield f"tensor {tensor.id}: dtype {tensor.dtype!r} is unknown; allowed: {', '.join(sorted(dtypes))}"
    for operator in item.operators:
        place = f"operator {operator.id}"
        yield from _missing(place, "tensor", (*operator.reads, *operator.writes), shapes)
        terms = (*operator.model_flops, *operator.executed_flops, *(term for _, term in operator.traffic or ()))
        yield from _missing(place, "atom", _atoms(terms), atoms)
        for dtype, _ in operator.traffic or ():
            if dtype not in dtypes:
                yield f"{place}: dtype {dtype!r} of its traffic is unknown; allowed: {', '.join(sorted(dtypes))}"
        for dim in operator.local_dims:
            yield from _of_dim(f"{place}, dim {dim.name}", dim, shapes)
    yield from _missing("inputs and outputs", "tensor", (*item.inputs, *item.outputs), shapes)
    yield from _missing("sites", "tensor", (site.tensor for site in item.sites), shapes)
    for option in item.recompute:
        yield from _missing(f"recompute {option.name}", "tensor", option.saved, shapes)
        yield from _missing(f"recompute {option.name}", "operator", option.operators, operators)


def _of_dim(place: str, dim: LocalDim, shapes: dict[int, tuple[tuple[int, ...], ...]]) -> Iterator[str]:
    for spot in (*dim.reads, *dim.writes):
        dims = shapes.get(spot.tensor, ())
        if not (0 <= spot.dim < len(dims) and 0 <= spot.atom < len(dims[spot.dim])):
            yield f"{place}: tensor {spot.tensor} has no dim {spot.dim} with an atom number {spot.atom}"


def _atoms(terms: Iterable[Term]) -> Iterator[int]:
    return (atom for term in terms for atom in term.atoms)


def _missing(place: str, kind: str, given: Iterable[int], known: Iterable[int]) -> Iterator[str]:
    lost = sorted(set(given) - set(known))
    if lost:
        yield f"{place}: no {kind} has the id {', '.join(map(str, lost[:3]))}"
