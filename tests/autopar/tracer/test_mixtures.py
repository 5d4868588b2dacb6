"""Mixtures of experts, however their code runs them: the same FLOPs, by closed form, and no expert left out.

A token visits top-k experts of three products (gate, up, down) of hidden times ffn: 2 FLOPs a multiply-add, backward twice
the forward (Shazeer et al., arXiv 1701.06538; Jiang et al., arXiv 2401.04088).
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM, DeepseekV3Config, MixtralConfig, Qwen3MoeConfig

from autopar.errors import CaptureError
from autopar.tracer import capture

HIDDEN, FFN, EXPERTS, LAYERS, VOCABULARY = 64, 48, 8, 4, 512
COMMON = {
    "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
CONFIGS = {
    "mixtral": (MixtralConfig, {"intermediate_size": FFN, "head_dim": 16, "num_local_experts": EXPERTS}, 0),
    "qwen3": (Qwen3MoeConfig, {"moe_intermediate_size": FFN, "head_dim": 16, "num_experts": EXPERTS, "mlp_only_layers": []}, 0),
    "deepseek": (
        DeepseekV3Config,
        {"moe_intermediate_size": FFN, "n_routed_experts": EXPERTS, "n_shared_experts": 1, "n_group": 2, "topk_group": 1,
         "first_k_dense_replace": 0, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
         "v_head_dim": 16},
        1,  # a shared expert that every token visits
    ),
}  # fmt: skip


def closed_form(tokens, visits):
    return 3 * visits * tokens * 3 * 2 * HIDDEN * FFN * LAYERS


def expert_flops(graph, batch, seq):
    sizes = graph.sizes(batch, seq)
    return sum(
        count * term.value(sizes)
        for name, count in graph.class_counts.items()
        for operator in graph.class_by_name[name].operators
        if "expert" in operator.module
        for term in operator.model_flops
    )


def require_closed_form(graph, visits):
    for batch, seq in ((2, 32), (6, 32), (2, 64), (4, 48)):
        assert expert_flops(graph, batch, seq) == pytest.approx(closed_form(batch * seq, visits), rel=1e-9)


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("family", CONFIGS)
def test_every_implementation_of_transformers_counts_the_same(family, implementation):
    cls, own, shared = CONFIGS[family]
    config = cls(**COMMON, **own, num_experts_per_tok=2)

    def inputs(batch, seq):
        tokens = torch.randint(0, VOCABULARY, (batch, seq))
        return (), {"input_ids": tokens, "labels": tokens}

    graph = capture(
        lambda: AutoModelForCausalLM.from_config(config, experts_implementation=implementation), inputs, seq_len=32
    )
    require_closed_form(graph, 2 + shared)
    assert not [note for note in graph.notes if note.kind != "mixes_batch"]


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(HIDDEN, FFN, bias=False), nn.Linear(HIDDEN, FFN, bias=False)
        self.down = nn.Linear(FFN, HIDDEN, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Mixture(nn.Module):
    """`run(experts, tokens, scores)` is a loop as people write it."""

    def __init__(self, run):
        super().__init__()
        self.run, self.router = run, nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, x):
        tokens = x.flatten(0, 1)
        return x + self.run(self.experts, tokens, self.router(tokens).softmax(-1)).view_as(x)


def mixed(experts, tokens, weights, chosen):
    out = torch.zeros_like(tokens)
    for number, expert in enumerate(experts):
        token, visit = torch.where(chosen == number)
        out.index_add_(0, token, expert(tokens[token]) * weights[token, visit, None])
    return out


def topk(experts, tokens, scores):
    return mixed(experts, tokens, *scores.topk(2, -1))


def argmax(experts, tokens, scores):
    chosen = scores.argmax(-1, keepdim=True)
    return mixed(experts, tokens, scores.gather(1, chosen), chosen)


def largest(experts, tokens, scores):
    return mixed(experts, tokens, *(found[:, None] for found in scores.max(-1)))


def sort(experts, tokens, scores):
    return mixed(experts, tokens, *(found[:, :2] for found in scores.sort(-1, descending=True)))


def only_hit(experts, tokens, scores):
    weights, chosen = scores.topk(2, -1)
    hit, out = F.one_hot(chosen, EXPERTS).permute(2, 1, 0), torch.zeros_like(tokens)
    for (number,) in hit.sum((1, 2)).gt(0).nonzero():
        visit, token = torch.where(hit[number.item()])
        out.index_add_(0, token, experts[number.item()](tokens[token]) * weights[token, visit, None])
    return out


def if_any(experts, tokens, scores):
    weights, chosen = scores.topk(2, -1)
    out = torch.zeros_like(tokens)
    for number, expert in enumerate(experts):
        if (chosen == number).any():
            token, visit = (chosen == number).nonzero(as_tuple=True)
            out = out.index_add(0, token, expert(tokens[token]) * weights[token, visit, None])
    return out


def sorted_rows(experts, tokens, scores):
    weights, chosen = scores.topk(2, -1)
    order = chosen.flatten().argsort()
    counts = torch.bincount(chosen.flatten(), minlength=EXPERTS).tolist()
    parts = [expert(rows) for expert, rows in zip(experts, tokens[order // 2].split(counts), strict=True)]
    return torch.zeros_like(tokens).index_add(0, order // 2, torch.cat(parts) * weights.flatten()[order, None])


def above_a_threshold(experts, tokens, scores):
    return mixed(experts, tokens, scores, torch.where(scores > 1 / EXPERTS, torch.arange(EXPERTS), -1))


class Layers(nn.Module):
    def __init__(self, run):
        super().__init__()
        self.layers = nn.ModuleList(Mixture(run) for _ in range(LAYERS))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def captured(run):
    return capture(lambda: Layers(run), lambda batch, seq: (torch.randn(batch, seq, HIDDEN),), seq_len=32)


@pytest.mark.parametrize(
    ("run", "visits"),
    [(topk, 2), (argmax, 1), (largest, 1), (sort, 2), (only_hit, 2), (if_any, 2), (sorted_rows, 2)],
)
def test_every_loop_over_experts_counts_all_of_them(run, visits):
    graph = captured(run)
    require_closed_form(graph, visits)
    (block,) = (graph.class_by_name[run.block_class] for run in graph.chains[0].runs)
    assert {op.module for op in block.operators if op.module.endswith(".down")} == {
        f"experts.{number}.down" for number in range(EXPERTS)
    }
    assert not graph.notes


def test_a_router_whose_number_of_rows_depends_on_weights_is_named_not_guessed():
    with pytest.raises(CaptureError, match=r"layers\.0.*aten\.\w*(nonzero|where)"):
        captured(above_a_threshold)
