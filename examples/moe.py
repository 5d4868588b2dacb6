"""A decoder with a mixture of experts (Shazeer et al., arXiv 1701.06538; Jiang et al., arXiv 2401.04088).

The router sends each token to its best experts and weighs what they make of it; each expert runs on the tokens it was given.
"""

from dataclasses import dataclass

import torch
from llama import Config, Llama
from torch import nn


@dataclass(frozen=True)
class MoeConfig(Config):
    experts: int = 8
    visits: int = 2


class Expert(nn.Module):
    def __init__(self, hidden, ffn):
        super().__init__()
        self.gate, self.up = nn.Linear(hidden, ffn, bias=False), nn.Linear(hidden, ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x):
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.visits = config.visits
        self.router = nn.Linear(config.hidden, config.experts, bias=False)
        self.experts = nn.ModuleList(Expert(config.hidden, config.ffn) for _ in range(config.experts))

    def forward(self, x):
        tokens = x.flatten(0, -2)
        weights, chosen = self.router(tokens).softmax(dim=-1).topk(self.visits, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        mixed = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            token, visit = torch.where(chosen == number)
            mixed.index_add_(0, token, expert(tokens[token]) * weights[token, visit, None])
        return mixed.view_as(x)


class MoeDecoder(Llama):
    """A Llama whose feed-forward layers are mixtures of experts."""

    def __init__(self, config):
        super().__init__(config)
        for layer in self.layers:
            layer.ffn = Experts(config)
