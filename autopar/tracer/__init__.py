"""Torch in, Graph out: a training step recorded on meta tensors."""
