"""A convolutional network that steps a fluid on a periodic grid: residual blocks of 3x3 windows that wrap around.

Windows read neighbours, so dividing the grid itself would exchange a border (a halo) before every convolution.
"""

import torch
from torch import nn

GRID, FIELDS, CHANNELS, LAYERS = 256, 4, 128, 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = (
            nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, padding_mode="circular") for _ in range(2)
        )

    def forward(self, x):
        return x + self.second(nn.functional.silu(self.first(x)))


class FlowSolver(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Conv2d(FIELDS, CHANNELS, 1), nn.Conv2d(CHANNELS, FIELDS, 1)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, now, later=None):
        x = self.encode(now)
        for block in self.blocks:
            x = block(x)
        return now + self.decode(x)


def build_model():
    return FlowSolver()


def example_inputs(batch, seq):
    dtype = torch.get_default_dtype()
    return tuple(torch.randn(batch, FIELDS, GRID, GRID, dtype=dtype) for _ in range(2))


def loss(output, now, later):
    return (output - later).float().square().mean()
