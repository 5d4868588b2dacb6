"""Which operators share a kernel.

Eager: each operator is its own. Compiled or fused: pointwise operators and reductions that hand tensors to one another
form one kernel, unless a contraction, an attention call or a collective lies between any two of them. An operator's level
is the largest number of those on a way to it; operators of one level that are connected form a region, and no way leads
out of a region and back in.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autopar.documents.graph import Operator
from autopar.pricing.kinds import kind_of
from autopar.pricing.layout import Layout

HEAVIEST_FIRST = ("loss", "softmax", "norm", "embedding", "dropout", "activation", "add", "copy")


@dataclass(frozen=True)
class Kernel:
    """Operators launched together. `kind`: gemm, attention, or the slowest pointwise class among them."""

    kind: str
    operators: tuple[Operator, ...]


def kernels_of(operators: Iterable[Operator], layout: Layout, fuse: bool) -> list[Kernel]:
    """Kernels of operators in execution order; views launch nothing."""
    running = list(operators)
    if not fuse:
        return [Kernel(kind_of(op), (op,)) for op in running if kind_of(op) != "view"]
    group, kernels = _regions(running, layout)
    regions: dict[int, list[Operator]] = {}
    for operator in running:
        if operator.id in group:
            regions.setdefault(_find(group, operator.id), []).append(operator)
    for members in regions.values():
        kinds = {kind_of(operator) for operator in members}
        kernels.append(Kernel(next(kind for kind in HEAVIEST_FIRST if kind in kinds), tuple(members)))
    return kernels


def _regions(operators: list[Operator], layout: Layout) -> tuple[dict[int, int], list[Kernel]]:
    """Union-find parents of the operators that fuse, and the kernels of those that do not."""
    level: dict[int, int] = {}
    maker: dict[int, int] = {}
    group: dict[int, int] = {}
    kernels = []
    own_level: dict[int, int] = {}
    for operator in operators:
        kind = kind_of(operator)
        crossing = {tensor for tensor in operator.reads if (operator.id, tensor) in layout.crossing}
        here = max((level.get(tensor, 0) + (tensor in crossing) for tensor in operator.reads), default=0)
        if kind in ("gemm", "attention"):
            kernels.append(Kernel(kind, (operator,)))
            here += 1
        elif kind == "view":
            made = [maker[tensor] for tensor in operator.reads if tensor in maker and tensor not in crossing]
            maker.update((tensor, made[0]) for tensor in operator.writes if made)
        else:
            group[operator.id] = operator.id
            own_level[operator.id] = here
            for tensor in operator.reads:
                if tensor in maker and tensor not in crossing and own_level[maker[tensor]] == here:
                    group[_find(group, maker[tensor])] = _find(group, operator.id)
            maker.update((tensor, operator.id) for tensor in operator.writes)
        level.update((tensor, here) for tensor in operator.writes)
    return group, kernels


def _find(group: dict[int, int], member: int) -> int:
    while group[member] != member:
        member = group[member]
    return member
