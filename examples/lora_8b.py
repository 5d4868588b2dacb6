"""Llama-3 8B with low-rank adapters (Hu et al., arXiv 2106.09685): all weights frozen, small pairs of matrices train."""

import torch
from llama import Config, Llama, next_token_loss
from torch import nn

SEQ_LEN = 8192
RANK, SCALE = 16, 2.0
CONFIG = Config(vocabulary=128_256, hidden=4096, layers=32, heads=32, kv_heads=8, ffn=14_336)


class Adapted(nn.Module):
    """A frozen linear layer, and what the adapter adds to it."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, RANK, bias=False)
        self.up = nn.Linear(RANK, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x) + SCALE * self.up(self.down(x))


def build_model():
    model = Llama(CONFIG).requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if name in ("q_proj", "v_proj"):
                setattr(module, name, Adapted(child))
    return model


def example_inputs(batch, seq):
    tokens = torch.randint(0, CONFIG.vocabulary, (batch, seq + 1))
    return tokens[:, :-1], tokens[:, 1:]


def loss(output, tokens, labels):
    return next_token_loss(output, labels)
