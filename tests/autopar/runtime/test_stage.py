"""Stages without tracing: what a pipeline may cut, and what it refuses with the reason."""

from __future__ import annotations

import pytest
import small_models
import torch
from parity import TIMEOUT, alone, assert_equal, plan_for, trained
from torch import nn

from autopar.errors import RequestError
from autopar.runtime.launch import on_ranks
from autopar.runtime.probe import probe
from autopar.runtime.stage import Cut, StageModule, split

CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x, extra=None):
        return x + self.inner(x) + (0 if extra is None else extra)


class Model(nn.Module):
    """Embedding, four blocks, head; subclasses change how the blocks run."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, tokens):
        return self.head(self.blocks(self.embedding(tokens)))

    def blocks(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Twice(Model):
    def blocks(self, x):
        return super().blocks(super().blocks(x))


class ByKeyword(Model):
    def blocks(self, x):
        for layer in self.layers:
            x = layer(x=x)
        return x


class Between(Model):
    def blocks(self, x):
        for layer in self.layers:
            x = layer(x) * 2
        return x


class SkipsOver(Model):
    def blocks(self, x):
        first = self.layers[0](x)
        x = first
        for layer in self.layers[1:]:
            x = layer(x, extra=first)
        return x


class HandsOn(Model):
    """The first block makes what all others read, with a gradient or without: neither is in the hidden state."""

    learns = True

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(HandingBlock() for _ in range(4))

    def blocks(self, x):
        extra = None
        for layer in self.layers:
            x, extra = layer(x, extra, self.learns)
        return x


class HandsOnValues(HandsOn):
    learns = False


class HandingBlock(Block):
    def forward(self, x, extra, learns):
        if extra is None:
            extra = self.inner(x) if learns else self.inner(x).detach()
        return super().forward(x, extra), extra


class Learned(Model):
    """A parameter of the model itself that every block sees."""

    def __init__(self):
        super().__init__()
        self.slope = nn.Parameter(torch.randn(8))

    def blocks(self, x):
        for layer in self.layers:
            x = layer(x, self.slope)
        return x


class ReadsEmbedding(Model):
    """The head is a product with the embedding's weight, without a module of its own."""

    def __init__(self):
        super().__init__()
        del self.head

    def forward(self, tokens):
        return self.blocks(self.embedding(tokens)) @ self.embedding.weight.T


class Tuples(Model):
    """Blocks that return (hidden state, something else)."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(TupleBlock() for _ in range(4))

    def blocks(self, x):
        for layer in self.layers:
            x = layer(x)[0]
        return x


class TupleBlock(Block):
    def forward(self, x, extra=None):
        return super().forward(x, extra), None


TOKENS = torch.arange(12).reshape(3, 4)
INPUTS = ((TOKENS,), {})


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Twice, "run in the order .* not once each"),
        (ByKeyword, "does not get its hidden state as first argument"),
        (Between, "something happens between"),
        (SkipsOver, "reads what came of block 0 beside the hidden state"),
        (HandsOn, "block 1 reads what came of block 0 beside the hidden state"),
        (HandsOnValues, "block 1 reads what came of block 0 beside the hidden state"),
    ],
)
def test_models_that_a_pipeline_cannot_cut_are_refused_with_the_reason(model, reason):
    with pytest.raises(RequestError, match=reason):
        probe(model(), "layers", INPUTS)


@pytest.mark.parametrize("build", [Model, Learned, ReadsEmbedding, Tuples, small_models.gpt_tied])
def test_stages_one_after_another_compute_what_the_model_computes(build):
    torch.manual_seed(0)
    model = build()
    chain = "blocks" if hasattr(model, "position") else "layers"
    found = probe(model, chain, INPUTS)
    stages = []
    for first, last in ((0, 0), (1, 2), (3, 3)):
        pieces = split(model, Cut(chain, first, last, 4), found, CPU)
        stage = StageModule(
            pieces, lambda output, inputs, number: output.square().mean(), torch.enable_grad, torch.float64
        )
        stage.micro_batches = {0: INPUTS}
        stage.attach()
        stages.append(stage)
    number = torch.tensor(0)
    loss = stages[2](stages[1](stages[0](number=number), number=number), number=number)
    whole = model(TOKENS).square().mean()
    assert loss.item() == pytest.approx(whole.item(), abs=1e-12)
    loss.backward()
    whole_gradients = dict(
        zip(dict(model.named_parameters()), torch.autograd.grad(whole, list(model.parameters())), strict=True)
    )
    summed: dict[str, torch.Tensor] = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            if parameter.grad is not None:
                known = stage.pieces.names[name.removeprefix("model.")]
                summed[known] = summed.get(known, 0) + parameter.grad
    for name, gradient in whole_gradients.items():
        assert torch.allclose(summed[name], gradient, atol=1e-12 if gradient.dtype is torch.float64 else 1e-6), name


def test_a_stage_holds_its_own_blocks_and_ends_only():
    model = small_models.build_model()
    found = probe(model, "layers", INPUTS)
    names = [
        {
            name.rpartition(".")[0]
            for name, _ in split(model, Cut("layers", *blocks, 4), found, CPU).model.named_parameters()
        }
        for blocks in ((0, 1), (2, 3))
    ]
    assert "embedding" in names[0]
    assert "head" not in names[0]
    assert "embedding" not in names[1]
    assert {"norm", "head"} <= names[1]
    assert not names[0] & names[1]


def test_a_model_that_looks_at_values_is_cut_too():
    plan = plan_for("llama", pp=2, micro_batch=6, schedule="1f1b")
    ranks = on_ranks(2, lambda rank: trained(small_models.looking, plan), TIMEOUT)
    assert_equal(ranks, alone(small_models.looking), "looking")
