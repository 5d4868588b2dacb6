"""autopar turns a PyTorch model and a GPU cluster into a training plan, and runs it.

    graph = autopar.capture("model.py")
    plan = autopar.plan(graph, "a100x64", global_batch=512)
    line = autopar.simulate(plan)
    step = autopar.parallelize(model, plan)

Names are imported when first used, so that ``import autopar`` stays light and needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from autopar.version import __version__ as __version__

if TYPE_CHECKING:
    from autopar.api import calibrate, capture, compare, explain, parallelize, plan, run, simulate
    from autopar.documents import Graph, Plan, Timeline
    from autopar.errors import (
        AutoparError,
        CaptureError,
        DocumentError,
        NoPlanFits,
        PlanMismatch,
        ProfileError,
        RequestError,
        RunFailed,
    )
    from hardware_profiles.chip import Chip
    from hardware_profiles.cluster import Cluster

__all__ = [
    "AutoparError",
    "CaptureError",
    "Chip",
    "Cluster",
    "DocumentError",
    "Graph",
    "NoPlanFits",
    "Plan",
    "PlanMismatch",
    "ProfileError",
    "RequestError",
    "RunFailed",
    "Timeline",
    "calibrate",
    "capture",
    "compare",
    "explain",
    "parallelize",
    "plan",
    "run",
    "simulate",
]

_HOME = {
    "Chip": "hardware_profiles.chip",
    "Cluster": "hardware_profiles.cluster",
    "Graph": "autopar.documents",
    "Plan": "autopar.documents",
    "Timeline": "autopar.documents",
    "calibrate": "autopar.api",
    "capture": "autopar.api",
    "compare": "autopar.api",
    "explain": "autopar.api",
    "parallelize": "autopar.api",
    "plan": "autopar.api",
    "run": "autopar.api",
    "simulate": "autopar.api",
}


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module(_HOME.get(name, "autopar.errors")), name)
    raise AttributeError(f"module 'autopar' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
