"""Reading measurements, choosing what is held out, fitting a table: shared by the `distill_*` scripts."""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

MIN_DIMS = (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096, 8192)
SEQS = (512, 1024, 2048, 4096, 8192, 16384)
FEWEST_SHAPES = 5.0
"""A knot that fewer shapes lie near is left out."""
SMOOTHNESS = 0.004
"""Error given up per unit of bend (second difference of log fractions)."""
Row = dict[str, str]
Floats = NDArray[np.float64]


def rows(folder: Path, name: str) -> list[Row]:
    with (folder / name).open(newline="") as file:
        return list(csv.DictReader(file))


def held_out(key: str) -> bool:
    """A third of all shapes, the same ones in every run."""
    return hashlib.sha256(key.encode()).digest()[0] % 3 == 0


def fit(
    x: Floats, ideal: Floats, floor: Floats, seconds: Floats, knots: Iterable[float], smoothness: float = SMOOTHNESS
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Fractions f at the knots for which max(ideal / f(x), floor) comes closest to the measured seconds.

    The mean absolute error of the logarithm falls coordinate by coordinate: a shape that memory bounds says no more of f than
    that it is not less.
    """
    points = np.array(list(knots), dtype=np.float64)
    spread = np.array([np.interp(np.log2(x), np.log2(points), unit) for unit in np.eye(len(points))])
    points = points[spread.sum(axis=1) >= FEWEST_SHAPES]
    basis = np.array([np.interp(np.log2(x), np.log2(points), unit) for unit in np.eye(len(points))]).T
    values = np.clip(0.8 * (points / 1024) ** 0.7, 0.02, 0.8)

    def error(fractions: Floats) -> float:
        bends = np.abs(np.diff(np.log(fractions), n=2)).sum() if len(fractions) > 2 else 0.0
        off = np.abs(np.log(np.maximum(ideal / (basis @ fractions), floor) / seconds)).mean()
        return float(off + smoothness * bends)

    best = error(values)
    for step in (0.5,) * 5 + (0.2,) * 4 + (0.1,) * 4 + (0.05,) * 4 + (0.02,) * 3 + (0.01,) * 3:
        for knot in range(len(points)):
            for factor in (1 + step, 1 / (1 + step)):
                trial = values.copy()
                trial[knot] = min(max(trial[knot] * factor, 0.005), 1.0)
                if (found := error(trial)) < best:
                    best, values = found, trial
    return tuple(float(p) for p in points), tuple(round(float(v), 3) for v in values)
