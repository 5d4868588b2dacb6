"""A Llama small enough to train on a laptop's processor, with a stream of synthetic text to learn from."""

import torch
from llama import Config, Llama, next_token_loss

SEQ_LEN = 64
CONFIG = Config(vocabulary=256, hidden=64, layers=4, heads=8, kv_heads=4, ffn=176)


def build_model():
    return Llama(CONFIG)


def example_inputs(batch, seq):
    tokens = torch.randint(0, CONFIG.vocabulary, (batch, seq + 1))
    return tokens[:, :-1], tokens[:, 1:]


def loss(output, tokens, labels):
    return next_token_loss(output, labels)


def batches(batch, seq, seed):
    """Sequences that count upwards by a stride of their own, with a tenth of the tokens replaced by noise."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        start = torch.randint(0, CONFIG.vocabulary, (batch, 1), generator=generator)
        stride = torch.randint(1, 8, (batch, 1), generator=generator)
        tokens = (start + stride * torch.arange(seq + 1)) % CONFIG.vocabulary
        noise = torch.randint(0, CONFIG.vocabulary, tokens.shape, generator=generator)
        tokens = torch.where(torch.rand(tokens.shape, generator=generator) < 0.1, noise, tokens)
        yield tokens[:, :-1], tokens[:, 1:]
