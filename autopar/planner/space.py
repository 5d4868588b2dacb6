"""The configurations: every legal (pp, tp, sp, dp, micro-batch, schedule, virtual stages, ZeRO) of a request.

Degrees are any divisors. 1F1B wherever it is legal; GPipe under every pipeline: it keeps more, but hides its sends. Interleaved
with every number of chunks that leaves each one block or more, where all blocks are of one class.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from autopar.errors import RequestError
from autopar.legality import Choices, problems
from autopar.planner.request import Request
from cost_models.in_flight import Schedule


class Configuration(NamedTuple):
    """One point of the space, before blocks are given to stages."""

    pp: int
    tp: int
    sp: bool
    dp: int
    micro_batch: int
    micro_batches: int
    schedule: Schedule
    virtual_stages: int
    zero: int
    cp: int = 1
    ep: int = 1
    etp: int = 1
    zero_group: int | None = None
    """Priced where a caller states it; the search does not offer it."""

    @property
    def replicas(self) -> int:
        """Ranks that hold the same parameters: dp times cp."""
        return self.dp * self.cp

    @property
    def shards(self) -> int:
        """Ranks that divide states: all replicas, unless the group is stated."""
        return min(self.zero_group or self.replicas, self.replicas)


def configurations(
    request: Request, devices: int, blocks: int, tp_degrees: dict[int, tuple[bool, ...]], is_equal: bool = True
) -> list[Configuration]:
    """Every legal configuration; `tp_degrees`: degree -> which of sp (False, True) the model's division allows.

    `is_equal`: whether all blocks are of one class.

    Raises RequestError, with the arithmetic, when what is fixed leaves none.
    """
    found = [
        Configuration(pp, tp, sp, dp, micro_batch, m, schedule, v, zero, etp=tp)
        for pp, tp, dp in _degrees(request, devices, blocks, tuple(tp_degrees))
        for sp in tp_degrees[tp]
        if request.allows("sp", int(sp)) and not (sp and "sp" in request.forbidden)
        for micro_batch, m in _micro_batches(request, dp)
        for schedule, v in _schedules(request, pp, m, blocks if is_equal else pp)
        for zero in _zeros(request, dp)
    ]
    if not found:
        chunks = request.value("virtual_stages") or 1
        if not is_equal and (request.fixed.get("schedule") == "interleaved" or chunks > 1):
            raise RequestError(
                "schedule=interleaved: this version interleaves blocks of one class only, and this model's blocks differ; "
                "use 1f1b or gpipe"
            )
        raise RequestError(_why_none(request, devices, blocks, tuple(tp_degrees)))
    return found


def divisors(number: int) -> list[int]:
    """Divisors in rising order."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def _degrees(request: Request, devices: int, blocks: int, tps: tuple[int, ...]) -> Iterator[tuple[int, int, int]]:
    for tp in tps:
        if devices % tp or not _wanted(request, "tp", tp):
            continue
        for pp in divisors(devices // tp):
            dp = devices // tp // pp
            if (
                pp <= blocks
                and _wanted(request, "pp", pp)
                and _wanted(request, "dp", dp)
                and request.global_batch % dp == 0
            ):
                yield pp, tp, dp


def _wanted(request: Request, key: str, value: int) -> bool:
    return request.allows(key, value) and not (value > 1 and key in request.forbidden)


def _micro_batches(request: Request, dp: int) -> Iterator[tuple[int, int]]:
    each = request.global_batch // dp
    for micro_batch in divisors(each):
        if request.allows("micro_batch", micro_batch):
            yield micro_batch, each // micro_batch


def _schedules(request: Request, pp: int, m: int, blocks: int) -> Iterator[tuple[Schedule, int]]:
    offered: list[tuple[Schedule, int]] = []
    if m >= pp:
        offered.append(("1f1b", 1))
    if pp > 1 or request.fixed.get("schedule") == "gpipe":
        offered.append(("gpipe", 1))
    if pp > 1 and m % pp == 0:
        offered += [("interleaved", v) for v in range(2, blocks // pp + 1)]
    for name, v in offered:
        if request.allows("schedule", name) and request.allows("virtual_stages", v) and name not in request.forbidden:
            yield name, v


def _zeros(request: Request, dp: int) -> Iterator[int]:
    for zero in range(4):
        if (zero == 0 or dp > 1) and request.allows("zero", zero) and not (zero > 0 and "zero" in request.forbidden):
            yield zero


def _why_none(request: Request, devices: int, blocks: int, tps: tuple[int, ...]) -> str:
    """The conflicting set: the fixed choices with the rule that they break."""
    fixed = {key: value for key, value in request.fixed.items() if isinstance(value, int)}
    tp, pp = fixed.get("tp", 1), fixed.get("pp", 1)
    said = ", ".join(
        [*(f"{key}={value}" for key, value in request.fixed.items()), *(f"no {key}" for key in request.forbidden)]
    )
    said = said or "nothing fixed"
    virtual = fixed.get("virtual_stages")
    usual = "interleaved" if virtual is not None and virtual > 1 else "1f1b"
    if devices % (tp * pp):
        return f"pp({pp}) * tp({tp}) = {pp * tp} does not divide the {devices} devices"
    if "tp" in fixed and tp not in tps:
        return (
            f"tp={tp}: the model has no division by {tp}: heads, feed-forward and hidden sizes must be multiples of it"
        )
    dp = fixed.get("dp", devices // (tp * pp))
    choices = Choices(
        devices=devices,
        global_batch=request.global_batch,
        blocks=blocks,
        pp=pp if "pp" in fixed else max(1, devices // (tp * dp)),
        dp=dp,
        tp=tp,
        micro_batch=fixed.get("micro_batch", 1),
        schedule=str(request.fixed.get("schedule", usual)),
        virtual_stages=virtual or (2 if request.fixed.get("schedule") == "interleaved" else 1),
        zero=fixed.get("zero", 0),
    )
    broken = next(problems(choices), None)
    if broken is None and request.fixed.get("sp"):
        broken = f"sp=1 divides the sequence over tp, and the model has no such division at tp={fixed.get('tp', '2 or more')}"
    if broken is None:
        broken = (
            f"what is left of pp * dp * tp does not make {devices} devices with a dp that divides "
            f"global_batch({request.global_batch}); fix or forbid less, or change --devices or --global-batch"
        )
    return f"no configuration is left ({said}): {broken}"
