"""Torch in, Graph out: a training step recorded on meta tensors."""

from autopar.tracer.sources import Source, open_source
from autopar.tracer.training_step import capture, example_batch, identify, rehearsal

__all__ = ["Source", "capture", "example_batch", "identify", "open_source", "rehearsal"]
