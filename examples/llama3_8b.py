"""Llama-3 8B (Grattafiori et al., arXiv 2407.21783, table 3)."""

import torch
from llama import Config, Llama, next_token_loss

SEQ_LEN = 8192
CONFIG = Config(vocabulary=128_256, hidden=4096, layers=32, heads=32, kv_heads=8, ffn=14_336)


def build_model():
    return Llama(CONFIG)


def example_inputs(batch, seq):
    tokens = torch.randint(0, CONFIG.vocabulary, (batch, seq + 1))
    return tokens[:, :-1], tokens[:, 1:]


def loss(output, tokens, labels):
    return next_token_loss(output, labels)
