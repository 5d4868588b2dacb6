"""A GPT-3-style decoder in plain PyTorch: LayerNorm, learned positions, fused QKV, GELU, dropout."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Config:
    """Sizes of a GPT-style model."""

    vocabulary: int
    hidden: int
    layers: int
    heads: int
    positions: int
    dropout: float = 0.1


class Attention(nn.Module):
    """Causal self-attention, queries, keys and values from one projection."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_dim, self.dropout = config.hidden // config.heads, config.dropout
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden)
        self.out = nn.Linear(config.hidden, config.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, seq, hidden) -> the same."""
        batch, seq, _ = x.shape
        q, k, v = (part.view(batch, seq, -1, self.head_dim).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        dropout = self.dropout if self.training else 0.0
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.out(out.transpose(1, 2).reshape(batch, seq, -1))


class Block(nn.Module):
    """Attention and a four times wider feed-forward, each behind a norm and beside a residual."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden)
        self.attention = Attention(config)
        self.ffn_norm = nn.LayerNorm(config.hidden)
        self.up = nn.Linear(config.hidden, 4 * config.hidden)
        self.down = nn.Linear(4 * config.hidden, config.hidden)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, seq, hidden) -> the same."""
        x = x + self.drop(self.attention(self.attention_norm(x)))
        return x + self.drop(self.down(F.gelu(self.up(self.ffn_norm(x)))))


class GPT(nn.Module):
    """Token ids (batch, seq) to logits (batch, seq, vocabulary); the head is tied to the embedding."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.hidden)
        self.position = nn.Embedding(config.positions, config.hidden)
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden)
        self.head = nn.Linear(config.hidden, config.vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        """The labels are for `loss`; the model does not read them."""
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        x = self.drop(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def next_token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy, in fp32 or wider."""
    scores = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(scores.flatten(0, 1), labels.flatten())
