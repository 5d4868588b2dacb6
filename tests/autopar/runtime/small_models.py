"""A model file: a Llama and a GPT with tied embeddings, small, in float64, with a float64 loss."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))

import gpt
import llama
import torch
import torch.nn.functional as F

SEQ_LEN, VOCABULARY = 16, 96


def build_model():
    torch.manual_seed(0)
    config = llama.Config(vocabulary=VOCABULARY, hidden=32, layers=4, heads=4, kv_heads=4, ffn=48)
    return llama.Llama(config).to(torch.float64)


def gpt_tied():
    torch.manual_seed(0)
    config = gpt.Config(vocabulary=VOCABULARY, hidden=32, layers=4, heads=4, positions=SEQ_LEN, dropout=0.0)
    return gpt.GPT(config).to(torch.float64)


def grouped_heads():
    torch.manual_seed(0)
    config = llama.Config(vocabulary=97, hidden=32, layers=5, heads=4, kv_heads=2, ffn=48)
    return llama.Llama(config).to(torch.float64)


def example_inputs(batch, seq):
    tokens = torch.randint(0, VOCABULARY, (batch, seq + 1))
    return tokens[:, :-1], tokens[:, 1:]


def loss(output, tokens, labels):
    return F.cross_entropy(output.flatten(0, 1), labels.flatten())


def batches(batch, seq, seed):
    generator = torch.Generator().manual_seed(seed)
    while True:
        tokens = torch.randint(0, VOCABULARY, (batch, seq + 1), generator=generator)
        yield tokens[:, :-1], tokens[:, 1:]


class Looking(llama.Llama):
    """A model that looks at the values of its inputs, as many of Hugging Face's do."""

    def forward(self, tokens, labels=None):
        if tokens.max().item() >= self.config.vocabulary:
            raise ValueError("a token outside of the vocabulary")
        return super().forward(tokens)


def looking():
    torch.manual_seed(0)
    config = llama.Config(vocabulary=VOCABULARY, hidden=32, layers=4, heads=4, kv_heads=4, ffn=48)
    return Looking(config).to(torch.float64)


class Shifted(llama.Llama):
    """A model with a parameter of its own, in no module: every chunk of a pipeline holds it."""

    def __init__(self, config):
        super().__init__(config)
        self.shift = torch.nn.Parameter(torch.full((config.hidden,), 0.01))

    def forward(self, tokens, labels=None):
        x = self.embedding(tokens) + self.shift
        cos, sin = self.rotary(tokens.shape[1], x)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.head(self.norm(x))


def shifted():
    torch.manual_seed(0)
    config = llama.Config(vocabulary=VOCABULARY, hidden=32, layers=4, heads=4, kv_heads=4, ffn=48)
    return Shifted(config).to(torch.float64)


def deep():
    torch.manual_seed(0)
    config = llama.Config(vocabulary=VOCABULARY, hidden=32, layers=8, heads=4, kv_heads=4, ffn=48)
    return llama.Llama(config).to(torch.float64)
