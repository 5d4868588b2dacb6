"""Architectures of published runs as plain PyTorch models, captured once and resized by their number of layers.

    GPT-style    LayerNorm, biases, learned positions, GELU, tied head       (gated_mlp = 0)
    Llama-style  RMSNorm, rotary positions, SwiGLU, own head                 (gated_mlp = 1)

Attention is one fused call, or explicit with a softmax and dropout, as the framework runs it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from autopar.documents.graph import Chain, Graph
from autopar.tracer import capture

CAPTURED_LAYERS = 4


@dataclass(frozen=True)
class Architecture:
    """Sizes of a decoder."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    gated: bool
    vocabulary: int
    seq_len: int
    fused_attention: bool
    dropout: float


class Norm(nn.Module):
    """RMSNorm or LayerNorm."""

    def __new__(cls, a: Architecture) -> Any:
        return nn.RMSNorm(a.hidden) if a.gated else nn.LayerNorm(a.hidden)


class Attention(nn.Module):
    """Causal self-attention with grouped keys and values."""

    def __init__(self, a: Architecture) -> None:
        super().__init__()
        self.a = a
        self.sizes = [heads * a.head_dim for heads in (a.heads, a.kv_heads, a.kv_heads)]
        if a.gated:
            self.q, self.k, self.v = (nn.Linear(a.hidden, size, bias=False) for size in self.sizes)
        else:
            self.qkv = nn.Linear(a.hidden, sum(self.sizes))
        self.out = nn.Linear(a.heads * a.head_dim, a.hidden, bias=not a.gated)
        self.drop = nn.Dropout(a.dropout)

    def forward(self, x: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None) -> torch.Tensor:
        """(batch, seq, hidden) -> the same."""
        batch, seq, _ = x.shape
        parts = (self.q(x), self.k(x), self.v(x)) if self.a.gated else self.qkv(x).split(self.sizes, dim=-1)
        q, k, v = (part.reshape(batch, seq, -1, self.a.head_dim).transpose(1, 2) for part in parts)
        if cos is not None and sin is not None:
            q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        if self.a.fused_attention:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.a.kv_heads < self.a.heads)
        else:
            scores = self.drop((q @ k.transpose(2, 3) / math.sqrt(self.a.head_dim)).softmax(dim=-1))
            out = scores @ v
        return self.out(out.transpose(1, 2).reshape(batch, seq, -1))


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class FeedForward(nn.Module):
    """GELU, or SwiGLU."""

    def __init__(self, a: Architecture) -> None:
        super().__init__()
        self.gate = nn.Linear(a.hidden, a.ffn, bias=False) if a.gated else None
        self.up = nn.Linear(a.hidden, a.ffn, bias=not a.gated)
        self.down = nn.Linear(a.ffn, a.hidden, bias=not a.gated)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, seq, hidden) -> the same."""
        inner = F.gelu(self.up(x)) if self.gate is None else F.silu(self.gate(x)) * self.up(x)
        return self.down(inner)


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and beside a residual."""

    def __init__(self, a: Architecture) -> None:
        super().__init__()
        self.norm1, self.norm2 = Norm(a), Norm(a)
        self.attention, self.ffn = Attention(a), FeedForward(a)
        self.drop = nn.Dropout(a.dropout) if a.dropout else nn.Identity()

    def forward(self, x: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None) -> torch.Tensor:
        """(batch, seq, hidden) -> the same."""
        x = x + self.drop(self.attention(self.norm1(x), cos, sin))
        return x + self.drop(self.ffn(self.norm2(x)))


class Decoder(nn.Module):
    """Token ids (batch, seq) to logits (batch, seq, vocabulary)."""

    def __init__(self, a: Architecture) -> None:
        super().__init__()
        self.a = a
        self.embedding = nn.Embedding(a.vocabulary, a.hidden)
        self.position = None if a.gated else nn.Embedding(a.seq_len, a.hidden)
        self.layers = nn.ModuleList(Block(a) for _ in range(a.layers))
        self.norm = Norm(a)
        self.head = nn.Linear(a.hidden, a.vocabulary, bias=False)
        if not a.gated:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        """Mean cross entropy where labels are given, else logits."""
        x = self.embedding(tokens)
        cos = sin = None
        if self.position is not None:
            x = x + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        else:
            cos, sin = self._rotary(tokens.shape[1], x)
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits = self.head(self.norm(x))
        return logits if labels is None else F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())

    def _rotary(self, seq: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        dim = self.a.head_dim
        frequency = 10000.0 ** (-torch.arange(0, dim, 2, device=like.device).double() / dim)
        angle = torch.outer(torch.arange(seq, device=like.device).double(), frequency).repeat(1, 2)
        return angle.cos().to(like.dtype), angle.sin().to(like.dtype)


def graph_of(architecture: Architecture) -> Graph:
    """The captured step of an architecture; architectures that differ in their layers alone share one capture."""
    return _resized(_captured(replace(architecture, layers=CAPTURED_LAYERS)), architecture.layers)


@cache
def _captured(architecture: Architecture) -> Graph:
    def tokens(batch: int, seq: int) -> Any:
        drawn = torch.zeros((batch, seq + 1), dtype=torch.int64)
        return drawn[:, :-1], drawn[:, 1:]

    return capture(lambda: Decoder(architecture), tokens, seq_len=architecture.seq_len, dtype="bf16")


_RESIZED: dict[tuple[int, int], tuple[Graph, Graph]] = {}


def _resized(graph: Graph, layers: int) -> Graph:
    """The same classes in a chain of another length."""
    key = (id(graph), layers)
    if key not in _RESIZED:
        (chain,) = graph.chains
        (run,) = chain.runs
        stem = chain.modules[0].rpartition(".")[0]
        longer = Chain(
            name=chain.name,
            modules=tuple(f"{stem}.{number}" for number in range(layers)),
            runs=(run.model_copy(update={"count": layers}),),
            prologue=chain.prologue,
            epilogue=chain.epilogue,
        )
        _RESIZED[key] = (graph, graph.model_copy(update={"chains": (longer,)}))
    return _RESIZED[key][1]
