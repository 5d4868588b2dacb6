"""The interval of a prediction.

    sigma^2 = sum over independent groups of parts (r_g * seconds_g)^2 + (floor * step)^2
    interval = step * exp(-+ 1.2816 * sigma / step)             80 % of a normal distribution of log error

Parts that err together (compute and recompute use the same tables) are added before squaring; groups that err apart are
added in quadrature. `floor` covers what no part shows: a framework's unknown habits, clock, machine.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hardware_profiles.chip import Chip

Z80 = 1.2815515655446004
"""Quantile of the normal distribution that leaves 10 % on each side."""
GROUPS = {
    "compute": "compute",
    "recompute": "compute",
    "tp": "collective",
    "cp": "collective",
    "ep": "all_to_all",
    "pp": "send",
    "dp": "collective",
    "offload": "offload",
    "bubble": "bubble",
    "optimizer": "optimizer",
    "overhead": "host",
}
"""Part of a step -> group whose errors go together."""
RESIDUALS = {
    "compute": 0.03,
    "collective": 0.30,
    "all_to_all": 0.56,
    "send": 0.60,
    "offload": 0.40,
    "bubble": 0.17,
    "optimizer": 0.10,
    "host": 0.05,
    "floor": 0.08,
}
"""Relative standard deviation by group, where the chip's own `residuals` say nothing: fitted to published runs
(`benchmarks/runs_intervals.py`; what that puts at zero is held to a little). The floor is what whole frameworks and
machines differ by; offload was not measured and counts like collectives."""


def interval(seconds_by_part: Mapping[str, float], chip: Chip) -> tuple[float, float]:
    """The 80 % interval (low, high) of a step that is the sum of its parts, in seconds.

    Args:
        seconds_by_part: the prediction by part (the names of `GROUPS`; others count as a group of their own), in all
        above 0.
        chip: `residuals` override the defaults by group's name.

    """
    step_seconds = sum(seconds_by_part.values())
    residuals = {**RESIDUALS, **chip.residuals}
    seconds: dict[str, float] = {}
    for part, value in seconds_by_part.items():
        group = GROUPS.get(part, part)
        seconds[group] = seconds.get(group, 0.0) + value
    variance = (residuals["floor"] * step_seconds) ** 2
    variance += sum((residuals.get(group, 0.15) * value) ** 2 for group, value in seconds.items())
    spread = Z80 * float(np.sqrt(variance)) / step_seconds
    return step_seconds * float(np.exp(-spread)), step_seconds * float(np.exp(spread))
