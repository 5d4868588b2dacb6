"""A Fourier neural operator (Li et al., arXiv 2010.08895): advances a field of a physics simulation by one time step.

Each block mixes channels mode by mode in the frequency domain, and point by point beside it.
"""

import torch
from torch import nn

GRID, FIELDS, CHANNELS, MODES, LAYERS = 128, 3, 64, 24, 4


class SpectralMix(nn.Module):
    """The lowest modes of each direction, every mode with a matrix of its own; real and imaginary parts are parameters."""

    def __init__(self):
        super().__init__()
        scale = 1 / CHANNELS**2
        self.weight = nn.Parameter(scale * torch.rand(2, 2, CHANNELS, CHANNELS, MODES, MODES))

    def forward(self, x):
        spectrum = torch.fft.rfft2(x.float())
        low, high = torch.complex(self.weight[0].float(), self.weight[1].float())
        mixed = torch.zeros_like(spectrum)
        mixed[:, :, :MODES, :MODES] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, :MODES, :MODES], low)
        mixed[:, :, -MODES:, :MODES] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, -MODES:, :MODES], high)
        return torch.fft.irfft2(mixed, s=x.shape[-2:]).to(x.dtype)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.spectral, self.local = SpectralMix(), nn.Conv2d(CHANNELS, CHANNELS, 1)

    def forward(self, x):
        return nn.functional.gelu(self.spectral(x) + self.local(x))


class FourierOperator(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift = nn.Conv2d(FIELDS, CHANNELS, 1)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.project = nn.Sequential(
            nn.Conv2d(CHANNELS, 2 * CHANNELS, 1), nn.GELU(), nn.Conv2d(2 * CHANNELS, FIELDS, 1)
        )

    def forward(self, field, after=None):
        x = self.lift(field)
        for block in self.blocks:
            x = block(x)
        return self.project(x)


def build_model():
    return FourierOperator()


def example_inputs(batch, seq):
    dtype = torch.get_default_dtype()
    return tuple(torch.randn(batch, FIELDS, GRID, GRID, dtype=dtype) for _ in range(2))


def loss(output, field, after):
    return (output - after).float().square().mean()
