"""Pipeline schedules as data: for each rank the ordered forwards and backwards it executes.

    gpipe        all forwards, then all backwards                            (Huang et al. 2019, arXiv 1811.06965)
    1f1b         min(m, p - i) forwards, then one backward, one forward, ... (Narayanan et al. 2021, arXiv 2104.04473)
    interleaved  v chunks per rank, depth first in rounds of m / max(1, m // p) micro-batches; rank i warms up with
                 (v - 1) * (micro-batches per round) + 2 * (p - 1 - i) forwards                      (the same paper)

p pipeline ranks, m micro-batches, v chunks per rank, i the rank. The lists equal what torch.distributed.pipelining
executes (ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B of torch 2.13).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from autopar.documents.plan import ScheduleName
from autopar.errors import RequestError


class Action(NamedTuple):
    """One forward or backward of one chunk of the rank for one micro-batch."""

    backward: bool
    chunk: int
    micro_batch: int


Order = tuple[Action, ...]


@lru_cache(maxsize=64)
def orders(name: ScheduleName, pp: int, micro_batches: int, virtual_stages: int = 1) -> tuple[Order, ...]:
    """For each pp rank its actions in execution order.

    Raises RequestError where the schedule does not exist for these numbers.
    """
    if name != "interleaved" and virtual_stages != 1:
        raise RequestError(
            f"schedule {name} runs 1 chunk per rank, but virtual_stages is {virtual_stages}; use schedule interleaved"
        )
    if name == "gpipe":
        return tuple(_gpipe(micro_batches) for _ in range(pp))
    if name == "1f1b":
        return tuple(_one_f_one_b(pp, rank, micro_batches) for rank in range(pp))
    _check_rounds(pp, micro_batches)
    return tuple(_interleaved(pp, rank, micro_batches, virtual_stages) for rank in range(pp))


def _gpipe(micro_batches: int) -> Order:
    return tuple(Action(backward, 0, number) for backward in (False, True) for number in range(micro_batches))


def _one_f_one_b(pp: int, rank: int, micro_batches: int) -> Order:
    forwards = (Action(False, 0, number) for number in range(micro_batches))
    backwards = (Action(True, 0, number) for number in range(micro_batches))
    return _warm_up_then_alternate(forwards, backwards, min(micro_batches, pp - 1 - rank))


def _check_rounds(pp: int, micro_batches: int) -> None:
    rounds = max(1, micro_batches // pp)
    if micro_batches % rounds:
        raise RequestError(
            f"schedule interleaved runs max(1, micro_batches({micro_batches}) // pp({pp})) = {rounds} rounds, "
            f"but {micro_batches} micro-batches do not divide by {rounds}; use a multiple of pp"
        )


def _interleaved(pp: int, rank: int, micro_batches: int, chunks: int) -> Order:
    per_round = micro_batches // max(1, micro_batches // pp)
    warm_up = (chunks - 1) * per_round + 2 * (pp - 1 - rank)
    forwards = _depth_first(False, micro_batches, per_round, range(chunks))
    backwards = _depth_first(True, micro_batches, per_round, range(chunks - 1, -1, -1))
    return _warm_up_then_alternate(forwards, backwards, min(warm_up, micro_batches * chunks))


def _depth_first(backward: bool, micro_batches: int, per_round: int, chunks: range) -> Iterator[Action]:
    """Round by round, chunk by chunk: `per_round` micro-batches go through every chunk before the next enter."""
    for first in range(0, micro_batches, per_round):
        for chunk in chunks:
            for number in range(first, first + per_round):
                yield Action(backward, chunk, number)


def _warm_up_then_alternate(forwards: Iterator[Action], backwards: Iterator[Action], warm_up: int) -> Order:
    """`warm_up` forwards; then a forward and a backward in turn; then the backwards that are left."""
    actions = [next(forwards) for _ in range(warm_up)]
    for forward in forwards:
        actions += (forward, next(backwards))
    actions += backwards
    return tuple(actions)


def in_flight(order: Order) -> dict[int, int]:
    """Chunk -> the most micro-batches of it whose forward has begun and whose backward has not ended."""
    now: dict[int, int] = {}
    most: dict[int, int] = {}
    for action in order:
        now[action.chunk] = now.get(action.chunk, 0) + (-1 if action.backward else 1)
        most[action.chunk] = max(most.get(action.chunk, 0), now[action.chunk])
    return most
