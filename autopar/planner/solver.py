"""Integer programmes through PuLP: HiGHS by default, CBC where HiGHS is missing. Proven optima only, or the bound reached.

PuLP calls a problem stopped by its time limit ``Optimal``: `sol_status` tells. HiGHS prints a banner to stdout even when
told to be silent, which would break JSON output; its default gaps are 1e-4 relative and 1e-6 absolute, which are no
proof: a microsecond is more than a small block takes.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import pulp

PROVEN = 1


@dataclass(frozen=True)
class Solution:
    """What a solver found; values are read from the problem's variables."""

    status: Literal["optimal", "feasible", "infeasible"]
    objective: float
    solver: str


def solve(problem: pulp.LpProblem, time_limit: float | None = None) -> Solution:
    """Solve in place. ``feasible``: stopped by the limit with an answer that is not proven."""
    name, solver = _solver(time_limit)
    with _silent():
        problem.solve(solver)
    if problem.sol_status == PROVEN:
        return Solution("optimal", float(pulp.value(problem.objective) or 0.0), name)
    if problem.sol_status == pulp.LpSolutionIntegerFeasible:
        return Solution("feasible", float(pulp.value(problem.objective) or 0.0), name)
    return Solution("infeasible", float("inf"), name)


def _solver(time_limit: float | None) -> tuple[str, Any]:
    name = solver_name()
    if name == "HiGHS":
        return name, pulp.HiGHS(msg=False, timeLimit=time_limit, gapRel=0.0, gapAbs=0.0, threads=1)
    return name, pulp.PULP_CBC_CMD(msg=False, timeLimit=time_limit, gapRel=0.0, gapAbs=0.0, threads=1)


@cache
def solver_name() -> str:
    """The solver that will be used."""
    return "HiGHS" if pulp.HiGHS().available() else "CBC"


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Send file descriptor 1 to nowhere: the banner is written below Python."""
    sys.stdout.flush()
    try:
        kept = os.dup(1)
    except OSError:
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)
