"""What a plan may not be, and why: rules shared by planner, runtime and exporters. No torch.

Every rule returns the reason in words, with the arithmetic, or None.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

SPLIT_BACKWARD = ("interleaved_zero_bubble", "zbv", "dualpipev")
"""Schedules that run input and weight gradients apart."""


@dataclass(frozen=True)
class Choices:
    """The numbers that rules look at; `blocks` is the number of blocks of all chains together."""

    devices: int
    global_batch: int
    blocks: int
    pp: int
    dp: int
    tp: int
    micro_batch: int
    schedule: str
    virtual_stages: int = 1
    zero: int = 0
    cp: int = 1
    ep: int = 1
    etp: int = 1
    sp: bool = False
    seq_len: int | None = None
    experts: int | None = None
    """Routed experts of a block, 0 without any; None, like a `seq_len` of None: not looked at."""

    @property
    def micro_batches(self) -> int:
        """Micro-batches per step on each dp rank."""
        return self.global_batch // (self.dp * self.micro_batch)


def problems(c: Choices) -> Iterator[str]:
    """Every rule that the choices break."""
    yield from (reason for rule in RULES if (reason := rule(c)) is not None)


def degrees_multiply(c: Choices) -> str | None:
    """The mesh has as many ranks as there are devices."""
    product = c.pp * c.dp * c.cp * c.tp
    if product == c.devices:
        return None
    cp = f" * cp({c.cp})" if c.cp > 1 else ""
    return f"pp({c.pp}) * dp({c.dp}){cp} * tp({c.tp}) = {product}, but there are {c.devices} devices"


def batch_divides(c: Choices) -> str | None:
    """Every dp rank gets whole micro-batches of equal size."""
    if c.global_batch % (c.dp * c.micro_batch) == 0:
        return None
    return (
        f"global_batch({c.global_batch}) is not a multiple of dp({c.dp}) * micro_batch({c.micro_batch}) = "
        f"{c.dp * c.micro_batch}"
    )


def enough_blocks(c: Choices) -> str | None:
    """Every virtual stage holds at least one block."""
    stages = c.pp * c.virtual_stages
    if stages <= c.blocks:
        return None
    return f"pp({c.pp}) * virtual_stages({c.virtual_stages}) = {stages} stages, but the model has {c.blocks} blocks"


def schedule_fits(c: Choices) -> str | None:
    """1F1B needs a micro-batch for every stage; interleaving needs full rounds of them and several chunks."""
    m = c.micro_batches
    if c.schedule == "1f1b":
        if c.virtual_stages != 1:
            return f"1f1b has one chunk per stage, but virtual_stages is {c.virtual_stages}; use schedule=interleaved"
        if m < c.pp:
            return f"1f1b needs micro_batches({m}) >= pp({c.pp}); use a smaller micro-batch, less dp, or schedule=gpipe"
    if c.schedule == "gpipe" and c.virtual_stages != 1:
        return f"gpipe has one chunk per stage, but virtual_stages is {c.virtual_stages}"
    if c.schedule == "interleaved":
        if c.virtual_stages < 2 or c.pp < 2:
            return f"interleaved needs virtual_stages >= 2 and pp >= 2, given {c.virtual_stages} and {c.pp}"
        if m % c.pp:
            return f"interleaved needs micro_batches({m}) to be a multiple of pp({c.pp})"
    return None


def zero_fits(c: Choices) -> str | None:
    """ZeRO divides over dp; gathering under a split backward gives wrong gradients in torch 2.13 (tested)."""
    if c.zero > 0 and c.dp == 1:
        return f"zero={c.zero} divides states over dp, but dp is 1"
    if c.zero == 3 and c.schedule in SPLIT_BACKWARD:
        return (
            f"{c.schedule} runs input and weight gradients apart: with zero=3 gradients would be wrong; use zero <= 2"
        )
    return None


def sequence_divides(c: Choices) -> str | None:
    """Each cp rank holds an early and a late piece of every sequence, so that causal work is even; sp divides what it holds."""
    if c.seq_len is None:
        return None
    if c.cp > 1 and c.seq_len % (2 * c.cp):
        return f"seq_len({c.seq_len}) is not a multiple of 2 * cp({c.cp}): each rank holds an early and a late piece"
    if c.sp and c.seq_len % (c.cp * c.tp):
        return f"seq_len({c.seq_len}) is not a multiple of cp({c.cp}) * tp({c.tp}), over which sp divides it"
    return None


def experts_fit(c: Choices) -> str | None:
    """Ep divides the experts and dp_shard * cp * tp, and does not multiply; etp is 1 or tp."""
    if c.experts == 0 and c.ep > 1:
        return f"ep({c.ep}) divides routed experts, and the model has none that are computed as grouped products"
    if c.experts and c.experts % c.ep:
        return f"ep({c.ep}) does not divide the {c.experts} experts of a block"
    if (c.dp * c.cp * c.tp) % (c.ep * c.etp):
        return f"ep({c.ep}) * etp({c.etp}) does not divide dp({c.dp}) * cp({c.cp}) * tp({c.tp}) = {c.dp * c.cp * c.tp}"
    if c.etp not in (1, c.tp):
        return f"etp({c.etp}) must be 1 or tp({c.tp})"
    return None


RULES = (degrees_multiply, batch_divides, zero_fits, schedule_fits, enough_blocks, sequence_divides, experts_fit)


def beyond_runtime(cp: int, ep: int, etp: int, tp: int) -> str | None:
    """What of a mesh this package's runtime does not carry out; None where it carries out all of it.

    `etp` tells nothing where a model has no experts: give tp.
    """
    found = [f"{name}={size}" for name, size in (("cp", cp), ("ep", ep)) if size > 1]
    if etp != tp:
        found.append(f"etp={etp} under tp={tp}")
    return ", ".join(found) + " (it carries out pp, dp and tp)" if found else None
