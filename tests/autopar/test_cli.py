"""The commands as a user types them: what they print, where they stop, and that mistakes get one clear message."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from autopar.cli import main
from autopar.documents import Graph, Plan

ROOT = Path(__file__).parents[2]
GRAPH = str(ROOT / "tests" / "fixtures" / "graph.json")
PLAN = str(ROOT / "tests" / "fixtures" / "plan.json")


def run(capsys, *words):
    status = main([str(word) for word in words])
    out, err = capsys.readouterr()
    return status, out, err


def planned(capsys, tmp_path, *words):
    path = tmp_path / "plan.json"
    status, out, err = run(capsys, "plan", GRAPH, "--cluster", "local-cpu-x4", "--global-batch", 8, "-o", path, *words)
    assert status == 0, err
    return Plan.load(path), out


def test_plan_writes_a_plan_and_ends_with_the_next_command(capsys, tmp_path):
    plan, out = planned(capsys, tmp_path)
    assert plan.mesh.devices == 4
    assert out.splitlines()[-1].startswith(f"next: autopar simulate {tmp_path / 'plan.json'}")


def test_the_next_command_runs(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, out = planned(capsys, tmp_path)
    words = out.splitlines()[-1].removeprefix("next: autopar ").split()
    assert run(capsys, *words)[0] == 0
    assert (tmp_path / "trace.json").exists()
    assert (tmp_path / "pipeline.png").exists()


def test_plan_fits_on_one_screen(capsys, tmp_path):
    _, out = planned(capsys, tmp_path)
    assert len(out.splitlines()) <= 40


def test_json_is_the_plan_and_nothing_else(capsys, tmp_path):
    plan, out = planned(capsys, tmp_path, "--json")
    assert Plan.from_json(out) == plan


def test_what_was_fixed_is_kept(capsys, tmp_path):
    plan, _ = planned(capsys, tmp_path, "--fix", "tp=2,pp=2,micro_batch=1,zero=0")
    assert (plan.mesh.tp, plan.mesh.pp, plan.schedule.micro_batch) == (2, 2, 1)
    assert {stage.zero for stage in plan.stages} == {0}


def test_what_was_forbidden_is_not_used(capsys, tmp_path):
    plan, _ = planned(capsys, tmp_path, "--forbid", "pp,tp")
    assert (plan.mesh.tp, plan.mesh.pp, plan.mesh.dp) == (1, 1, 4)


def test_simulate_prints_parts_that_add_up(capsys):
    status, out, _ = run(capsys, "simulate", PLAN, "--json")
    figures = json.loads(out)
    assert status == 0
    assert sum(figures["seconds_by_part"].values()) == pytest.approx(figures["step_seconds"], rel=1e-12)


def test_a_straggler_makes_the_step_longer(capsys):
    plain = json.loads(run(capsys, "simulate", PLAN, "--json")[1])
    slow = json.loads(run(capsys, "simulate", PLAN, "--json", "--straggler", "rank=1,slow=2")[1])
    assert slow["step_seconds"] > plain["step_seconds"]


def test_explain_says_what_each_stage_holds(capsys, tmp_path):
    planned(capsys, tmp_path)
    status, out, _ = run(capsys, "explain", tmp_path / "plan.json")
    assert status == 0
    assert "parameters" in out


def test_profiles_lists_clusters_and_shows_sources(capsys):
    assert "h100x16384" in run(capsys, "profiles")[1]
    assert "DGX A100" in run(capsys, "profiles", "a100x64")[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plam"], "did you mean 'plan'"),
        (["plan", GRAPH, "--cluster", "a100x64"], "--global-batch"),
        (["plan", GRAPH, "--cluster", "a100x46", "--global-batch", "8"], "did you mean 'a100x64'"),
        (["plan", GRAPH, "--cluster", "local-cpu-x4", "--global-batch", "zero"], "'zero' is not a whole number"),
        (["plan", GRAPH, "--cluster", "local-cpu-x4", "--global-batch", "0"], "at least 1"),
        (["plan", GRAPH, "--cluster", "local-cpu-x4", "--global-batch", "8", "--fix", "tpp=2"], "did you mean 'tp'"),
        (["plan", GRAPH, "--cluster", "local-cpu-x4", "--global-batch", "8", "--fix", "tp=two"], "tp"),
        (["plan", GRAPH, "--cluster", "local-cpu-x4", "--global-batch", "8", "--fix", "tp=3"], "4"),
        (["plan", GRAPH, "--cluster", "local-cpu-x4", "--global-batch", "8", "--fix", "pp=2,tp=4"], "8"),
        (["plan", GRAPH, "--cluster", "local-cpu-x4", "--global-batch", "8", "--fix", "micro_batch=3"], "3"),
        (["plan", GRAPH, "--cluster", "local-cpu-x4", "--global-batch", "8", "--forbid", "recomput"], "recompute"),
        (["plan", GRAPH, "--cluster", "local-cpu-x4", "--global-batch", "8", "--optimizer", "adamx"], "did you mean"),
        (["plan", GRAPH, "--cluster", "local-cpu-x4", "--global-batch", "8", "--devices", "5"], "4"),
        (["plan", GRAPH, "--cluster", "local-cpu-x4", "--global-batch", "8", "--memory-margin", "120%"], "100%"),
        (["plan", "absent.py", "--cluster", "local-cpu-x4", "--global-batch", "8"], "absent.py"),
        (["simulate", "absent.json"], "absent.json"),
        (["simulate", GRAPH], "is this a plan file"),
        (["simulate", PLAN, "--straggler", "rank=7,slow=2"], "pp ranks 0 to 1"),
        (["simulate", PLAN, "--straggler", "nonsense"], "rank=3,slow=1.2"),
        (["profiles", "h100x640"], "did you mean"),
    ],
)
def test_a_mistake_gets_one_message_and_status_2(capsys, words, message):
    status, out, err = run(capsys, *words)
    assert status == 2
    assert message in err
    assert "Traceback" not in err
    assert not out


def test_explaining_against_another_models_plan_is_refused(capsys, tmp_path):
    plan = Plan.load(PLAN)
    other = plan.model_copy(update={"model": plan.model.model_copy(update={"hash": "f" * 16, "parameters": 5})})
    other.save(tmp_path / "other.json")
    status, _, err = run(capsys, "explain", PLAN, "--against", tmp_path / "other.json")
    assert status == 2
    assert f"parameters {plan.model.parameters:,} against 5" in err


def test_a_model_too_large_exits_3_and_says_by_how_much(capsys, tmp_path):
    graph = Graph.load(GRAPH)
    wide = tuple(
        atom.model_copy(update={"size": atom.size * 20_000}) if atom.name in ("hidden", "ffn") else atom
        for atom in graph.indices
    )
    classes = tuple(
        item.model_copy(
            update={
                "parameters": tuple(
                    p.model_copy(update={"shape": tuple(20_000 * n for n in p.shape)}) for p in item.parameters
                )
            }
        )
        for item in graph.block_classes
    )
    graph.model_copy(update={"indices": wide, "block_classes": classes}).save(tmp_path / "wide.json")
    status, _, err = run(
        capsys,
        "plan",
        tmp_path / "wide.json",
        "--cluster",
        "local-cpu-x4",
        "--global-batch",
        8,
        "-o",
        tmp_path / "p.json",
    )
    assert status == 3
    assert "GiB" in err
    assert "stage" in err
    assert not (tmp_path / "p.json").exists()


def test_a_reader_that_leaves_early_is_no_error():
    command = f"{sys.executable} -m autopar profiles | head -1"
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True, check=True)
    assert not done.stderr
