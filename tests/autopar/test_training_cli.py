"""run, compare and calibrate as a user types them."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from autopar.cli import main
from autopar.documents import Plan
from autopar.documents.run_lines import RunLines
from autopar.tracer import open_source
from hardware_profiles.cluster import Cluster

ROOT = Path(__file__).parents[2]
TINY = str(ROOT / "examples" / "tiny_llama.py")
MODEL = """
import torch
from torch import nn
SEQ_LEN = 8

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(16, 11)
    def forward(self, tokens, labels):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

def build_model():
    return Model()

def example_inputs(batch, seq):
    return torch.randint(0, 11, (batch, seq)), torch.randint(0, 11, (batch, seq))

def loss(output, tokens, labels):
    return torch.nn.functional.cross_entropy(output.flatten(0, 1), labels.flatten())
"""


def call(capsys, *words):
    status = main([str(word) for word in words])
    out, err = capsys.readouterr()
    return status, out, err


@pytest.fixture
def planned(tmp_path, monkeypatch, capsys):
    """A function that plans the model above with some choices fixed and gives the plan's path."""
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(MODEL)

    def plan(*words, fix="pp=1,tp=1,dp=2,zero=1", cluster="local-cpu-x2", dtype="fp64"):
        arguments = (
            "plan",
            "model.py",
            "--cluster",
            cluster,
            "--global-batch",
            4,
            "--dtype",
            dtype,
            "--fix",
            fix,
            *words,
        )
        status, _, err = call(capsys, *arguments)
        assert status == 0, err
        return "plan.json"

    return plan


def losses(path):
    return [line["loss"] for line in RunLines.load(path).steps]


def test_a_planned_model_trains_and_is_compared(planned, capsys):
    path = planned()
    status, out, err = call(capsys, "run", path, "--steps", 3, "--metrics", "run.jsonl")
    assert status == 0, err
    assert out.splitlines()[-1] == "next: autopar compare plan.json run.jsonl"
    lines = RunLines.load("run.jsonl")
    assert lines.header["mesh"]["dp_shard"] == 2
    assert lines.header["world"] == 2
    assert [line["step"] for line in lines.steps] == [1, 2, 3]
    status, out, _ = call(capsys, "compare", path, "run.jsonl")
    assert status == 0
    assert f"{Plan.load(path).predicted.step_seconds * 1e3:,.4g}" in out
    assert f"{lines.step_seconds * 1e3:,.4g}" in out


def test_the_same_seed_gives_the_same_losses_under_every_plan(planned, capsys):
    found = []
    for fix in ("pp=1,tp=1,dp=2,zero=1", "pp=2,tp=1,dp=1", "pp=1,tp=2,dp=1"):
        assert call(capsys, "run", planned(fix=fix), "--steps", 3, "--seed", 7, "--metrics", "run.jsonl")[0] == 0
        found.append(losses("run.jsonl"))
    assert found[1] == pytest.approx(found[0], abs=1e-9)
    assert found[2] == pytest.approx(found[0], abs=1e-9)


def test_a_run_resumes_where_it_was_saved_under_another_plan(planned, capsys):
    assert call(capsys, "run", planned(), "--steps", 4, "--metrics", "whole.jsonl")[0] == 0
    words = ("--checkpoint", "kept", "--save-every", 2, "--metrics", "parts.jsonl")
    assert call(capsys, "run", "plan.json", "--steps", 2, *words)[0] == 0
    status, _, err = call(capsys, "run", planned(fix="pp=2,tp=1,dp=1"), "--steps", 4, "--resume", *words)
    assert status == 0, err
    assert losses("parts.jsonl") == pytest.approx(losses("whole.jsonl"), abs=1e-9)


def test_a_run_starts_from_someone_elses_weights(planned, capsys):
    safetensors = pytest.importorskip("safetensors.torch")
    path = planned()
    torch.manual_seed(5)
    model = open_source("model.py").build()
    Path("weights").mkdir()
    safetensors.save_file(model.state_dict(), "weights/model.safetensors")
    status, _, err = call(capsys, "run", path, "--steps", 1, "--init-from", "weights", "--metrics", "run.jsonl")
    assert status == 0, err
    assert call(capsys, "run", path, "--steps", 1, "--seed", 5, "--metrics", "seeded.jsonl")[0] == 0
    # The same weights, other data: equal only where the data are; so compare with a run whose seed made these weights.
    assert (
        call(capsys, "run", path, "--steps", 1, "--seed", 5, "--init-from", "weights", "--metrics", "both.jsonl")[0]
        == 0
    )
    assert losses("both.jsonl") == pytest.approx(losses("seeded.jsonl"), abs=1e-9)
    assert losses("run.jsonl") != pytest.approx(losses("seeded.jsonl"), abs=1e-9)


