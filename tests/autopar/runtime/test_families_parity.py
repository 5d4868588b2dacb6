"""Families whose code takes heads apart in ways of its own train over tp as in one process, by the planner's division."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import TIMEOUT, Trained, assembled, held

import autopar
from autopar.documents import Plan
from autopar.runtime.launch import on_ranks
from autopar.runtime.step import parallelize
from benchmarks.family_configs import SMALL

transformers = pytest.importorskip("transformers")

SEQ = 16
NO_TORCH_ATTENTION = ("BLOOM", "GPT-OSS")
NO_SEQUENCE = ("BLOOM", "GPT-BigCode")
"""Their code needs whole sequences."""
FAMILIES = ("OPT", "BLOOM", "Phi-3", "Falcon", "GPT-BigCode", "GPT-OSS", "Mixtral", "DeepSeek-V2", "ALBERT", "T5")
WITHIN = 2e-6
"""Their norms, routers and losses round to fp32 inside; a gradient that is only a share is off by far more."""


def config(family: str) -> dict[str, Any]:
    fields = SMALL[family]
    layers = next(name for name in ("num_hidden_layers", "num_layers", "n_layer", "n_layers") if name in fields)
    return fields | {layers: 4} | ({"decoder_start_token_id": 0, "pad_token_id": 0} if family == "T5" else {})


def build(family: str) -> torch.nn.Module:
    torch.manual_seed(0)
    fields = config(family)
    made = transformers.AutoConfig.for_model(**fields)
    made._experts_implementation = "eager"  # grouped products take no fp64
    made._attn_implementation = "eager" if family in NO_TORCH_ATTENTION else "sdpa"
    return getattr(transformers, fields["architectures"][0])(made).double()


def data() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(0, 96, (8, SEQ), generator=generator) for _ in range(2)]
    return [{"input_ids": tokens, "labels": tokens} for tokens in rows]


def descent(parameters: Any) -> torch.optim.Optimizer:
    """Steps in proportion to gradients: AdamW would make as large steps of the rounding of those near zero."""
    return torch.optim.SGD(parameters, lr=0.1)


def alone(family: str) -> Trained:
    model = build(family)
    optimizer = descent(model.parameters())
    found = Trained([], [], {})
    for batch in data():
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        found.norms.append(
            float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
        )
        optimizer.step()
        found.losses.append(loss.item())
    found.weights = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
    return found


def trained(family: str, plan: Plan) -> Trained:
    step = parallelize(build(family), plan, build_optimizer=descent, timeout=TIMEOUT)
    found = Trained([], [], {})
    for batch in data():
        found.losses.append(step(batch))
        found.norms.append(step.grad_norm)
    found.weights = held(step)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_trains_over_tp_as_alone(family: str, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(config(family)))
    plans = []
    for sp in (0,) if family in NO_SEQUENCE else (0, 1):
        fixed = {"pp": 1, "tp": 2, "dp": 1, "micro_batch": 4, "sp": sp, "recompute": "none"}
        path = tmp_path / "config.json"
        plans.append(autopar.plan(path, "local-cpu-x2", global_batch=8, seq_len=SEQ, dtype="fp64", fixed=fixed))
    by_rank = on_ranks(2, lambda rank: [trained(family, plan) for plan in plans], TIMEOUT)
    one = alone(family)
    for number, plan in enumerate(plans):
        what = f"{family} sp={plan.options['sp']}"
        ranks = [answers[number] for answers in by_rank]
        for rank in ranks:
            assert rank.losses == pytest.approx(one.losses, rel=WITHIN), what
            assert rank.norms == pytest.approx(one.norms, rel=WITHIN), what
        for name, weight in assembled(ranks).items():
            assert (weight - one.weights[name]).abs().max() < WITHIN, f"{what}: {name}"
