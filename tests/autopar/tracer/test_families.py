"""Every family of models at a small size: parameters, FLOPs by closed forms, storages kept against those that torch keeps."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from benchmarks.family_configs import FFN, HEADS, HIDDEN, KV_HEADS, LAYERS, SEQ, SMALL, VOCABULARY
from tests.families import BATCH, captured, really_run, saved_storages

HEAD_DIM = HIDDEN // HEADS
GROUPED = 2 * HIDDEN**2 + 2 * HIDDEN * KV_HEADS * HEAD_DIM
FULL = 4 * HIDDEN**2
GATED, PLAIN = 3 * HIDDEN * FFN, 2 * HIDDEN * FFN
EXPERTS, VISITS = 8, 2

# Weight elements that a token meets in one block.
WEIGHTS = {
    "Llama 2": FULL + GATED,
    "Llama 3": GROUPED + GATED,
    "Mistral": GROUPED + GATED,
    "Qwen2": GROUPED + GATED,
    "Qwen3": GROUPED + GATED,
    "Gemma 2": GROUPED + GATED,
    "Gemma 3": GROUPED + GATED,
    "Phi-3": GROUPED + GATED,
    "StarCoder2": GROUPED + PLAIN,
    "GPT-2": FULL + 8 * HIDDEN**2,
    "GPT-J": FULL + 8 * HIDDEN**2,
    "GPT-NeoX": FULL + PLAIN,
    "OPT": FULL + PLAIN,
    "BLOOM": FULL + 8 * HIDDEN**2,
    "Falcon": GROUPED + 8 * HIDDEN**2,
    "MPT": FULL + 8 * HIDDEN**2,
    "GPT-BigCode": 2 * HIDDEN**2 + 2 * HIDDEN * HEAD_DIM + 8 * HIDDEN**2,
    "Mixtral": GROUPED + HIDDEN * EXPERTS + VISITS * GATED,
    "GPT-OSS": GROUPED + HIDDEN * EXPERTS + VISITS * GATED,
    "Qwen3-MoE": GROUPED + HIDDEN * EXPERTS + VISITS * 3 * HIDDEN * 32,
}


@pytest.mark.parametrize("family", WEIGHTS)
def test_a_decoder_costs_six_flops_a_weight_and_token_and_its_attention(family):
    # Kaplan et al., arXiv 2001.08361, section 2.1; attention 12 s^2 h a block forward and backward (Korthikanti et al.).
    graph = captured(family)
    weights = LAYERS * WEIGHTS[family] + VOCABULARY * HIDDEN
    for batch in (1, 5):
        expected = batch * (6 * weights * SEQ + 12 * LAYERS * SEQ**2 * HIDDEN)
        assert graph.flops("model", batch, SEQ) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("family", ["T5", "flan-T5"])
def test_cross_attention_reads_keys_of_the_encoder(family):
    # Raffel et al., arXiv 1910.10683: an encoder block has one attention, a decoder block two.
    ffn = GATED if family == "flan-T5" else PLAIN
    weights = LAYERS * ((FULL + ffn) + (2 * FULL + ffn)) + VOCABULARY * HIDDEN
    expected = BATCH * (6 * weights * SEQ + 3 * 12 * LAYERS * SEQ**2 * HIDDEN)
    assert captured(family).flops("model", BATCH, SEQ) == pytest.approx(expected, rel=1e-6)


def test_an_encoder_predicts_words_through_one_more_matrix():
    weights = LAYERS * (FULL + PLAIN) + HIDDEN**2 + VOCABULARY * HIDDEN
    expected = BATCH * (6 * weights * SEQ + 12 * LAYERS * SEQ**2 * HIDDEN)
    for family in ("BERT", "RoBERTa"):
        assert captured(family).flops("model", BATCH, SEQ) == pytest.approx(expected, rel=1e-6)


def test_one_block_read_many_times_costs_as_often():
    # Lan et al., arXiv 1909.11942: all layers share one block; words are embedded narrow, widened, and narrowed again.
    narrow = 32
    weights = LAYERS * (FULL + PLAIN) + 2 * narrow * HIDDEN + narrow * VOCABULARY
    expected = BATCH * (6 * weights * SEQ + 12 * LAYERS * SEQ**2 * HIDDEN)
    assert captured("ALBERT").flops("model", BATCH, SEQ) == pytest.approx(expected, rel=1e-6)


PATCHES, PIXELS = 9, 3 * 8 * 8
# The image needs no gradient: two products for its patches. One token sums them up.
IMAGE = 6 * LAYERS * (FULL + PLAIN) * (PATCHES + 1) + 12 * LAYERS * (PATCHES + 1) ** 2 * HIDDEN
IMAGE += 4 * PIXELS * HIDDEN * PATCHES


def test_images_cost_their_patches_and_one_summary_token():
    expected = IMAGE + 6 * HIDDEN * 2
    assert captured("ViT").flops("model", BATCH, SEQ) == pytest.approx(BATCH * expected, rel=1e-6)


def test_pairs_of_images_and_texts_cost_both_towers_and_every_pair():
    # Radford et al., arXiv 2103.00020, figure 3: one vector of each is projected, and every image meets every text.
    text, common = 6 * LAYERS * (FULL + PLAIN) * SEQ + 12 * LAYERS * SEQ**2 * HIDDEN, 32
    for batch in (BATCH, 4 * BATCH):
        expected = batch * (IMAGE + text + 2 * 6 * HIDDEN * common) + 6 * batch**2 * common
        assert captured("CLIP").flops("model", batch, SEQ) == pytest.approx(expected, rel=1e-6)


def test_an_image_before_a_text_costs_its_tower_and_a_projector():
    # Liu et al., arXiv 2310.03744: two matrices project each patch's vector; text and image fill one sequence.
    language = 6 * (LAYERS * (GROUPED + GATED) + VOCABULARY * HIDDEN) * SEQ + 12 * LAYERS * SEQ**2 * HIDDEN
    expected = BATCH * (IMAGE + 6 * 2 * HIDDEN**2 * PATCHES + language)
    graph = captured("LLaVA", vision_feature_layer=-1)
    assert graph.flops("model", BATCH, SEQ) == pytest.approx(expected, rel=1e-6)


def test_speech_costs_two_convolutions_an_encoder_and_a_decoder():
    # Radford et al., arXiv 2212.04356, section 2.2: filters of width 3, the second with stride 2.
    bands, width = 8, 3
    attention = 12 * LAYERS * SEQ**2 * HIDDEN
    encoder = 4 * bands * width * HIDDEN * 2 * SEQ + 6 * HIDDEN * width * HIDDEN * SEQ
    encoder += 6 * LAYERS * (FULL + PLAIN) * SEQ + attention
    decoder = 6 * (LAYERS * (2 * FULL + PLAIN) + VOCABULARY * HIDDEN) * SEQ + 2 * attention
    expected = BATCH * (encoder + decoder)
    assert captured("Whisper").flops("model", BATCH, SEQ) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("family", ["DeepSeek-V2", "DeepSeek-V3"])
def test_latent_attention_costs_its_low_rank_products(family):
    # DeepSeek-AI, arXiv 2405.04434, section 2.1: queries, and keys with values, pass through a small latent.
    query, latent, rope, nope, value, inner = 32, 16, 4, 8, 8, 32
    attention = HIDDEN * query + query * HEADS * (nope + rope) + HIDDEN * (latent + rope)
    attention += latent * HEADS * (nope + value) + HEADS * value * HIDDEN
    experts = HIDDEN * EXPERTS + (VISITS + 1) * 3 * HIDDEN * inner
    weights = LAYERS * attention + GATED + (LAYERS - 1) * experts + VOCABULARY * HIDDEN
    scores = 6 * LAYERS * SEQ**2 * HEADS * (nope + rope + value)
    expected = BATCH * (6 * weights * SEQ + scores)
    assert captured(family).flops("model", BATCH, SEQ) == pytest.approx(expected, rel=1e-6)


_SCORES = 4 * BATCH * SEQ * SEQ
_FLOAT_MASK = ({_SCORES: LAYERS}, {SEQ * SEQ: 1})
_LEARNED_BIAS = (
    {HEADS * _SCORES: 2 * LAYERS},
    {4 * HEADS * SEQ * SEQ: 2 * LAYERS, 4 * BATCH * HEADS * SEQ: 2 * LAYERS},
)
_LATENT_SCORES = (
    {HEADS * _SCORES: LAYERS},
    {4 * BATCH * SEQ * HEADS * (8 + 8): LAYERS, 4 * BATCH * HEADS * SEQ: LAYERS},
)
OTHERWISE_ON_CPU: dict[str, tuple[dict[int, int], dict[int, int]]] = {
    # A mask of booleans, one for the model, becomes one of floats of every sequence in every call.
    "Mistral": _FLOAT_MASK,
    "Gemma 3": _FLOAT_MASK,
    "Falcon": _FLOAT_MASK,
    "StarCoder2": _FLOAT_MASK,
    # No fused kernel takes a bias that learns: probabilities are kept, not the bias and one number a query.
    "T5": _LEARNED_BIAS,
    "flan-T5": _LEARNED_BIAS,
    # Nor unequal head sizes: probabilities and a copy of v are kept, not keys with values, the output and one number a
    # query; the copy of v and the output are of one size.
    "DeepSeek-V2": _LATENT_SCORES,
    "DeepSeek-V3": _LATENT_SCORES,
}
"""Families whose CPU kernels keep other storages than the device's: bytes -> how many, of the CPU alone and of ours alone."""


