"""Executors: what a training framework does differently from the next one, and defaults for what a run does not state.

A published run is priced under its framework's executor; the chip, the cluster and the kernels are all else that
differs between runs. `autopar` is this package's own runtime, whose habits are those of torch's FSDP2 and of
torchtitan.

Sources: Megatron-LM (arXiv 2104.04473, 2205.05198), DeepSpeed ZeRO (arXiv 1910.02054), torch FSDP (arXiv 2304.11277),
torchtitan (arXiv 2410.06511); fractions hidden are what published step times of each framework allow, rounded to 0.05.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import Literal

from hardware_profiles.chip import normal_dtype
from hardware_profiles.errors import ProfileError
from hardware_profiles.schema import did_you_mean


@dataclass(frozen=True)
class Executor:
    """Behaviour of one training framework. The defaults are those of this package's own runtime."""

    name: str
    kernels: Literal["eager", "compiled", "fused"] = "eager"
    """Default kernels of the framework."""
    fp8_kernels: Literal["compiled"] | None = None
    """Those under fp8 where they differ (torchtitan's fp8 is told to be run with torch.compile)."""
    attention: Literal["flash", "explicit"] = "flash"
    attention_kernel: Literal["flash", "flash1", "cudnn"] | None = None
    """None: the one that comes with the kernels."""
    sequence_parallel: bool = True
    """Whether tensor parallelism comes with sequence parallelism by default."""
    saves_gathered_input: bool = False
    """Under sequence parallelism the gathered input of a column-wise linear is kept for backward (torch's DTensor), not
    the divided one that is gathered again (Megatron)."""
    zero: Literal[0, 1, 2, 3] = 1
    """Default division of states over dp."""
    tp_overlap: float = 0.0
    """Fraction of tensor-parallel collectives that hides behind compute."""
    tp_backward_overlap: float = 0.0
    """Of the backward's collectives that a product can run beside: the reduction of a column-wise linear's input gradient
    (beside wgrad), and the second gather of its input (beside dgrad)."""
    ring_in_fp32: bool = False
    """Under context parallelism attention runs piece by piece: results are merged in fp32 by eager kernels, and gradients of
    keys and values travel one full turn of the ring in fp32 (torch's `_templated_ring_attention`)."""
    cp_overlap: float = 0.0
    """Fraction of the exchange of keys and values that hides behind attention."""
    ep_overlap: float = 0.0
    """Fraction of the all-to-alls of experts that hides behind other compute."""
    experts_over_tp: bool = False
    """Whether tp divides experts too where nothing else is said (Megatron-Core's default; Megatron-Bridge's is one)."""
    sends_rows_once_per_node: bool = False
    """Dispatch to experts goes to each node once and is spread there (DeepEP, HybridEP)."""
    dp_overlap: float = 1.0
    """Fraction of data-parallel collectives that runs beside compute, where there is compute to hide behind; what that
    slows is the chip's affair (`overlap`)."""
    ends_exposed: bool = True
    """The first gather and the last reduction of a step stand alone."""
    gathers_units: bool = True
    """Under ZeRO each unit (a block) is gathered and reduced on its own; False: buckets, as without it."""
    bucket_bytes: float = 25 * 2**20
    """Of gradients that are averaged in one message where states are whole (as torch's DDP)."""
    wide_gradients: Literal["always", "bf16", "never"] = "always"
    """When gradients are kept and reduced in fp32: whatever the compute dtype, for bf16 only, or never."""
    accumulates: bool = True
    """Whether adding a gradient to its accumulator is traffic of its own; False where the product does it."""
    host_factor: float = 1.0
    """Host time per kernel relative to the chip's `host_us`, with the framework's default kernels."""
    checkpoint_seconds: float = 100e-6
    """Host time for each recomputed block and micro-batch."""
    collective_seconds: float = 15e-6
    """Host time for each tensor-parallel collective."""
    bf16_all_reduces: bool = False
    """ZeRO 1 averages bf16's gradients whole on every rank (DeepSpeed's pipeline engine), not scattered."""
    scatters_sends: bool = False
    """Where every tp rank holds the whole hidden state, each sends its share of it and the receivers gather (Megatron-LM's
    scatter/gather, arXiv 2104.04473 section 4.1; DeepSpeed's partitioned pipes)."""
    send_seconds: float = 0.0
    """Host time of a pipeline send and its receive, where the framework waits for the device after each (Megatron before
    2022 synchronises after every exchange)."""
    broadcast_seconds: float = 0.0
    """Per dp rank and step: parameters sent out rank by rank after the update."""
    selective_products: float = 0.0
    """Share of the kept matrix products that selective recompute runs again all the same."""
    recompute: Literal["none", "selective", "full"] | None = None
    """Default of the framework's own launch scripts; None: no usual choice."""
    virtual_stages: int | None = None
    """Chunks of a rank under an interleaved schedule where nothing else is said; None: no usual choice."""
    recompute_stops_early: bool = True
    """Full recompute ends with the last value that backward needs (torch); False: it runs the whole forward (Megatron)."""
    micro_batches_from_stages: bool = False
    """Under a pipeline a rank's batch is cut into as many micro-batches as there are stages, where nothing else is said."""
    kept_outputs: float = 0.0
    """Copies of the model's output that the last of several stages keeps of every micro-batch until the step ends: torch's
    schedules keep each and join them."""
    fused_loss: bool = False
    """The loss is one kernel that keeps its scores in the compute dtype and puts their gradient in their place (Megatron's and
    Transformer Engine's fused cross entropy, FlashAttention's in llm-foundry)."""
    wide_rotary: bool = False
    """Rotary positions are applied in fp32."""
    composite_norm: bool = False
    """RMSNorm is a chain of operators in fp32 (torch before its fused kernel of 2025)."""
    fused_projections: bool = False
    """One product makes queries, keys and values, one both halves of a gated feed-forward (Megatron's `linear_qkv` and
    `linear_fc1`)."""
    repeats_keys: bool = False
    """Keys and values of grouped queries are copied out to every query head before attention (torchtitan's `repeat_kv`)."""
    cast_share: float = 1.0
    """Traffic of casts to fp8 over one read and two writes: 1.5 where scales follow from the tensor itself, which is then read
    twice (torchao's dynamic scaling); less where the operator before writes fp8."""
    casts_weights: bool = True
    """Whether weights are cast at every use; Megatron keeps them over the micro-batches of a step."""

    def gradient_bytes(self, dtype: str) -> float:
        """Bytes of a gradient element where it is accumulated and reduced."""
        if normal_dtype(dtype) in ("fp32", "tf32", "fp64"):
            return 8.0 if normal_dtype(dtype) == "fp64" else 4.0
        wide = self.wide_gradients == "always" or (self.wide_gradients == "bf16" and normal_dtype(dtype) != "fp16")
        return 4.0 if wide else 2.0

    def accumulation_bytes(self, dtype: str) -> float:
        """Memory traffic per parameter and micro-batch to add a gradient to its accumulator: read, read, write; a wider
        accumulator takes a widened copy first.
        """
        if not self.accumulates:
            return 0.0
        wide = self.gradient_bytes(dtype)
        return 2.0 + 2 * wide + (wide if wide > 2 else 0.0)


