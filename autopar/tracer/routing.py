"""Operators that meta tensors would record falsely, routed to ones that behave as the device's kernels do.

On meta, `scaled_dot_product_attention` decomposes into matmuls and a softmax and keeps s^2 scores; the flash kernel keeps
q, k, v, o and one log-sum-exp per query. `rms_norm` decomposes into an upcast and ten pointwise operators; the CUDA kernel
is one, and keeps its input and one factor per row. Dropout keeps a mask of the compute dtype; the CUDA kernel a bool.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch._dynamo  # torch's meta kernels import it and the next at their first call: here rather than in a capture
import torch.fx.experimental.symbolic_shapes
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint


@torch.library.custom_op("autopar::attention", mutates_args=())
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Flash attention: q (batch, heads, s, d), k and v (batch, kv heads, t, d) -> o like q, lse (batch, heads, s) in fp32."""
    raise NotImplementedError("only recorded, never computed")


@attention.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool) -> Any:
    if k.shape[1] != v.shape[1] or k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise RuntimeError(f"attention of {q.shape[1]} query heads with {k.shape[1]} key and {v.shape[1]} value heads")
    if mask is not None:
        torch.broadcast_shapes(mask.shape, (*q.shape[:3], k.shape[2]))
    # o lies in memory as q does, as flash and cuDNN kernels allocate it: where q is laid out as (batch, s, heads, d), the
    # projection after it reads the same storage; where the heads come first, it reads a copy.
    shape, order = (*q.shape[:3], v.shape[-1]), sorted(range(4), key=q.stride, reverse=True)
    o = q.new_empty([shape[dim] for dim in order]).permute([order.index(dim) for dim in range(4)])
    return o, q.new_empty(q.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("autopar::attention_backward", mutates_args=())
def attention_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    mask: torch.Tensor | None,
    learned_mask: bool,
    causal: bool,
) -> list[torch.Tensor]:
    """Gradients of q, k, v and a learned mask, shaped and laid out like them."""
    raise NotImplementedError("only recorded, never computed")


@attention_backward.register_fake
def _(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: Any,
    lse: Any,
    mask: Any,
    learned_mask: bool,
    causal: bool,
) -> Any:
    return [torch.empty_like(tensor) for tensor in (q, k, v, *([mask] if learned_mask else []))]


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, mask, causal = inputs
    o, lse = output
    ctx.set_materialize_grads(False)
    ctx.causal, ctx.learned_mask = causal, mask is not None and mask.requires_grad
    ctx.save_for_backward(q, k, v, o, lse, mask)


def _differentiate(ctx: Any, grad: torch.Tensor, _lse: Any) -> Any:
    q, k, v, o, lse, mask = ctx.saved_tensors
    dq, dk, dv, *dmask = attention_backward(grad, q, k, v, o, lse, mask, ctx.learned_mask, ctx.causal)
    return dq, dk, dv, dmask[0] if dmask else None, None


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


@contextmanager
def no_checkpointing() -> Iterator[None]:
    """Within the block `torch.utils.checkpoint` keeps everything: what to recompute is the planner's choice."""
    before = (checkpoint.CheckpointFunction, checkpoint._checkpoint_without_reentrant_generator)
    checkpoint.CheckpointFunction = _RunsPlainly
    checkpoint._checkpoint_without_reentrant_generator = _plainly
    try:
        yield
    finally:
        checkpoint.CheckpointFunction, checkpoint._checkpoint_without_reentrant_generator = before


class _RunsPlainly:
    @staticmethod
    def apply(function: Any, _preserve: bool, *args: Any) -> Any:
        return function(*args)


def _plainly(*_: Any, **__: Any) -> Iterator[None]:
    yield


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


@contextmanager
def device_kernels() -> Iterator[None]:
    """Within the block operators behave as the device's kernels do.

    torch's own Python functions (multi-head attention) run outside of any mode, so the name they call is replaced too.
    """
    original = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = _routed_attention
    try:
        with DeviceKernels(original):
            yield
    finally:
        F.scaled_dot_product_attention = original


class DeviceKernels(TorchFunctionMode):
    """Routes attention, norms and dropout while it is active."""

    def __init__(self, attention_function: Any) -> None:
        super().__init__()
        self._attention = attention_function

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is self._attention:
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
    if query.dim() == 4:
        return attention(query, key, value, attn_mask, is_causal)[0]
    # Three dims are one head; of more than four the leading ones are batch.
    leading = query.shape[:-2]
    four = [t.unsqueeze(-3) if t.dim() == 3 else t.flatten(0, -4) for t in (query, key, value)]
    mask = attn_mask.flatten(0, -4) if attn_mask is not None and attn_mask.dim() > 4 else attn_mask
    out = attention(*four, mask, is_causal)[0]
    return out.squeeze(-3) if len(leading) == 1 else out.unflatten(0, leading[:-1])


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
