"""Plan in, training step out: torch.distributed carries out what the plan says."""
