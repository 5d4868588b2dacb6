"""Global batches and the parts of them: a rank's, and each micro-batch's.

Data-parallel rank d takes the d-th contiguous part, and of it micro-batch i the i-th. Tensors are divided along the dim whose
size is the batch: the first such dim of each tensor, unless `dims` says which.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from autopar.documents.plan import Plan
from autopar.errors import RequestError
from autopar.runtime.mesh import DP, Ranks
from autopar.runtime.probe import Inputs

Dims = Sequence[int | None]
"""For each tensor of a batch, in order, the dim that is the batch; None where every rank takes it whole."""


def as_inputs(batch: Any) -> Inputs:
    """A batch's three forms (args tuple, kwargs dict, (args, kwargs)) as (args, kwargs)."""
    if isinstance(batch, dict) or hasattr(batch, "keys"):
        return (), dict(batch)
    if (
        isinstance(batch, tuple)
        and len(batch) == 2
        and isinstance(batch[0], tuple | list)
        and isinstance(batch[1], dict)
    ):
        return tuple(batch[0]), dict(batch[1])
    if isinstance(batch, torch.Tensor):
        return (batch,), {}
    if isinstance(batch, tuple | list):
        return tuple(batch), {}
    raise RequestError(f"a batch is {type(batch).__name__}, expected an args tuple, a kwargs dict, or (args, kwargs)")


def batch_dims(example_inputs: Callable[[int, int], Any], seq: int) -> list[int | None]:
    """Which dim of each tensor follows the batch, from two batches of unlike sizes."""
    first, second = (_tensors(as_inputs(example_inputs(size, seq))) for size in (2, 3))
    return [
        next((dim for dim, (a, b) in enumerate(zip(one.shape, other.shape, strict=True)) if (a, b) == (2, 3)), None)
        for one, other in zip(first, second, strict=True)
    ]


def micro_batches(batch: Any, plan: Plan, ranks: Ranks, dims: Dims | None = None) -> list[Inputs]:
    """A rank's micro-batches of a global batch. Raises RequestError where the batch has another size than the plan's."""
    inputs = as_inputs(batch)
    total, count = plan.workload.global_batch, plan.schedule.micro_batches
    leaves, structure = tree_flatten(inputs)
    dims = list(dims) if dims is not None else [_batch_dim(tensor, total) for tensor in _tensors(inputs)]
    place = ranks["dp_replicate"] * ranks.sizes["dp_shard"] + ranks["dp_shard"]
    own = total // ranks.size(*DP)
    if not any(dim is not None for dim in dims):
        shapes = [tuple(tensor.shape) for tensor in _tensors(inputs)]
        raise RequestError(f"the plan's global batch is {total}, but no dim of the batch's tensors is: {shapes}")
    found = []
    for number in range(count):
        start = place * own + number * (own // count)
        found.append(tree_unflatten(_cut(leaves, dims, total, start, own // count), structure))
    return [tree_map(lambda leaf: _to(leaf, ranks.device), inputs) for inputs in found]


def in_dtype(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """Inputs as a model with parameters in `dtype` takes them: floating tensors in that dtype, as fully_shard casts them."""
    return tree_map(
        lambda leaf: leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf, inputs
    )


def _cut(leaves: list[Any], dims: Dims, total: int, start: int, size: int) -> list[Any]:
    remaining = iter(dims)
    found = []
    for leaf in leaves:
        dim = next(remaining) if isinstance(leaf, torch.Tensor) else None
        if dim is not None and leaf.shape[dim] != total:
            raise RequestError(
                f"dim {dim} of a batch's tensor of shape {tuple(leaf.shape)} is not the global batch, {total}"
            )
        found.append(leaf if dim is None else leaf.narrow(dim, start, size))
    return found


def _to(leaf: Any, device: torch.device) -> Any:
    return leaf.to(device, non_blocking=True) if isinstance(leaf, torch.Tensor) else leaf


def _batch_dim(tensor: torch.Tensor, total: int) -> int | None:
    return next((dim for dim, size in enumerate(tensor.shape) if size == total), None)


def _tensors(inputs: Inputs) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(inputs)[0] if isinstance(leaf, torch.Tensor)]
