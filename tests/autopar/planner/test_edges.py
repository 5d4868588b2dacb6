"""Tensors that skip blocks: every pipeline cut that they cross sends them on, and the planner says what the runtime cannot."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopar
from autopar.planner.edges import carried_bytes, why_uncut
from benchmarks.family_configs import HEADS, LAYERS
from benchmarks.family_configs import HIDDEN as FAMILY_HIDDEN
from benchmarks.family_configs import SEQ as FAMILY_SEQ
from tests.families import captured

HIDDEN, SEQ, BLOCKS, BATCH, BF16 = 32, 16, 6, 3, 2
ONE = BATCH * SEQ * HIDDEN * BF16
"""Bytes of one hidden state."""


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x, skip):
        return x + self.mix(x + skip)


class Model(nn.Module):
    """Subclasses say what every block reads beside the hidden state."""

    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x):
        return self.leave(self.through(self.enter(x)))


class Plain(Model):
    def through(self, x):
        for block in self.blocks:
            x = block(x, 1.0)
        return x


class ReadsEntry(Model):
    """What comes before the blocks every stage makes for itself."""

    def through(self, x):
        first = x
        for block in self.blocks:
            x = block(x, first)
        return x


class ReadsFirst(Model):
    """What the first block made, read by all others."""

    def through(self, x):
        first = x = self.blocks[0](x, 1.0)
        for block in self.blocks[1:]:
            x = block(x, first)
        return x


class ReadsFirstAtTheEnd(Model):
    """What the first block made, read after the last."""

    def through(self, x):
        first = x = self.blocks[0](x, 1.0)
        for block in self.blocks[1:]:
            x = block(x, 1.0)
        return x + first


def graph_of(model):
    return autopar.capture(
        model, lambda batch, seq: (torch.zeros(batch, seq, HIDDEN, dtype=torch.bfloat16),), seq_len=SEQ
    )


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (Plain, [0] * 5),
        (ReadsEntry, [0] * 5),
        # The second block gets it as its hidden state already; that it is sent twice over the first cut is not known.
        (ReadsFirst, [ONE] * 5),
        (ReadsFirstAtTheEnd, [ONE] * 5),
    ],
)
def test_each_cut_sends_what_later_blocks_read(model, expected):
    graph = graph_of(model)
    assert list(carried_bytes(graph, BATCH, SEQ, BF16)) == expected
    assert (why_uncut(graph) is None) == (not any(expected))


def test_a_decoder_sends_on_the_encoders_output_and_each_bias():
    # Raffel et al., arXiv 1910.10683: the first block of either makes a bias of (heads, queries, keys) for all others.
    graph = captured("T5")
    layers, heads, hidden, seq = LAYERS, HEADS, FAMILY_HIDDEN, FAMILY_SEQ
    bias, output = heads * seq * seq * BF16, BATCH * seq * hidden * BF16
    sent = carried_bytes(graph, BATCH, seq, BF16)
    assert list(sent) == [bias] * (layers - 1) + [0] + [output + bias] * (layers - 1)
    assert "2 lists of blocks" in why_uncut(graph)


def test_a_cut_that_skips_is_planned_only_where_it_is_asked_for_and_then_paid_for():
    graph, asked = graph_of(ReadsFirst), {"dp": 1, "tp": 1, "micro_batch": 2}
    plan = autopar.plan(graph, "local-cpu-x2", global_batch=8)
    assert plan.mesh.pp == 1
    assert any("pp is not offered" in note and "--fix pp=N" in note for note in plan.notes)
    forced, plain = (
        autopar.plan(found, "local-cpu-x2", global_batch=8, fixed=asked | {"pp": 2})
        for found in (graph, graph_of(Plain))
    )
    assert forced.export_only
    assert not plain.export_only
    first, other = (made.costs[0].chunks[0].send_bytes for made in (forced, plain))
    assert first == 2 * other == 2 * (2 * SEQ * HIDDEN * BF16)
