"""Torch in, Graph out: a training step recorded on meta tensors."""

from autopar.tracer.training_step import capture

__all__ = ["capture"]
