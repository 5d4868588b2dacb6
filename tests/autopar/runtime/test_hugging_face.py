"""Llama, Gemma 2, Gemma 3 and GPT-2 as Hugging Face writes them; their own loss is computed in fp32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import TIMEOUT, Trained, assert_equal, held

import autopar
from autopar.runtime.launch import on_ranks
from autopar.runtime.step import parallelize

transformers = pytest.importorskip("transformers")

GROUPED = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
           "num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 16}  # fmt: skip
SLIDING = {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8}
CONFIGS = {
    "llama": GROUPED | {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False},
    "gemma2": GROUPED | SLIDING | {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"]},
    "gemma3_text": GROUPED | SLIDING | {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"]},
    "gpt2": {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 32, "n_layer": 4, "n_head": 4,
             "n_positions": 16, "vocab_size": 96, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}  # fmt: skip


def build(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**CONFIGS[name])
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, module in list(model.named_modules()):
        # Their own norms round to fp32 inside, where another order of sums shows; torch's do not.
        if type(module).__name__ == "LlamaRMSNorm":
            model.set_submodule(name, torch.nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps))
        if type(module).__name__ in ("Gemma2RMSNorm", "Gemma3RMSNorm"):
            model.set_submodule(name, ShiftedNorm(len(module.weight), config.rms_norm_eps))
    return model.double()


class ShiftedNorm(torch.nn.Module):
    """A norm whose weights are differences from one."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.zeros(size)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, self.weight.shape, 1 + self.weight, self.eps)


def data() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(0, 96, (8, 16), generator=generator) for _ in range(3)]
    return [{"input_ids": tokens, "labels": tokens} for tokens in rows]


def alone(name: str) -> Trained:
    model = build(name)
    optimizer = torch.optim.AdamW(model.parameters())
    found = Trained([], [], {})
    for batch in data():
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        found.norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])))
        optimizer.step()
        found.losses.append(loss.item())
    found.weights = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
    return found


def trained(name: str, plan: Any) -> Trained:
    step = parallelize(build(name), plan, timeout=TIMEOUT)
    found = Trained([], [], {})
    for batch in data():
        found.losses.append(step(batch))
        found.norms.append(step.grad_norm)
    found.weights = held(step)
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_hugging_face_models_train_as_alone(name: str, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    choices: list[dict[str, Any]] = [
        {"pp": 2, "tp": 1, "dp": 1, "micro_batch": 2, "schedule": "1f1b"},
        {"pp": 1, "tp": 1, "dp": 2, "micro_batch": 2, "zero": 3},
        {"pp": 1, "tp": 2, "dp": 1, "micro_batch": 4, "sp": 0},
    ]
    if CONFIGS[name].get("num_key_value_heads"):
        choices.append({"pp": 1, "tp": 2, "dp": 1, "micro_batch": 4, "sp": 1})
    plans = [
        autopar.plan(
            tmp_path / "config.json",
            "local-cpu-x2",
            global_batch=8,
            seq_len=16,
            dtype="fp64",
            fixed=fixed | {"recompute": "none"},
        )
        for fixed in choices
    ]
    by_rank = on_ranks(2, lambda rank: [trained(name, plan) for plan in plans], TIMEOUT)
    one = alone(name)
    for number, plan in enumerate(plans):
        assert_equal([answers[number] for answers in by_rank], one, f"{name} {plan.mesh}", loss_within=5e-6)
