"""What is asked of the planner, checked: sizes, what is fixed, what is forbidden."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

from autopar.errors import RequestError
from autopar.planner.targets import TARGETS, Target
from cost_models.memory import OPTIMIZERS
from hardware_profiles.chip import DTYPE_NAMES, normal_dtype
from hardware_profiles.schema import did_you_mean

NUMBERS = ("pp", "tp", "cp", "ep", "etp", "dp", "zero", "micro_batch", "virtual_stages", "sp")
WORDS = {"schedule": ("gpipe", "1f1b", "interleaved"), "recompute": ("none", "selective", "full"),
         "kernels": ("eager", "compiled", "fused")}  # fmt: skip
FORBIDDABLE = ("pp", "tp", "cp", "ep", "dp", "sp", "zero", "recompute", "gpipe", "interleaved")
MOST_SEQUENCES, MOST_TOKENS = 1_000_000, 10**9
"""Of a step and of a sequence. A prime number of sequences is that many micro-batches: more could not be simulated."""

Kernels = Literal["eager", "compiled", "fused"]


@dataclass(frozen=True)
class Request:
    """A request whose parts agree; `fixed` holds numbers and words by key."""

    global_batch: int
    seq_len: int
    dtype: str = "bf16"
    optimizer: str = "adamw"
    kernels: Kernels = "eager"
    objective: str = "time"
    fixed: Mapping[str, int | str] = field(default_factory=dict)
    forbidden: tuple[str, ...] = ()
    devices: int | None = None
    time_limit: float | None = None
    memory_margin: float = 0.05
    moe_imbalance: float = 1.0
    """Rows of the most loaded ep rank over the mean: an assumption about the router."""
    refused: tuple[tuple[int, bool], ...] = ()
    """(tp, sp) that a dry run showed the model's code not to accept."""
    target: str = "run"
    """Who carries the plan out (`targets`)."""
    executor: str = "autopar"
    """Whose habits are priced (`cost_models.executors`): the target's, unless a caller states another."""
    loss_parallel: bool = True
    """Whether the loss may see logits divided along the vocabulary; a dry run shows where its code does not accept them."""
    whole_prologue: bool = False
    """Whether sequences stay whole before the first block; a dry run shows where code there does not accept parts."""
    whole_modules: tuple[tuple[int, str], ...] = ()
    """(tp, module): modules whose code a dry run showed not to accept parts of its tensors; their matrices stay whole."""

    @classmethod
    def parse(cls, *, fixed: Mapping[str, Any], forbidden: Sequence[str], **values: Any) -> Request:
        """Check every part. Raises RequestError."""
        request = cls(fixed=dict(check_fixed(fixed)), forbidden=tuple(forbidden), **values)
        kernels = request.fixed.get("kernels", request.kernels)
        if request.target not in TARGETS:
            raise RequestError(
                f"target {request.target}: unknown{did_you_mean(request.target, TARGETS)}; allowed: {', '.join(TARGETS)}"
            )
        request = replace(request, kernels=cast(Kernels, kernels), executor=TARGETS[request.target].executor)
        _check(request)
        return request

    def without(self, refused: tuple[tuple[int, bool], ...]) -> Request:
        """The request with some (tp, sp) left out."""
        return replace(self, refused=refused)

    def picks(self, axis: str) -> bool:
        """Whether a degree is fixed or forbidden."""
        return axis in self.fixed or axis in self.forbidden

    @property
    def carrier(self) -> Target:
        """Who carries the plan out."""
        return TARGETS[self.target]

    def value(self, key: str) -> int | None:
        """A fixed number."""
        found = self.fixed.get(key)
        return found if isinstance(found, int) else None

    def allows(self, key: str, value: int | str) -> bool:
        """Whether a choice is neither fixed to something else nor forbidden."""
        return self.fixed.get(key, value) == value


def parse_fixed(text: str) -> dict[str, str]:
    """``tp=8,pp=4`` as a mapping. Raises RequestError."""
    found: dict[str, str] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals or not key or not value:
            raise RequestError(f"--fix {item}: give it as key=value, for example tp=8")
        if key in found and found[key] != value:
            raise RequestError(f"--fix: {key} is fixed to both {found[key]} and {value}")
        found[key] = value
    return found


def parse_names(text: str) -> tuple[str, ...]:
    """``pp,recompute`` as names. Raises RequestError."""
    names = tuple(filter(None, (part.strip() for part in text.split(","))))
    for name in names:
        if name not in FORBIDDABLE:
            raise RequestError(
                f"--forbid {name}: unknown{did_you_mean(name, FORBIDDABLE)}; allowed: {', '.join(FORBIDDABLE)}"
            )
    return names


