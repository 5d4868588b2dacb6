"""Operators -> seconds on the device.

    matrix multiply   t = launch + max(flops / (peak * fraction(min(m, n, k)) * sustained), bytes / (bandwidth * copy))
    fused attention   t = launch + max(flops / (peak * fraction(seq)), bytes / (bandwidth * copy))
    pointwise         t = launch + bytes / (bandwidth * fraction(class))
    host              t = operators * host_us * factor(kernels)

The roofline is Williams et al. 2009 (doi 10.1145/1498765.1498785); fractions are measured (`cost_models.tables`).
`sustained` is the long-run over the microbenchmark rate under the power limit, which fused attention does not reach.
Fractions never exceed 1, so no operator runs above the hardware's peak. Every argument that is a size may be a numpy
array; they broadcast.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from cost_models.tables import (
    Array,
    Seconds,
    attention_fraction,
    effective_dim,
    gemm_fraction,
    plain,
    pointwise_fraction,
)
from hardware_profiles.chip import Chip, normal_dtype

Layout = Literal["forward", "dgrad", "wgrad", "any"]
Kernels = Literal["eager", "compiled", "fused"]
AttentionKernel = Literal["flash", "flash1", "cudnn", "explicit"]
Phase = Literal["forward", "backward"]

BYTES_PER_ELEMENT = {
    "fp64": 8.0,
    "fp32": 4.0,
    "tf32": 4.0,
    "bf16": 2.0,
    "fp16": 2.0,
    "fp8": 1.0,
    "int8": 1.0,
    "nvfp4": 0.5,
}
ALIGNMENT_BYTES = 16
MISALIGNED = 0.03
"""Fraction of the peak of batched products whose rows do not start at multiples of 16 bytes: about 9 TFLOP/s on A100 (head dim
108 in BigScience's sweeps)."""
BATCHED = 2.0
"""A batch of products fills the device as products of this many times the smallest dim do alone."""
ATTENTION_KERNEL: dict[str, AttentionKernel] = {"eager": "flash", "compiled": "flash", "fused": "cudnn"}
"""The attention kernel that comes with a choice of kernels; a chip without tables of cudnn uses those of flash."""
HOST_FACTOR: dict[str, float] = {"eager": 1.0, "compiled": 0.5, "fused": 0.35}
"""Host time per launched kernel relative to eager: compiled code skips dispatch and autograd; 0.35 was identified from
Megatron-Core against eager Megatron of 2020-21."""


def element_bytes(dtype: str) -> float:
    """Bytes of one element. Raises KeyError for an unknown dtype."""
    return BYTES_PER_ELEMENT[normal_dtype(dtype)]


def gemm_seconds(
    chip: Chip,
    m: ArrayLike,
    n: ArrayLike,
    k: ArrayLike,
    dtype: str,
    layout: Layout = "forward",
    batch: ArrayLike = 1,
    grouped: bool = False,
    bytes_: ArrayLike | None = None,
) -> Seconds:
    """Seconds of `batch` products [m, k] x [k, n].

    Args:
        chip: what runs it.
        m: rows of the output.
        n: columns of the output.
        k: the summed size.
        dtype: of inputs and output.
        layout: forward (TN), dgrad (NN) or wgrad (NT, accumulating in fp32): which measured table applies.
        batch: independent products in one kernel.
        grouped: one kernel over groups of unequal rows (experts): the chip's own table, if it has one.
        bytes_: moved through memory, where factors overlap there (a convolution's patches); None: each factor once.

    """
    m, n, k, batch = (np.asarray(value, dtype=np.float64) for value in (m, n, k, batch))
    flops = 2.0 * m * n * k * batch
    dim = effective_dim(m, n, k) * np.where((batch > 1) & (not grouped), BATCHED, 1.0)
    rate = chip.peak_flops(dtype) * gemm_fraction(chip, dim, dtype, layout, grouped)
    width = element_bytes(dtype)
    if not grouped:
        odd = (
            (m * width % ALIGNMENT_BYTES != 0) | (n * width % ALIGNMENT_BYTES != 0) | (k * width % ALIGNMENT_BYTES != 0)
        )
        rate = np.where((batch > 1) & odd, np.minimum(rate, chip.peak_flops(dtype) * MISALIGNED), rate)
    once = batch * (width * (m * k + k * n) + max(width, 2.0) * m * n)  # fp8 products write bf16
    moved = once if bytes_ is None else np.asarray(bytes_, dtype=np.float64)
    return _roofline(chip, flops, rate, moved)


def attention_seconds(
    chip: Chip,
    flops: ArrayLike,
    bytes_: ArrayLike,
    *,
    phase: Phase,
    seq: ArrayLike,
    head_dim: ArrayLike,
    causal: bool,
    dtype: str,
    kernel: AttentionKernel = "flash",
) -> Seconds:
    """Seconds of one fused attention call that executes `flops` (causal skips already taken out) and moves `bytes_`.

    An explicit attention is no kernel but products and a softmax, which the caller prices one by one; asked for here it
    is priced as a batched product of [seq, head_dim] x [head_dim, seq].
    """
    if kernel == "explicit":
        fraction = gemm_fraction(chip, np.minimum(np.asarray(seq, dtype=np.float64), head_dim), dtype, "any")
    else:
        fraction = attention_fraction(chip, seq, head_dim, phase, causal, kernel)
    rate = chip.peak_flops(dtype) * _at_most_peak(fraction)
    return _roofline(chip, np.asarray(flops, dtype=np.float64), rate, np.asarray(bytes_, dtype=np.float64))


def pointwise_seconds(chip: Chip, bytes_: ArrayLike, kind: str) -> Seconds:
    """Seconds of one memory-bound kernel that reads and writes `bytes_` in all.

    `kind` is a class of `hardware_profiles.chip.Efficiency.pointwise`: copy, add, norm, softmax, activation, dropout,
    embedding, loss, optimizer. Raises KeyError for another.
    """
    bandwidth = chip.memory_bytes_per_second * pointwise_fraction(chip, kind)
    return plain(chip.launch_seconds + np.asarray(bytes_, dtype=np.float64) / bandwidth)


def host_seconds(chip: Chip, operators: ArrayLike, kernels: Kernels = "eager") -> Seconds:
    """Host seconds to issue `operators` kernels: the device waits where this exceeds its own time."""
    return plain(np.asarray(operators, dtype=np.float64) * chip.host_seconds * HOST_FACTOR[kernels])


def fused_bytes(input_bytes: ArrayLike, output_bytes: ArrayLike, inner_bytes: ArrayLike, kernels: Kernels) -> Seconds:
    """Memory traffic of a chain of pointwise operators.

    `inner_bytes` is what passes from one operator of the chain to the next: written and read once each when every
    operator is a kernel of its own (eager), kept in registers when the chain is one kernel (compiled, fused).
    """
    outer = np.asarray(input_bytes, dtype=np.float64) + np.asarray(output_bytes, dtype=np.float64)
    return plain(outer + (2.0 * np.asarray(inner_bytes, dtype=np.float64) if kernels == "eager" else 0.0))


def _at_most_peak(fraction: Array) -> Array:
    return np.minimum(fraction, 1.0)


def _roofline(chip: Chip, flops: Array, rate: Array, bytes_: Array) -> Seconds:
    bandwidth = chip.memory_bytes_per_second * pointwise_fraction(chip, "copy")
    return plain(chip.launch_seconds + np.maximum(flops / rate, bytes_ / bandwidth))
