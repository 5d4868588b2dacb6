"""Measured tables: the fraction of the hardware's peak that kernels reach, read between their points.

    fraction(x) = interpolation of measured fractions, linear in log2(x), held constant beyond both ends

A chip without a table of its own gets the generic ones below: the medians of the public measurements that
`benchmarks/distill_tables.py` distils, rounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hardware_profiles.chip import AttentionTable, Chip, GemmTable, normal_dtype

Array = NDArray[np.float64]
Seconds = Any
"""A float, or an array where an argument was one."""

GENERIC_GEMM = GemmTable(
    min_dim=(64, 128, 192, 256, 384, 512, 768, 1024, 2048),
    fraction_of_peak=(0.12, 0.26, 0.36, 0.45, 0.56, 0.64, 0.70, 0.74, 0.77),
    source="medians over A100, H100, H200 and B200 of public bf16 GEMM sweeps",
)
GENERIC_ATTENTION = {
    "forward": AttentionTable(
        phase="forward",
        seq=(512, 1024, 2048, 4096, 8192, 16384),
        fraction_of_peak=(0.25, 0.34, 0.42, 0.48, 0.52, 0.53),
        source="FlashAttention-2 paper (arXiv 2307.08691), A100 and H100 forward",
    ),
    "backward": AttentionTable(
        phase="backward",
        seq=(512, 1024, 2048, 4096, 8192, 16384),
        fraction_of_peak=(0.20, 0.27, 0.34, 0.39, 0.42, 0.43),
        source="FlashAttention-2 paper (arXiv 2307.08691), A100 and H100 backward",
    ),
}
GENERIC_POINTWISE = {
    "copy": 0.85,
    "add": 0.80,
    "activation": 0.75,
    "norm": 0.60,
    "softmax": 0.80,
    "dropout": 0.80,
    "embedding": 0.50,
    "loss": 0.50,
    "optimizer": 0.75,
}
"""Fraction of memory bandwidth by operator class; STREAM-like copies reach 0.85-0.92, reductions less."""
MEAN_WEIGHT = 0.25
"""How far the geometric mean counts beside the smallest dim: among equal smallest dims larger products run faster."""
FLASH1 = 0.55
"""FlashAttention of the first generation (and Triton's) relative to FlashAttention-2, which is about twice as fast in its own
paper (arXiv 2307.08691) and 1.7 times in published long-sequence training."""
HEAD_DIM_FRACTION = ((32.0, 0.55), (64.0, 0.80), (128.0, 1.0), (256.0, 1.05))
"""FlashAttention's rate by head dim, relative to 128 (same papers)."""


def plain(value: Any) -> Any:
    """A Python float where the result is one number, else the array."""
    return float(value) if np.ndim(value) == 0 else value


def interpolate(x: ArrayLike, points: Sequence[float], values: Sequence[float]) -> Array:
    """Values between measured points, linear in log2(x), constant beyond the ends."""
    return np.asarray(np.interp(np.log2(np.maximum(x, 1e-300)), np.log2(points), values), dtype=np.float64)


def interpolate_log(x: ArrayLike, points: Sequence[float], values: Sequence[float]) -> Array:
    """Positive values between measured points, linear in log-log: what times by size look like."""
    return np.asarray(np.exp2(interpolate(x, points, [float(v) for v in np.log2(values)])), dtype=np.float64)


def effective_dim(m: ArrayLike, n: ArrayLike, k: ArrayLike) -> Array:
    """The dim by which GEMM tables are read: the smallest of m, n, k, drawn towards their geometric mean."""
    m, n, k = (np.asarray(value, dtype=np.float64) for value in (m, n, k))
    smallest = np.minimum(np.minimum(m, n), k)
    return np.asarray(smallest ** (1 - MEAN_WEIGHT) * np.cbrt(m * n * k) ** MEAN_WEIGHT, dtype=np.float64)


def gemm_fraction(chip: Chip, min_dim: ArrayLike, dtype: str, layout: str, grouped: bool = False) -> Array:
    """Fraction of the dense peak that a GEMM reaches in the long run whose smallest of m, n, k is `min_dim`."""
    tables = (chip.efficiency.grouped_gemm if grouped else ()) or chip.efficiency.gemm or (GENERIC_GEMM,)
    table = max(tables, key=lambda item: _closeness(item, dtype, layout))
    rate = chip.sustained_rate
    if table.sustained is not None:  # a part at another power limit differs as it does from its other tables
        rate *= table.sustained / chip.efficiency.sustained
    return np.minimum(interpolate(min_dim, table.min_dim, table.fraction_of_peak) * rate, 1.0)


def _closeness(table: GemmTable, dtype: str, layout: str) -> tuple[int, int]:
    """Best: the same dtype, then bf16; among these the same layout, then a table for any layout."""
    same_dtype = normal_dtype(table.dtype) == normal_dtype(dtype)
    by_layout = {layout: 3, "any": 2, "forward": 1}.get(table.layout, 0)
    return 2 if same_dtype else int(table.dtype == "bf16"), by_layout


def attention_fraction(
    chip: Chip, seq: ArrayLike, head_dim: ArrayLike, phase: str, causal: bool, kernel: str = "flash"
) -> Array:
    """Fraction of the dense peak that a fused attention kernel reaches; flops counted as executed (causal: half)."""
    tables = [table for table in chip.efficiency.attention if table.kernel != "explicit" and table.phase == phase]
    width = float(np.median(np.asarray(head_dim)))
    table = min(
        tables or [GENERIC_ATTENTION[phase]],
        key=lambda item: (
            item.kernel != kernel.rstrip("1"),
            item.causal != causal,
            abs(np.log2(item.head_dim / width)),
        ),
    )
    widths, factors = zip(*HEAD_DIM_FRACTION, strict=True)
    scale = interpolate(head_dim, widths, factors) / interpolate(table.head_dim, widths, factors)
    scale = scale * (FLASH1 if kernel == "flash1" else 1.0)
    return np.minimum(interpolate(seq, table.seq, table.fraction_of_peak) * scale, 1.0)


def pointwise_fraction(chip: Chip, kind: str) -> float:
    """Fraction of memory bandwidth that a class of memory-bound operators reaches; KeyError for an unknown class."""
    measured = chip.efficiency.pointwise
    return min(measured[kind] if kind in measured else GENERIC_POINTWISE[kind], 1.0)
