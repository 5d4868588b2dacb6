"""A hand-written encoder with its own attention: explicit scores, additive positions, a gate on every head's output."""

import math

import torch
from torch import nn

SEQ_LEN = 512
VOCABULARY, HIDDEN, HEADS, LAYERS = 8192, 1024, 16, 6


class GatedAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Linear(HIDDEN, HIDDEN)
        self.key = nn.Linear(HIDDEN, HIDDEN)
        self.value = nn.Linear(HIDDEN, HIDDEN)
        self.gate = nn.Linear(HIDDEN, HIDDEN)
        self.out = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x, bias):
        q, k, v = (self.heads(project(x)) for project in (self.query, self.key, self.value))
        scores = torch.einsum("bhsd,bhtd->bhst", q, k) / math.sqrt(HIDDEN // HEADS) + bias
        mixed = torch.einsum("bhst,bhtd->bhsd", scores.softmax(dim=-1), v)
        mixed = mixed.permute(0, 2, 1, 3).flatten(2)
        return self.out(mixed * torch.sigmoid(self.gate(x)))

    def heads(self, x):
        return x.unflatten(-1, (HEADS, HIDDEN // HEADS)).permute(0, 2, 1, 3)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = GatedAttention()
        self.mix = nn.Sequential(nn.Linear(HIDDEN, 3 * HIDDEN), nn.SiLU(), nn.Linear(3 * HIDDEN, HIDDEN))
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)

    def forward(self, x, bias):
        x = self.norm1(x + self.attention(x, bias))
        return self.norm2(x + self.mix(x))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.slope = nn.Parameter(torch.zeros(HEADS, 1, 1))
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens, labels=None):
        position = torch.arange(tokens.shape[1], device=tokens.device)
        bias = -self.slope.exp() * (position[:, None] - position[None, :]).abs()
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, bias)
        return self.head(x)


def build_model():
    return Encoder()


def example_inputs(batch, seq):
    tokens = torch.randint(0, VOCABULARY, (batch, seq))
    return tokens, tokens.clone()


def loss(output, tokens, labels):
    scores = output if output.dtype == torch.float64 else output.float()
    return nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())
