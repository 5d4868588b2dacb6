"""Which operators run as one kernel: connected pointwise operators, reductions and norms, when kernels are compiled or fused.

A fused group reads from memory what comes from outside it and writes what is read outside it or kept for backward.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.documents.graph import BlockClass
from autopar.pricing.division import is_view
from autopar.pricing.work import Work


def fusion_groups(block_class: BlockClass, works: Sequence[Work]) -> list[list[Work]]:
    """Operators grouped into kernels, in execution order; contractions and views stand alone."""
    group_of: dict[int, int] = {}
    groups: dict[int, list[Work]] = {}
    source = _through_views(block_class)
    writer = {tensor: work.operator.id for work in works for tensor in work.operator.writes}
    for number, work in enumerate(works):
        joined = number
        if work.kind not in ("matmul", "attention", "view", "embedding"):
            producers = [writer.get(source.get(read, read)) for read in work.operator.reads]
            own = [group_of[p] for p in producers if p in group_of and _fuses(groups[group_of[p]][0])]
            # Only the latest producer's group: joining earlier ones could close a cycle through a contraction between.
            joined = max(own, default=number)
            if joined != number and _contraction_between(works, groups[joined][-1], number):
                joined = number
        group_of[work.operator.id] = joined
        groups.setdefault(joined, []).append(work)
    return list(groups.values())


def external_tensors(block_class: BlockClass, group: Sequence[Work]) -> tuple[int, ...]:
    """Tensors that a group reads from or writes to memory."""
    inside = {work.operator.id for work in group}
    written = {tensor for work in group for tensor in work.operator.writes}
    read = {tensor for work in group for tensor in work.operator.reads}
    needed = {
        tensor
        for operator in block_class.operators
        if operator.id not in inside
        for tensor in operator.reads
        if tensor in written
    }
    needed |= {tensor for tensor in written if block_class.tensor_by_id[tensor].saved or tensor in block_class.outputs}
    return tuple(sorted((read - written) | needed))


def _fuses(work: Work) -> bool:
    return work.kind not in ("matmul", "attention", "view", "embedding")


def _contraction_between(works: Sequence[Work], last: Work, number: int) -> bool:
    positions = {work.operator.id: place for place, work in enumerate(works)}
    between = works[positions[last.operator.id] + 1 : number]
    return any(work.kind in ("matmul", "attention") for work in between)


def _through_views(block_class: BlockClass) -> dict[int, int]:
    """A view's output -> the tensor behind it."""
    source: dict[int, int] = {}
    for operator in block_class.operators:
        if is_view(operator) and operator.reads:
            for tensor in operator.writes:
                source[tensor] = source.get(operator.reads[0], operator.reads[0])
    return source
