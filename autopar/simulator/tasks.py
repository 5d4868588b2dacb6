"""What one action does to the streams of its rank, worked out once per (rank, chunk, phase).

    own work of an action = overhead + recompute + compute + exposed collectives
    exposed of a collective = seconds - hidden,  hidden = overlap * seconds, all together at most recompute + compute

Within an action the collectives of all blocks are drawn back to back so that they end with it: the hidden part lies
beside the compute, the exposed part in the gap behind it. dp collectives (gathers of parameters, reductions of
gradients) have a stream of their own and are spread over actions by `data_parallel`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.documents.plan import ActionCost, Plan, StageCost
from autopar.simulator.schedules import Order

PART_OF_AXIS = {
    "pp": "pp", "dp_replicate": "dp", "dp_shard": "dp", "cp": "cp", "tp": "tp", "etp": "tp", "ep": "ep"
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Piece:
    """A span within an action; `offset` seconds after the action's own work begins."""

    stream: str
    kind: str
    offset: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Task:
    """An action's own work: how long, of which parts (`documents.plan.PARTS`), and its spans."""

    seconds: float
    parts: Mapping[str, float]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class DpWork:
    """dp collectives that belong to one action, in seconds; of them `head` and `tail` have nothing to hide behind."""

    gather: float = 0.0
    head: float = 0.0
    reduce: float = 0.0
    tail: float = 0.0


def task(cost: ActionCost, *, backward: bool, slow: float = 1.0) -> Task:
    """The own work of an action; `slow` multiplies compute and recompute, not collectives or the host's time."""
    compute, recompute, overhead = cost.compute_seconds * slow, cost.recompute_seconds * slow, cost.overhead_seconds
    hidden = sum(item.seconds * item.overlap for item in cost.collectives)
    share = min(1.0, (compute + recompute) / hidden) if hidden > 0 else 0.0
    parts = {"compute": compute, "recompute": recompute, "overhead": overhead}
    for item in cost.collectives:
        part = PART_OF_AXIS[item.axis]
        parts[part] = parts.get(part, 0.0) + item.seconds * (1 - item.overlap * share)
    seconds = sum(parts.values())
    return Task(seconds, parts, (*_compute_pieces(parts, backward), *_collective_pieces(cost, seconds)))


def _compute_pieces(parts: Mapping[str, float], backward: bool) -> list[Piece]:
    named = (
        ("overhead", parts["overhead"]),
        ("recompute", parts["recompute"]),
        ("backward" if backward else "forward", parts["compute"]),
    )
    pieces, offset = [], 0.0
    for kind, seconds in named:
        if seconds > 0:
            pieces.append(Piece("compute", kind, offset, seconds))
        offset += seconds
    return pieces


def _collective_pieces(cost: ActionCost, end: float) -> list[Piece]:
    by_kind: dict[str, float] = {}
    for item in cost.collectives:
        kind = PART_OF_AXIS[item.axis]
        by_kind[kind] = by_kind.get(kind, 0.0) + item.seconds
    pieces, offset = [], end - sum(by_kind.values())
    for kind, seconds in by_kind.items():
        if seconds > 0:
            pieces.append(Piece("collective", kind, offset, seconds))
        offset += seconds
    return pieces


def tasks(plan: Plan, slow: Mapping[int, float]) -> list[list[tuple[Task, Task]]]:
    """For each rank and chunk the (forward, backward) task."""
    return [
        [
            (
                task(chunk.forward, backward=False, slow=slow.get(rank, 1.0)),
                task(chunk.backward, backward=True, slow=slow.get(rank, 1.0)),
            )
            for chunk in cost.chunks
        ]
        for rank, cost in enumerate(plan.costs)
    ]


def data_parallel(cost: StageCost, order: Order) -> dict[int, DpWork]:
    """Position in `order` -> the dp collectives of that action.

    `dp_exposed_seconds` is split between the first gather (head) and the last reduction (tail) in proportion to how
    long each takes, and never exceeds them.
    """
    gathers = {i: cost.chunks[order[i].chunk].gather_seconds for i in _gather_positions(cost, order)}
    reduces = {i: cost.chunks[order[i].chunk].reduce_seconds for i in _reduce_positions(cost, order)}
    first, last = min(gathers, default=-1), max(reduces, default=-1)
    ends = gathers.get(first, 0.0) + reduces.get(last, 0.0)
    exposed = min(1.0, cost.dp_exposed_seconds / ends) if ends > 0 else 0.0
    works = {}
    for i in sorted(gathers.keys() | reduces.keys()):
        gather, reduce = gathers.get(i, 0.0), reduces.get(i, 0.0)
        if gather or reduce:
            head, tail = (exposed * gather if i == first else 0.0), (exposed * reduce if i == last else 0.0)
            works[i] = DpWork(gather, head, reduce, tail)
    return works


def _gather_positions(cost: StageCost, order: Order) -> list[int]:
    if cost.gathers == "never":
        return []
    if cost.gathers == "each_action":
        return list(range(len(order)))
    first: dict[int, int] = {}
    for i, action in enumerate(order):
        first.setdefault(action.chunk, i)
    return list(first.values())


def _reduce_positions(cost: StageCost, order: Order) -> list[int]:
    if cost.reduces == "never":
        return []
    backwards = [i for i, action in enumerate(order) if action.backward]
    if cost.reduces == "each_backward":
        return backwards
    return list({order[i].chunk: i for i in backwards}.values())
