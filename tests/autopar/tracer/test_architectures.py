"""What a Graph says of architectures other than a plain decoder."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from autopar.documents import Graph
from autopar.tracer import capture
from tests.models import GptLayer


def from_config(folder, **fields) -> Graph:
    pytest.importorskip("transformers")
    (folder / "config.json").write_text(json.dumps(fields))
    return capture(str(folder))


def test_each_token_pays_for_the_experts_it_visits(tmp_path):
    hidden, ffn, layers, vocabulary, experts, seq = 64, 96, 4, 100, 8, 32
    graph = from_config(
        tmp_path,
        model_type="mixtral",
        architectures=["MixtralForCausalLM"],
        hidden_size=hidden,
        intermediate_size=ffn,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=layers,
        vocab_size=vocabulary,
        num_local_experts=experts,
        num_experts_per_tok=2,
        max_position_embeddings=seq,
    )
    active = layers * (3 * hidden**2 + experts * hidden + 2 * 3 * hidden * ffn) + vocabulary * hidden
    for batch in (1, 5):
        expected = batch * (6 * active * seq + layers * 12 * seq**2 * hidden)
        assert graph.flops("model", batch, seq) == pytest.approx(expected, rel=1e-9)


@pytest.fixture(scope="module")
def t5(tmp_path_factory) -> Graph:
    return from_config(
        tmp_path_factory.mktemp("t5"),
        model_type="t5",
        architectures=["T5ForConditionalGeneration"],
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_heads=4,
        num_layers=5,
        vocab_size=100,
        n_positions=32,
    )


def test_encoder_and_decoder_are_two_chains_with_one_epilogue(t5):
    assert [(chain.name, chain.count) for chain in t5.chains] == [("encoder.block", 5), ("decoder.block", 5)]
    assert [chain.epilogue for chain in t5.chains] == [None, "epilogue"]
    # The first block of each holds the table of relative positions.
    assert [[run.count for run in chain.runs] for chain in t5.chains] == [[1, 4], [1, 4]]


def test_the_encoders_output_reaches_every_block_of_the_decoder(t5):
    reaches = [
        edge
        for edge in t5.edges
        if edge.source == "decoder.block:prologue" and edge.to_last == "decoder.block:4" and edge.gradient
    ]
    assert any([len(dim) for dim in edge.dims] == [1, 1, 1] for edge in reaches)


def test_relative_positions_of_the_first_block_reach_the_last(t5):
    assert {(edge.source, edge.to_last) for edge in t5.edges if edge.source.endswith(":0") and edge.gradient} == {
        ("encoder.block:0", "encoder.block:4"),
        ("decoder.block:0", "decoder.block:4"),
    }


def test_a_convolution_costs_two_flops_a_multiply_add():
    class Patches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patch = nn.Conv2d(3, 64, kernel_size=4, stride=4)
            self.layers = nn.ModuleList(GptLayer(64, 4, True) for _ in range(4))

        def forward(self, image: torch.Tensor) -> torch.Tensor:
            x = self.patch(image).flatten(2).transpose(1, 2)
            for layer in self.layers:
                x = layer(x)
            return x

    def images(batch: int, seq: int):
        return (torch.zeros(batch, 3, 32, 32, dtype=torch.get_default_dtype()),)

    graph = capture(Patches(), images, seq_len=64)
    tokens, hidden = 64, 64
    layers = 4 * (72 * tokens * hidden**2 + 12 * tokens**2 * hidden)
    # The image needs no gradient, so backward is one product, as forward is.
    assert graph.flops("model", 3, 64) == 3 * (layers + 2 * (2 * tokens * hidden * 3 * 4 * 4))


def test_blocks_of_two_kinds_that_alternate_are_two_classes():
    class Alternating(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(GptLayer(64, 4 if number % 2 else 8, True) for number in range(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    def inputs(batch: int, seq: int):
        return (torch.zeros(batch, seq, 64, dtype=torch.get_default_dtype()),)

    graph = capture(Alternating(), inputs, seq_len=16)
    (chain,) = graph.chains
    assert [run.count for run in chain.runs] == [1] * 8
    assert len({run.block_class for run in chain.runs}) == 2
    # The first block's input needs no gradient, which the block that stands for its kind does not show.
    assert graph.flops("model", 1, 16) == 8 * (72 * 16 * 64**2 + 12 * 16**2 * 64)
