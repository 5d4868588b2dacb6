"""Plans, models and batches that do not belong together are refused in words."""

from __future__ import annotations

import pytest
import small_models
import torch
from parity import TIMEOUT, data, plan_for

from autopar.errors import PlanMismatch, RequestError
from autopar.runtime.launch import on_ranks
from autopar.runtime.names import local_part, pieces
from autopar.runtime.step import parallelize
from autopar.runtime.zero import BUCKET_BYTES, _buckets


def test_another_models_plan_is_refused_with_both_sizes():
    plan = plan_for("gpt")
    with pytest.raises(PlanMismatch, match="parameters, but this model has"):
        parallelize(small_models.build_model(), plan, small_models.loss)


def test_a_batch_of_another_size_is_refused_with_its_shapes():
    step = parallelize(small_models.build_model(), plan_for("llama"), small_models.loss)
    batch = small_models.example_inputs(7, small_models.SEQ_LEN)
    with pytest.raises(RequestError, match=r"global batch is 24.*\(7, 16\)"):
        step(batch)


def test_a_world_of_another_size_is_refused_with_the_plans_axes():
    with pytest.raises(PlanMismatch, match=r"2 ranks \(tp\(2\)\), but 1 were started"):
        parallelize(small_models.build_model(), plan_for("llama", tp=2), small_models.loss)


@pytest.mark.parametrize(
    ("change", "words"),
    [({"mesh": {"cp": 2}}, "cp=2"), ({"export_only": True}, "export_only"), ({"dtype": "fp16"}, "loss scaling")],
)
def test_what_is_not_carried_out_is_refused(change, words):
    plan = plan_for("llama")
    if "mesh" in change:
        change = {"mesh": plan.mesh.model_copy(update=change["mesh"])}
    if "dtype" in change:
        change = {"workload": plan.workload.model_copy(update=change)}
    with pytest.raises(RequestError, match=words):
        parallelize(small_models.build_model(), plan.model_copy(update=change), small_models.loss)


def test_a_model_without_values_is_refused():
    with pytest.raises(RequestError, match="on meta"):
        parallelize(small_models.build_model().to("meta"), plan_for("llama"), small_models.loss)


def test_stages_that_share_a_parameter_must_store_it_alike():
    plan = plan_for("gpt", pp=2, dp=2, zero=1, micro_batch=6, schedule="1f1b")
    mixed = plan.model_copy(update={"stages": (plan.stages[0], plan.stages[1].model_copy(update={"zero": 0}))})

    def work(rank: int) -> None:
        parallelize(small_models.gpt_tied(), mixed, small_models.loss, timeout=TIMEOUT)(data()[0])

    with pytest.raises(RequestError, match=r"embedding\.weight is held by stages \[0, 1\]"):
        on_ranks(4, work, TIMEOUT)


def test_segments_are_divided_each_on_its_own():
    fused = plan_for("gpt", tp=2).placements["blocks.*.attention.qkv.weight"]["tp"]
    rows = torch.arange(96).reshape(96, 1)
    second = local_part(rows, fused, 2, 1).flatten().tolist()
    assert second == [*range(16, 32), *range(48, 64), *range(80, 96)]


def test_parts_of_all_ranks_make_the_whole():
    rows = [
        row
        for rank in range(4)
        for piece in pieces(12, "Shard(0)", 4, rank)
        for row in range(piece.whole, piece.whole + 3)
    ]
    assert rows == list(range(12))
    with pytest.raises(PlanMismatch, match=r"tp\(4\) cannot divide dim 0"):
        pieces(10, "Shard(0)", 4, 0)


def test_buckets_hold_every_parameter_once_and_one_dtype_each():
    parameters = [
        torch.nn.Parameter(torch.zeros(2**20, dtype=dtype)) for dtype in [torch.float32] * 9 + [torch.float64]
    ]
    buckets = list(_buckets(parameters))
    assert sorted(id(p) for bucket in buckets for p in bucket) == sorted(map(id, parameters))
    assert all(len({p.dtype for p in bucket}) == 1 for bucket in buckets)
    # A bucket is closed by the parameter that fills it: without its last it is not full.
    assert all(sum(p.numel() * p.element_size() for p in bucket[:-1]) < BUCKET_BYTES for bucket in buckets)
