"""Errors of predictions: by source and over all.

    error = |p - m| / m        bias = mean (p - m) / m        rank correlation = Spearman's, over plans of one group
    regret = measured seconds of the plan predicted best / of the best - 1

The last two are averaged over groups of three or more rows that differ in their plan alone. The headline is the
macro-average: every source has one vote.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from runs_pricing import Scored
from runs_table import Run, Skip

from hardware_profiles.chip import GIB

LEAST_GROUP = 3
GB_DEFINITION = r"\bGB\b"


def measured_bytes(run: Run) -> float | None:
    """Bytes; sources that print GB mean 10^9."""
    if run.memory_gib is None:
        return None
    return run.memory_gib * (1e9 if re.search(GB_DEFINITION, run.memory_definition) else GIB)


def summary(scored: Sequence[Scored], skipped: Sequence[Skip], duplicates: int = 0) -> dict[str, Any]:
    """The figures of INTERFACE for a set of rows; fractions. None where there is nothing to say."""
    timed = [one for one in scored if is_timed(one.run)]
    errors = np.array([one.seconds / (one.run.seconds or 1.0) - 1 for one in timed])
    inside = [one.low <= (one.run.seconds or 0.0) <= one.high for one in timed]
    widths = [(one.high - one.low) / 2 / one.seconds for one in timed]
    kinds: dict[str, int] = {}
    for reason in skipped:
        kinds[reason.kind] = kinds.get(reason.kind, 0) + 1
    correlation, regret, groups = ranking(timed)
    memory = [one.memory_bytes / measured - 1 for one in scored if (measured := measured_bytes(one.run)) is not None]
    peers = [
        abs(peer / run.seconds - 1) for run in (one.run for one in timed) if (peer := peer_seconds(run)) and run.seconds
    ]
    peer_memory = [abs(peer) for one in scored if (peer := peer_memory_error(one.run)) is not None]
    return {
        "rows": len(scored) + len(skipped) + duplicates,
        "scored": len(scored),
        "duplicates": duplicates,
        "skipped": kinds,
        "timed": len(timed),
        "searched": sum(one.searched for one in timed),
        "median_abs_error": _of(np.median, np.abs(errors)),
        "mean_abs_error": _of(np.mean, np.abs(errors)),
        "p90_abs_error": _of(lambda values: np.percentile(values, 90), np.abs(errors)),
        "bias": _of(np.mean, errors),
        "within_interval": _of(np.mean, inside),
        "interval_half_width": _of(np.median, widths),
        "rank_correlation": correlation,
        "regret": regret,
        "groups": groups,
        "memory_mean_abs_error": _of(np.mean, np.abs(memory)),
        "memory_bias": _of(np.mean, memory),
        "memory_max_abs_error": _of(np.max, np.abs(memory)),
        "peer_mean_abs_error": _of(np.mean, peers),
        "peer_memory_mean_abs_error": _of(np.mean, peer_memory),
    }


def is_timed(run: Run) -> bool:
    """Whether its step time counts: memory-only rows carry times of deterministic test runs."""
    return run.seconds is not None and run.tier != "M"


def ranking(timed: Sequence[Scored]) -> tuple[float | None, float | None, int]:
    """Spearman correlation and regret, averaged over groups; how many groups."""
    groups: dict[object, list[Scored]] = {}
    for one in timed:
        groups.setdefault(one.run.group, []).append(one)
    correlations, regrets = [], []
    for group in groups.values():
        if len(group) < LEAST_GROUP:
            continue
        measured = np.array([one.run.seconds or 0.0 for one in group])
        predicted = np.array([one.seconds for one in group])
        regrets.append(float(measured[np.argmin(predicted)] / measured.min() - 1))
        correlations.append(spearman(measured, predicted))
    return _of(np.mean, correlations), _of(np.mean, regrets), len(regrets)


def spearman(first: np.ndarray, second: np.ndarray) -> float:
    """Rank correlation, ties at their mean rank; 0 where one side does not vary."""
    one, other = _ranks(first), _ranks(second)
    if one.std() == 0 or other.std() == 0:
        return 0.0
    return float(np.corrcoef(one, other)[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts - 1) / 2)[inverse]


def peer_seconds(run: Run) -> float | None:
    """Seconds that another tool predicted for this row, where the row carries them."""
    found = re.search(r"(?:step|p_cost)\s+([\d.]+)\s*s", run.peer)
    return float(found.group(1)) if found else None


def peer_memory_error(run: Run) -> float | None:
    """Relative error of another tool's memory."""
    found = re.search(r"mem [\d.]+ GiB \(([-+\d.]+)%\)", run.peer)
    return float(found.group(1)) / 100 if found else None


def macro(by_source: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Means over sources of their figures: every source with timed rows has one vote."""
    names = ("median_abs_error", "mean_abs_error", "p90_abs_error", "within_interval", "rank_correlation", "regret")
    return {
        name: _of(np.mean, [one[name] for one in by_source.values() if one[name] is not None and one["timed"]])
        for name in names
    }


def _of(function: Any, values: Any) -> float | None:
    return float(function(np.asarray(values, dtype=float))) if len(values) else None
