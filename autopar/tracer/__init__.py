"""Torch in, Graph out: a training step recorded on meta tensors."""

from autopar.tracer.sources import Source, open_source
from autopar.tracer.training_step import capture, identify, rehearsal

__all__ = ["Source", "capture", "identify", "open_source", "rehearsal"]
