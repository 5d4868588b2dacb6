"""T5 11B (Raffel et al., arXiv 1910.10683, section 3.7), from the transformers library's classes."""

import torch
from transformers import T5Config, T5ForConditionalGeneration

SEQ_LEN = 512
CONFIG = T5Config(
    d_model=1024,
    d_kv=128,
    d_ff=65_536,
    num_heads=128,
    num_layers=24,
    vocab_size=32_128,
    dropout_rate=0.1,
    use_cache=False,
    pad_token_id=0,
    eos_token_id=1,
    decoder_start_token_id=0,
)


def build_model():
    return T5ForConditionalGeneration(CONFIG)


def example_inputs(batch, seq):
    tokens, labels = (torch.randint(0, CONFIG.vocab_size, (batch, seq)) for _ in range(2))
    return {"input_ids": tokens, "labels": labels}
