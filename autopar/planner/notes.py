"""What a Plan says in words: what carries it out, what was assumed, which divisions change results."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.documents.plan import NOT_RUNNABLE
from autopar.legality import beyond_runtime
from autopar.planner.case import Case
from autopar.planner.edges import why_uncut
from hardware_profiles.chip import normal_dtype


def notes(case: Case) -> Iterator[str]:
    """All but what mixes the batch: the carrier's, the chip's, the capture's."""
    yield from _carrier(case)
    dtype, chip = normal_dtype(case.model.request.dtype), case.model.chip
    if dtype not in chip.teraflops:
        yield f"{chip.name} has no {dtype} arithmetic: priced as if run wider; it has {', '.join(chip.teraflops)} (--dtype)"
    for note in case.model.graph.notes:
        if note.kind != "mixes_batch":
            yield f"{note.where}: {note.message}"


def numerics(case: Case) -> Iterator[str]:
    """What mixes the batch, and which of the plan's divisions change what comes of it."""
    c = case.c
    parts = [f"{name}={size}" for name, size in (("dp", c.dp), ("cp", c.cp)) if size > 1]
    parts += [f"{c.micro_batches} micro-batches"] if c.micro_batches > 1 else []
    verb = "does" if len(parts) == 1 and c.micro_batches == 1 else "do"
    said = f"here {' and '.join(parts)} {verb} so" if parts else "nothing here does so"
    for note in case.model.graph.notes:
        if note.kind == "mixes_batch":
            yield f"{note.where}: {note.message} ({said})"


def not_runnable(case: Case) -> str | None:
    """Why `autopar run` does not carry a configuration out; None where it does."""
    c, request = case.c, case.model.request
    beyond = beyond_runtime(c.cp, c.ep, c.etp if case.model.prices.expert_count else c.tp, c.tp)
    made = f"made and priced for {request.target}" if request.target != "run" else None
    uncut = why_uncut(case.model.graph) if c.pp > 1 else None
    return "; ".join(filter(None, (made, beyond, uncut))) or None


def _carrier(case: Case) -> Iterator[str]:
    """What runs the plan, and what another target would offer."""
    if (reason := not_runnable(case)) is not None:
        yield f"{NOT_RUNNABLE}: {reason}"
    elif case.model.prices.expert_count:
        yield "ep is not offered: autopar run does not carry it out; --target megatron searches over ep, etp and cp"
    request = case.model.request
    if case.c.pp == 1 and not request.picks("pp") and (uncut := why_uncut(case.model.graph)) is not None:
        yield f"pp is not offered: {uncut}; --fix pp=N plans it all the same"
    imbalance = request.moe_imbalance
    if imbalance > 1:
        yield f"assumed: the most loaded of the ep={case.c.ep} ranks gets {min(imbalance, case.c.ep):g} times the mean's tokens"
