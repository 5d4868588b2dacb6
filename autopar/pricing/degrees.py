"""Which degrees a division can have: every divided dim must come apart into equal, whole parts.

A dim [atom ... ] divided on an atom is cut into contiguous parts of what lies from that atom inwards: 8 groups of 4
query heads divide by 16, 8 key heads do not: no cut goes through a head.
Vocabularies need not divide: the last rank's part is padded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from autopar.documents.graph import Graph, Tensor
from autopar.pricing.division import Division, Placement
from autopar.pricing.options import Facts, facts_of


def fits(tensor: Tensor, placement: Placement, sizes: Mapping[int, float], degree: int, facts: Facts) -> bool:
    """Whether a tensor in this placement comes apart into `degree` equal parts."""
    if not placement.divided:
        return True
    dim = tensor.dims[placement.dim]
    if dim[placement.atom] in facts.vocabulary:
        return True
    parts = tensor.segments.get(placement.dim, (dim[placement.atom :],))
    return all(_cuts(part, sizes, degree, facts) for part in parts)


def _cuts(part: tuple[int, ...], sizes: Mapping[int, float], degree: int, facts: Facts) -> bool:
    """Whether a run of atoms comes apart without cutting through a head dim."""
    pieces: float = 1
    for atom in part:
        if atom in facts.uncut:
            return False
        pieces *= sizes[atom]
        if pieces % degree == 0:
            return True
    return False


def divides(
    graph: Graph, division: Division, degree: int, micro_batch: int | None = None, seq: int | None = None
) -> bool:
    """Whether a division can have a degree at a micro-batch and sequence length."""
    return not list(obstacles(graph, division, degree, micro_batch, seq))


def obstacles(
    graph: Graph, division: Division, degree: int, micro_batch: int | None = None, seq: int | None = None
) -> Iterator[str]:
    """Why a division cannot have a degree, in words, one a tensor dim."""
    facts = facts_of(graph, division.block_class, division.boundary)
    sizes = graph.sizes(micro_batch, seq)
    names = {atom.id: atom.name for atom in graph.indices}
    seen: set[tuple[int, ...]] = set()
    conversions = [(c.site.tensor, placement) for c in division.conversions for placement in (c.source, c.target)]
    for tensor_id, placement in [*division.placements.items(), *conversions]:
        tensor = facts.block_class.tensor_by_id[tensor_id]
        if fits(tensor, placement, sizes, degree, facts):
            continue
        dim = tensor.dims[placement.dim][placement.atom :]
        if dim not in seen:
            seen.add(dim)
            yield f"{' * '.join(f'{names[a]}({sizes[a]})' for a in dim)} does not divide by {degree}"
