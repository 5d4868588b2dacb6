"""HiGHS through PuLP, quiet and honest: proven or not, with its bound.

`LpStatus` says Optimal after a time-out, so `sol_status` decides; the gap is 0 (HiGHS's default is 1e-4); whatever the
library prints to standard output is swallowed, since commands print JSON there.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import pulp


@dataclass(frozen=True)
class Solution:
    """What a solver says of a problem; values stand in the problem's variables."""

    status: Literal["optimal", "feasible", "infeasible"]
    objective: float
    bound: float
    solver_name: str


def solve(problem: pulp.LpProblem, time_limit: float | None = None) -> Solution:
    """Minimise or maximise; ``feasible`` means stopped at the time limit with a solution."""
    solver = pulp.HiGHS(msg=False, gapRel=0, timeLimit=time_limit, threads=1)
    with _quiet():
        problem.solve(solver)
    if problem.sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        return Solution("infeasible", float("inf"), float("inf"), "HiGHS")
    objective = float(pulp.value(problem.objective) or 0.0)
    if problem.sol_status == pulp.LpSolutionOptimal:
        return Solution("optimal", objective, objective, "HiGHS")
    return Solution("feasible", objective, float(problem.solverModel.getInfo().mip_dual_bound), "HiGHS")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Nothing reaches standard output, not even from C."""
    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)