def test_the_example_learns_real_text_on_four_ranks(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ("--cluster", "local-cpu-x4", "--global-batch", 8, "--seq-len", 64, "--dtype", "fp32")
    assert call(capsys, "plan", TINY, *words)[0] == 0
    status, _, err = call(capsys, "run", "plan.json", "--steps", 80, "--metrics", "run.jsonl")
    assert status == 0, err
    told = losses("run.jsonl")
    assert told[0] > 5
    assert sum(told[-10:]) / 10 < 3


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--nproc", 3), "the plan is for 2 ranks, not 3"),
        (("--resume",), "--checkpoint DIR"),
        (("--resume", "--checkpoint", "nowhere"), "no checkpoint to resume from"),
        (("--checkpoint", "model.py", "--save-every", 1), "checkpoints cannot be kept there"),
        (("--init-from", "nowhere"), "holds no .safetensors file"),
        (("--metrics", "no/such/run.jsonl"), "no folder"),
        (("--model", "other.py"), "no such file"),
        (("--steps", 0), "at least 1"),
        (("--clip-norm", "nan"), "above 0"),
    ],
)
def test_what_a_run_cannot_do_is_one_message(planned, capsys, words, says):
    status, _, err = (
        call(capsys, "run", planned(), "--steps", 1, *words)
        if "--steps" not in words
        else call(capsys, "run", planned(), *words)
    )
    assert status == 2
    assert says in err
    assert "Traceback" not in err


def test_another_model_is_refused_before_anything_starts(planned, capsys):
    path = planned()
    Path("model.py").write_text(MODEL.replace("32", "48"))
    status, _, err = call(capsys, "run", path, "--steps", 1)
    assert status == 2
    assert "parameters" in err
    assert "plan again" in err


def test_a_model_without_a_loss_is_refused(planned, capsys):
    path = planned()
    Path("model.py").write_text(MODEL[: MODEL.index("def loss")])
    status, _, err = call(capsys, "run", path, "--steps", 1)
    assert status == 2
    assert "define `def loss(output, *inputs)`" in err


def test_a_model_that_fails_while_it_trains_is_named_with_its_line(planned, capsys):
    path = planned()
    broken = "        if not x.is_meta:\n            raise ZeroDivisionError('by choice')\n"
    Path("model.py").write_text(
        MODEL.replace("        return self.head(x)\n", broken + "        return self.head(x)\n")
    )
    status, _, err = call(capsys, "run", path, "--steps", 1)
    assert status == 2
    assert "ZeroDivisionError: by choice" in err
    assert "model.py:" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("def batches(batch, seq, seed):\n    return None\n", "batches(batch, seq, seed) returned NoneType"),
        ("def build_optimizer(params):\n    return None\n", "build_optimizer(params) returned NoneType"),
    ],
)
def test_what_a_model_file_gives_is_named_where_it_is_something_else(planned, capsys, given, says):
    path = planned()
    Path("model.py").write_text(MODEL + given)
    status, _, err = call(capsys, "run", path, "--steps", 1)
    assert status == 2
    assert says in err


def test_two_lists_of_blocks_are_planned_without_a_pipeline(planned, capsys):
    twice = MODEL.replace(
        "        self.head =", "        self.others = nn.ModuleList(Block() for _ in range(4))\n        self.head ="
    )
    twice = twice.replace(
        "        return self.head(x)",
        "        for block in self.others:\n            x = block(x)\n        return self.head(x)",
    )
    path = planned()
    Path("model.py").write_text(twice)
    words = ("--cluster", "local-cpu-x2", "--global-batch", 4, "--dtype", "fp64")
    status, _, err = call(capsys, "plan", "model.py", *words)
    assert status == 0, err
    assert Plan.load(path).mesh.pp == 1
    status, _, err = call(capsys, "plan", "model.py", *words, "--fix", "pp=2")
    assert status == 0, err
    assert Plan.load(path).export_only  # what was asked for is planned, and said not to run
    status, _, err = call(capsys, "run", path, "--steps", 1)
    assert status == 2
    assert "2 lists of blocks" in err


