"""Every rule of legality, with its arithmetic in the message, on configurations that other tools accepted and then failed."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from autopar.legality import SPLIT_BACKWARD, Choices, problems

GOOD = Choices(devices=64, global_batch=128, blocks=32, pp=4, dp=8, tp=2, micro_batch=1, schedule="1f1b")


def broken(**changed) -> list[str]:
    return list(problems(dataclasses.replace(GOOD, **changed)))


def test_a_plain_3d_configuration_breaks_no_rule():
    assert broken() == []


@pytest.mark.parametrize("devices", [1, 2, 3, 5, 6, 7, 12, 24])
def test_any_number_of_devices_is_legal_as_a_degree(devices):
    # pytorch #141237, levanter #429, alpa #579: 5 or 6 devices failed there.
    found = broken(devices=devices, dp=devices, pp=1, tp=1, global_batch=4 * devices)
    assert found == []


def test_degrees_that_do_not_fill_the_devices_are_refused_with_their_product():
    (reason,) = broken(devices=60)
    assert reason == "pp(4) * dp(8) * tp(2) = 64, but there are 60 devices"


def test_context_parallelism_counts_in_the_product():
    (reason,) = broken(cp=2)
    assert "pp(4) * dp(8) * cp(2) * tp(2) = 128" in reason
    assert broken(cp=2, devices=128) == []


def test_a_batch_that_ranks_cannot_share_evenly_is_refused():
    (reason,) = broken(global_batch=100)
    assert "global_batch(100)" in reason and "dp(8) * micro_batch(1) = 8" in reason


def test_a_micro_batch_that_does_not_divide_a_ranks_share_is_refused():
    # 128 over dp 8 leaves 16 a rank: micro-batches of 3 do not fill it.
    assert any("= 24" in reason for reason in broken(micro_batch=3))


def test_fewer_micro_batches_than_stages_hang_under_1f1b_so_they_are_refused():
    # torchtitan #775: the run hung. 128 / (8 * 8) = 2 micro-batches for 4 stages.
    (reason,) = broken(micro_batch=8)
    assert "micro_batches(2) >= pp(4)" in reason and "gpipe" in reason


def test_gpipe_runs_with_fewer_micro_batches_than_stages():
    assert broken(micro_batch=8, schedule="gpipe") == []


@pytest.mark.parametrize(("micro_batches", "legal"), [(4, True), (6, False), (8, True), (10, False), (12, True)])
def test_interleaving_needs_whole_rounds_of_micro_batches(micro_batches, legal):
    # Megatron-LM's interleaved schedule (arXiv 2104.04473, section 2.2): a multiple of the pipeline's stages.
    found = broken(schedule="interleaved", virtual_stages=2, global_batch=8 * micro_batches)
    assert (found == []) is legal
    if not legal:
        assert f"micro_batches({micro_batches})" in found[0] and "pp(4)" in found[0]


@pytest.mark.parametrize(("pp", "virtual_stages"), [(4, 1), (1, 2)])
def test_interleaving_needs_several_chunks_and_several_stages(pp, virtual_stages):
    (reason,) = broken(schedule="interleaved", virtual_stages=virtual_stages, pp=pp, devices=16 * pp)
    assert f"given {virtual_stages} and {pp}" in reason


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_chunks_belong_to_interleaved_schedules_only(schedule):
    (reason,) = broken(schedule=schedule, virtual_stages=2)
    assert "one chunk per stage" in reason and "virtual_stages is 2" in reason


def test_every_virtual_stage_holds_a_block():
    (reason,) = broken(schedule="interleaved", virtual_stages=9)
    assert reason == "pp(4) * virtual_stages(9) = 36 stages, but the model has 32 blocks"
    assert broken(schedule="interleaved", virtual_stages=8) == []


def test_blocks_need_not_divide_by_the_stages():
    # Megatron-Bridge PR5884: recipes of 60 layers over 8 stages could not start; here stages may be uneven.
    assert broken(blocks=60, pp=8, dp=4, global_batch=128) == []


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_zero_without_data_parallelism_divides_nothing(zero):
    (reason,) = broken(dp=1, pp=32, zero=zero)
    assert f"zero={zero}" in reason and "dp is 1" in reason


@pytest.mark.parametrize(("schedule", "zero"), list(itertools.product(SPLIT_BACKWARD, range(4))))
def test_split_backwards_and_gathered_parameters_exclude_each_other(schedule, zero):
    found = broken(schedule=schedule, zero=zero, virtual_stages=2)
    assert any("zero=3" in reason for reason in found) is (zero == 3)


@pytest.mark.parametrize(
    ("ep", "etp", "legal"), [(8, 1, True), (16, 1, True), (8, 2, True), (3, 1, False), (16, 2, False)]
)
def test_experts_divide_what_data_and_tensor_parallelism_span(ep, etp, legal):
    found = broken(ep=ep, etp=etp)
    assert (found == []) is legal
    if not legal:
        assert f"ep({ep}) * etp({etp})" in found[0] and "= 16" in found[0]


def test_expert_tensor_parallelism_is_none_or_tp():
    found = broken(tp=4, dp=4, etp=2)
    assert found == ["etp(2) must be 1 or tp(4)"]


def test_all_broken_rules_are_named_at_once():
    found = broken(devices=63, global_batch=4, blocks=3)
    assert len(found) >= 3


def test_degrees_of_one_are_never_a_problem():
    # pytorch #127213: an axis of size 1 failed.
    one = Choices(devices=1, global_batch=1, blocks=1, pp=1, dp=1, tp=1, micro_batch=1, schedule="1f1b")
    assert list(problems(one)) == []
