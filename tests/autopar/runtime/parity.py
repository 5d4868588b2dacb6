"""Runs plans on forked ranks and one process beside them, and says how far apart they end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any

import small_models
import torch
from torch import nn

import autopar
from autopar.documents import Graph, Plan
from autopar.runtime.checkpoint import parameters
from autopar.runtime.launch import on_ranks
from autopar.runtime.step import parallelize

BATCH, STEPS, CLIP = 24, 5, 0.5
FACTORIES = {
    "llama": small_models.build_model,
    "gpt": small_models.gpt_tied,
    "grouped": small_models.grouped_heads,
    "shifted": small_models.shifted,
    "deep": small_models.deep,
}
TIMEOUT = timedelta(seconds=60)


@dataclass
class Trained:
    """Losses and norms step by step, and the weights at the end (whole, or the parts a rank holds)."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Any]


@cache
def graph_of(model: str) -> Graph:
    name = FACTORIES[model].__name__
    return autopar.capture(f"{Path(__file__).parent}/small_models.py:{name}")


def plan_for(model: str, **fixed: Any) -> Plan:
    """The planner's plan with these choices fixed, on as many ranks as they multiply to."""
    fixed = {"pp": 1, "tp": 1, "dp": 1, "recompute": "none"} | fixed
    if fixed["tp"] > 1:
        fixed.setdefault("sp", 0)
    devices = prod(fixed[axis] for axis in ("pp", "tp", "dp"))
    return autopar.plan(graph_of(model), "local-cpu-x8", devices=devices, global_batch=BATCH, dtype="fp64", fixed=fixed)


def data() -> list[Any]:
    return list(islice(small_models.batches(BATCH, small_models.SEQ_LEN, 1), STEPS))


@cache
def alone(build: Callable[[], nn.Module], clip: float | None = CLIP) -> Trained:
    """One process, whole batches, torch's own AdamW and clipping."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    found = Trained([], [], {})
    for batch in data():
        optimizer.zero_grad()
        loss = small_models.loss(model(*batch), *batch)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip if clip is not None else float("inf"))
        optimizer.step()
        found.losses.append(loss.item())
        found.norms.append(float(norm))
    found.weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return found


def trained(
    build: Callable[[], nn.Module], plan: Plan, loss: Any = small_models.loss, clip: float | None = CLIP
) -> Trained:
    """The same steps on this rank of a process group."""
    step = parallelize(build(), plan, loss, clip_norm=clip, timeout=TIMEOUT)
    found = Trained([], [], {})
    for batch in data():
        found.losses.append(step(batch))
        found.norms.append(step.grad_norm)
    found.weights = held(step)
    return found


def held(step: Any) -> dict[str, Any]:
    """Name -> (shape of the whole, the rectangles of it that this rank holds)."""
    return {
        name.removeprefix("model."): (tuple(whole.shape), [(offsets, part.clone()) for offsets, part in whole.parts])
        for name, whole in parameters(step).items()
    }


def assembled(ranks: Sequence[Trained]) -> dict[str, torch.Tensor]:
    """Whole weights from what ranks hold; not a number where none does."""
    whole: dict[str, torch.Tensor] = {}
    for rank in ranks:
        for name, (shape, rectangles) in rank.weights.items():
            into = whole.setdefault(name, torch.full(shape, float("nan"), dtype=torch.float64))
            for offsets, part in rectangles:
                into[tuple(slice(o, o + size) for o, size in zip(offsets, part.shape, strict=True))] = part
    return whole


def run_cases(cases: Sequence[tuple[str, Plan]]) -> None:
    """Train every case within one fork of the ranks it needs, and hold each against one process."""
    world = cases[0][1].mesh.devices

    def work(rank: int) -> list[Trained]:
        return [trained(FACTORIES[model], plan) for model, plan in cases]

    by_rank = on_ranks(world, work, TIMEOUT)
    for number, (model, plan) in enumerate(cases):
        assert_equal(
            [answers[number] for answers in by_rank], alone(FACTORIES[model]), f"{model} {plan.mesh} {plan.schedule}"
        )


def assert_equal(ranks: Sequence[Trained], one: Trained, what: str, loss_within: float = 1e-9) -> None:
    """Losses, norms and every weight are those of one process."""
    for rank in ranks:
        assert max(abs(a - b) for a, b in zip(rank.losses, one.losses, strict=True)) < loss_within, what
        assert max(abs(a - b) for a, b in zip(rank.norms, one.norms, strict=True)) < max(1e-9, loss_within), what
    whole = assembled(ranks)
    assert whole.keys() == one.weights.keys(), what
    for name, weight in whole.items():
        difference = (weight - one.weights[name]).abs().max().item()
        assert difference < 1e-9, f"{what}: {name} differs by {difference}"
