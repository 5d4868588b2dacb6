"""Plan in, Timeline out: one training step replayed event by event."""
