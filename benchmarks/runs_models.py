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
    experts: int = 0
    topk: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    wide_rotary: bool = False
    repeats_keys: bool = False
    composite_norm: bool = False
    fused_projections: bool = False
    latent: tuple[int, int, int] | None = None
    """Ranks of queries, of keys and values, and the rotary part of a head: multi-head latent attention (arXiv 2405.04434)."""


LATENT = {"deepseek": (1536, 512, 64), "kimi": (1536, 512, 64)}
"""Model families with latent attention, whose ranks the CSV has no column for (their published configs)."""


def latent_ranks(model: str) -> tuple[int, int, int] | None:
    """Ranks by the family's name; None: plain attention."""
    return next((ranks for family, ranks in LATENT.items() if model.lower().startswith(family)), None)


class CompositeNorm(nn.Module):
    """RMSNorm operator by operator in fp32."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., size) -> the same."""
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * self.weight


def _norm(a: Architecture) -> nn.Module:
    if not a.gated:
        return nn.LayerNorm(a.hidden)
    return CompositeNorm(a.hidden) if a.composite_norm else nn.RMSNorm(a.hidden)


class Attention(nn.Module):
    """Causal self-attention with grouped keys and values."""

    def __init__(self, a: Architecture) -> None:
        super().__init__()
        self.a = a
        self.sizes = [heads * a.head_dim for heads in (a.heads, a.kv_heads, a.kv_heads)]
        self.is_fused = a.fused_projections or not a.gated
        if self.is_fused:
            self.qkv = nn.Linear(a.hidden, sum(self.sizes), bias=not a.gated)
        else:
            self.q, self.k, self.v = (nn.Linear(a.hidden, size, bias=False) for size in self.sizes)
        self.out = nn.Linear(a.heads * a.head_dim, a.hidden, bias=not a.gated)
        self.drop = nn.Dropout(a.dropout)

    def forward(self, x: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None) -> torch.Tensor:
        """(batch, seq, hidden) -> the same."""
        batch, seq, _ = x.shape
        parts = self.qkv(x).split(self.sizes, dim=-1) if self.is_fused else (self.q(x), self.k(x), self.v(x))
        q, k, v = (part.reshape(batch, seq, -1, self.a.head_dim).transpose(1, 2) for part in parts)
        if cos is not None and sin is not None:
            wide = torch.float32 if self.a.wide_rotary else q.dtype
            q, k = (_rotate(part.to(wide), cos.to(wide), sin.to(wide)).to(part.dtype) for part in (q, k))
        if self.a.repeats_keys and self.a.kv_heads < self.a.heads:
            k, v = (_repeated(part, self.a.heads // self.a.kv_heads) for part in (k, v))
        if self.a.fused_attention:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=k.shape[1] < q.shape[1])
        else:
            scores = self.drop((q @ k.transpose(2, 3) / math.sqrt(self.a.head_dim)).softmax(dim=-1))
            out = scores @ v
        return self.out(out.transpose(1, 2).reshape(batch, seq, -1))


def _repeated(x: torch.Tensor, times: int) -> torch.Tensor:
    """(batch, heads, seq, dim) with each head `times` times."""
    batch, heads, seq, dim = x.shape
    return x.unsqueeze(2).expand(batch, heads, times, seq, dim).reshape(batch, heads * times, seq, dim)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class LatentAttention(nn.Module):
    """Queries, and keys with values, each through a narrow projection; one rotary key for all heads."""

    def __init__(self, a: Architecture, ranks: tuple[int, int, int]) -> None:
        super().__init__()
        self.a, (q_rank, self.rank, self.rotary) = a, ranks
        self.q_down, self.q_norm = nn.Linear(a.hidden, q_rank, bias=False), nn.RMSNorm(q_rank)
        self.q_up = nn.Linear(q_rank, a.heads * (a.head_dim + self.rotary), bias=False)
        self.kv_down, self.kv_norm = nn.Linear(a.hidden, self.rank, bias=False), nn.RMSNorm(self.rank)
        self.key = nn.Linear(a.hidden, self.rotary, bias=False)
        self.k_up = nn.Linear(self.rank, a.heads * a.head_dim, bias=False)
        self.v_up = nn.Linear(self.rank, a.heads * a.head_dim, bias=False)
        self.out = nn.Linear(a.heads * a.head_dim, a.hidden, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """(batch, seq, hidden) -> the same; `cos` and `sin` are those of the rotary part."""
        batch, seq, _ = x.shape
        narrow = self.kv_norm(self.kv_down(x))
        flat = (self.q_up(self.q_norm(self.q_down(x))), self.k_up(narrow), self.v_up(narrow))
        q, k, v = (part.view(batch, seq, self.a.heads, -1).transpose(1, 2) for part in flat)
        plain, turned = q.split([self.a.head_dim, self.rotary], dim=-1)
        q = torch.cat((plain, _rotate(turned, cos, sin)), dim=-1)
        one = _rotate(self.key(x).view(batch, seq, 1, -1).transpose(1, 2), cos, sin)
        k = torch.cat((k, one.expand(-1, self.a.heads, -1, -1)), dim=-1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(out.transpose(1, 2).reshape(batch, seq, -1))


class Grouped(nn.Module):
    """One matrix for each group of rows."""

    def __init__(self, experts: int, into: int, out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, into, out))

    def forward(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """(rows, into) -> (rows, out); group g ends before row ends[g]."""
        return torch._grouped_mm(rows, self.weight, offs=ends)


class Experts(nn.Module):
    """Experts as grouped products over the rows that a router sends them; a shared one beside them."""

    def __init__(self, a: Architecture) -> None:
        super().__init__()
        self.a = a
        self.router = nn.Linear(a.hidden, a.experts, bias=False)
        self.is_fused = a.gated and a.fused_projections
        self.gate = Grouped(a.experts, a.hidden, a.expert_ffn) if a.gated and not self.is_fused else None
        self.up = Grouped(a.experts, a.hidden, a.expert_ffn * (1 + self.is_fused))
        self.down = Grouped(a.experts, a.expert_ffn, a.hidden)
        self.shared = FeedForward(a, a.shared_ffn) if a.shared_ffn else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, seq, hidden) -> the same."""
        flat = x.reshape(-1, x.shape[-1])
        weights, chosen = self.router(flat).softmax(dim=-1).topk(self.a.topk, dim=-1)
        order = chosen.flatten().argsort()
        ends = F.one_hot(chosen.flatten(), self.a.experts).sum(0).cumsum(0).to(torch.int32)
        rows = flat[order // self.a.topk]
        inner = self.up(rows, ends)
        if self.is_fused:
            gate, inner = inner.chunk(2, dim=-1)
            inner = F.silu(gate) * inner
        else:
            inner = F.gelu(inner) if self.gate is None else F.silu(self.gate(rows, ends)) * inner
        out = self.down(inner, ends) * weights.flatten()[order].unsqueeze(-1)
        total = torch.zeros_like(flat).index_add(0, order // self.a.topk, out).view_as(x)
        return total if self.shared is None else total + self.shared(x)


class FeedForward(nn.Module):
    """GELU, or SwiGLU."""

    def __init__(self, a: Architecture, ffn: int) -> None:
        super().__init__()
        self.is_fused = a.gated and a.fused_projections
        self.gate = nn.Linear(a.hidden, ffn, bias=False) if a.gated and not self.is_fused else None
        self.up = nn.Linear(a.hidden, ffn * (1 + self.is_fused), bias=not a.gated)
        self.down = nn.Linear(ffn, a.hidden, bias=not a.gated)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, seq, hidden) -> the same."""
        inner = self.up(x)
        if self.is_fused:
            gate, inner = inner.chunk(2, dim=-1)
            return self.down(F.silu(gate) * inner)
        return self.down(F.gelu(inner) if self.gate is None else F.silu(self.gate(x)) * inner)


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and beside a residual."""

    def __init__(self, a: Architecture) -> None:
        super().__init__()
        self.norm1, self.norm2 = _norm(a), _norm(a)
        self.attention = Attention(a) if a.latent is None else LatentAttention(a, a.latent)
        self.ffn = Experts(a) if a.experts else FeedForward(a, a.ffn)
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
        self.norm = _norm(a)
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
        dim = self.a.head_dim if self.a.latent is None else self.a.latent[2]
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
