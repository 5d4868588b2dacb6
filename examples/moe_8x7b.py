"""Mixtral 8x7B (Jiang et al., arXiv 2401.04088, table 1)."""

import torch
from llama import next_token_loss
from moe import MoeConfig, MoeDecoder

SEQ_LEN = 8192
CONFIG = MoeConfig(vocabulary=32_000, hidden=4096, layers=32, heads=32, kv_heads=8, ffn=14_336, rope_theta=1e6)


def build_model():
    return MoeDecoder(CONFIG)


def example_inputs(batch, seq):
    tokens = torch.randint(0, CONFIG.vocabulary, (batch, seq + 1))
    return tokens[:, :-1], tokens[:, 1:]


def loss(output, tokens, labels):
    return next_token_loss(output, labels)
