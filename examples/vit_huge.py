"""ViT-H/14 for image classification (Dosovitskiy et al., arXiv 2010.11929, table 1)."""

import torch
from torch import nn

IMAGE, PATCH, CLASSES = 224, 14, 1000
HIDDEN, HEADS, FFN, LAYERS = 1280, 16, 5120, 32
SEQ_LEN = (IMAGE // PATCH) ** 2


class VisionTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, HIDDEN, PATCH, PATCH)
        self.summary = nn.Parameter(torch.zeros(1, 1, HIDDEN))
        self.positions = nn.Parameter(torch.zeros(1, 1 + SEQ_LEN, HIDDEN))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(HIDDEN, HEADS, FFN, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(LAYERS)
        )
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, CLASSES)

    def forward(self, images, labels=None):
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.summary.expand(len(x), -1, -1), x], dim=1) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x[:, 0]))


def build_model():
    return VisionTransformer()


def example_inputs(batch, seq):
    images = torch.randn(batch, 3, IMAGE, IMAGE, dtype=torch.get_default_dtype())
    return images, torch.randint(0, CLASSES, (batch,))


def loss(output, images, labels):
    return nn.functional.cross_entropy(output.float(), labels)
