"""Five steps under a plan end where one process ends: losses, gradient norms (clipped) and weights, in float64."""

from __future__ import annotations

import pytest
from parity import plan_for, run_cases

from autopar.documents.plan import Plan

MODELS = ("llama", "gpt")


@pytest.mark.parametrize("model", MODELS)
def test_two_ranks_by_tensor(model):
    run_cases([(model, plan_for(model, tp=2, micro_batch=12, sp=sp)) for sp in (0, 1)])


@pytest.mark.parametrize("model", MODELS)
def test_two_ranks_by_data_at_every_zero_stage(model):
    run_cases([(model, plan_for(model, dp=2, zero=zero, micro_batch=4)) for zero in range(4)])


@pytest.mark.parametrize("model", MODELS)
def test_two_stages_under_every_schedule(model):
    plans = [plan_for(model, pp=2, micro_batch=6, schedule=name) for name in ("gpipe", "1f1b")]
    plans.append(plan_for(model, pp=2, micro_batch=6, schedule="interleaved", virtual_stages=2))
    run_cases([(model, plan) for plan in plans])


def test_four_stages_interleaved():
    plan = plan_for("deep", pp=4, micro_batch=6, schedule="interleaved", virtual_stages=2)
    assert (plan.mesh.pp, plan.schedule.virtual_stages) == (4, 2)
    run_cases([("deep", plan)])


def test_three_ranks_by_data_at_every_zero_stage():
    run_cases([("gpt", plan_for("gpt", dp=3, zero=zero, micro_batch=4)) for zero in range(4)])


@pytest.mark.parametrize("model", MODELS)
def test_four_ranks_by_tensor_stage_and_both(model):
    plans = [plan_for(model, tp=4, micro_batch=12, sp=sp) for sp in (0, 1)]
    plans += [plan_for(model, pp=4, micro_batch=6, schedule=name) for name in ("gpipe", "1f1b")]
    plans += [plan_for(model, pp=2, tp=2, micro_batch=6, schedule="1f1b", sp=sp) for sp in (0, 1)]
    run_cases([(model, plan) for plan in plans])


@pytest.mark.parametrize("model", MODELS)
def test_four_ranks_by_data_beside_tensor_or_stage(model):
    plans = [plan_for(model, tp=2, dp=2, zero=zero, micro_batch=6, sp=zero // 3) for zero in (0, 1, 3)]
    plans += [plan_for(model, pp=2, dp=2, zero=zero, micro_batch=3, schedule="1f1b") for zero in (0, 1, 3)]
    run_cases([(model, plan) for plan in plans])


def test_eight_ranks_divided_three_ways():
    shape = {"pp": 2, "tp": 2, "dp": 2, "zero": 3, "micro_batch": 3, "sp": 1}
    run_cases(
        [
            ("gpt", plan_for("gpt", schedule="1f1b", **shape)),
            ("llama", plan_for("llama", schedule="interleaved", virtual_stages=2, **shape)),
        ]
    )


def test_unequal_stages_grouped_heads_and_a_vocabulary_that_does_not_divide():
    plan = plan_for("grouped", pp=2, tp=2, micro_batch=6, schedule="1f1b")
    unequal = tuple(
        stage.model_copy(update={"chunks": ({"layers": blocks},)})
        for stage, blocks in zip(plan.stages, ((0, 3), (4, 4)), strict=True)
    )
    run_cases([("grouped", plan), ("grouped", plan.model_copy(update={"stages": unequal}))])


def test_fewer_key_heads_than_ranks():
    plan = plan_for("grouped", tp=4, micro_batch=12)
    assert plan.mesh.tp == 4
    run_cases([("grouped", plan)])
    run_cases([("grouped", plan_for("grouped", tp=4, dp=2, zero=1, micro_batch=6))])


@pytest.mark.parametrize("model", MODELS)
def test_recompute_changes_nothing(model):
    recomputed = [plan_for(model, dp=2, zero=3, micro_batch=6, recompute=mode) for mode in ("selective", "full")]
    assert all(entry.mode != "none" for plan in recomputed for entry in plan.recompute)
    run_cases([(model, plan) for plan in [*recomputed, plan_for(model, pp=2, micro_batch=6, recompute="full")]])


def test_replicas_of_sharded_groups_are_one_more_axis():
    plan = plan_for("llama", dp=4, zero=2, micro_batch=6)
    replicated = plan.model_copy(update={"mesh": plan.mesh.model_copy(update={"dp_replicate": 2, "dp_shard": 2})})
    run_cases([("llama", replicated), ("llama", _at_zero(replicated, 3)), ("llama", _at_zero(replicated, 0))])


def test_stages_may_differ_in_zero():
    plan = plan_for("llama", pp=2, dp=2, zero=1, micro_batch=6, schedule="1f1b")
    stages = (plan.stages[0], plan.stages[1].model_copy(update={"zero": 0}))
    run_cases([("llama", plan.model_copy(update={"stages": stages}))])


def _at_zero(plan: Plan, zero: int) -> Plan:
    return plan.model_copy(update={"stages": tuple(stage.model_copy(update={"zero": zero}) for stage in plan.stages)})
