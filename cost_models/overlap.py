"""What hides behind what, and what it slows.

    exposed = seconds * (1 - overlap)                           overlap: by executor and kind of parallelism
    slowed  = t + min(c, t * f) * (1 - 1 / f)                   t compute alone, c concurrent collective, f slow-down

While a collective runs beside it, compute advances at 1/f of its speed (it shares memory bandwidth and
multiprocessors); f is a property of the chip, by class of operator.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from cost_models.executors import executor as executor_of
from cost_models.tables import Seconds, plain
from hardware_profiles.chip import Chip

Parallelism = Literal["tp", "cp", "ep", "pp", "dp", "send"]


def overlap_fraction(what: Parallelism, executor: str = "autopar") -> float:
    """Fraction of the collectives of one kind of parallelism that the executor can hide behind compute.

    cp hides where keys and values travel round a ring beside attention, ep where another micro-batch's compute runs
    beside an all-to-all. Pipeline sends ("pp" or "send") have a stream of their own and never hold up their sender's
    compute: 1; that a receiver waits for them is the schedule's affair.
    """
    behaviour = executor_of(executor)
    hidden = {
        "tp": behaviour.tp_overlap,
        "cp": behaviour.cp_overlap,
        "ep": behaviour.ep_overlap,
        "dp": behaviour.dp_overlap,
        "pp": 1.0,
        "send": 1.0,
    }
    return hidden.get(what, 0.0)


def hides(chip: Chip) -> bool:
    """Whether anything can: a device without ports of its own moves every byte itself, with the cores that compute."""
    return chip.link.kind != "none"


def slowed_seconds(
    chip: Chip,
    compute_seconds: ArrayLike,
    collective_seconds: ArrayLike,
    kind: Literal["gemm", "attention", "pointwise"] = "gemm",
) -> Seconds:
    """Compute seconds when a collective of `collective_seconds` starts with it: never less than alone."""
    factor = float(getattr(chip.overlap_slowdown, kind))
    compute = np.asarray(compute_seconds, dtype=np.float64)
    together = np.minimum(np.asarray(collective_seconds, dtype=np.float64), compute * factor)
    return plain(compute + together * (1.0 - 1.0 / factor))
