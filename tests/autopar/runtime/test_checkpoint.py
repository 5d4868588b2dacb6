"""Checkpoints: a run goes on under another plan as if nothing had happened; a failed save leaves the last good one."""

from __future__ import annotations

import json
import resource
import signal
from pathlib import Path

import pytest
import small_models
from parity import CLIP, FACTORIES, TIMEOUT, alone, data, plan_for

from autopar.errors import AutoparError, DocumentError
from autopar.runtime import checkpoint
from autopar.runtime.launch import on_ranks, run
from autopar.runtime.step import parallelize
from autopar.runtime.train import Recipe, RunOptions

RECIPE = Recipe(
    small_models.gpt_tied,
    small_models.example_inputs,
    small_models.loss,
    None,
    lambda b, s, seed: small_models.batches(b, s, 1),
)


def goes_on(plan, folder: Path, steps: int) -> list[float]:
    """Resume (or start), train up to `steps`, saving at the end; losses of the steps trained."""
    options = RunOptions(
        steps=steps,
        clip_norm=CLIP,
        checkpoint=folder,
        save_every=1,
        resume=bool(checkpoint.found(folder)),
        timeout=TIMEOUT,
    )
    return [line["loss"] for line in run(plan, RECIPE, options)[1:]]


def test_a_run_goes_on_under_other_plans_with_the_losses_of_one_process(tmp_path):
    plans = [
        plan_for("gpt", tp=2, dp=2, zero=3, micro_batch=6),
        plan_for("gpt", pp=2, micro_batch=6, schedule="1f1b"),
        plan_for("gpt", dp=4, zero=1, micro_batch=6),
    ]
    losses = [loss for plan, steps in zip(plans, (2, 3, 5), strict=True) for loss in goes_on(plan, tmp_path, steps)]
    assert losses == pytest.approx(alone(small_models.gpt_tied).losses, abs=1e-9)
    assert [path.name for path in checkpoint.found(tmp_path)] == ["step-00000004", "step-00000005"]


@pytest.mark.parametrize("model", ["gpt", "shifted"])
def test_every_chunk_of_a_rank_goes_on_with_its_copy_of_a_parameter(tmp_path, model):
    build = FACTORIES[model]
    recipe = Recipe(build, small_models.example_inputs, small_models.loss, None, RECIPE.batches)
    plan = plan_for(model, pp=2, micro_batch=6, schedule="interleaved", virtual_stages=2)
    options = {"clip_norm": CLIP, "checkpoint": tmp_path, "save_every": 1, "timeout": TIMEOUT}
    losses = [line["loss"] for line in run(plan, recipe, RunOptions(steps=2, **options))[1:]]
    losses += [line["loss"] for line in run(plan, recipe, RunOptions(steps=5, resume=True, **options))[1:]]
    assert losses == pytest.approx(alone(build).losses, abs=1e-9)


def test_a_damaged_checkpoint_is_named_with_the_one_before(tmp_path):
    plan = plan_for("gpt", dp=2, zero=1, micro_batch=6)
    goes_on(plan, tmp_path, 2)
    (checkpoint.found(tmp_path)[-1] / ".metadata").write_bytes(b"cut")
    with pytest.raises(DocumentError, match=r"step-00000002: the checkpoint cannot be read.*step-00000001"):
        goes_on(plan, tmp_path, 3)


def test_bf16_goes_on_from_its_fp32_masters(tmp_path):
    plan = plan_for("gpt", dp=2, zero=2, micro_batch=6).model_copy(deep=True)
    plan = plan.model_copy(update={"workload": plan.workload.model_copy(update={"dtype": "bf16"})})
    whole = [line["loss"] for line in run(plan, RECIPE, RunOptions(steps=4, timeout=TIMEOUT))[1:]]
    options = {"checkpoint": tmp_path, "save_every": 2, "timeout": TIMEOUT}
    parts = [line["loss"] for line in run(plan, RECIPE, RunOptions(steps=2, **options))[1:]]
    parts += [line["loss"] for line in run(plan, RECIPE, RunOptions(steps=4, resume=True, **options))[1:]]
    assert parts == whole


def test_a_save_that_fails_names_the_cause_and_leaves_the_last_good_checkpoint(tmp_path):
    plan = plan_for("gpt", dp=2, zero=1, micro_batch=6)

    def work(rank: int) -> str:
        step = parallelize(small_models.gpt_tied(), plan, small_models.loss, timeout=TIMEOUT)
        step(data()[0])
        checkpoint.save(step, tmp_path, 1)
        step(data()[1])
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
        try:
            checkpoint.save(step, tmp_path, 2)
        except DocumentError as error:
            return str(error)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        return "saved"

    for message in on_ranks(2, work, TIMEOUT):
        assert "step-00000002: the checkpoint cannot be written" in message
        assert "the last good checkpoint is" in message
        assert "step-00000001" in message
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_another_models_checkpoint_is_refused(tmp_path):
    goes_on(plan_for("gpt", dp=2, zero=1, micro_batch=6), tmp_path, 1)

    def work(rank: int) -> str:
        step = parallelize(
            small_models.build_model(), plan_for("llama", dp=2, zero=1, micro_batch=6), small_models.loss
        )
        with pytest.raises(AutoparError) as caught:
            checkpoint.load(step, tmp_path)
        return str(caught.value)

    plan_for("llama", dp=2, zero=1, micro_batch=6)
    assert "another model's" in on_ranks(2, work, TIMEOUT)[0]


def test_what_a_checkpoint_says_of_itself(tmp_path):
    plan = plan_for("gpt", dp=2, zero=1, micro_batch=6)
    goes_on(plan, tmp_path, 1)
    about = json.loads((tmp_path / "step-00000001" / "progress.json").read_text())
    assert about == {"step": 1, "plan_hash": plan.hash, "seed": 0}
