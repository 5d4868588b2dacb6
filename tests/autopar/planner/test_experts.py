"""What experts of grouped products cost under tp where nothing else divides them."""

import json
import re

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

import autopar

CONFIG = {
    "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "vocab_size": 512, "hidden_size": 64, "head_dim": 16,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    "num_local_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize("tp", [2, 4])
def test_experts_are_held_as_the_plan_places_them(tp, tmp_path):
    """Of a divided parameter a rank holds 1 / tp; master weights take 4 bytes an element (Rajbhandari et al., 1910.02054)."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    graph = autopar.capture(config, seq_len=64)
    fixed = {"pp": 1, "dp": 1, "tp": tp, "zero": 0, "micro_batch": 1}
    plan = autopar.plan(graph, "h100x8", global_batch=4, devices=tp, fixed=fixed)
    with torch.device("meta"):
        model = MixtralForCausalLM(MixtralConfig(**CONFIG))
    held = 0.0
    for name, parameter in model.named_parameters():
        placed = plan.placements[re.sub(r"\.\d+\.", ".*.", name)]["tp"]
        held += parameter.numel() / (1 if placed == "Replicate" else tp)
    assert any("experts" in name and placed["tp"] != "Replicate" for name, placed in plan.placements.items())
    assert plan.costs[0].memory["parameters"] == pytest.approx(4 * held, rel=1e-9)
