"""How long operators take on a device.

    matmul      max(FLOPs / (peak * e_gemm(min(m, n, k)) * sustained), bytes / (bandwidth * e_copy)) + launch
    attention   max(FLOPs / (peak * e_attention(seq) * sustained), bytes / (bandwidth * e_copy)) + launch
    pointwise   bytes / (bandwidth * e_class) + launch
    host        operators * host seconds of one: the device waits where the host is slower

A roofline with one efficiency is good to 7-8 % only while every dim of a matmul is 512 or more; below, measured tables by the
smallest dim are interpolated in log-log. Every argument that is a number may be a numpy array; results broadcast.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from hardware_profiles.chip import AttentionTable, Chip, GemmTable, normal_dtype

Layout = Literal["forward", "dgrad", "wgrad"]
Phase = Literal["forward", "backward"]
Kernels = Literal["eager", "compiled", "fused"]
Seconds = Any
"""A float, or an array where an argument was one."""

ELEMENT_BYTES = {"fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int8": 1, "nvfp4": 0.5}

GENERIC_GEMM = ((16, 64, 128, 192, 362, 724, 1448, 4096), (0.03, 0.12, 0.22, 0.30, 0.42, 0.61, 0.72, 0.78))
"""min(m, n, k) and fraction of peak for a chip without tables: the shape seen on A100 and H100 (docs/costs.md)."""
GENERIC_ATTENTION = ((128, 512, 2048, 8192), (0.20, 0.35, 0.50, 0.55))
BACKWARD_ATTENTION = 0.85
"""Backward rate over forward rate where a chip has only forward tables (Dao, arXiv 2307.08691, figures 5-6: 0.8 to 0.9)."""
GENERIC_POINTWISE = {
    "copy": 0.80, "add": 0.80, "activation": 0.70, "dropout": 0.60, "norm": 0.45, "softmax": 0.60,
    "embedding": 0.50, "loss": 0.50, "optimizer": 0.70,
}  # fmt: skip
HOST_SHARE = {"eager": 1.0, "compiled": 0.15, "fused": 0.35}
"""Host work per operator relative to eager: a compiled region issues few, cheap launches; hand-fused modules a third."""


def element_bytes(dtype: str) -> float:
    """Bytes of one element of a training dtype."""
    return ELEMENT_BYTES[normal_dtype(dtype)]


def gemm_seconds(
    chip: Chip, m: ArrayLike, n: ArrayLike, k: ArrayLike, dtype: str, layout: Layout = "forward", batch: ArrayLike = 1
) -> Seconds:
    """`batch` products of (m, k) by (k, n)."""
    m, n, k, batch = (np.asarray(value, dtype=float) for value in (m, n, k, batch))
    flops = 2 * m * n * k * batch
    rate = chip.peak_flops(dtype) * gemm_fraction(chip, np.minimum(np.minimum(m, n), k), dtype, layout)
    moved = (m * k + k * n + m * n) * batch * element_bytes(dtype)
    return _plain(
        np.maximum(flops / (rate * chip.efficiency.sustained), moved / _bandwidth(chip, "copy")) + chip.launch_seconds
    )


def gemm_fraction(chip: Chip, smallest: ArrayLike, dtype: str, layout: Layout = "forward") -> Seconds:
    """Fraction of the dense peak at a smallest dim, at most 1."""
    table = _gemm_table(chip, normal_dtype(dtype), layout)
    points, values = GENERIC_GEMM if table is None else (table.min_dim, table.fraction_of_peak)
    return _interpolate(smallest, points, values)


def _gemm_table(chip: Chip, dtype: str, layout: str) -> GemmTable | None:
    """The table of this layout and dtype; else of any layout; else of bf16, whose shape other dtypes share."""
    tables = chip.efficiency.gemm
    for wanted in ((layout, dtype), ("any", dtype), (layout, "bf16"), ("any", "bf16"), ("forward", "bf16")):
        for table in tables:
            if (table.layout, table.dtype) == wanted:
                return table
    return None


def attention_seconds(
    chip: Chip,
    flops: ArrayLike,
    bytes_: ArrayLike,
    *,
    phase: Phase,
    seq: ArrayLike,
    head_dim: int,
    causal: bool,
    dtype: str,
) -> Seconds:
    """One flash attention call of `flops` executed FLOPs (causal skips already taken off) over `seq` query positions."""
    table, factor = _attention_table(chip, phase, head_dim, causal)
    points, values = GENERIC_ATTENTION if table is None else (table.seq, table.fraction_of_peak)
    rate = chip.peak_flops(dtype) * factor * _interpolate(seq, points, values) * chip.efficiency.sustained
    compute = np.asarray(flops, dtype=float) / rate
    return _plain(np.maximum(compute, np.asarray(bytes_, dtype=float) / _bandwidth(chip, "copy")) + chip.launch_seconds)


def _attention_table(chip: Chip, phase: Phase, head_dim: int, causal: bool) -> tuple[AttentionTable | None, float]:
    """The nearest table and a factor on its rate: phase first, then causality, then head dim."""
    tables = [table for table in chip.efficiency.attention if table.kernel == "flash"]
    own = [table for table in tables if table.phase == phase]
    factor = 1.0 if own or phase == "forward" else BACKWARD_ATTENTION
    candidates = own or tables
    if not candidates:
        return None, factor
    return min(candidates, key=lambda t: (t.causal != causal, abs(np.log(t.head_dim / head_dim)))), factor


def pointwise_seconds(chip: Chip, bytes_: ArrayLike, kind: str) -> Seconds:
    """An operator that moves `bytes_` through memory; `kind` is a class of `Efficiency.pointwise`."""
    return _plain(np.asarray(bytes_, dtype=float) / _bandwidth(chip, kind) + chip.launch_seconds)


def host_seconds(chip: Chip, operators: ArrayLike, kernels: Kernels = "eager") -> Seconds:
    """Time the host needs to issue operators."""
    return _plain(np.asarray(operators, dtype=float) * chip.host_seconds * HOST_SHARE[kernels])


def _bandwidth(chip: Chip, kind: str) -> float:
    fraction = chip.efficiency.pointwise.get(kind, GENERIC_POINTWISE[kind])
    return chip.memory_bytes_per_second * fraction


def _interpolate(at: ArrayLike, points: Sequence[float], values: Sequence[float]) -> Any:
    """Log-log interpolation; level beyond the last point, proportional below the first; at most 1."""
    where: Any = np.maximum(np.asarray(at, dtype=float), 1.0)
    inside = np.exp(np.interp(np.log(where), np.log(points), np.log(values)))
    return np.minimum(np.where(where < points[0], inside * where / points[0], inside), 1.0)


def _plain(value: Any) -> Seconds:
    return float(value) if np.ndim(value) == 0 else value
