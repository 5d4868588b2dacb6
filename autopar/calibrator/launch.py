"""What one more operator costs, however small: dispatch, autograd, Python and the views around it.

    launch = seconds of a training pass over a few numbers / operators of its Graph that are no views

The model is a transformer's block, for its mixture of operators and views; the count is the Graph's, because that is what prices
are given for.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from autopar.calibrator.timing import seconds_of

HIDDEN, HEADS, LAYERS = 16, 2, 4
BATCH, SEQ = 1, 4


class Block(nn.Module):
    """Attention and a gated feed-forward of a few numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(HIDDEN) for _ in range(2))
        self.qkv = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(3))
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.gate, self.up, self.down = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, seq, hidden) -> the same."""
        batch, seq, _ = x.shape
        y = self.norms[0](x)
        q, k, v = (linear(y).view(batch, seq, HEADS, -1).transpose(1, 2) for linear in self.qkv)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, seq, HIDDEN))
        y = self.norms[1](x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Probe(nn.Module):
    """Blocks in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, seq, hidden) -> the same."""
        for block in self.blocks:
            x = block(x)
        return x


def probe_inputs(batch: int, seq: int) -> tuple[torch.Tensor]:
    """What a Probe takes."""
    return (torch.randn(batch, seq, HIDDEN),)


def launch_seconds(operators: int, device: torch.device, window: float, align: Callable[[], None]) -> float:
    """Seconds for each of a Probe's `operators`."""
    model = Probe().to(device)
    x = torch.randn(BATCH, SEQ, HIDDEN, device=device)
    align()
    return seconds_of(lambda: model(x).sum().backward(), device, window) / operators
