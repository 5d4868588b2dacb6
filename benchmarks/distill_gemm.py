"""Measured matrix products -> tables of the fraction of peak by smallest dim, and their held-out errors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from distill_fit import MIN_DIMS, Floats, Row, fit, held_out

from cost_models.compute import element_bytes, gemm_seconds
from cost_models.tables import effective_dim, pointwise_fraction
from hardware_profiles.chip import Chip, GemmTable


def gemm_data(data: Iterable[Row], op: Callable[[str], bool]) -> dict[str, Floats]:
    """Columns m, n, k, seconds of the operators wanted; dims of less than 16 aside."""
    found, keys = [], []
    for row in data:
        sizes = re.search(r"m(\d+)_n(\d+)_k(\d+)", row["shape_or_bytes"])
        if sizes and op(row["op"]):
            m, n, k = (float(value) for value in sizes.groups())
            batch = re.match(r"[bg](\d+)_", row["shape_or_bytes"])
            count = float(batch.group(1)) if batch else 1.0
            found.append((m, n, k, 2 * m * n * k * count / float(row["value"]) / 1e12, count))
            keys.append(row["shape_or_bytes"])
    columns = np.array(found).T
    test = np.array([held_out(key) for key in keys])
    named = dict(zip(("m", "n", "k", "seconds", "batch"), columns, strict=True))
    return {**named, "test": test.astype(float)}


def gemm_table(
    chip: Chip,
    data: dict[str, Floats],
    layout: Any,
    source: str,
    everything: bool,
    dtype: str = "bf16",
    knots: Iterable[float] = MIN_DIMS,
) -> GemmTable:
    """Fit on shapes that run long enough for the launch not to matter."""
    m, n, k, batch = data["m"], data["n"], data["k"], data["batch"]
    flops = 2 * m * n * k * batch
    width = element_bytes(dtype)
    bytes_ = batch * (width * (m * k + k * n) + max(width, 2.0) * m * n)
    moved = bytes_ / chip.memory_bytes_per_second / pointwise_fraction(chip, "copy")
    net = data["seconds"] - chip.launch_seconds
    usable = (net > 1e-5) & (np.minimum(np.minimum(m, n), k) >= 16) & (flops > 2e9)
    usable &= (data["test"] == 0) | everything
    ideal = flops / chip.peak_flops(dtype)
    size = effective_dim(m, n, k)
    points, values = fit(size[usable], ideal[usable], moved[usable], net[usable], knots)
    return GemmTable(layout=layout, dtype=dtype, min_dim=points, fraction_of_peak=values, source=source)


def extended(table: GemmTable, reference: GemmTable) -> GemmTable:
    """A table continued below its smallest dim in the shape of another."""
    first, at = table.min_dim[0], np.log2(reference.min_dim)
    scale = table.fraction_of_peak[0] / np.interp(np.log2(first), at, reference.fraction_of_peak)
    below = [
        (d, round(float(f * scale), 3)) for d, f in zip(reference.min_dim, reference.fraction_of_peak, strict=True)
    ]
    joined = [pair for pair in below if pair[0] < first] + list(zip(table.min_dim, table.fraction_of_peak, strict=True))
    dims, fractions = zip(*joined, strict=True)
    return table.model_copy(update={"min_dim": dims, "fraction_of_peak": fractions})


def gemm_errors(title: str, chip: Chip, data: dict[str, Floats], layout: Any, dtype: str = "bf16") -> None:
    m, n, k, batch = data["m"], data["n"], data["k"], data["batch"]
    error = np.abs(gemm_seconds(chip, m, n, k, dtype, layout, batch) / data["seconds"] - 1)
    smallest = np.minimum(np.minimum(m, n), k)
    large = 2 * m * n * k * batch >= 1e10
    print(f"  {title}: mean absolute error on held-out shapes (all sizes | 10 GFLOP and more)")
    for low, high in ((64, 128), (128, 256), (256, 512), (512, 1024), (1024, 1e9)):
        band = (smallest >= low) & (smallest < high) & (data["test"] == 1)
        if band.any():
            big = f"{error[band & large].mean():6.1%}" if (band & large).any() else "     -"
            print(f"    min dim {low:>5} to {high:<6g} {error[band].mean():6.1%} | {big}  ({band.sum()} shapes)")
