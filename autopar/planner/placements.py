"""Divisions as the Plan says them: parameter placements and conversions at sites, by full name."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Literal

from autopar.documents.graph import Chain
from autopar.documents.plan import Conversion, SegmentPlacement, SiteRef
from autopar.planner.case import Model
from autopar.planner.space import Configuration
from autopar.pricing import Division
from autopar.pricing.division import PARTIAL, WHOLE_PARTIAL_GRADIENT, SiteConversion, is_view


def placements(model: Model, c: Configuration) -> dict[str, dict[str, str | SegmentPlacement]]:
    """Parameter -> axis -> placement, where tp or ep divide. ``*`` stands for the block's number where all blocks are alike.

    Experts are divided over ep, and over tp only where etp is tp.
    """
    if c.tp == c.ep == 1:
        return {}
    found: dict[str, dict[str, str | SegmentPlacement]] = {}
    for prefix, class_name in _places(model):
        division = model.prices.division(class_name, c.tp, c.sp)
        block_class = model.graph.class_by_name[class_name]
        for parameter in block_class.parameters:
            if parameter.tensor is not None:
                own: dict[str, str | SegmentPlacement] = {}
                numbered = _expert_dim(model, class_name, parameter.tensor)
                if c.tp > 1:
                    of_tp = numbered is None or c.etp == c.tp
                    own["tp"] = _placement(model, division, class_name, parameter.tensor) if of_tp else "Replicate"
                if c.ep > 1:
                    own["ep"] = "Replicate" if numbered is None else f"Shard({numbered})"
                found[prefix + parameter.name] = own
    return found


def _expert_dim(model: Model, class_name: str, tensor: int) -> int | None:
    """The dim that numbers experts."""
    dims = model.graph.class_by_name[class_name].tensor_by_id[tensor].dims
    experts = model.prices.experts[class_name]
    return next((number for number, atoms in enumerate(dims) if experts & set(atoms)), None)


def loss_is_parallel(model: Model, c: Configuration) -> bool:
    """Whether the loss sees logits divided along the vocabulary."""
    if c.tp == 1:
        return False
    ends = [chain.epilogue for chain in model.graph.chains if chain.epilogue]
    return any(model.prices.division(end, c.tp, c.sp).composites for end in ends)


def shares(model: Model, c: Configuration) -> dict[str, Literal["gradient", "value"]]:
    """Whole parameters of which each tp rank sees only its share (`Plan.shares`); empty without tp."""
    found: dict[str, Literal["gradient", "value"]] = {}
    for prefix, class_name in _places(model) if c.tp > 1 else ():
        division = model.prices.division(class_name, c.tp, c.sp)
        block_class = model.graph.class_by_name[class_name]
        added = {
            read
            for operator in block_class.operators
            if any(division.states.get(write) == PARTIAL for write in operator.writes) and not is_view(operator)
            for read in operator.reads
        }
        for parameter in block_class.parameters:
            if parameter.tensor is not None and division.states.get(parameter.tensor) == WHOLE_PARTIAL_GRADIENT:
                found[prefix + parameter.name] = "value" if parameter.tensor in added else "gradient"
    return found


def conversions(model: Model, c: Configuration) -> tuple[Conversion, ...]:
    """Where a tensor's state changes on tp, forward; rows that go to their experts and back, keys and values that cp gathers."""
    found = [*_exchanges(model, c)]
    for prefix, class_name in _places(model) if c.tp > 1 else ():
        division = model.prices.division(class_name, c.tp, c.sp)
        for item in division.conversions:
            module = (prefix + item.site.module).rstrip(".")
            site = SiteRef(module=module, where=item.site.where, argument=item.site.argument)
            gradient = {"R*": "share", "R": "whole"}.get(item.target.kind)
            found.append(
                Conversion.model_validate(
                    {
                        "site": site,
                        "axis": "tp",
                        "forward": item.forward,
                        "dim": item.dim,
                        "gradient": gradient,
                        "within": _within(model, class_name, item, c.tp),
                    }
                )
            )
    return tuple(one for number, one in enumerate(found) if one not in found[:number])  # calls of one module are alike


def _within(model: Model, class_name: str, item: SiteConversion, degree: int) -> int | None:
    """The length of a divided index that shares its dim with the batch, at the source of a conversion."""
    divided = item.source if item.source.kind == "S" else item.target
    if divided.kind != "S" or divided.atom == 0:
        return None
    sizes = model.graph.sizes(1, model.prices.request.seq_len)
    atoms = model.graph.class_by_name[class_name].tensor_by_id[item.site.tensor].dims[divided.dim]
    return prod(sizes[atom] for atom in atoms[divided.atom :]) // (degree if divided is item.source else 1)


def _exchanges(model: Model, c: Configuration) -> Iterator[Conversion]:
    for prefix, class_name in _places(model):
        block_class = model.graph.class_by_name[class_name]
        forward = [operator for operator in block_class.operators if operator.phase == "forward"]
        attentions = [op.module for op in forward if op.name.startswith("autopar.attention")] if c.cp > 1 else []
        experts = [op.module for op in forward if "grouped" in op.name][:1] if c.ep > 1 else []
        for module in attentions:
            for argument in (1, 2):
                site = SiteRef(module=(prefix + module).rstrip("."), where="attention", argument=argument)
                yield Conversion(site=site, axis="cp", forward="all_gather", dim=2, gradient="share")
        for module in experts:
            for where in ("input", "output"):
                site = SiteRef.model_validate({"module": (prefix + module).rstrip("."), "where": where})
                yield Conversion(site=site, axis="ep", forward="all_to_all", dim=0)


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
        # A model without blocks is one block without a name; one that is itself a container has blocks "0", "1", ...
        blocks = f"{chain.name}.*.".removeprefix(".")
        yield blocks if chain.modules != ("",) else "", chain.runs[0].block_class
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
