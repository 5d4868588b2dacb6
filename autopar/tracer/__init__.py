"""Torch in, Graph out: a training step recorded on meta tensors."""

from autopar.tracer.training_step import capture, rehearsal

__all__ = ["capture", "rehearsal"]
