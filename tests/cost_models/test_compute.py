import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models.compute import (
    attention_seconds,
    element_bytes,
    fused_bytes,
    gemm_seconds,
    host_seconds,
    pointwise_seconds,
)
from cost_models.tables import GENERIC_POINTWISE
from hardware_profiles.chip import Efficiency, GemmTable
from hardware_profiles.profile import load_chip
from tests.cost_models.machines import chip

dims = st.integers(min_value=1, max_value=32768)


@given(dims, dims, dims, st.sampled_from(["forward", "dgrad", "wgrad"]))
def test_no_product_runs_above_the_peak_or_the_memory_bandwidth(m, n, k, layout):
    for machine in (chip(), load_chip("h100-80gb-sxm"), load_chip("b200")):
        seconds = gemm_seconds(machine, m, n, k, "bf16", layout)
        assert seconds >= 2 * m * n * k / machine.peak_flops("bf16")
        assert seconds >= 2 * (m * k + k * n + m * n) / machine.memory_bytes_per_second


def test_a_table_that_claims_more_than_the_peak_is_held_to_it():
    table = GemmTable(min_dim=(1, 65536), fraction_of_peak=(1.5, 1.5), source="made up")
    machine = chip(efficiency=Efficiency(gemm=(table,), sustained=1.2), launch_us=0)
    assert gemm_seconds(machine, 8192, 8192, 8192, "bf16") == pytest.approx(2 * 8192**3 / 300e12)


@given(dims, dims, dims)
def test_a_product_with_more_rows_takes_no_less_time(m, n, k):
    machine = load_chip("h100-80gb-sxm")
    assert gemm_seconds(machine, 2 * m, n, k, "bf16") >= 0.999 * gemm_seconds(machine, m, n, k, "bf16")


def test_splitting_a_product_eight_ways_takes_more_than_an_eighth():
    whole = gemm_seconds(chip(), 4096, 4096, 4096, "bf16")
    assert gemm_seconds(chip(), 4096, 512, 4096, "bf16") > whole / 8


def test_arrays_broadcast_and_numbers_stay_numbers():
    seconds = gemm_seconds(chip(), np.array([[1024], [2048]]), np.array([512, 1024, 2048]), 4096, "bf16")
    assert seconds.shape == (2, 3)
    assert seconds[1, 2] == gemm_seconds(chip(), 2048, 2048, 4096, "bf16")
    assert isinstance(gemm_seconds(chip(), 8, 8, 8, "bf16"), float)
    assert isinstance(pointwise_seconds(chip(), 8, "add"), float)


def test_fp8_runs_twice_as_fast_where_compute_bounds():
    machine = chip(launch_us=0)
    ratio = gemm_seconds(machine, 8192, 8192, 8192, "bf16") / gemm_seconds(machine, 8192, 8192, 8192, "fp8")
    assert ratio == pytest.approx(2)


# Azure's cuBLASLt figures for ND A100 v4 (AI-benchmarking-guide, ND_A100_v4_results.md): not among the fitted sweeps.
@pytest.mark.parametrize(
    ("m", "n", "k", "teraflops"),
    [(2048, 2048, 2048, 221.8), (4096, 4096, 4096, 228.0), (8192, 8192, 8192, 253.7), (6144, 12288, 12288, 250.8)],
)
def test_large_products_on_a100_are_within_12_percent_of_azures_figures(m, n, k, teraflops):
    machine = load_chip("a100-80gb-sxm")
    burst = machine.model_copy(update={"efficiency": machine.efficiency.model_copy(update={"sustained": 1.0})})
    measured = 2 * m * n * k / (teraflops * 1e12)
    assert gemm_seconds(burst, m, n, k, "fp16") == pytest.approx(measured, rel=0.12)


def test_the_best_product_on_h100_is_near_the_best_that_was_ever_measured():
    # 794.5 TFLOP/s at 2048 x 2048 x 13312: stas00/ml-engineering, maximum achievable matmul rates
    machine = load_chip("h100-80gb-sxm")
    burst = machine.model_copy(update={"efficiency": machine.efficiency.model_copy(update={"sustained": 1.0})})
    measured = 2 * 2048 * 2048 * 13312 / 794.5e12
    assert gemm_seconds(burst, 2048, 2048, 13312, "bf16") == pytest.approx(measured, rel=0.1)


@given(
    st.integers(128, 65536), st.sampled_from([64, 128, 256]), st.booleans(), st.sampled_from(["forward", "backward"])
)
def test_no_attention_runs_above_the_peak(seq, head_dim, causal, phase):
    flops = 4.0 * seq * seq * head_dim * 32
    for name in ("a100-80gb-sxm", "h100-80gb-sxm", "b200"):
        machine = load_chip(name)
        for kernel in ("flash", "cudnn", "explicit"):
            seconds = attention_seconds(
                machine,
                flops,
                0.0,
                phase=phase,
                seq=seq,
                head_dim=head_dim,
                causal=causal,
                dtype="bf16",
                kernel=kernel,
            )
            assert seconds >= flops / machine.peak_flops("bf16")


def test_flash_attention_2_on_a100_is_within_15_percent_of_its_paper():
    # arXiv 2307.08691, figure 4: forward and backward, causal, head dim 128, 16k tokens, hidden 2048, 8k sequence: 182
    machine = load_chip("a100-80gb-sxm")
    forward = 4 * 8192**2 * 2048 * 2 / 2
    shape = {"seq": 8192, "head_dim": 128, "causal": True, "dtype": "fp16"}
    seconds = attention_seconds(machine, forward, 0, phase="forward", **shape)
    seconds += attention_seconds(machine, 2.5 * forward, 0, phase="backward", **shape)
    assert 3.5 * forward / seconds / 1e12 == pytest.approx(182, rel=0.15)


@given(st.sampled_from(sorted(GENERIC_POINTWISE)), st.floats(0, 1e12), st.floats(0, 1e12))
def test_pointwise_time_grows_with_bytes_and_never_beats_memory(kind, some, more):
    machine = chip()
    assert pointwise_seconds(machine, some + more, kind) >= pointwise_seconds(machine, some, kind)
    assert pointwise_seconds(machine, some, kind) >= some / machine.memory_bytes_per_second


def test_an_unknown_class_of_pointwise_operator_is_refused():
    with pytest.raises(KeyError):
        pointwise_seconds(chip(), 1, "fft")


def test_fusing_a_chain_saves_a_write_and_a_read_of_what_passes_inside():
    assert fused_bytes(10, 20, 7, "eager") - fused_bytes(10, 20, 7, "compiled") == 14


def test_eager_operators_cost_the_host_most():
    eager, compiled, fused = (host_seconds(chip(), 100, kernels) for kernels in ("eager", "compiled", "fused"))
    assert eager > compiled > fused > 0
    assert eager == pytest.approx(100 * chip().host_seconds)


def test_bytes_of_elements():
    assert [element_bytes(name) for name in ("float64", "float", "bf16", "half", "fp8", "nvfp4")] == [
        8,
        4,
        2,
        2,
        1,
        0.5,
    ]
