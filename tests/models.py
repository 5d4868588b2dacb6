"""Small models that the tests of capture share."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Batch = Callable[[int, int], Any]


class GptLayer(nn.Module):
    """The transformer layer of Korthikanti et al. (arXiv 2205.05198, figure 2), attention explicit or fused."""

    def __init__(self, hidden: int, heads: int, fused: bool) -> None:
        super().__init__()
        self.heads, self.fused = heads, fused
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop(self.out(self.attention(self.norm1(x))))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, hidden = x.shape
        q, k, v = (
            part.reshape(batch, seq, self.heads, hidden // self.heads).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        if self.fused:
            out = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)
        else:
            scores = self.drop((q @ k.transpose(2, 3) / math.sqrt(hidden // self.heads)).softmax(dim=-1))
            out = scores @ v
        return out.transpose(1, 2).reshape(batch, seq, hidden)


class Stack(nn.Module):
    """Layers between an input projection and a norm."""

    def __init__(self, layer: Callable[[], nn.Module], hidden: int, depth: int) -> None:
        super().__init__()
        self.enter = nn.Linear(hidden, hidden)
        self.layers = nn.ModuleList(layer() for _ in range(depth))
        self.norm = nn.LayerNorm(hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


def hidden_states(hidden: int) -> Batch:
    """Inputs of a `Stack`."""
    return lambda batch, seq: (torch.randn(batch, seq, hidden, dtype=torch.get_default_dtype()),)
