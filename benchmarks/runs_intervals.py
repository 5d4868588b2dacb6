"""Residuals of predictions by group of parts, for `cost_models.uncertainty`; and how intervals fare on a source left out.

    (log measured / predicted)^2  ~  sum over groups r_g^2 share_g^2 + floor^2        least squares, r >= 0

Every source has one vote; errors beyond `CLIP` count as that, and the result is scaled by `TIGHTER`: squared errors are drawn by
the tails, and what is wanted is the interval that four rows in five fall into.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from runs_pricing import Scored
from runs_scores import is_timed

from cost_models.uncertainty import GROUPS, Z80

NAMES = ("compute", "collective", "all_to_all", "send", "bubble", "optimizer", "host", "floor")
CLIP = 0.25
TIGHTER = 0.7

Array = NDArray[np.float64]


def left_out_intervals(scored: Sequence[Scored]) -> tuple[float, float]:
    """Share of rows inside the 80 % interval whose residuals come from the other sources; the median half-width."""
    shares, errors, sources = _arrays(scored)
    inside, widths = [], []
    for source in sorted(set(sources)):
        own = sources == source
        spread = Z80 * np.sqrt(shares[own] @ fit_squares(shares[~own], errors[~own], sources[~own]))
        inside.append(np.abs(errors[own]) <= spread)
        widths.append(np.sinh(spread))
    return float(np.concatenate(inside).mean()), float(np.median(np.concatenate(widths)))


def residuals(scored: Sequence[Scored]) -> dict[str, float]:
    """Group -> relative standard deviation, from all sources."""
    return dict(zip(NAMES, np.sqrt(fit_squares(*_arrays(scored))).round(3).tolist(), strict=True))


def fit_squares(shares: Array, errors: Array, sources: NDArray[np.str_]) -> Array:
    """Squares of the residuals, by coordinate descent on non-negative least squares."""
    weights = np.sqrt(1.0 / np.array([np.sum(sources == source) for source in sources]))
    left, right = shares * weights[:, None], np.minimum(errors**2, CLIP**2) * weights
    gram, target = left.T @ left, left.T @ right
    found = np.zeros(len(NAMES))
    for _ in range(2000):
        for i in range(len(NAMES)):
            if gram[i, i] > 0:
                found[i] = max(0.0, found[i] + (target[i] - gram[i] @ found) / gram[i, i])
    return found * TIGHTER


def _arrays(scored: Sequence[Scored]) -> tuple[Array, Array, NDArray[np.str_]]:
    """Squared shares of each group in the step, log errors, sources; a row each."""
    timed = [one for one in scored if is_timed(one.run)]
    shares = np.zeros((len(timed), len(NAMES)))
    for row, one in enumerate(timed):
        for part, seconds in one.parts.items():
            group = GROUPS.get(part, part)
            if group in NAMES:
                shares[row, NAMES.index(group)] += seconds / one.seconds
        shares[row, -1] = 1.0
    errors = np.log([(one.run.seconds or 1.0) / one.seconds for one in timed])
    return shares**2, errors, np.array([one.run.source for one in timed])
