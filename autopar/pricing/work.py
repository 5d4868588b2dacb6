"""What each operator of a block class does at given sizes: its kind, FLOPs, matmul shape and bytes moved.

Sizes may be arrays (one entry per micro-batch size), so that one pass prices them all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from autopar.documents.graph import BlockClass, Operator, Tensor, element_bytes
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
class Product:
    """One matrix product: atoms with their sizes and letters (m, n, k or b), 2 m n k b FLOPs in all."""

    dims: tuple[tuple[int, Amount, str], ...]
    layout: Layout


@dataclass(frozen=True)
class Work:
    """One operator's work, undivided."""

    operator: Operator
    kind: str
    """matmul, attention, view, or a class of pointwise."""
    flops: Amount
    bytes: Amount
    products: tuple[Product, ...] = ()
    """Of a matmul: one; of a convolution's backward: one for each gradient of its factors."""
    is_linear: bool = False
    """A matmul with a parameter, or a backward one of such: what low-precision recipes cast."""

    @property
    def is_convolution(self) -> bool:
        """Whether rows of its products overlap in memory, so that `bytes` is less than what the factors would hold."""
        return is_convolution(self.operator)


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
    if is_convolution(operator):
        return Work(operator, kind, flops, moved, convolution_products(block_class, operator, sizes))
    origin = operator if operator.forward is None else block_class.operator_by_id[operator.forward]
    product = Product(matmul_dims(block_class, operator, sizes), matmul_layout(block_class, operator))
    return Work(operator, kind, flops, moved, (product,), _reads_parameter(block_class, origin))


def is_convolution(operator: Operator) -> bool:
    """A convolution or its backward operator."""
    return operator.name.startswith("aten.convolution")


def bytes_moved(block_class: BlockClass, operator: Operator, sizes: Mapping[int, Amount], compute_bytes: int) -> Amount:
    """Bytes through memory: as the operator states, else every read and write once."""
    if operator.traffic is not None:
        return sum((term.value(sizes) * element_bytes(dtype, compute_bytes) for dtype, term in operator.traffic), 0.0)
    tensors = dict.fromkeys((*operator.reads, *operator.writes))
    return sum((block_class.tensor_by_id[tensor].bytes(sizes, compute_bytes) for tensor in tensors), 0.0)


def matmul_dims(
    block_class: BlockClass, operator: Operator, sizes: Mapping[int, Amount]
) -> tuple[tuple[int, Amount, str], ...]:
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
        found.append((atom, sizes[atom], letter))
    return tuple(found)


def convolution_products(
    block_class: BlockClass, operator: Operator, sizes: Mapping[int, Amount]
) -> tuple[Product, ...]:
    """A convolution as matrix products over patches (implicit GEMM, Chetlur et al. 2014, arXiv 1410.0759).

    Forward: m = batch and positions, n = output channels, k = input channels and filter, b = channels of their own.
    The gradient of the source trades n for k, that of the weight sums over m.
    """
    origin = operator if operator.forward is None else block_class.operator_by_id[operator.forward]
    source, weight = (block_class.tensor_by_id[read] for read in origin.reads[:2])
    out = block_class.tensor_by_id[origin.writes[0]]
    transposed = bool(weight.dims[0]) and weight.dims[0][0] in source.atoms and weight.dims[0][0] not in out.atoms
    if operator is not origin:
        # Own positions of the backward operator's tensors: the gradient has those of the output.
        source, weight = (block_class.tensor_by_id[read] for read in operator.reads[1:3])
        out = block_class.tensor_by_id[operator.reads[0]]
    forward = tuple(
        (atom, sizes[atom], _convolution_letter(atom, source, weight, out, transposed))
        for term in operator.executed_flops[:1]
        for atom in term.atoms
    )
    if operator is origin:
        return (Product(forward, "forward"),)
    written = [block_class.tensor_by_id[write].atoms for write in operator.writes]
    batch = source.dims[0]
    found = []
    if any(set(batch) <= set(atoms) for atoms in written):
        found.append(Product(_relabelled(forward, {"n": "k", "k": "n"}), "dgrad"))
    if weight.atoms in written:
        found.append(Product(_relabelled(forward, {"m": "k", "k": "n", "n": "m"}), "wgrad"))
    return tuple(found)


def _convolution_letter(atom: int, source: Tensor, weight: Tensor, out: Tensor, transposed: bool) -> str:
    if atom not in weight.atoms:
        return "m"
    if atom in out.atoms:
        return "b" if atom in source.atoms else "n"
    return "n" if transposed and atom not in source.atoms else "k"


def _relabelled(
    dims: tuple[tuple[int, Amount, str], ...], letters: Mapping[str, str]
) -> tuple[tuple[int, Amount, str], ...]:
    return tuple((atom, size, letters.get(letter, letter)) for atom, size, letter in dims)


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
    for read in operator.reads:
        tensor = read
        while tensor in block_class.viewed:
            tensor = block_class.viewed[tensor]
        if block_class.tensor_by_id[tensor].parameter is not None:
            return True
    return False


def product(values: list[Amount]) -> Amount:
    """The product; 1 for none."""
    return prod(values, start=1.0)
