"""Divisions as the Plan says them: parameter placements and conversions at sites, by full name."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.documents.graph import Chain
from autopar.documents.plan import Conversion, SegmentPlacement, SiteRef
from autopar.planner.case import Model
from autopar.planner.space import Configuration
from autopar.pricing import Division


def placements(model: Model, c: Configuration) -> dict[str, dict[str, str | SegmentPlacement]]:
    """Parameter -> tp -> placement; empty without tp. ``*`` stands for the block's number where all blocks are alike."""
    if c.tp == 1:
        return {}
    found: dict[str, dict[str, str | SegmentPlacement]] = {}
    for prefix, class_name in _places(model):
        division = model.prices.division(class_name, c.tp, c.sp)
        for parameter in model.graph.class_by_name[class_name].parameters:
            if parameter.tensor is not None:
                found[prefix + parameter.name] = {"tp": _placement(model, division, class_name, parameter.tensor)}
    return found


def conversions(model: Model, c: Configuration) -> tuple[Conversion, ...]:
    """Where the runtime changes a tensor's state, forward; empty without tp."""
    if c.tp == 1:
        return ()
    found = []
    for prefix, class_name in _places(model):
        division = model.prices.division(class_name, c.tp, c.sp)
        for item in division.conversions:
            module = (prefix + item.site.module).rstrip(".")
            site = SiteRef(module=module, where=item.site.where, argument=item.site.argument)
            found.append(Conversion(site=site, axis="tp", forward=item.forward, dim=item.dim))
    return tuple(found)


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


def _placement(model: Model, division: Division, class_name: str, tensor: int) -> str | SegmentPlacement:
    state = division.states.get(tensor)
    if state is None or state.kind != "S":
        return "Replicate"
    segments = model.graph.class_by_name[class_name].tensor_by_id[tensor].segments.get(state.dim)
    if segments is None:
        return f"Shard({state.dim})"
    sizes = model.graph.sizes()
    lengths = []
    for atoms in segments:
        length = 1
        for atom in atoms:
            length *= sizes[atom]
        lengths.append(length)
    return SegmentPlacement(dim=state.dim, segments=tuple(lengths))
