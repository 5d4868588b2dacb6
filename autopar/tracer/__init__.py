"""Torch in, Graph out: a training step recorded on meta tensors."""

from autopar.tracer.capture import capture

__all__ = ["capture"]
