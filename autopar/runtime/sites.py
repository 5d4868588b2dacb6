"""Where a Plan's conversions take place in a model: module hooks, and the arguments of an attention call.

Hooks at `input` see the tensors among a module's arguments, positional ones first; at `output` those it returns; at
`attention` the queries, keys and values of every scaled_dot_product_attention that the module issues.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from autopar.documents.plan import Conversion
from autopar.runtime.names import named_modules_of

Convert = Callable[[torch.Tensor, Conversion], torch.Tensor]
Undo = Callable[[], None]

_ATTENTION = F.scaled_dot_product_attention


def install(
    model: nn.Module, conversions: Sequence[Conversion], convert: Convert, moot: frozenset[str] = frozenset()
) -> list[Undo]:
    """Let `convert` change the tensor at every site that the model holds, but for those of `moot` modules.

    Returns what takes the hooks away again.
    """
    convert = _within_batch(convert)
    undo: list[Undo] = []
    attention: dict[nn.Module, list[Conversion]] = {}
    for conversion in conversions:
        for name, module in named_modules_of(model, conversion.site.module):
            if name in moot:
                continue
            if conversion.site.where == "attention":
                attention.setdefault(module, []).append(conversion)
            else:
                undo.append(_hook(module, conversion, convert))
    undo += [_around_attention(module, found, convert) for module, found in attention.items()]
    return undo


def _within_batch(convert: Convert) -> Convert:
    """Where the batch and what is divided make up one dim: the two apart while it is converted."""

    def converted(tensor: torch.Tensor, conversion: Conversion) -> torch.Tensor:
        if conversion.within is None or conversion.dim is None:
            return convert(tensor, conversion)
        apart = tensor.unflatten(conversion.dim, (-1, conversion.within))
        moved = convert(apart, conversion.model_copy(update={"dim": conversion.dim + 1}))
        return moved.flatten(conversion.dim, conversion.dim + 1)

    return converted


def _hook(module: nn.Module, conversion: Conversion, convert: Convert) -> Undo:
    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return _with_tensor((args, kwargs), conversion, convert)

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        return _with_tensor(output, conversion, convert)

    if conversion.site.where == "input":
        return module.register_forward_pre_hook(before, with_kwargs=True).remove
    return module.register_forward_hook(after).remove


def _with_tensor(values: Any, conversion: Conversion, convert: Convert) -> Any:
    leaves, structure = tree_flatten(values)
    tensors = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    place = tensors[conversion.site.argument]
    leaves[place] = convert(leaves[place], conversion)
    return tree_unflatten(leaves, structure)


def _around_attention(module: nn.Module, conversions: list[Conversion], convert: Convert) -> Undo:
    def arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        named = dict(kwargs)
        first = list(args[:3]) + [named.pop(name) for name in ("query", "key", "value")[len(args[:3]) :]]
        for conversion in conversions:
            first[conversion.site.argument] = convert(first[conversion.site.argument], conversion)
        return (*first, *args[3:]), named

    return wrap_forward(module, lambda: _AttentionCalls(arguments))


def wrap_forward(module: nn.Module, context: Callable[[], Any]) -> Undo:
    """Run a module's forward within a context of its own; returns what takes that away again."""
    forward = module.forward

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with context():
            return forward(*args, **kwargs)

    module.forward = wrapped
    return lambda: setattr(module, "forward", forward)


class _AttentionCalls(TorchFunctionMode):
    """Changes the arguments of attention calls, also where the function's name was replaced (as capture does)."""

    def __init__(self, arguments: Callable[[Any, Any], tuple[Any, dict[str, Any]]]) -> None:
        super().__init__()
        self.arguments = arguments
        self.replaced: Any = None

    def __enter__(self) -> _AttentionCalls:
        named = F.scaled_dot_product_attention
        if named is not _ATTENTION:
            self.replaced = named

            def converted(*args: Any, **kwargs: Any) -> Any:
                positional, rest = self.arguments(args, kwargs)
                return named(*positional, **rest)

            F.scaled_dot_product_attention = converted
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        if self.replaced is not None:
            F.scaled_dot_product_attention = self.replaced
        super().__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = args, kwargs or {}
        if func is _ATTENTION:
            args, kwargs = self.arguments(args, kwargs)
        return func(*args, **kwargs)
