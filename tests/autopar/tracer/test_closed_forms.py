"""FLOPs, parameters and saved bytes of captured models against published closed forms."""

from __future__ import annotations

import pytest

from autopar.documents import Graph
from autopar.tracer import capture
from tests.models import GptLayer, Stack, hidden_states


@pytest.fixture(scope="module")
def gpt() -> Graph:
    return capture("examples/gpt3_175b.py")


@pytest.fixture(scope="module", params=["llama3_8b", "llama31_70b", "llama31_405b"])
def llama(request):
    sizes = {
        "llama3_8b": (4096, 32, 8, 32, 14_336),
        "llama31_70b": (8192, 80, 8, 64, 28_672),
        "llama31_405b": (16_384, 126, 8, 128, 53_248),
    }
    return capture(f"examples/{request.param}.py"), *sizes[request.param]


def test_gpt_flops_equal_the_published_formula(gpt):
    # Narayanan et al., arXiv 2104.04473, appendix, less recompute: 72 B s L h^2 (1 + s/6h + V/12hL).
    batch, seq, hidden, layers, vocabulary = 4, 2048, 12_288, 96, 51_200
    expected = 72 * batch * seq * layers * hidden**2 * (1 + seq / (6 * hidden) + vocabulary / (12 * hidden * layers))
    assert gpt.flops("model", batch, seq) == pytest.approx(expected, rel=1e-6)


def test_gpt_executes_half_the_attention_and_five_matmuls_backward(gpt):
    # Dao, arXiv 2307.08691: causal kernels skip half, backward has five matmuls where forward has two.
    seq, hidden, layers, vocabulary = 2048, 12_288, 96, 51_200
    dense = 72 * seq * layers * hidden**2 + 6 * seq * hidden * vocabulary
    attention = layers * 4 * seq**2 * hidden / 2 * (1 + 2.5)
    assert gpt.flops("executed", 1, seq) == pytest.approx(dense + attention, rel=1e-6)


def test_llama_flops_equal_six_per_matmul_parameter_and_token_plus_attention(llama):
    graph, hidden, layers, groups, heads, ffn = llama
    for seq in (8192, 2048):
        weights = layers * (2 * hidden**2 + 2 * hidden * groups * hidden // heads + 3 * hidden * ffn) + 128_256 * hidden
        assert graph.flops("model", 2, seq) == pytest.approx(
            2 * (6 * weights * seq + 12 * layers * seq**2 * hidden), rel=1e-6
        )
        assert graph.flops("executed", 1, seq) == pytest.approx(
            6 * weights * seq + 7 * layers * seq**2 * hidden, rel=1e-6
        )


def test_llama_parameters_are_counted_exactly(llama):
    # The figures that the published checkpoints hold (Grattafiori et al., arXiv 2407.21783).
    graph = llama[0]
    assert graph.model.parameters in (8_030_261_248, 70_553_706_496, 405_853_388_800)
    assert sum(parameter.elements for parameter in graph.parameters) == graph.model.parameters


def test_tied_weights_are_one_parameter(gpt):
    hidden, layers = 12_288, 96
    block = 12 * hidden**2 + 13 * hidden
    assert gpt.model.parameters == 51_200 * hidden + 2048 * hidden + layers * block + 2 * hidden
    assert gpt.tied == (("embedding.weight", "head.weight"),)


@pytest.mark.parametrize(("fused", "expected"), [(False, 114), (True, 34)])
def test_a_plain_gpt_layer_keeps_what_korthikanti_counted(fused, expected):
    # arXiv 2205.05198, equations 1 and 3: sbh (34 + 5 a s / h), of which fused attention keeps 34; a = h/128, s = 2048.
    hidden, seq = 1024, 2048
    graph = capture(
        Stack(lambda: GptLayer(hidden, hidden // 128, fused), hidden, 4), hidden_states(hidden), seq_len=seq
    )
    (layer,) = (c for c in graph.block_classes if c.name.startswith("layers"))
    for batch in (1, 4):
        kept = layer.saved_bytes(graph.sizes(batch, seq), 2)
        assert kept / (seq * batch * hidden) == pytest.approx(expected, rel=0.005)


def test_dropping_explicit_attention_leaves_what_fused_attention_keeps():
    # Korthikanti et al., section 5: selective recompute of attention leaves 34 sbh.
    hidden, seq = 1024, 2048
    graph = capture(Stack(lambda: GptLayer(hidden, 8, False), hidden, 4), hidden_states(hidden), seq_len=seq)
    layer = graph.class_by_name["layers.*"]
    option = next(option for option in layer.recompute if option.name == "selective")
    sizes = graph.sizes(1, seq)
    kept = sum(layer.tensor_by_id[tensor].bytes(sizes, 2) for tensor in option.saved)
    assert kept / (seq * hidden) == pytest.approx(34, rel=0.005)
