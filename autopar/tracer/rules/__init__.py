"""What each aten operator does with the dims of its tensors: one function per kind of operator, none per model."""

from autopar.tracer.rules import (  # noqa: F401  (each registers its rules)
    attention,
    convolution,
    matmul,
    norm,
    picks,
    pointwise,
    reduce,
    shape,
)
from autopar.tracer.rules.base import Context, Letter, Place, Role, Rule, base_name, find_rule

__all__ = ["Context", "Letter", "Place", "Role", "Rule", "base_name", "find_rule"]
