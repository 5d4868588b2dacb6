import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models.executors import EXECUTORS, FRAMEWORKS, executor
from cost_models.memory import STORAGE
from cost_models.overlap import overlap_fraction
from cost_models.uncertainty import GROUPS, interval
from hardware_profiles.chip import OverlapSlowdown
from hardware_profiles.errors import ProfileError
from tests.cost_models.machines import chip


@given(st.dictionaries(st.sampled_from(sorted(GROUPS)), st.floats(1e-6, 1e3), min_size=1))
def test_the_interval_holds_the_prediction(parts):
    low, high = interval(parts, chip())
    assert 0 < low < sum(parts.values()) < high


def test_parts_that_err_apart_are_surer_than_one_part():
    one, two = ({"compute": 1.0}, {"compute": 0.5, "optimizer": 0.5})
    machine = chip(residuals={"compute": 0.2, "optimizer": 0.2})
    wide, narrow = (interval(parts, machine) for parts in (one, two))
    assert wide[1] - wide[0] > narrow[1] - narrow[0]


def test_parts_that_err_together_are_no_surer():
    together = interval({"compute": 0.5, "recompute": 0.5}, chip())
    assert together == pytest.approx(interval({"compute": 1.0}, chip()))


def test_a_floor_remains_when_every_part_is_known_exactly():
    machine = chip(residuals={"compute": 0.0, "floor": 0.04})
    low, high = interval({"compute": 1.0}, machine)
    assert high == pytest.approx(1.0526, abs=1e-3)  # exp(1.2816 x 0.04)
    assert low == pytest.approx(1 / high)


@given(st.floats(1, 3), st.sampled_from(["tp", "cp", "ep", "dp"]), st.sampled_from(sorted(EXECUTORS)))
def test_a_hidden_collective_costs_what_it_slows(factor, what, executor_name):
    machine = chip(overlap_slowdown=OverlapSlowdown(gemm=factor))
    hidden = overlap_fraction(what, executor_name)
    # of a second that is hidden, 1 / factor of the compute beside it was done, and the rest comes after
    assert overlap_fraction(what, executor_name, machine) == pytest.approx(hidden - hidden * (1 - 1 / factor))


def test_a_pipelines_sends_slow_nothing():
    assert overlap_fraction("pp", chip=chip(overlap_slowdown=OverlapSlowdown(gemm=1.76))) == 1


def test_autopars_tensor_parallel_collectives_block():
    assert overlap_fraction("tp") == 0
    assert overlap_fraction("dp") == overlap_fraction("tp", "nemo") == 1


@pytest.mark.parametrize(
    ("framework", "name"),
    [
        ("Megatron-DeepSpeed 3D", "megatron_deepspeed"),
        ("DeepSpeed 3D (Megatron v1.1.5)", "deepspeed_megatron"),
        ("HF Trainer + DeepSpeed", "deepspeed"),
        ("Megatron-LM 2020", "megatron_2021"),
        ("Megatron-Core r0.8.0", "nemo"),
        ("Megatron-Bridge / NeMo 26.04", "megatron_bridge"),
        ("Composer/llm-foundry FSDP", "composer"),
        ("torchtitan (FSDP2)", "torchtitan"),
        ("InternEvo v0.2.1dev20231121", "internevo"),
        ("MaxText (JAX)", "xla"),
        ("autopar", "autopar"),
    ],
)
def test_frameworks_are_known_as_people_write_them(framework, name):
    assert executor(framework).name == name


def test_an_unknown_framework_is_refused_with_what_is_known():
    with pytest.raises(ProfileError, match="did you mean 'torchtitan'"):
        executor("torchtitn")


def test_every_executor_says_how_it_stores_states():
    assert set(STORAGE) == set(EXECUTORS)
    assert set(FRAMEWORKS.values()) <= set(EXECUTORS)
