import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models.memory import (
    OPTIMIZERS,
    RESERVE_FRACTION,
    STORAGE,
    communicator_bytes,
    context_bytes,
    optimizer_traffic_bytes,
    state_bytes,
)
from hardware_profiles.chip import CommunicatorMemory
from hardware_profiles.cluster import Group
from hardware_profiles.errors import ProfileError
from tests.cost_models.machines import chip, node_group


def per_parameter(zero, shards, executor, dtype="bf16", optimizer="adamw", **more):
    return state_bytes(1.0, optimizer=optimizer, dtype=dtype, zero=zero, shards=shards, executor=executor, **more).total


@pytest.mark.parametrize("shards", [2, 8, 64])
def test_deepspeed_holds_what_the_zero_paper_says(shards):
    # Rajbhandari et al. 2020, arXiv 1910.02054, figure 1 (K = 12)
    expected = [16, 4 + 12 / shards, 2 + 14 / shards, 16 / shards]
    assert [per_parameter(zero, shards, "deepspeed") for zero in range(4)] == pytest.approx(expected)


def test_megatron_holds_18_bytes_and_its_distributed_optimizer_6_and_12_over_n():
    # Megatron-LM docs, distributed optimizer: bf16 parameters, fp32 gradients
    assert per_parameter(0, 1, "megatron") == 18
    assert per_parameter(1, 16, "megatron") == pytest.approx(6 + 12 / 16)


def test_fsdp2_divides_fp32_parameters_gradients_and_states():
    found = state_bytes(1e9, optimizer="adamw", dtype="bf16", zero=3, shards=64, largest_unit=1e7)
    assert found.parameters + found.gradients + found.states == pytest.approx((4 + 4 + 8) * 1e9 / 64)
    # two gathered units in bf16, one gradient in bf16 and its copy in fp32
    assert found.gathered == pytest.approx((2 + 2 + 2 + 4) * 1e7)


def test_fsdp2_under_a_pipeline_keeps_whole_fp32_gradients():
    # 405B at pp 16, tp 8: 12.7 GB a stage
    found = state_bytes(405e9 / 128, optimizer="adamw", dtype="bf16", zero=3, shards=128, pipelined=True)
    assert found.gradients == pytest.approx(12.7e9, rel=0.01)
    assert found.gathered == pytest.approx(2 * 405e9 / 128)


def test_zero_2_over_several_micro_batches_holds_gradients_like_zero_1():
    once, often = (
        state_bytes(1.0, optimizer="adamw", dtype="bf16", zero=2, shards=8, accumulating=flag).gradients
        for flag in (False, True)
    )
    assert (once, often) == (0.5, 4.0)


@pytest.mark.parametrize(("dtype", "width"), [("fp32", 4), ("fp64", 8)])
@pytest.mark.parametrize("executor", ["autopar", "fsdp1"])
def test_full_precision_keeps_no_second_copy(dtype, width, executor):
    assert per_parameter(0, 1, executor, dtype) == 4 * width


def test_frozen_parameters_have_neither_gradient_nor_state():
    found = state_bytes(0.0, optimizer="adamw", dtype="bf16", zero=0, shards=1, frozen=100.0)
    assert (found.parameters, found.gradients, found.states) == (200, 0, 0)


@given(
    st.sampled_from(sorted(STORAGE)),
    st.sampled_from(sorted(OPTIMIZERS)),
    st.sampled_from(["bf16", "fp32", "fp64"]),
    st.integers(2, 64),
    st.booleans(),
)
def test_a_higher_zero_value_never_holds_more_between_steps_nor_do_more_shards(
    executor, optimizer, dtype, shards, pipe
):
    held = [per_parameter(zero, shards, executor, dtype, optimizer, pipelined=pipe, at_peak=False) for zero in range(4)]
    assert held == sorted(held, reverse=True)
    for zero in range(4):
        more = per_parameter(zero, 2 * shards, executor, dtype, optimizer, pipelined=pipe)
        assert more <= per_parameter(zero, shards, executor, dtype, optimizer, pipelined=pipe)


@given(st.sampled_from(sorted(STORAGE)), st.integers(0, 3), st.booleans())
def test_the_peak_holds_no_less_than_the_rest(executor, zero, pipelined):
    peak, rest = (
        per_parameter(zero, 8, executor, pipelined=pipelined, at_peak=flag, largest_unit=0.1) for flag in (True, False)
    )
    assert peak >= rest


def test_optimizer_states_by_name():
    states = {
        name: state_bytes(1.0, optimizer=name, dtype="bf16", zero=0, shards=1).states
        for name in ("sgd", "sgd_momentum", "adamw", "adam8bit")
    }
    assert states == {"sgd": 0, "sgd_momentum": 4, "adamw": 8, "adam8bit": 2}


def test_an_unknown_optimizer_is_named_with_the_near_miss():
    with pytest.raises(ProfileError, match="did you mean 'adamw'"):
        state_bytes(1.0, optimizer="adamww", dtype="bf16", zero=0, shards=1)


def test_an_adamw_update_moves_30_bytes_a_parameter_in_mixed_precision():
    # gradient 4, master and two moments 12 read and 12 written, bf16 parameter 2 written
    assert optimizer_traffic_bytes(1.0, "adamw", "bf16") == 30


def test_communicators_are_counted_by_groups_of_more_than_one():
    machine = chip(communicator_gib=CommunicatorMemory(first=1.5, each=0.5, all_to_all=3.0))
    groups = [Group(size=1), node_group(8), node_group(2), Group(size=1)]
    assert communicator_bytes(machine, groups) == 2 * 2**30
    assert communicator_bytes(machine, 2, all_to_all=True) == 5 * 2**30
    assert communicator_bytes(machine, [Group(size=1)]) == 0


def test_context_and_reserve():
    assert context_bytes(chip(context_gib=0.5)) == 2**29
    assert pytest.approx(0.94) == 1 / (1 + RESERVE_FRACTION)