def check_fixed(fixed: Mapping[str, Any]) -> dict[str, int | str]:
    """Known keys with values of their kind; dp_replicate and dp_shard become dp. Raises RequestError."""
    found: dict[str, int | str] = {}
    for key, value in fixed.items():
        if key in WORDS:
            if value not in WORDS[key]:
                raise RequestError(
                    f"fixed {key}={value}: unknown{did_you_mean(str(value), WORDS[key])}; allowed: {', '.join(WORDS[key])}"
                )
            found[key] = str(value)
        elif key in (*NUMBERS, "dp_replicate", "dp_shard"):
            found[key] = _number(key, value)
        else:
            allowed = (*NUMBERS, "dp_replicate", "dp_shard", *WORDS)
            raise RequestError(f"fixed {key}: unknown{did_you_mean(key, allowed)}; allowed: {', '.join(allowed)}")
    return _with_dp(found)


def _number(key: str, value: Any) -> int:
    try:
        number = int(value)
    except (TypeError, ValueError):
        raise RequestError(f"fixed {key}={value}: must be a whole number") from None
    least = 0 if key in ("zero", "sp") else 1
    most = {"zero": 3, "sp": 1}.get(key)
    if number < least or (most is not None and number > most):
        raise RequestError(
            f"fixed {key}={number}: must be {f'{least} to {most}' if most is not None else f'at least {least}'}"
        )
    return number


def _with_dp(found: dict[str, int | str]) -> dict[str, int | str]:
    """HSDP is not planned yet: one of the two data-parallel degrees is 1, so their product is dp."""
    replicate, shard = found.pop("dp_replicate", None), found.pop("dp_shard", None)
    if replicate is None and shard is None:
        return found
    if replicate not in (None, 1) and shard not in (None, 1):
        raise RequestError("fixed dp_replicate and dp_shard: this version uses one of them; give dp and zero instead")
    if replicate not in (None, 1) and found.setdefault("zero", 0) != 0:
        raise RequestError(f"fixed dp_replicate={replicate} replicates states, but zero={found['zero']} divides them")
    product = int(replicate or 1) * int(shard or 1)
    if product > 1 and found.setdefault("dp", product) != product:
        raise RequestError(f"fixed dp_replicate * dp_shard = {product}, but dp={found['dp']}")
    return found


def _check(request: Request) -> None:
    if request.optimizer not in OPTIMIZERS:
        raise RequestError(
            f"optimizer {request.optimizer}: unknown{did_you_mean(request.optimizer, OPTIMIZERS)}; "
            f"allowed: {', '.join(OPTIMIZERS)}"
        )
    if request.dtype not in DTYPE_NAMES:
        raise RequestError(f"dtype {request.dtype}: unknown{did_you_mean(request.dtype, DTYPE_NAMES)}")
    normal_dtype(request.dtype)
    for key in ("pp", "tp", "cp", "ep", "dp", "sp"):
        least = 0 if key == "sp" else 1
        if key in request.forbidden and int(request.fixed.get(key, least)) > least:
            raise RequestError(f"{key} is both forbidden and fixed to {request.fixed[key]}")
    if "recompute" in request.forbidden and request.fixed.get("recompute", "none") != "none":
        raise RequestError(f"recompute is both forbidden and fixed to {request.fixed['recompute']}")
    if request.fixed.get("schedule") in request.forbidden:
        raise RequestError(f"schedule {request.fixed['schedule']} is both forbidden and fixed")
    if "zero" in request.forbidden and request.fixed.get("zero", 0):
        raise RequestError(f"zero is both forbidden and fixed to {request.fixed['zero']}")
    for name, given, most in (
        ("global batch", request.global_batch, MOST_SEQUENCES),
        ("seq_len", request.seq_len, MOST_TOKENS),
    ):
        if not 1 <= given <= most:
            raise RequestError(f"{name} {given}: must be between 1 and {most:,}")
    if request.devices is not None and request.devices < 1:
        raise RequestError(f"devices {request.devices}: must be at least 1")
    if not 0 <= request.memory_margin < 1:
        raise RequestError(f"memory margin {request.memory_margin}: must be at least 0 and below 1")
    if not 1 <= request.moe_imbalance < math.inf:
        raise RequestError(
            f"moe imbalance {request.moe_imbalance}: the most loaded rank's tokens over the mean, so at least 1; "
            "1 is a perfectly balanced router"
        )
    if request.time_limit is not None and not request.time_limit > 0:
        raise RequestError(f"time limit {request.time_limit}: must be above 0 seconds")
    if request.objective != "time":
        raise RequestError(f"objective {request.objective}: this version plans for time")
