"""How far a prediction may be off: residuals of calibration, in quadrature.

Parts of a step with relative standard errors e_i and shares s_i have ``sqrt(sum (s_i e_i)^2)`` together when they err
independently; 1.28 standard errors each way hold 80 %.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt

from hardware_profiles.chip import Chip

NORMAL_80 = 1.2816
RESIDUALS = {"compute": 0.08, "recompute": 0.08, "tp": 0.20, "cp": 0.20, "ep": 0.25, "pp": 0.30, "dp": 0.25, "offload": 0.30,
             "bubble": 0.10, "optimizer": 0.15, "overhead": 0.30}  # fmt: skip
"""Relative standard errors where a chip's profile has none of its own."""
COMMON = 0.04
"""What all parts share: clocks, power limits, stragglers."""


def interval(seconds_by_part: Mapping[str, float], chip: Chip) -> tuple[float, float]:
    """The 80 % interval (low, high) of a step that is the sum of its parts, in seconds."""
    step = sum(seconds_by_part.values())
    own = sum((seconds * chip.residuals.get(part, RESIDUALS[part])) ** 2 for part, seconds in seconds_by_part.items())
    half = NORMAL_80 * sqrt(own + (COMMON * step) ** 2)
    return max(step - half, 0.0), step + half
