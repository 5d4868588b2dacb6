"""Executors: what a training framework does differently from the next one, and defaults for what a run does not state.

A published run is priced under its framework's executor; the chip, the cluster and the kernels are all else that
differs between runs. `autopar` is this package's own runtime, whose habits are those of torch's FSDP2 and of
torchtitan.

Sources: Megatron-LM (arXiv 2104.04473, 2205.05198), DeepSpeed ZeRO (arXiv 1910.02054), torch FSDP (arXiv 2304.11277),
torchtitan (arXiv 2410.06511); fractions hidden are what published step times of each framework allow, rounded to 0.05.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hardware_profiles.errors import ProfileError
from hardware_profiles.schema import did_you_mean


@dataclass(frozen=True)
class Executor:
    """Behaviour of one training framework."""

    name: str
    kernels: Literal["eager", "compiled", "fused"]
    """Default kernels of the framework."""
    attention: Literal["flash", "explicit"]
    sequence_parallel: bool
    """Whether tensor parallelism comes with sequence parallelism by default."""
    saves_gathered_input: bool
    """Under sequence parallelism the gathered input of a column-wise linear is kept for backward (torch's DTensor), not
    the divided one that is gathered again (Megatron)."""
    zero: Literal[0, 1, 2, 3]
    """Default division of states over dp."""
    tp_overlap: float
    """Fraction of tensor-parallel collectives that hides behind compute."""
    dp_overlap: float
    """Fraction of data-parallel collectives that hides behind compute, where there is compute to hide behind."""
    ends_exposed: bool
    """The first gather and the last reduction of a step stand alone."""
    accumulation_bytes: float
    """Memory traffic per parameter and micro-batch to add a gradient to its accumulator; 0 where the GEMM does it."""
    host_factor: float
    """Host time per operator relative to the chip's `host_us`."""
    checkpoint_seconds: float
    """Host time for each recomputed block and micro-batch."""
    collective_seconds: float
    """Host time for each tensor-parallel collective."""
    broadcast_seconds: float = 0.0
    """Per dp rank and step: parameters sent out rank by rank after the update."""
    cp_overlap: float = 0.0
    """Fraction of the exchange of keys and values that hides behind attention."""
    reduce_bytes: float = 4.0
    """Bytes per gradient element in the reduction over dp."""
    selective_products: float = 0.0
    """Share of the kept matrix products that selective recompute runs again all the same."""
    attention_kernel: Literal["flash", "cudnn"] | None = None
    """None: the one that comes with the kernels."""
    micro_batches_from_stages: bool = False
    """Under a pipeline a rank's batch is cut into as many micro-batches as there are stages, where nothing else is said."""
    cast_share: float = 1.0
    """Share of the casts to fp8 that is traffic of its own, not fused into the operator before."""


EXECUTORS = {
    item.name: item
    for item in (
        Executor("autopar", "eager", "flash", True, True, 1, 0.0, 0.9, True, 12.0, 1.0, 100e-6, 15e-6),
        Executor("torchtitan", "compiled", "flash", True, True, 3, 0.0, 0.9, True, 0.0, 1.0, 100e-6, 15e-6),
        Executor("megatron", "fused", "flash", True, False, 1, 0.9, 0.5, False, 0.0, 1.0, 100e-6, 10e-6),
        Executor("megatron_2022", "eager", "explicit", True, False, 0, 0.0, 0.0, True, 0.0, 3.0, 250e-6, 30e-6),
        Executor("megatron_2021", "eager", "explicit", False, False, 0, 0.0, 0.0, True, 6.0, 4.5, 250e-6, 30e-6),
        Executor("megatron_deepspeed", "eager", "explicit", False, False, 1, 0.0, 0.0, True, 14.0, 4.5, 250e-6, 30e-6),
        Executor("deepspeed", "eager", "explicit", False, False, 1, 0.0, 0.7, True, 6.0, 1.5, 150e-6, 20e-6),
        Executor("fsdp1", "eager", "flash", False, True, 3, 0.0, 0.95, True, 0.0, 1.5, 150e-6, 20e-6),
        Executor("internevo", "fused", "flash", True, False, 1, 0.3, 0.6, True, 0.0, 1.0, 100e-6, 15e-6, 2.5e-3),
        Executor("xla", "compiled", "flash", True, False, 3, 0.5, 0.9, True, 0.0, 0.0, 0.0, 0.0),
    )
}
"""Every executor by name."""

FRAMEWORKS = {
    "autopar": "autopar",
    "torchtitan": "torchtitan",
    "fsdp2": "torchtitan",
    "fsdp+tp": "torchtitan",
    "megatron-lm": "megatron",
    "megatron-core": "megatron",
    "megatron-bridge": "megatron",
    "nemo": "megatron",
    "megatron-lm-2022": "megatron_2022",
    "megatron-lm-2021": "megatron_2021",
    "megatron-lm-2020": "megatron_2021",
    "megatron-deepspeed": "megatron_deepspeed",
    "deepspeed-3d": "megatron_deepspeed",
    "deepspeed": "deepspeed",
    "fsdp": "fsdp1",
    "fsdp1": "fsdp1",
    "composer": "fsdp1",
    "internevo": "internevo",
    "maxtext": "xla",
    "paxml": "xla",
}
"""A piece of a framework's name as people write it (lower case, dashes for spaces) -> executor; the longest piece
wins."""


def executor(name: str) -> Executor:
    """The executor of that name, or of the framework of that name (with or without a version behind it).

    Raises:
        ProfileError: unknown; the message lists what is known.

    """
    if name in EXECUTORS:
        return EXECUTORS[name]
    written = name.strip().lower().replace(" ", "-")
    pieces = [piece for piece in FRAMEWORKS if piece in written]
    if not pieces:
        known = sorted({*EXECUTORS, *FRAMEWORKS})
        raise ProfileError(f"unknown framework '{name}'{did_you_mean(name, known)}; known: {', '.join(known)}")
    return EXECUTORS[FRAMEWORKS[max(pieces, key=len)]]
