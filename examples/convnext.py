"""A convolutional network built like a transformer (Liu et al., arXiv 2201.03545): depthwise windows, then wide mixes."""

import torch
from torch import nn

IMAGE, CLASSES = 224, 1000
GROUPS = ((96, 3), (192, 3), (384, 9), (768, 3))
"""(channels, blocks) of each group: ConvNeXt-T."""


class ChannelNorm(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.window = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels)
        self.up, self.down = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)
        self.scale = nn.Parameter(torch.full((channels,), 1e-6))

    def forward(self, x):
        y = self.norm(self.window(x).permute(0, 2, 3, 1))
        y = self.scale * self.down(nn.functional.gelu(self.up(y)))
        return x + y.permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    def __init__(self):
        super().__init__()
        groups, before = [], 3
        for channels, count in GROUPS:
            shrink = (
                [nn.Conv2d(3, channels, 4, 4), ChannelNorm(channels)]
                if before == 3
                else [ChannelNorm(before), nn.Conv2d(before, channels, 2, 2)]
            )
            groups.append(nn.Sequential(*shrink, *(Block(channels) for _ in range(count))))
            before = channels
        self.groups = nn.ModuleList(groups)
        self.norm, self.head = nn.LayerNorm(before), nn.Linear(before, CLASSES)

    def forward(self, images, labels=None):
        for group in self.groups:
            images = group(images)
        return self.head(self.norm(images.mean(dim=(2, 3))))


def build_model():
    return ConvNeXt()


def example_inputs(batch, seq):
    images = torch.randn(batch, 3, IMAGE, IMAGE, dtype=torch.get_default_dtype())
    return images, torch.randint(0, CLASSES, (batch,))


def loss(output, images, labels):
    return nn.functional.cross_entropy(output.float(), labels)
