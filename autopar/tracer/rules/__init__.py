"""What each aten operator does with the dims of its tensors: one function per kind of operator, none per model."""

from autopar.tracer.rules import matmul, reduce, shape  # noqa: F401  (each registers its rules)
from autopar.tracer.rules.base import Context, Letter, Place, Role, Rule, base_name, find_rule

__all__ = ["Context", "Letter", "Place", "Role", "Rule", "base_name", "find_rule"]
