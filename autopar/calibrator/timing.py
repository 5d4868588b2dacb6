"""How long one call takes on a device while the other ranks call it too.

The mean over a window of many calls, not the median: where ranks share cores, a call that was set aside for another rank's is
part of what calls cost.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

LEAST_CALLS = 1


def seconds_of(call: Callable[[], Any], device: torch.device, window: float) -> float:
    """Mean seconds of a call over about `window` seconds, after one call to warm up."""
    call()
    _wait(device)
    count = 0
    start = now = time.perf_counter()
    while count < LEAST_CALLS or now - start < window:
        call()
        _wait(device)
        count += 1
        now = time.perf_counter()
    return (now - start) / count


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