@pytest.mark.parametrize("family", SMALL)
def test_every_storage_kept_is_one_that_torch_keeps(family):
    # Captured at another batch, and two blocks of five were run.
    kept, parameters = really_run(family)
    assert captured(family).model.parameters == parameters
    ours = saved_storages(captured(family), BATCH, SEQ)
    assert (kept - ours, ours - kept) == OTHERWISE_ON_CPU.get(family, ({}, {}))


UNROLLED = ("Mamba", "Mamba 2")
"""Run their sequence step by step or chunk by chunk."""


@pytest.mark.parametrize("family", UNROLLED)
def test_a_model_that_unrolls_its_sequence_is_named(family):
    assert any(note.kind == "unrolls_sequence" for note in captured(family).notes)


@pytest.mark.parametrize("family", [family for family in SMALL if family not in UNROLLED])
def test_figures_at_other_sizes_equal_a_capture_at_those_sizes(family):
    graph, other = captured(family), captured(family, SEQ // 2)
    for batch in (1, 4):
        for which in ("model", "executed"):
            again = graph.flops(which, batch, SEQ // 2)
            assert again == pytest.approx(other.flops(which, batch, SEQ // 2), rel=1e-12)
        assert saved_storages(graph, batch, SEQ // 2) == saved_storages(other, batch, SEQ // 2)
