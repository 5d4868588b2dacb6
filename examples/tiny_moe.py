"""A mixture of experts small enough to run on a laptop's processor."""

import torch
from llama import next_token_loss
from moe import MoeConfig, MoeDecoder

SEQ_LEN = 64
CONFIG = MoeConfig(vocabulary=256, hidden=64, layers=4, heads=8, kv_heads=4, ffn=96, experts=4)


def build_model():
    return MoeDecoder(CONFIG)


def example_inputs(batch, seq):
    tokens = torch.randint(0, CONFIG.vocabulary, (batch, seq + 1))
    return tokens[:, :-1], tokens[:, 1:]


def loss(output, tokens, labels):
    return next_token_loss(output, labels)
