"""Divisions as the Plan says them: parameter placements and conversions at sites, by full name."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.documents.graph import Chain
from autopar.documents.plan import Conversion, SegmentPlacement
from autopar.planner.case import Model
from autopar.planner.sharding import plan_conversions, plan_placements
from autopar.planner.space import Configuration


def placements(model: Model, c: Configuration) -> dict[str, dict[str, str | SegmentPlacement]]:
    """Parameter -> tp -> placement; empty without tp. ``*`` stands for the block's number where all blocks are alike."""
    if c.tp == 1:
        return {}
    found: dict[str, dict[str, str | SegmentPlacement]] = {}
    for prefix, class_name in _places(model):
        division = model.prices.division(class_name, c.tp, c.sp)
        for name, placement in plan_placements(model.graph, division).items():
            found[prefix + name] = {"tp": placement}
    return found


def conversions(model: Model, c: Configuration) -> tuple[Conversion, ...]:
    """Where the runtime changes a tensor's state, forward; empty without tp."""
    if c.tp == 1:
        return ()
    return tuple(
        conversion
        for prefix, class_name in _places(model)
        for conversion in plan_conversions(model.prices.division(class_name, c.tp, c.sp), prefix.rstrip("."))
    )


def _places(model: Model) -> Iterator[tuple[str, str]]:
    """(prefix of names, class) of every kind of block and end."""
    for chain in model.graph.chains:
        if chain.prologue:
            yield "", chain.prologue
        yield from _blocks(chain)
        if chain.epilogue:
            yield "", chain.epilogue


def _blocks(chain: Chain) -> Iterator[tuple[str, str]]:
    if len({run.block_class for run in chain.runs}) == 1:
        yield (f"{chain.name}.*." if chain.name else ""), chain.runs[0].block_class
        return
    for number, module in enumerate(chain.modules):
        yield f"{module}.", chain.block_class_of(number)
