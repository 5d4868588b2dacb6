"""A residual network for images (He et al., arXiv 1512.03385): bottlenecks, strides, batch normalisation."""

import torch
from torch import nn

IMAGE, CLASSES = 224, 1000
GROUPS = ((64, 3), (128, 4), (256, 6), (512, 3))
"""(inner channels, bottlenecks) of each group: ResNet-50."""
WIDEN = 4


class Bottleneck(nn.Module):
    def __init__(self, channels, inner, stride):
        super().__init__()
        out = WIDEN * inner
        self.path = nn.Sequential(
            nn.Conv2d(channels, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(),
            nn.Conv2d(inner, inner, 3, stride, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(),
            nn.Conv2d(inner, out, 1, bias=False), nn.BatchNorm2d(out),
        )  # fmt: skip
        same = channels == out and stride == 1
        self.shortcut = nn.Identity() if same else nn.Sequential(
            nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out)
        )  # fmt: skip

    def forward(self, x):
        return torch.relu(self.path(x) + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        blocks, channels = [], 64
        for group, (inner, count) in enumerate(GROUPS):
            for number in range(count):
                blocks.append(Bottleneck(channels, inner, 2 if group and number == 0 else 1))
                channels = WIDEN * inner
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(channels, CLASSES)

    def forward(self, images, labels=None):
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(dim=(2, 3)))


def build_model():
    return ResNet()


def example_inputs(batch, seq):
    images = torch.randn(batch, 3, IMAGE, IMAGE, dtype=torch.get_default_dtype())
    return images, torch.randint(0, CLASSES, (batch,))


def loss(output, images, labels):
    return nn.functional.cross_entropy(output.float(), labels)
