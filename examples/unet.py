"""A UNet that takes noise out of images (Ronneberger et al., arXiv 1505.04597; Ho et al., arXiv 2006.11239).

What each level of the way down makes is read again on the way up: skips that a pipeline cut would have to pay for.
"""

import torch
from torch import nn

IMAGE, CHANNELS, TIME = 64, (128, 256, 512), 512


class Mix(nn.Module):
    """Two convolutions with the time of the noise between them."""

    def __init__(self, channels, out):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(32, channels), nn.Conv2d(channels, out, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(32, out), nn.Conv2d(out, out, 3, padding=1)
        self.time = nn.Linear(TIME, out)
        self.shortcut = nn.Conv2d(channels, out, 1) if channels != out else nn.Identity()

    def forward(self, x, time):
        y = self.conv1(nn.functional.silu(self.norm1(x))) + self.time(time)[:, :, None, None]
        return self.shortcut(x) + self.conv2(nn.functional.silu(self.norm2(y)))


class Attention(nn.Module):
    def __init__(self, channels, heads=8):
        super().__init__()
        self.norm, self.heads = nn.GroupNorm(32, channels), heads
        self.qkv, self.out = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)

    def forward(self, x):
        height, width = x.shape[-2:]
        tokens = self.norm(x).flatten(2).transpose(1, 2)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(tokens).chunk(3, dim=-1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x + self.out(mixed).transpose(1, 2).unflatten(-1, (height, width))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        first, *others = CHANNELS
        self.time = nn.Sequential(nn.Linear(1, TIME), nn.SiLU(), nn.Linear(TIME, TIME))
        self.enter, self.leave = nn.Conv2d(3, first, 3, padding=1), nn.Conv2d(first, 3, 3, padding=1)
        pairs = list(zip(CHANNELS, others, strict=False))
        self.down = nn.ModuleList(Mix(small, large) for small, large in pairs)
        self.shrink = nn.ModuleList(nn.Conv2d(large, large, 3, 2, 1) for _, large in pairs)
        self.middle, self.attention = Mix(CHANNELS[-1], CHANNELS[-1]), Attention(CHANNELS[-1])
        self.grow = nn.ModuleList(nn.Conv2d(large, large, 3, padding=1) for _, large in reversed(pairs))
        self.up = nn.ModuleList(Mix(2 * large, small) for small, large in reversed(pairs))

    def forward(self, noisy, noise, time):
        time = self.time(time)
        x, skips = self.enter(noisy), []
        for mix, shrink in zip(self.down, self.shrink, strict=True):
            x = mix(x, time)
            skips.append(x)
            x = shrink(x)
        x = self.attention(self.middle(x, time))
        for grow, mix in zip(self.grow, self.up, strict=True):
            x = grow(nn.functional.interpolate(x, scale_factor=2.0))
            x = mix(torch.cat([x, skips.pop()], dim=1), time)
        return self.leave(x)


def build_model():
    return UNet()


def example_inputs(batch, seq):
    dtype = torch.get_default_dtype()
    noisy, noise = (torch.randn(batch, 3, IMAGE, IMAGE, dtype=dtype) for _ in range(2))
    return noisy, noise, torch.rand(batch, 1, dtype=dtype)


def loss(output, noisy, noise, time):
    return (output - noise).float().square().mean()