TORCHTITAN = Executor(
    "torchtitan",
    composite_norm=True,
    fp8_kernels="compiled",
    wide_rotary=True,
    repeats_keys=True,
    ring_in_fp32=True,
    kept_outputs=2.0,
    cast_share=1.5,
    saves_gathered_input=True,
    zero=3,
    accumulates=False,
    selective_products=0.5,
    micro_batches_from_stages=True,
    virtual_stages=2,
)
"""Its asynchronous tp needs torch.compile, which cuts products and collectives into pieces that run beside each other."""

NEMO = Executor(
    "nemo",
    experts_over_tp=True,
    casts_weights=False,
    fused_projections=True,
    fused_loss=True,
    kernels="fused",
    gathers_units=False,
    bucket_bytes=160e6,
    wide_gradients="never",
    tp_backward_overlap=1.0,
    recompute_stops_early=False,
    tp_overlap=1.0,
    cp_overlap=1.0,
    dp_overlap=0.7,
    ends_exposed=False,
    accumulates=False,
    collective_seconds=10e-6,
)

FSDP1 = Executor(
    "fsdp1",
    kernels="eager",
    attention_kernel="flash1",
    sequence_parallel=False,
    saves_gathered_input=True,
    zero=3,
    dp_overlap=1.0,
    accumulates=False,
    host_factor=1.5,
    checkpoint_seconds=150e-6,
    collective_seconds=20e-6,
)

