"""What users' models do on their own: checkpoint their blocks, return their loss, keep running statistics."""

from __future__ import annotations

import pytest
import torch
from parity import TIMEOUT
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

import autopar
from autopar.runtime.launch import on_ranks
from autopar.runtime.step import parallelize

BATCH, WIDE = 8, 16


class Mix(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDE, 4 * WIDE), nn.Linear(4 * WIDE, WIDE)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))


class Checkpoints(nn.Module):
    """Runs every block again in backward, and returns its loss."""

    def __init__(self, reentrant):
        super().__init__()
        self.reentrant, self.enter = reentrant, nn.Linear(WIDE, WIDE)
        self.blocks = nn.ModuleList(Mix() for _ in range(4))

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x.square().mean()


def inputs(batch, seq):
    return (torch.randn(batch, WIDE, dtype=torch.get_default_dtype(), generator=torch.Generator().manual_seed(1)),)


FIXED = {"pp": 1, "tp": 1, "dp": 1, "recompute": "none"}


def losses_on_ranks(build, fixed, dtype):
    fixed = FIXED | fixed
    world = fixed["pp"] * fixed["tp"] * fixed["dp"]
    plan = autopar.plan(
        autopar.capture(build, lambda batch, seq: (torch.zeros(batch, WIDE, dtype=torch.get_default_dtype()),)),
        "local-cpu-x8", devices=world, global_batch=BATCH, dtype=dtype, fixed=fixed,
    )  # fmt: skip

    def work(rank):
        torch.manual_seed(0)
        step = parallelize(build(), plan, timeout=TIMEOUT)
        return [step(inputs(BATCH, 1)) for _ in range(3)]

    first, *others = on_ranks(world, work, TIMEOUT)
    assert all(other == first for other in others)
    return first


def losses_alone(build):
    torch.manual_seed(0)
    model = build().double()
    optimizer, losses = torch.optim.AdamW(model.parameters()), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(inputs(BATCH, 1)[0].double())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    "fixed",
    [
        {"tp": 2},
        {"pp": 2, "micro_batch": 4, "schedule": "1f1b"},
        {"dp": 2, "zero": 3, "recompute": "full"},
        {"dp": 2, "zero": 0, "recompute": "selective"},
    ],
    ids=str,
)
def test_checkpoints_of_the_models_own_code_leave_recompute_to_the_plan(fixed, reentrant):
    def build():
        return Checkpoints(reentrant)

    assert losses_on_ranks(build, fixed, "fp64") == pytest.approx(losses_alone(build), rel=1e-9)


class Scaled(nn.Module):
    """Single numbers that learn, in a block and outside: fully_shard cannot divide them."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(ScaledMix() for _ in range(4))
        self.temperature = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return (x * self.temperature.exp()).square().mean()


class ScaledMix(Mix):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.1))

    def forward(self, x):
        return x + self.gain * super().forward(x)


@pytest.mark.parametrize(
    "fixed",
    [
        *({"dp": 2, "zero": zero} for zero in range(4)),
        {"dp": 2, "zero": 3, "micro_batch": 2},
        {"tp": 2},
        {"pp": 2, "micro_batch": 4, "schedule": "1f1b"},
        {"pp": 2, "dp": 2, "zero": 2, "micro_batch": 2, "schedule": "1f1b"},
    ],
    ids=str,
)
def test_single_numbers_learn_as_in_one_process(fixed):
    assert losses_on_ranks(Scaled, fixed, "fp64") == pytest.approx(losses_alone(Scaled), rel=1e-9)


class Normalised(nn.Module):
    """Running statistics and power iterations, read beside parameters of 16 bits; and a table that keeps its own."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(spectral_norm(nn.Linear(WIDE, WIDE)) for _ in range(4))
        self.norm, self.rotary = nn.BatchNorm1d(WIDE), Table()

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return (self.norm(x) * self.rotary(x)).square().mean()


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("angles", torch.linspace(0, 100, WIDE, dtype=torch.float32))

    def forward(self, x):
        assert self.angles.dtype is torch.float32
        return self.angles.cos().to(x.dtype)


def test_running_statistics_follow_the_training_dtype_and_tables_do_not():
    losses = losses_on_ranks(Normalised, {"dp": 2}, "bf16")
    assert all(torch.isfinite(torch.tensor(losses)))
