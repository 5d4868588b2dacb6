"""Operators that work on each element alone, and losses that add such elements up."""

from __future__ import annotations

from autopar.tracer.rules.base import Context, Letter, Role, Rule, base, rule

_SAME_TENSOR = ("detach", "alias", "lift_fresh")


@rule(
    "pointwise", "aten.clone", "aten._to_copy", "aten.copy_", "aten.detach", "aten.alias", "aten.fill_", "aten.zero_",
    "aten.zeros_like", "aten.ones_like", "aten.empty_like", "aten.full_like", "aten.native_dropout",
    "aten.native_dropout_backward", "aten.masked_fill", "aten.masked_fill_", "aten.lift_fresh", "aten.bernoulli_",
    "aten.rand_like", "aten.randn_like", "aten.uniform_", "aten.normal_", "aten.to", "aten.contiguous", "aten._conj",
    "aten.floor_divide", "aten.polar", "aten.complex", "aten.softplus_backward", "aten.silu_backward", "aten.gelu_backward",
    "aten.elu_backward", "aten.hardswish", "aten.hardswish_backward", "aten.hardtanh_backward", "aten.hardsigmoid",
    "aten.hardsigmoid_backward", "aten.leaky_relu_backward", "aten.log_sigmoid_forward", "aten.log_sigmoid_backward",
    "aten.mish_backward", "aten.softshrink_backward", "aten.threshold_backward", "aten.logit_backward",
    "aten._prelu_kernel", "aten._prelu_kernel_backward", "aten.celu", "aten.selu",
)  # fmt: skip
def pointwise(c: Context) -> Rule:
    """Every tensor's dims stand, from the right, against those of the first write."""
    found = _broadcast(c, c.out)
    if base(c) in _SAME_TENSOR:
        found.moves = []
    return found


def _broadcast(c: Context, reference: int, role: Role = "parallel") -> Rule:
    tensors = (*c.operator.writes, *c.operator.reads)
    found = Rule()
    for dim in range(len(c.shape(reference))):
        places = [(tensor, own) for tensor in tensors if (own := _against(c, tensor, reference, dim)) is not None]
        found.letters.append(Letter(role, places))
    return found


def _against(c: Context, tensor: int, reference: int, dim: int) -> int | None:
    """The dim of `tensor` that is broadcast against `dim` of `reference`; None where it has none or size 1."""
    own = dim - len(c.shape(reference)) + len(c.shape(tensor))
    return own if own >= 0 and c.shape(tensor)[own] == c.shape(reference)[dim] != 1 else None


@rule("aten.tril", "aten.triu", "aten.tril_", "aten.triu_")
def triangle(c: Context) -> Rule:
    """What is kept depends on the place in the last two dims."""
    found = _broadcast(c, c.out)
    for letter in found.letters[-2:]:
        letter.role = "whole"
    return found


@rule("aten.mse_loss", "aten.huber_loss", "aten.smooth_l1_loss", "aten.binary_cross_entropy", "aten.soft_margin_loss",
      "aten.binary_cross_entropy_with_logits")  # fmt: skip
def elementwise_loss(c: Context) -> Rule:
    """One loss per element, added up in a sum; a mean is an average of the shards' means."""
    prediction = c.tensor(0)
    reduced = len(c.shape(c.out)) < len(c.shape(prediction))
    return _broadcast(c, prediction, "summed" if reduced else "parallel")


@rule("aten.mse_loss_backward", "aten.huber_loss_backward", "aten.smooth_l1_loss_backward",
      "aten.binary_cross_entropy_backward", "aten.soft_margin_loss_backward")  # fmt: skip
def elementwise_loss_backward(c: Context) -> Rule:
    """One gradient per element; that of a mean is divided by the number of all elements, not of a shard's."""
    return _broadcast(c, c.out)
