"""Inputs that are floats (images, fields, sound): the model takes them in its own dtype, the loss as they came.

The model is itself the container of its blocks, as an nn.Sequential is.
"""

from __future__ import annotations

import pytest
import torch
from parity import TIMEOUT
from torch import nn

import autopar
from autopar.runtime.launch import on_ranks
from autopar.runtime.step import parallelize

BATCH, STEPS, WIDE = 8, 3, 16


class Mix(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDE, 4 * WIDE), nn.Linear(4 * WIDE, WIDE)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))


def inputs(batch, seq):
    return torch.randn(batch, WIDE), torch.randn(batch, WIDE)


class Predicts(nn.Sequential):
    """Takes a target too, which it hands to the loss."""

    def forward(self, x, target):
        return super().forward(x)


def build():
    torch.manual_seed(0)
    return Predicts(*(Mix() for _ in range(4)))


def loss(output, x, target):
    assert target.dtype is torch.float32
    return (output.double() - target).square().mean()


def batches():
    torch.manual_seed(1)
    return [inputs(BATCH, 1) for _ in range(STEPS)]


@pytest.mark.parametrize(("dtype", "within"), [("fp64", 1e-9), ("bf16", 0.02)])
@pytest.mark.parametrize(
    "fixed", [{"tp": 2}, {"dp": 2, "zero": 3}, {"pp": 2, "micro_batch": 4, "schedule": "1f1b"}], ids=str
)
def test_floats_train_as_in_one_process(fixed, dtype, within):
    fixed = {"pp": 1, "tp": 1, "dp": 1} | fixed
    graph = autopar.capture(
        build, lambda batch, seq: tuple(x.to(torch.get_default_dtype()) for x in inputs(batch, seq))
    )
    plan = autopar.plan(graph, "local-cpu-x8", devices=2, global_batch=BATCH, dtype=dtype, fixed=fixed)

    def work(rank):
        step = parallelize(build(), plan, loss, timeout=TIMEOUT)
        return [step(batch) for batch in batches()]

    model = build().double()
    optimizer = torch.optim.AdamW(model.parameters())
    expected = []
    for x, target in batches():
        optimizer.zero_grad()
        value = loss(model(x.double(), target), x, target)
        value.backward()
        optimizer.step()
        expected.append(value.item())
    for losses in on_ranks(2, work, TIMEOUT):
        assert losses == pytest.approx(expected, rel=within)
