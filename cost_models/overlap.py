"""What hides behind what.

dp     ZeRO gathers run ahead of the forward that needs them, reductions behind the next backward: all but the first and last unit
tp     blocking in the autopar runtime: the next operator needs the result
send   on its own stream, behind the next micro-batch's compute
"""

from __future__ import annotations

OVERLAP = {"dp": 0.9, "tp": 0.0, "send": 1.0}
"""Share of each kind that the autopar runtime can hide behind compute (FSDP2's prefetch hides all but about a tenth)."""


def overlap_fraction(what: str) -> float:
    """Share of a collective's time that can hide behind compute: dp, tp or send."""
    return OVERLAP[what]
