"""L1: what a block costs at each (tp, sp, micro-batch), with every recompute option, and what a stage holds.

Prices are asked for once per (class, tp, sp) with all micro-batch sizes together. Of a block's recompute options those that
another beats in both bytes and seconds are dropped: no optimum is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.documents.graph import Chain, Graph
from autopar.documents.plan import Collective
from autopar.pricing import BlockPrice, Division, RecomputePrice

Prices = Callable[[str, int, bool], "tuple[Division, list[BlockPrice]] | None"]
"""(class, tp, sp) -> its division and its price at each micro-batch size; None where the class has no such division."""


@dataclass(frozen=True)
class Layer:
    """One position of the model: a block's class, its chain and number, and the ends fixed to it."""

    block_class: str
    chain: str
    number: int
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


@dataclass(frozen=True)
class Menu:
    """A block's recompute options, most bytes first: parallel arrays of bytes kept and extra backward seconds."""

    names: tuple[str, ...]
    saved_bytes: np.ndarray
    seconds: np.ndarray


@dataclass(frozen=True)
class Column:
    """A class at one micro-batch size: seconds of an action, the menu, and the bytes it brings."""

    price: BlockPrice
    forward: float
    backward: float
    menu: Menu


def layers_of(graph: Graph) -> list[Layer]:
    """All blocks in order; a chain's prologue goes with its first block, its epilogue with its last."""
    found: list[Layer] = []
    for chain in graph.chains:
        found += _layers(chain)
    return found


def _layers(chain: Chain) -> list[Layer]:
    last = chain.count - 1
    return [
        Layer(
            block_class=chain.block_class_of(number),
            chain=chain.name,
            number=number,
            before=(chain.prologue,) if chain.prologue and number == 0 else (),
            after=(chain.epilogue,) if chain.epilogue and number == last else (),
        )
        for number in range(chain.count)
    ]


def column(price: BlockPrice, allowed: Sequence[str]) -> Column:
    """A price as a column; `allowed` are the recompute modes offered."""
    forward = price.forward_seconds + price.forward_overhead_seconds + exposed(price.forward_collectives)
    backward = price.backward_seconds + price.backward_overhead_seconds + exposed(price.backward_collectives)
    return Column(price, forward, backward, menu(price, allowed))


def exposed(collectives: Sequence[Collective]) -> float:
    """Seconds of collectives that do not hide."""
    return sum(item.seconds * (1 - item.overlap) for item in collectives)


def menu(price: BlockPrice, allowed: Sequence[str]) -> Menu:
    """Options of the allowed modes that no other beats in bytes and seconds, most bytes first."""
    options = [(name, option) for name, option in price.recompute.items() if option.mode in allowed]
    if not options:
        # A class without such an entry (an embedding has nothing to recompute) keeps what it keeps.
        options = [(name, option) for name, option in price.recompute.items() if option.mode == "none"]
    options.sort(key=lambda item: (_extra(item[1]), item[1].saved_bytes))
    front: list[tuple[str, RecomputePrice]] = []
    for name, option in options:
        if not front or option.saved_bytes < front[-1][1].saved_bytes:
            front.append((name, option))
    return Menu(
        tuple(name for name, _ in front),
        np.array([option.saved_bytes for _, option in front]),
        np.array([_extra(option) for _, option in front]),
    )


def _extra(option: RecomputePrice) -> float:
    return option.seconds + option.overhead_seconds + exposed(option.collectives)


def best_mix(choices: Menu, blocks: int, budget: float, weight: float) -> tuple[float, tuple[int, ...]] | None:
    """Least extra seconds for `blocks` equal blocks whose kept bytes times `weight` fit the budget; how many take each option.

    Exact: the numbers of all options but two are enumerated, the last two follow. None where even the leanest does not fit.
    """
    saved, seconds = choices.saved_bytes * weight, choices.seconds
    count = len(saved)
    if blocks * saved[-1] > budget:
        return None
    if blocks * saved[0] <= budget or count == 1:
        return float(blocks * seconds[0]), (blocks,) + (0,) * (count - 1)
    grids = np.meshgrid(*(np.arange(blocks + 1) for _ in range(count - 2)), indexing="ij") if count > 2 else []
    fixed = [grid.ravel() for grid in grids] or []
    # Options 2.. are enumerated; of the first two as few of the leaner are taken as fit.
    rest: np.ndarray = blocks - sum(fixed, np.zeros(1, dtype=int))
    used: np.ndarray = sum((n * saved[i + 2] for i, n in enumerate(fixed)), np.zeros(1))
    over = used + rest * saved[0] - budget
    lean = np.maximum(0, np.ceil(over / (saved[0] - saved[1]) - 1e-9))
    legal = (rest >= 0) & (lean <= rest)
    if not legal.any():
        return None
    extra = lean * seconds[1] + (rest - lean) * seconds[0]
    extra = sum((n * seconds[i + 2] for i, n in enumerate(fixed)), extra)
    best = int(np.argmin(np.where(legal, extra, np.inf)))
    numbers = (int(rest[best] - lean[best]), int(lean[best]), *(int(n[best]) for n in fixed))
    return float(extra[best]), numbers
