"""The configurations: every legal (pp, tp, sp, cp, ep, etp, dp, micro-batch, schedule, virtual stages, ZeRO) of a request.

Degrees are any divisors. 1F1B wherever it is legal; GPipe under every pipeline: it keeps more, but hides its sends. Interleaved
with every number of chunks that leaves each one block or more, where all blocks are of one class.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from autopar.errors import RequestError
from autopar.legality import Choices, experts_fit, problems, sequence_divides
from autopar.planner.request import Request
from cost_models.in_flight import Schedule


class Inside(NamedTuple):
    """What divides a block's inside."""

    tp: int = 1
    sp: bool = False
    cp: int = 1
    ep: int = 1
    etp: int = 1


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
    def inside(self) -> Inside:
        """What divides a block's inside."""
        return Inside(self.tp, self.sp, self.cp, self.ep, self.etp)

    @property
    def replicas(self) -> int:
        """Ranks that hold the same parameters: dp times cp."""
        return self.dp * self.cp

    @property
    def shards(self) -> int:
        """Ranks that divide states: all replicas, unless the group is stated."""
        return min(self.zero_group or self.replicas, self.replicas)

    @property
    def expert_replicas(self) -> int:
        """Ranks that hold the same experts."""
        return max(1, self.replicas * self.tp // (self.ep * self.etp))


@dataclass(frozen=True)
class Offer:
    """What a model and its machine let the space hold."""

    devices: int
    blocks: int
    tp_degrees: Mapping[int, tuple[bool, ...]]
    """Degree -> which of sp (False, True) the model's division allows."""
    is_equal: bool = True
    """Whether all blocks are of one class."""
    experts: int = 0
    """Routed experts of a block."""
    is_divisible_by_cp: bool = True
    is_cut: bool = True
    """Whether whoever carries the plan out can cut a pipeline from the model."""
    reach: int = 1
    """Devices that reach each other without the network: tp and cp together stay within them, unless fixed."""


class Prefix(NamedTuple):
    """Configurations that differ in schedule, chunks and ZeRO only."""

    pp: int
    dp: int
    inside: Inside
    micro_batch: int
    micro_batches: int


def prefixes(request: Request, offer: Offer) -> list[Prefix]:
    """All that hold a configuration. Raises RequestError, with the arithmetic, when what is fixed leaves none."""
    found = [
        prefix
        for inside in _insides(request, offer)
        for pp, dp in _degrees(request, offer, inside)
        for micro_batch, m in _micro_batches(request, dp)
        if any(expand(request, offer, prefix := Prefix(pp, dp, inside, micro_batch, m)))
    ]
    if not found:
        chunks = request.value("virtual_stages") or 1
        if not offer.is_equal and (request.fixed.get("schedule") == "interleaved" or chunks > 1):
            raise RequestError(
                "schedule=interleaved: this version interleaves blocks of one class only, and this model's blocks differ; "
                "use 1f1b or gpipe"
            )
        raise RequestError(_why_none(request, offer))
    return found


def expand(request: Request, offer: Offer, prefix: Prefix) -> Iterator[Configuration]:
    """The configurations of a prefix."""
    pp, dp, (tp, sp, cp, ep, etp), micro_batch, m = prefix
    for schedule, v in _schedules(request, pp, m, offer.blocks if offer.is_equal else pp):
        for zero in _zeros(request, dp):
            yield Configuration(pp, tp, sp, dp, micro_batch, m, schedule, v, zero, cp, ep, etp)


def configurations(request: Request, offer: Offer) -> list[Configuration]:
    """Every legal configuration. Raises as `prefixes` does."""
    return [c for prefix in prefixes(request, offer) for c in expand(request, offer, prefix)]


def divisors(number: int) -> list[int]:
    """Divisors in rising order."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def _insides(request: Request, offer: Offer) -> Iterator[Inside]:
    for tp, sps in offer.tp_degrees.items():
        if offer.devices % tp or not _wanted(request, "tp", tp):
            continue
        for sp in sps:
            if not request.allows("sp", int(sp)) or (sp and "sp" in request.forbidden):
                continue
            for cp in _offered(request, offer, "cp", max(1, offer.reach // tp)):
                for ep in _offered(request, offer, "ep", offer.experts or 1):
                    if request.carrier.ep_needs_sp and ep > 1 and tp > 1 and not sp:
                        continue
                    for etp in _etps(request, offer, tp):
                        yield Inside(tp, sp, cp, ep, etp)


def _offered(request: Request, offer: Offer, axis: str, most: int) -> list[int]:
    """Degrees of cp or ep: the fixed one, else what the target carries out."""
    if (fixed := request.value(axis)) is not None:
        return [fixed]
    if axis not in request.carrier.axes or axis in request.forbidden:
        return [1]
    return [d for d in divisors(offer.devices) if d <= most]


def _etps(request: Request, offer: Offer, tp: int) -> list[int]:
    """Tp inside experts: as outside, or none."""
    if (fixed := request.value("etp")) is not None:
        return [fixed]
    return list(dict.fromkeys((tp, 1))) if offer.experts and "etp" in request.carrier.axes else [tp]


def _degrees(request: Request, offer: Offer, inside: Inside) -> Iterator[tuple[int, int]]:
    """(pp, dp) beside what divides a block's inside."""
    tp, _, cp, _, _ = inside
    if offer.devices % (tp * cp) or (cp > 1 and not offer.is_divisible_by_cp):
        return
    for pp in divisors(offer.devices // tp // cp):
        dp = offer.devices // tp // cp // pp
        if (
            pp <= offer.blocks
            and (pp == 1 or offer.is_cut or "pp" in request.fixed)
            and _wanted(request, "pp", pp)
            and _wanted(request, "dp", dp)
            and request.global_batch % dp == 0
            and _breaks(request, offer, pp, dp, inside) is None
        ):
            yield pp, dp


def _breaks(request: Request, offer: Offer, pp: int, dp: int, inside: Inside) -> str | None:
    """The rule of sequences or experts that degrees break."""
    tp, sp, cp, ep, etp = inside
    choices = Choices(
        offer.devices, request.global_batch, offer.blocks, pp, dp, tp, 1, "1f1b", cp=cp, ep=ep, etp=etp, sp=sp,
        seq_len=request.seq_len, experts=offer.experts,
    )  # fmt: skip
    return sequence_divides(choices) or experts_fit(choices)


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
        is_offered = name in request.carrier.schedules or request.fixed.get("schedule") == name
        if (
            is_offered
            and request.allows("schedule", name)
            and request.allows("virtual_stages", v)
            and name not in request.forbidden
        ):
            yield name, v


def _zeros(request: Request, dp: int) -> Iterator[int]:
    for zero in range(4) if "zero" in request.fixed else request.carrier.zeros:
        if (zero == 0 or dp > 1) and request.allows("zero", zero) and not (zero > 0 and "zero" in request.forbidden):
            yield zero


def _why_none(request: Request, offer: Offer) -> str:
    """The conflicting set: the fixed choices with the rule that they break."""
    fixed = {key: value for key, value in request.fixed.items() if isinstance(value, int)}
    tp, pp, cp = (fixed.get(axis, 1) for axis in ("tp", "pp", "cp"))
    said = ", ".join(
        [*(f"{key}={value}" for key, value in request.fixed.items()), *(f"no {key}" for key in request.forbidden)]
    )
    said = said or "nothing fixed"
    virtual = fixed.get("virtual_stages")
    usual = "interleaved" if virtual is not None and virtual > 1 else "1f1b"
    devices, product = offer.devices, pp * cp * tp
    if devices % product:
        words = f"pp({pp}) * {f'cp({cp}) * ' if cp > 1 else ''}tp({tp})"
        return f"{words} = {product} does not divide the {devices} devices"
    if "tp" in fixed and tp not in offer.tp_degrees:
        return (
            f"tp={tp}: the model has no division by {tp}: heads, feed-forward and hidden sizes must be multiples of it"
        )
    if cp > 1 and not offer.is_divisible_by_cp:
        return f"cp={cp}: blocks of this model mix positions of a sequence outside of fused attention, which cp does not divide"
    dp = fixed.get("dp", devices // product)
    choices = Choices(
        devices=devices,
        global_batch=request.global_batch,
        blocks=offer.blocks,
        pp=pp if "pp" in fixed else max(1, devices // (tp * cp * dp)),
        dp=dp,
        tp=tp,
        micro_batch=fixed.get("micro_batch", 1),
        schedule=str(request.fixed.get("schedule", usual)),
        virtual_stages=virtual or (2 if request.fixed.get("schedule") == "interleaved" else 1),
        zero=fixed.get("zero", 0),
        cp=cp,
        ep=fixed.get("ep", 1),
        etp=fixed.get("etp", tp),
        sp=bool(fixed.get("sp")),
        seq_len=request.seq_len,
        experts=offer.experts,
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
