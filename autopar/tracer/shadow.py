"""Values of tensors on meta, worked out on the CPU only when the model's code asks for one.

Code that looks at values (is the mask all true? which experts were hit?) mostly looks at whole numbers and booleans that follow
from positions, masks and the inputs, so replaying what was recorded gives them. What follows from weights has no value; a
`topk` over it is answered as a perfectly balanced router would, each choice equally often.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from autopar.tracer.recording import OperatorRecord, Recording, Ref


class NoValue(Exception):
    """The value depends on weights, on random numbers of the model, or on a buffer made on meta."""


class Shadows:
    """CPU values of recorded tensors, by tensor id, made when first asked for."""

    def __init__(self, recording: Recording, inputs: Callable[[], dict[int, torch.Tensor]]) -> None:
        self._recording, self._inputs = recording, inputs
        self._producer: dict[int, tuple[OperatorRecord, Any, int]] = {}
        self._overwritten: dict[int, list[tuple[int, int]]] = {}
        self._values: dict[int, torch.Tensor] | None = None

    def note(self, operator: OperatorRecord, func: Any) -> None:
        """Remember how an operator's writes are made."""
        for place, tensor in enumerate(operator.writes):
            self._producer[tensor] = (operator, func, place)
        if func._schema.is_mutable:
            for tensor in operator.writes:
                storage = self._recording.tensors[tensor].storage
                self._overwritten.setdefault(storage, []).append((operator.id, tensor))

    def value(self, tensor: int) -> torch.Tensor:
        """The value of a tensor; raises NoValue."""
        if self._values is None:
            self._values = dict(self._inputs())
        if tensor not in self._values:
            if tensor not in self._producer:
                raise NoValue("a value that depends on weights is read")
            operator, func, place = self._producer[tensor]
            self._refuse_stale(tensor, operator.id)
            if "topk" in operator.name and place == 1:
                self._values[tensor] = self._balanced(operator, tensor)
            else:
                made = self._replay(operator.args, operator.kwargs, func, self.value)
                tensors = [leaf for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor)]
                self._values.update(zip(operator.writes, tensors, strict=True))
        return self._values[tensor]

    def shaped(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What an operator without a meta kernel returns, as empty meta tensors.

        Floats without a value count as zeros, but not where they decide the shape: that raises NoValue.
        """
        decides = torch.Tag.dynamic_output_shape in func.tags

        def value(tensor: int) -> torch.Tensor:
            record = self._recording.tensors[tensor]
            dtype = getattr(torch, record.dtype)
            if decides or not dtype.is_floating_point:
                return self.value(tensor)
            return torch.zeros((), dtype=dtype, device="cpu").expand(record.shape)

        made = self._replay(args, kwargs, func, value)
        return tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf, made)

    def _replay(self, args: Any, kwargs: Any, func: Any, value: Callable[[int], torch.Tensor]) -> Any:
        def real(leaf: Any) -> Any:
            if isinstance(leaf, Ref):
                found = value(leaf.tensor)
                return found.clone() if func._schema.is_mutable else found
            return torch.device("cpu") if isinstance(leaf, torch.device) else leaf

        real_args, real_kwargs = tree_map(real, (args, kwargs))
        if any(argument.name == "device" for argument in func._schema.arguments) and "device" not in real_kwargs:
            real_kwargs["device"] = torch.device("cpu")
        with torch.no_grad():
            return func(*real_args, **real_kwargs)

    def _balanced(self, operator: OperatorRecord, tensor: int) -> torch.Tensor:
        source, chosen = (self._recording.tensors[t].shape for t in (operator.reads[0], tensor))
        dim = (operator.args[2] if len(operator.args) > 2 else operator.kwargs.get("dim", -1)) % len(chosen)
        order = torch.arange(torch.Size(chosen).numel(), device="cpu").view(
            [*chosen[:dim], *chosen[dim + 1 :], chosen[dim]]
        )
        return (order % source[dim]).movedim(-1, dim)

    def _refuse_stale(self, tensor: int, made: int) -> None:
        """A later write through another view of the storage is not followed."""
        for operator, other in self._overwritten.get(self._recording.tensors[tensor].storage, ()):
            if operator > made and other != tensor:
                raise NoValue("a value that was overwritten in place is read")
