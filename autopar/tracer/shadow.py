"""Values of tensors on meta, worked out on the CPU only when the model's code asks for one.

Code that looks at values (is the mask all true? which experts were hit?) mostly looks at whole numbers and booleans that follow
from positions, masks and the inputs, so replaying what was recorded gives them. What follows from weights has no value; which
of it are largest (`topk`, `argmax`, a sort) is answered as a perfectly balanced router would, each choice equally often.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from autopar.tracer.recording import OperatorRecord, Recording, Ref

CHOICES = {
    "aten.topk.default": 2, "aten.argmax.default": 1, "aten.max.dim": 1, "aten.sort.default": 1, "aten.sort.stable": 1,
}  # fmt: skip
"""Operators whose last result are places along a dim, which stands there among their arguments."""


class NoValue(Exception):
    """The value depends on weights, on random numbers of the model, or on a buffer made on meta."""


class Shadows:
    """CPU values of recorded tensors, by tensor id, made when first asked for."""

    def __init__(self, recording: Recording, inputs: Callable[[], dict[int, torch.Tensor]]) -> None:
        self._recording, self._inputs = recording, inputs
        self._producer: dict[int, tuple[OperatorRecord, Any]] = {}
        self._overwritten: dict[int, list[tuple[int, int]]] = {}
        self._values: dict[int, torch.Tensor] | None = None

    def note(self, operator: OperatorRecord, func: Any) -> None:
        """Remember how an operator's writes are made."""
        self._producer |= dict.fromkeys(operator.writes, (operator, func))
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
            operator, func = self._producer[tensor]
            self._refuse_stale(tensor, operator.id)
            try:
                made = self._replay(operator.args, operator.kwargs, func, self.value)
            except NoValue:
                if operator.name not in CHOICES or tensor != operator.writes[-1]:
                    raise
                self._values[tensor] = self._balanced(operator, tensor, CHOICES[operator.name])
            else:
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

    def _balanced(self, operator: OperatorRecord, tensor: int, place: int) -> torch.Tensor:
        """Places along a dim, each equally often in every column of what was chosen."""
        source, chosen = (self._recording.tensors[t].shape for t in (operator.reads[0], tensor))
        dim = operator.args[place] if len(operator.args) > place else operator.kwargs.get("dim", -1)
        if dim is None or len(chosen) < len(source) - 1:
            raise NoValue("the place of the largest of all values, which depend on weights, is read")
        others = [size for number, size in enumerate(source) if number != dim % len(source)]
        count = torch.Size(chosen).numel() // torch.Size(others).numel()
        rows = torch.arange(torch.Size(others).numel(), device="cpu")[:, None]
        # What takes all places (a sort) starts one further in each row, so that the first few are balanced too.
        places = rows * (count if count < source[dim] else 1) + torch.arange(count, device="cpu")
        return (places % source[dim]).view(*others, count).movedim(-1, dim).reshape(chosen)

    def _refuse_stale(self, tensor: int, made: int) -> None:
        """A later write through another view of the storage is not followed."""
        for operator, other in self._overwritten.get(self._recording.tensors[tensor].storage, ()):
            if operator > made and other != tensor:
                raise NoValue("a value that was overwritten in place is read")
