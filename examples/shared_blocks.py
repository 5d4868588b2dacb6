"""An encoder whose every layer is the same layer (Lan et al., arXiv 1909.11942): the parameters of one, the work of twelve."""

import torch
from torch import nn

SEQ_LEN = 512
VOCABULARY, EMBEDDING, HIDDEN, HEADS, REPEATS = 30_000, 128, 768, 12, 12


class SharedEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.widen = nn.Embedding(VOCABULARY, EMBEDDING), nn.Linear(EMBEDDING, HIDDEN)
        self.positions = nn.Parameter(torch.zeros(SEQ_LEN, EMBEDDING))
        self.layer = nn.TransformerEncoderLayer(HIDDEN, HEADS, 4 * HIDDEN, dropout=0.0, batch_first=True)
        self.narrow = nn.Linear(HIDDEN, EMBEDDING)
        self.head = nn.Linear(EMBEDDING, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens, labels=None):
        x = self.widen(self.embedding(tokens) + self.positions[: tokens.shape[1]])
        for _ in range(REPEATS):
            x = self.layer(x)
        return self.head(self.narrow(x))


def build_model():
    return SharedEncoder()


def example_inputs(batch, seq):
    tokens = torch.randint(0, VOCABULARY, (batch, seq))
    return tokens, tokens.clone()


def loss(output, tokens, labels):
    return nn.functional.cross_entropy(output.float().flatten(0, 1), labels.flatten())