def test_lines_of_another_plan_are_not_compared(planned, capsys):
    assert call(capsys, "run", planned(), "--steps", 1, "--metrics", "run.jsonl")[0] == 0
    status, _, err = call(capsys, "compare", planned(fix="pp=2,tp=1,dp=1"), "run.jsonl")
    assert status == 2
    assert "give the plan that was run" in err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is empty"),
        ("{", "line 1 is not complete JSON"),
        ('{"step": 1}', "not the run's header"),
        ('{"plan_hash": "a", "world": 1, "mesh": {}}\n{"step": 1}', "line 2 is not a step"),
    ],
)
def test_lines_that_are_no_runs_are_refused(tmp_path, capsys, text, says):
    (tmp_path / "run.jsonl").write_text(text)
    status, _, err = call(capsys, "compare", ROOT / "tests" / "fixtures" / "plan.json", tmp_path / "run.jsonl")
    assert status == 2
    assert says in err


def test_calibrate_writes_a_cluster_that_plans(planned, capsys):
    status, out, err = call(capsys, "calibrate", "--quick", "--ranks", 2, "-o", "here.yaml")
    assert status == 0, err
    cluster = Cluster.load("here.yaml")
    assert cluster.devices == 2
    assert {(curve.kind, curve.ranks) for curve in cluster.curves} >= {
        ("all_reduce", 2),
        ("send", 2),
        ("all_to_all", 2),
    }
    assert all(sorted(curve.seconds) == list(curve.seconds) for curve in cluster.curves)
    chip = cluster.node_groups[0].chip
    assert 1e8 < chip.peak_flops("fp32") < 1e13
    assert all(0 < share <= 1 for table in chip.efficiency.gemm for share in table.fraction_of_peak)
    assert Plan.load(planned(cluster="here.yaml")).mesh.devices == 2
    assert "autopar plan" in out


def test_torchrun_starts_the_command_and_the_first_rank_speaks(planned):
    planned()
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "autopar"]
    words += ["run", "plan.json", "--steps", "2", "--metrics", "run.jsonl"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("next: autopar compare") == 1
    assert RunLines.load("run.jsonl").header["world"] == 2


def test_torchrun_restarts_a_killed_rank_from_its_checkpoint(planned, capsys):
    assert call(capsys, "run", planned(), "--steps", 6, "--metrics", "whole.jsonl")[0] == 0
    # Rank 1 dies in its fourth step, once; the second attempt goes on after the newest checkpoint, step 2.
    dies = (
        "    import os, pathlib\n"
        "    died = pathlib.Path('died')\n"
        "    count[0] += 1\n"
        "    if os.environ.get('RANK') == '1' and count[0] == 4 and not died.exists():\n"
        "        died.write_text('')\n"
        "        os.kill(os.getpid(), 9)\n"
    )
    text = MODEL.replace(
        "def loss(output, tokens, labels):\n", "count = [0]\ndef loss(output, tokens, labels):\n" + dies
    )
    Path("model.py").write_text(text)
    call(capsys, "plan", "model.py", "--cluster", "local-cpu-x2", "--global-batch", 4, "--dtype", "fp64", "--fix",
         "pp=1,tp=1,dp=2,zero=1,micro_batch=2")  # fmt: skip
    words = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "1",
    ]
    words += ["-m", "autopar", "run", "plan.json", "--steps", "6", "--metrics", "run.jsonl", "--timeout", "30"]
    words += ["--checkpoint", "kept", "--save-every", "2"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    shutil.rmtree("kept", ignore_errors=True)
    done = subprocess.run(words, capture_output=True, text=True, timeout=180, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert Path("died").exists()
    last = {
        json.loads(line).get("step"): json.loads(line).get("loss")
        for line in Path("run.jsonl").read_text().splitlines()
    }
    assert [last[step] for step in range(1, 7)] == pytest.approx(losses("whole.jsonl"), abs=1e-9)


def test_a_run_made_in_parts_says_so_and_is_the_same_under_every_plan(planned, capsys):
    found = []
    for fix in ("pp=1,tp=1,dp=2,zero=3", "pp=2,tp=1,dp=1", "pp=1,tp=2,dp=1"):
        words = ("--steps", 3, "--initialise", "parts", "--metrics", "run.jsonl")
        status, _, err = call(capsys, "run", planned(fix=fix), *words)
        assert status == 0, err
        assert RunLines.load("run.jsonl").header["initialised"] == "in parts, by name, from the seed"
        found.append(losses("run.jsonl"))
    assert found[1] == pytest.approx(found[0], abs=1e-9)
    assert found[2] == pytest.approx(found[0], abs=1e-9)
