"""The dry run: a plan's local shapes through the model's own code, on meta."""

from __future__ import annotations

import json

import pytest

import autopar
from autopar.api import dry_run as rehearse
from autopar.errors import RequestError

HEADER = """
import torch
from torch import nn
SEQ_LEN = 32
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_heads = 8
        self.q, self.k, self.v, self.o = (nn.Linear(64, 64, bias=False) for _ in range(4))
    def forward(self, x):
        b, s, _ = x.shape
        q, k, v = (p(x).view(b, s, HEADS, 8).transpose(1, 2) for p in (self.q, self.k, self.v))
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(out.transpose(1, 2).reshape(b, s, WIDTH))
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(64), Attention()
    def forward(self, x):
        return x + self.attention(self.norm(x))
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(128, 64), nn.Linear(64, 128, bias=False)
        self.layers = nn.ModuleList(Block() for _ in range(4))
    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
def build_model(): return Model()
def example_inputs(batch, seq): return (torch.randint(0, 128, (batch, seq)),)
def loss(output, tokens): return nn.functional.cross_entropy(output.flatten(0, 1), tokens.flatten())
"""


def model_file(tmp_path, heads):
    path = tmp_path / "model.py"
    width = "-1" if heads == "-1" else f"{heads} * 8"
    path.write_text(HEADER.replace("HEADS", heads).replace("WIDTH", width))
    return path


def plan(path, **fixed):
    return autopar.plan(path, "h100x8", global_batch=8, fixed=fixed)


def test_code_that_takes_head_counts_from_shapes_passes_as_it_is(tmp_path):
    found = plan(model_file(tmp_path, "-1"), tp=4)
    assert found.dry_run == "passed"
    assert "local_attributes" not in found.options


def test_a_head_count_in_an_attribute_is_found_and_named(tmp_path):
    found = plan(model_file(tmp_path, "self.num_heads"), tp=4)
    assert found.dry_run == "passed"
    assert found.options["local_attributes"] == "layers.*.attention.num_heads"


def test_a_head_count_written_into_the_code_is_refused_with_module_and_line(tmp_path):
    with pytest.raises(RequestError, match=r"(?s)tp=4.*'layers\.0\.attention'.*model\.py:\d+"):
        plan(model_file(tmp_path, "8"), tp=4)


def test_the_example_llama_passes_at_every_degree_of_a_node():
    for degree in (2, 4, 8):
        found = autopar.plan("examples/llama3_8b.py", "h100x8", global_batch=8, fixed={"tp": degree})
        assert found.dry_run == "passed"


def test_fused_projections_and_tied_heads_of_a_hugging_face_model_get_their_local_attributes(tmp_path):
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 1024, "n_layer": 4, "n_head": 16,
              "n_positions": 1024, "vocab_size": 257}  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    found = autopar.plan(path, "h100x8", global_batch=8, fixed={"tp": 4})
    assert found.dry_run == "passed"
    assert "transformer.h.*.attn.split_size" in found.options["local_attributes"]
    assert found.placements["transformer.h.*.attn.c_attn.weight"]["tp"].segments == (1024, 1024, 1024)


def test_blocks_that_gather_on_entry_and_slice_on_exit_pass_with_most_blocks_stood_in_for():
    graph = autopar.capture("examples/tiny_llama.py")
    found = autopar.plan(graph, "local-cpu-x4", global_batch=8, dtype="fp64", fixed={"tp": 2, "sp": 1})
    assert rehearse(found, "examples/tiny_llama.py").passed
