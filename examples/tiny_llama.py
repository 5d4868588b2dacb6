"""A Llama small enough to train on a laptop's processor, on real text: the help topics that come with Python, as bytes."""

import pydoc_data.topics

import torch
from llama import Config, Llama, next_token_loss

SEQ_LEN = 128
CONFIG = Config(vocabulary=256, hidden=128, layers=4, heads=8, kv_heads=4, ffn=344)


def build_model():
    return Llama(CONFIG)


def example_inputs(batch, seq):
    tokens = torch.randint(0, CONFIG.vocabulary, (batch, seq + 1))
    return tokens[:, :-1], tokens[:, 1:]


def loss(output, tokens, labels):
    return next_token_loss(output, labels)


def build_optimizer(params):
    return torch.optim.AdamW(params, lr=3e-3)


def batches(batch, seq, seed):
    """Passages of the text, each from a place drawn at random; a token is a byte."""
    text = "\n\n".join(pydoc_data.topics.topics.values()).encode()
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(0, len(tokens) - seq - 1, (batch, 1), generator=generator)
        passages = tokens[starts + torch.arange(seq + 1)]
        yield passages[:, :-1], passages[:, 1:]
