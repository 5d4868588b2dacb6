"""GPT-3 175B (Brown et al., arXiv 2005.14165, table 2.1)."""

import torch
from gpt import GPT, Config, next_token_loss

SEQ_LEN = 2048
CONFIG = Config(vocabulary=51_200, hidden=12_288, layers=96, heads=96, positions=2048)


def build_model():
    return GPT(CONFIG)


def example_inputs(batch, seq):
    tokens = torch.randint(0, CONFIG.vocabulary, (batch, seq + 1))
    return tokens[:, :-1], tokens[:, 1:]


def loss(output, tokens, labels):
    return next_token_loss(output, labels)
