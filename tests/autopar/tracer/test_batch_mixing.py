"""Which models mix samples: losses whose value over a batch is not the mean of its values over the parts.

Expected values come from torch: a note must be there exactly where two halves of a batch do not average to the whole.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM, MixtralConfig

import autopar
from autopar.tracer import capture
from autopar.tracer.batch_mixing import MEANS, PAIRS, PRODUCTS

HIDDEN, EXPERTS, SEQ = 16, 4, 8


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, EXPERTS)


class Regression(Base):
    def forward(self, x):
        return self.second(self.first(x).tanh()).square().mean()


class Attention(Base):
    """Positions meet positions, of one sample each."""

    def forward(self, x):
        y = self.first(x)
        return ((y @ y.transpose(1, 2)).softmax(-1) @ y).square().mean()


class RouterSquares(Base):
    """The z-loss (Zoph et al., arXiv 2202.08906, equation 5): a mean of each token's own square."""

    def forward(self, x):
        return self.second(x).logsumexp(-1).square().mean()


class SumOfMeans(Base):
    def forward(self, x):
        return self.first(x).square().mean() + 0.1 * self.second(x).abs().mean()


class Contrastive(Base):
    """Each sample's two views against all others' (Radford et al., arXiv 2103.00020, figure 3)."""

    def forward(self, x):
        one, other = (F.normalize(layer(x).mean(1), dim=-1) for layer in (self.first, nn.Identity()))
        logits = one @ other.t()
        return (logits.logsumexp(1) - logits.diagonal()).mean()


class LoadBalance(Base):
    """Fractions of tokens times mean probabilities (Fedus et al., arXiv 2101.03961, equation 4)."""

    def forward(self, x):
        probabilities = self.second(x).flatten(0, 1).softmax(-1)
        fractions = F.one_hot(probabilities.argmax(-1), EXPERTS).to(x.dtype).mean(0)
        return EXPERTS * (fractions * probabilities.mean(0)).sum()


class MeanSquared(Base):
    def forward(self, x):
        mean = self.second(x).mean((0, 1))
        return (mean * mean).sum()


class Centred(Base):
    def forward(self, x):
        y = self.first(x)
        return (y - y.mean((0, 1))).abs().mean()


CASES = {
    Regression: None, Attention: None, RouterSquares: None, SumOfMeans: None,
    Contrastive: PAIRS, LoadBalance: PRODUCTS, MeanSquared: PRODUCTS, Centred: MEANS,
}  # fmt: skip


def noted(graph):
    return [note.message for note in graph.notes if note.kind == "mixes_batch"]


@pytest.mark.parametrize("model", CASES)
def test_a_note_is_there_exactly_where_parts_do_not_average_to_the_whole(model):
    torch.manual_seed(0)
    real, x = model().double(), torch.randn(8, SEQ, HIDDEN, dtype=torch.float64)
    halves = sum(real(part) for part in x.chunk(2)) / 2
    assert torch.isclose(real(x), halves, rtol=1e-9).item() is (CASES[model] is None)

    graph = capture(model, lambda batch, seq: (torch.randn(batch, seq, HIDDEN),), seq_len=SEQ)
    assert noted(graph) == ([CASES[model]] if CASES[model] else [])


@pytest.mark.parametrize("is_trained", [True, False])
def test_the_auxiliary_loss_of_a_transformers_router_is_noted(is_trained):
    config = MixtralConfig(
        vocab_size=64, hidden_size=HIDDEN, intermediate_size=16, num_hidden_layers=4, num_attention_heads=2, head_dim=8,
        num_key_value_heads=2, num_local_experts=EXPERTS, output_router_logits=is_trained, tie_word_embeddings=False,
    )  # fmt: skip

    def inputs(batch, seq):
        tokens = torch.randint(0, 64, (batch, seq))
        return (), {"input_ids": tokens, "labels": tokens}

    graph = capture(lambda: AutoModelForCausalLM.from_config(config), inputs, seq_len=SEQ)
    assert (PRODUCTS in noted(graph)) is is_trained
    assert PAIRS not in noted(graph) and MEANS not in noted(graph)


def test_a_plan_says_which_of_its_divisions_change_numerics():
    graph = capture(LoadBalance, lambda batch, seq: (torch.randn(batch, seq, HIDDEN),), seq_len=SEQ)

    def numerics(devices, micro_batch):
        fixed = {"pp": 1, "tp": 1, "micro_batch": micro_batch}
        return autopar.plan(graph, "h100x8", global_batch=8, devices=devices, fixed=fixed).numerics

    (divided,) = numerics(4, 1)
    assert divided == f"model: {PRODUCTS} (here dp=4 and 2 micro-batches do so)"
    assert numerics(4, 2)[0].endswith("(here dp=4 does so)")
    assert numerics(1, 2)[0].endswith("(here 4 micro-batches do so)")
    assert numerics(1, 8)[0].endswith("(nothing here does so)")