EXECUTORS = {
    item.name: item
    for item in (
        Executor("autopar", saves_gathered_input=True),
        TORCHTITAN,
        replace(TORCHTITAN, name="torchtitan_async_tp", kernels="compiled", tp_overlap=0.25),
        Executor(
            "megatron",
            experts_over_tp=True,
            casts_weights=False,
            fused_projections=True,
            fused_loss=True,
            kernels="fused",
            gathers_units=False,
            bucket_bytes=160e6,
            tp_backward_overlap=0.5,
            recompute_stops_early=False,
            cp_overlap=1.0,
            dp_overlap=0.5,
            ends_exposed=False,
            accumulates=False,
            collective_seconds=10e-6,
        ),
        Executor(
            "megatron_script",
            experts_over_tp=True,
            casts_weights=False,
            fused_projections=True,
            kernels="fused",
            gathers_units=False,
            bucket_bytes=160e6,
            tp_backward_overlap=0.5,
            recompute_stops_early=False,
            cp_overlap=1.0,
            dp_overlap=0.5,
            ends_exposed=False,
            accumulates=False,
            collective_seconds=10e-6,
        ),
        NEMO,
        replace(NEMO, name="megatron_bridge", experts_over_tp=False, sends_rows_once_per_node=True),
        Executor(
            "megatron_2022",
            kernels="fused",
            scatters_sends=True,
            gathers_units=False,
            bucket_bytes=inf,
            attention="explicit",
            tp_backward_overlap=0.8,
            recompute_stops_early=False,
            zero=0,
            dp_overlap=0.0,
            wide_gradients="bf16",
            accumulates=False,
            host_factor=4.0,
            checkpoint_seconds=250e-6,
            collective_seconds=30e-6,
        ),
        Executor(
            "megatron_2021",
            kernels="fused",
            scatters_sends=True,
            send_seconds=400e-6,
            gathers_units=False,
            bucket_bytes=inf,
            attention="explicit",
            recompute_stops_early=False,
            sequence_parallel=False,
            zero=0,
            dp_overlap=0.0,
            wide_gradients="bf16",
            host_factor=5.3,
            checkpoint_seconds=250e-6,
            collective_seconds=30e-6,
        ),
        Executor(
            "megatron_deepspeed",
            kernels="fused",
            bf16_all_reduces=True,
            scatters_sends=True,
            send_seconds=400e-6,
            gathers_units=False,
            bucket_bytes=inf,
            attention="explicit",
            recompute_stops_early=False,
            sequence_parallel=False,
            zero=1,
            dp_overlap=0.0,
            wide_gradients="bf16",
            host_factor=5.3,
            checkpoint_seconds=250e-6,
            collective_seconds=30e-6,
        ),
        Executor(
            "deepspeed_megatron",
            kernels="fused",
            scatters_sends=True,
            send_seconds=400e-6,
            gathers_units=False,
            bucket_bytes=inf,
            attention="explicit",
            recompute_stops_early=False,
            sequence_parallel=False,
            zero=0,
            dp_overlap=0.0,
            wide_gradients="bf16",
            host_factor=5.3,
            checkpoint_seconds=250e-6,
            collective_seconds=30e-6,
            recompute="full",
        ),
        Executor(
            "deepspeed",
            kernels="eager",
            attention="explicit",
            sequence_parallel=False,
            dp_overlap=0.7,
            wide_gradients="never",
            host_factor=1.5,
            checkpoint_seconds=150e-6,
            collective_seconds=20e-6,
        ),
        FSDP1,
        replace(FSDP1, name="composer", fused_loss=True),
        Executor(
            "internevo",
            kernels="eager",
            attention_kernel="flash1",
            gathers_units=False,
            bucket_bytes=160e6,
            recompute_stops_early=False,
            tp_overlap=0.3,
            dp_overlap=0.6,
            wide_gradients="never",
            broadcast_seconds=2.5e-3,
        ),
        Executor(
            "xla",
            kernels="compiled",
            attention_kernel="cudnn",
            recompute="full",
            zero=3,
            tp_overlap=0.5,
            accumulates=False,
            host_factor=0.0,
            checkpoint_seconds=0.0,
            collective_seconds=0.0,
        ),
    )
}
"""Every executor by name."""

FRAMEWORKS = {
    "autopar": "autopar",
    "torchtitan": "torchtitan",
    "fsdp2": "torchtitan",
    "fsdp+tp": "torchtitan",
    "megatron-lm": "megatron",
    "megatron-core": "nemo",
    "megatron-core-(functional-test)": "megatron_script",
    "megatron-bridge": "megatron_bridge",
    "nemo": "nemo",
    "megatron-lm-2022": "megatron_2022",
    "megatron-lm-2021": "megatron_2021",
    "megatron-lm-2020": "megatron_2021",
    "megatron-deepspeed": "megatron_deepspeed",
    "deepspeed-3d": "deepspeed_megatron",
    "megatron-deepspeed-3d": "megatron_deepspeed",
    "deepspeed": "deepspeed",
    "fsdp": "fsdp1",
    "fsdp1": "fsdp1",
    "composer": "composer",
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
