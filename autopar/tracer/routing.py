"""Operators that meta tensors would record falsely, routed to ones that behave as the device's kernels do.

On meta, `scaled_dot_product_attention` decomposes into matmuls and a softmax and keeps s^2 scores; the flash kernel keeps
q, k, v, o and one log-sum-exp per query. `rms_norm` decomposes into an upcast and ten pointwise operators; the CUDA kernel
is one, and keeps its input and one factor per row. Dropout keeps a mask of the compute dtype; the CUDA kernel a bool.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode


@torch.library.custom_op("autopar::attention", mutates_args=())
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Flash attention: q (batch, heads, s, d), k and v (batch, kv heads, t, d) -> o like q, lse (batch, heads, s) in fp32."""
    raise NotImplementedError("only recorded, never computed")


@attention.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool) -> Any:
    batch, heads, s, _ = q.shape
    # o lies in memory as (batch, s, heads, d): the projection after it then reads the same storage.
    o = q.new_empty(batch, s, heads, v.shape[-1]).transpose(1, 2)
    return o, q.new_empty((batch, heads, s), dtype=torch.float32)


@torch.library.custom_op("autopar::attention_backward", mutates_args=())
def attention_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v, shaped and laid out like them."""
    raise NotImplementedError("only recorded, never computed")


@attention_backward.register_fake
def _(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: Any, lse: Any, mask: Any, causal: bool
) -> Any:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, mask, causal = inputs
    o, lse = output
    ctx.set_materialize_grads(False)
    ctx.causal = causal
    ctx.save_for_backward(q, k, v, o, lse, mask)


def _differentiate(ctx: Any, grad: torch.Tensor, _lse: Any) -> Any:
    q, k, v, o, lse, mask = ctx.saved_tensors
    return *attention_backward(grad, q, k, v, o, lse, mask, ctx.causal), None, None


attention.register_autograd(_differentiate, setup_context=_keep)


@torch.library.custom_op("autopar::rms_norm", mutates_args=())
def rms_norm(x: torch.Tensor, shape: list[int], weight: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """X (..., *shape) -> normalised x, and one factor per row in fp32."""
    raise NotImplementedError("only recorded, never computed")


@rms_norm.register_fake
def _(x: torch.Tensor, shape: list[int], weight: torch.Tensor | None) -> Any:
    rows = (*x.shape[: x.dim() - len(shape)], *(1 for _ in shape))
    return torch.empty_like(x), x.new_empty(rows, dtype=torch.float32)


@torch.library.custom_op("autopar::rms_norm_backward", mutates_args=())
def rms_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, shape: list[int], factor: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of x and of the weight."""
    raise NotImplementedError("only recorded, never computed")


@rms_norm_backward.register_fake
def _(grad: torch.Tensor, x: torch.Tensor, shape: list[int], factor: torch.Tensor, weight: torch.Tensor) -> Any:
    return torch.empty_like(x), torch.empty_like(weight)


def _keep_norm(ctx: Any, inputs: Any, output: Any) -> None:
    x, ctx.shape, weight = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, output[1], weight)


def _differentiate_norm(ctx: Any, grad: torch.Tensor, _factor: Any) -> Any:
    x, factor, weight = ctx.saved_tensors
    scale = x.new_ones(ctx.shape) if weight is None else weight
    dx, dweight = rms_norm_backward(grad, x, ctx.shape, factor, scale)
    return dx, None, None if weight is None else dweight


rms_norm.register_autograd(_differentiate_norm, setup_context=_keep_norm)


class NoInitialValues(TorchFunctionMode):
    """Skips random initial values while it is active: on meta they cost time and mean nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        filled = args[0] if args else kwargs.get("tensor")
        if getattr(func, "__name__", "") in _INITIALISERS and isinstance(filled, torch.Tensor) and filled.is_meta:
            return filled
        return func(*args, **kwargs)


_INITIALISERS = {"normal_", "uniform_", "trunc_normal_", "kaiming_uniform_", "kaiming_normal_", "xavier_uniform_",
                 "xavier_normal_", "orthogonal_", "exponential_", "log_normal_", "cauchy_", "geometric_"}  # fmt: skip


class DeviceKernels(TorchFunctionMode):
    """Routes attention and dropout while it is active."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _routed_attention(*args, **kwargs)
        if func in (F.rms_norm, torch.rms_norm):
            return _routed_rms_norm(*args, **kwargs)
        if func in (F.dropout, torch.dropout):
            return _routed_dropout(*args, **kwargs)
        return func(*args, **kwargs)


def _routed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    return attention(query, key, value, attn_mask, is_causal)[0]


def _routed_dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, **_: Any) -> Any:
    if not training or p == 0:
        return input
    return torch.native_dropout(input, p, True)[0]


def _routed_rms_norm(
    input: torch.Tensor,
    normalized_shape: Any,
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    shape = [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)
    return rms_norm(input, shape, weight)[0]
