"""What hides behind what, and what it slows.

    exposed = seconds * (1 - hidden / f)        hidden: by executor and kind of parallelism; f: the slow-down of compute

While a collective runs beside it, compute advances at 1/f of its speed (it shares memory bandwidth and multiprocessors): of
c hidden seconds, c (1 - 1/f) come back as compute that ends later. f is a property of the chip; measured values lie between
1.02 (through the network) and 1.8 (a gather inside an A100 node), so that it stands in a profile and is scarcely ever known.
"""

from __future__ import annotations

from typing import Literal

from cost_models.executors import executor as executor_of
from hardware_profiles.chip import Chip

Parallelism = Literal["tp", "cp", "ep", "pp", "dp", "send"]


def overlap_fraction(what: Parallelism, executor: str = "autopar", chip: Chip | None = None) -> float:
    """Fraction of the collectives of one kind of parallelism that costs nothing beside compute: what the executor can
    hide, less what that slows on the chip.

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
    }
    return unslowed(hidden[what], chip) if what in hidden else 1.0


def unslowed(hidden: float, chip: Chip | None) -> float:
    """What a hidden fraction of collectives saves beside products that it slows."""
    return hidden if chip is None else hidden / chip.overlap_slowdown.gemm


def hides(chip: Chip) -> bool:
    """Whether anything can: a device without ports of its own moves every byte itself, with the cores that compute."""
    return chip.link.kind != "none"
