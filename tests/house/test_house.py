"""The house's own rules: documents published, nothing heavy imported, a front door that is guarded."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def imported_by(statement: str) -> set[str]:
    """Top-level modules that a fresh interpreter holds after `statement`."""
    code = f"{statement}; import sys; print(' '.join({{name.partition('.')[0] for name in sys.modules}}))"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


@pytest.mark.parametrize("statement", ["import autopar", "import autopar.cli", "import hardware_profiles, cost_models"])
def test_the_front_door_imports_no_torch(statement):
    heavy = {"torch", "transformers", "matplotlib", "pulp", "highspy"}
    assert not imported_by(statement) & heavy


def test_planning_and_simulating_import_no_torch():
    statement = "import autopar.planner.search, autopar.simulator, autopar.report.trace, autopar.report.pictures"
    assert "torch" not in imported_by(statement)


def test_the_published_schemas_are_current():
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "docs/schemas/generate.py", "--check"], cwd=ROOT, env=environment, check=True)


def test_the_front_door_is_a_sorted_list_of_names_that_exist():
    import autopar

    assert list(autopar.__all__) == sorted(autopar.__all__)
    assert all(getattr(autopar, name) is not None for name in autopar.__all__)
