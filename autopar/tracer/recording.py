"""What the recorder hands to the index rules: aten operators in execution order, on meta tensors.

A `TensorRecord` is one *version* of a tensor as an operator read or wrote it; views are tensors of their own that share
a `storage`. Arguments keep their aten order, with a `Ref` in the place of every tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Ref:
    """Stands for a tensor in an operator's arguments."""

    tensor: int


@dataclass
class TensorRecord:
    """Shape, stride, storage; `dtype` is torch's name without the prefix (bfloat16, float32, int64)."""

    id: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    storage: int
    offset: int = 0
    parameter: str | None = None
    buffer: str | None = None
    saved_by: tuple[str, int] | None = None
    """Autograd keeps its storage for backward: the module that first asked, and the operator that ran then or next.

    Of the tensors that share a storage the first is marked.
    """


@dataclass
class OperatorRecord:
    """One aten call; `name` is ``aten.mm.default``, or ``autopar.attention`` / ``autopar.attention_backward``."""

    id: int
    name: str
    phase: Literal["forward", "backward"]
    module: str
    """FQN in the model of the innermost module that issued it; for backward that of its forward operator."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    forward: int | None = None
    """For a backward operator, the forward operator whose autograd node ran it (the first one of that node)."""


@dataclass
class ModuleCall:
    """One call of a module: which tensors went in (positional and keyword, in order) and came out."""

    module: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    first_operator: int
    last_operator: int


@dataclass
class Recording:
    """A stretch of a training step."""

    tensors: dict[int, TensorRecord] = field(default_factory=dict)
    operators: list[OperatorRecord] = field(default_factory=list)
    calls: list[ModuleCall] = field(default_factory=list)
    gradients: dict[int, int] = field(default_factory=dict)
    """Parameter tensor -> the tensor that ended as its gradient: equal shapes, equal indices."""
    assumed: list[tuple[str, str]] = field(default_factory=list)
    """(module, what was assumed about a value that meta tensors do not have)."""
