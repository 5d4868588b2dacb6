"""Plan in, Timeline out: one training step, operation by operation, without torch."""

from autopar.simulator.replay import score, simulate

__all__ = ["score", "simulate"]
