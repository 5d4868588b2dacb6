"""What each operator of a block class does at given sizes: its kind, FLOPs, matmul shape and bytes moved.

Sizes may be arrays (one entry per micro-batch size), so that one pass prices them all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from autopar.documents.graph import BlockClass, LocalDim, Operator, element_bytes
from autopar.pricing.division import divided_atom, is_view
from cost_models.compute import Layout

Amount = Any
"""A float, or an array of one per micro-batch size."""

CLASSES = {
    "norm": ("native_layer_norm", "rms_norm", "batch_norm", "group_norm", "var_mean"),
    "softmax": ("_softmax", "_safe_softmax"),
    "loss": ("log_softmax", "nll_loss", "cross_entropy"),
    "embedding": ("embedding", "gather", "index", "scatter", "topk"),
    "dropout": ("dropout", "bernoulli"),
    "activation": ("gelu", "silu", "relu", "sigmoid", "tanh", "erf", "exp", "softplus", "elu", "hardswish", "mish"),
    "copy": ("clone", "copy", "cat", "stack", "fill", "zeros", "ones", "full", "empty", "repeat", "pad", "arange"),
}


@dataclass(frozen=True)
class Work:
    """One operator's work, undivided."""

    operator: Operator
    kind: str
    """matmul, attention, view, or a class of pointwise."""
    flops: Amount
    bytes: Amount
    dims: tuple[tuple[LocalDim, Amount, str], ...] = ()
    """Matmuls: local dims with their sizes and letter: m, n, k or b."""
    layout: Layout = "forward"
    is_linear: bool = False
    """A matmul with a parameter, or a backward one of such: what low-precision recipes cast."""


def kind_of(operator: Operator) -> str:
    """How an operator is priced."""
    if operator.name.startswith("autopar.attention"):
        return "attention"
    if operator.executed_flops:
        return "matmul"
    if is_view(operator):
        return "view"
    name = operator.name.partition(".")[2]
    return next((kind for kind, words in CLASSES.items() if any(word in name for word in words)), "add")


def work_of(block_class: BlockClass, operator: Operator, sizes: Mapping[int, Amount], compute_bytes: int) -> Work:
    """The work of one operator at given atom sizes."""
    kind = kind_of(operator)
    flops = sum((term.value(sizes) for term in operator.executed_flops), 0.0)
    moved = bytes_moved(block_class, operator, sizes, compute_bytes)
    if kind != "matmul":
        return Work(operator, kind, flops, moved)
    origin = operator if operator.forward is None else block_class.operator_by_id[operator.forward]
    return Work(
        operator,
        kind,
        flops,
        moved,
        matmul_dims(block_class, operator, sizes),
        matmul_layout(block_class, operator),
        _reads_parameter(block_class, origin),
    )


def bytes_moved(block_class: BlockClass, operator: Operator, sizes: Mapping[int, Amount], compute_bytes: int) -> Amount:
    """Bytes through memory: as the operator states, else every read and write once."""
    if operator.traffic is not None:
        return sum((term.value(sizes) * element_bytes(dtype, compute_bytes) for dtype, term in operator.traffic), 0.0)
    tensors = dict.fromkeys((*operator.reads, *operator.writes))
    return sum((block_class.tensor_by_id[tensor].bytes(sizes, compute_bytes) for tensor in tensors), 0.0)


def matmul_dims(
    block_class: BlockClass, operator: Operator, sizes: Mapping[int, Amount]
) -> tuple[tuple[LocalDim, Amount, str], ...]:
    """Letters: k summed; m only in the first factor, n only in the second, b in both."""
    factors = [read for read in operator.reads if len(block_class.tensor_by_id[read].dims) > 1][-2:] or operator.reads[
        -2:
    ]
    first = factors[0]
    counted = Counter(atom for term in operator.executed_flops for atom in term.atoms)
    found = []
    for dim in operator.local_dims:
        atom = divided_atom(block_class, dim)
        inside = {position.tensor for position in dim.reads} & set(factors)
        if atom is None or not inside or not counted[atom]:
            continue  # the groups of a grouped matmul: each row meets one matrix of them
        counted[atom] -= 1
        written = bool(dim.writes)
        if dim.role == "whole":
            # Rows that data puts into groups: whole in every tensor, so only the index itself says where they stand.
            inside = {read for read in factors if atom in block_class.tensor_by_id[read].atoms}
            written = any(atom in block_class.tensor_by_id[write].atoms for write in operator.writes)
        letter = ("b" if written else "k") if len(inside) == 2 else "m" if first in inside else "n"
        found.append((dim, sizes[atom], letter))
    return tuple(found)


def matmul_layout(block_class: BlockClass, operator: Operator) -> Layout:
    """Forward; backward towards the input (a parameter is read) or towards the weight (both factors are activations)."""
    if operator.phase == "forward":
        return "forward"
    batch_summed = any(
        dim.role == "summed" and len(dim.reads) == 2 and not _reads_parameter(block_class, operator)
        for dim in operator.local_dims
    )
    return "wgrad" if batch_summed else "dgrad"


def _reads_parameter(block_class: BlockClass, operator: Operator) -> bool:
    """Whether a factor is a parameter or a view of one."""
    views = {op.writes[0]: op.reads[0] for op in block_class.operators if is_view(op) and op.reads and op.writes}
    for read in operator.reads:
        tensor = read
        while tensor in views:
            tensor = views[tensor]
        if block_class.tensor_by_id[tensor].parameter is not None:
            return True
    return False


def product(values: list[Amount]) -> Amount:
    """The product; 1 for none."""
    return prod(values, start=1.0)
