"""Llama-3.1 70B (Grattafiori et al., arXiv 2407.21783, table 3)."""

import torch
from llama import Config, Llama, next_token_loss

SEQ_LEN = 8192
CONFIG = Config(vocabulary=128_256, hidden=8192, layers=80, heads=64, kv_heads=8, ffn=28_672)


def build_model():
    return Llama(CONFIG)


def example_inputs(batch, seq):
    tokens = torch.randint(0, CONFIG.vocabulary, (batch, seq + 1))
    return tokens[:, :-1], tokens[:, 1:]


def loss(output, tokens, labels):
    return next_token_loss(output, labels)
