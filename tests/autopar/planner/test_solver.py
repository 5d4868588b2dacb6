"""The solver wrapper: proven optima, the same from both solvers, and silence on stdout."""

from __future__ import annotations

import pulp
import pytest

from autopar.planner import solver


def knapsack():
    """Values 10, 13, 7, 8 of weights 5, 6, 3, 4 within 10: the best is 13 + 8 = 21 (by hand)."""
    problem = pulp.LpProblem("knapsack", pulp.LpMaximize)
    take = [pulp.LpVariable(f"x{i}", cat="Binary") for i in range(4)]
    problem += pulp.lpSum(v * x for v, x in zip((10, 13, 7, 8), take, strict=True))
    problem += pulp.lpSum(w * x for w, x in zip((5, 6, 3, 4), take, strict=True)) <= 10
    return problem


@pytest.fixture(params=["HiGHS", "CBC"])
def name(request, monkeypatch):
    monkeypatch.setattr(solver, "solver_name", lambda: request.param)
    return request.param


def test_both_solvers_prove_the_same_optimum(name):
    found = solver.solve(knapsack())
    assert (found.status, found.solver) == ("optimal", name)
    assert found.objective == pytest.approx(21)


def test_an_impossible_problem_is_infeasible_not_optimal(name):
    problem = knapsack()
    problem += pulp.lpSum(problem.variables()) >= 5
    assert solver.solve(problem).status == "infeasible"


def test_nothing_is_printed(name, capfd):
    solver.solve(knapsack())
    assert capfd.readouterr().out == ""
