"""Starting ranks: what a run says of itself, and one cause when a rank fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import small_models
import torch
from parity import TIMEOUT, alone, plan_for

from autopar.errors import PlanMismatch, RequestError, RunFailed
from autopar.runtime.launch import on_ranks, run
from autopar.runtime.train import Recipe, RunOptions

RECIPE = Recipe(small_models.build_model, small_models.example_inputs, small_models.loss, None, small_models.batches)


def test_a_run_writes_the_mesh_as_built_and_a_line_for_each_step(tmp_path):
    plan = plan_for("llama", tp=2, dp=2, zero=1, micro_batch=6)
    told = tmp_path / "run.jsonl"
    run(plan, RECIPE, RunOptions(steps=3, seed=1, clip_norm=0.5, metrics=told, timeout=TIMEOUT))
    opening, *steps = [json.loads(line) for line in told.read_text().splitlines()]
    assert opening["plan_hash"] == plan.hash
    assert opening["world"] == 4
    assert opening["mesh"] == {"pp": 1, "dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 2}
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert [line["loss"] for line in steps] == pytest.approx(alone(small_models.build_model).losses[:3], abs=1e-9)
    assert all(len(line["peak_bytes"]) == 4 and line["tokens_per_second"] > 0 for line in steps)


def test_without_batches_every_plan_draws_the_same_example_inputs():
    recipe = Recipe(small_models.build_model, small_models.example_inputs, small_models.loss)
    plans = [plan_for("llama", dp=2, zero=0, micro_batch=6), plan_for("llama", tp=2, micro_batch=6)]
    first, second = (
        [line["loss"] for line in run(plan, recipe, RunOptions(steps=3, timeout=TIMEOUT))[1:]] for plan in plans
    )
    assert first == pytest.approx(second, abs=1e-9)


def test_another_number_of_ranks_is_refused_with_the_arithmetic():
    plan = plan_for("llama", tp=2, dp=2, zero=1, micro_batch=6)
    with pytest.raises(PlanMismatch, match="for 4 ranks"):
        run(plan, RECIPE, RunOptions(steps=1), nproc=2)


def test_a_rank_that_raises_is_named_with_its_line_and_the_others_stop():
    def work(rank: int) -> None:
        if rank == 1:
            raise ZeroDivisionError("by choice")
        torch.distributed.barrier()

    start = time.monotonic()
    with pytest.raises(RunFailed, match=r"rank 1 of 3 failed: ZeroDivisionError: by choice at .*test_launch\.py:\d+"):
        on_ranks(3, work, TIMEOUT)
    assert time.monotonic() - start < 30


def test_a_killed_rank_is_named_with_its_signal():
    def work(rank: int) -> None:
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        torch.distributed.barrier()

    with pytest.raises(RunFailed, match=r"rank 2 of 3 was ended by signal 9 \(SIGKILL\).*memory"):
        on_ranks(3, work, TIMEOUT)


def test_a_users_mistake_on_a_rank_stays_a_users_mistake():
    recipe = Recipe(small_models.build_model, small_models.example_inputs)
    with pytest.raises(RequestError, match="training needs a loss"):
        run(plan_for("llama", pp=2, micro_batch=6), recipe, RunOptions(steps=1, timeout=TIMEOUT))


def test_torchrun_joins_the_ranks_it_starts(tmp_path):
    plan = plan_for("llama", dp=2, zero=1, micro_batch=6)
    plan.save(tmp_path / "plan.json")
    script = tmp_path / "train.py"
    script.write_text(
        f"import sys; sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(Path.cwd())!r}]\n"
        "import small_models\n"
        "from autopar.documents import Plan\n"
        "from autopar.runtime.launch import run\n"
        "from autopar.runtime.train import Recipe, RunOptions\n"
        "recipe = Recipe(small_models.build_model, small_models.example_inputs, small_models.loss, None, small_models.batches)\n"
        f"options = RunOptions(steps=2, seed=1, clip_norm=0.5, metrics={str(tmp_path / 'run.jsonl')!r})\n"
        f"run(Plan.load({str(tmp_path / 'plan.json')!r}), recipe, options)\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert lines[0]["world"] == 2
    assert [line["loss"] for line in lines[1:]] == pytest.approx(alone(small_models.build_model).losses[:2], abs=1e-9)
