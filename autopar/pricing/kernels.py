"""Seconds of a list of operators on one rank, at any micro-batch, sequence length and degree.

gemm        m * n * batch = elements written, n from the dims that only the second operand and the output hold,
            k = flops / (2 m n batch): one rule for matmuls, grouped matmuls and convolutions
attention   executed FLOPs and the bytes of everything read and written
pointwise   bytes that enter and leave the kernel
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

from autopar.documents.graph import BYTES_PER_ELEMENT, LocalDim, Operator, Tensor
from autopar.pricing.amounts import Amounts, Floats
from autopar.pricing.fusion import Kernel, kernels_of
from autopar.pricing.kinds import RAGGED, base_name, kind_of
from autopar.pricing.layout import Layout
from cost_models.compute import ATTENTION_KERNEL, Kernels, attention_seconds, gemm_seconds, pointwise_seconds
from hardware_profiles.chip import Chip

OPERANDS = {"addmm": 1, "baddbmm": 1, "addbmm": 1, "convolution_backward": 1}
"""Position of the first of the two operands, where it is not the first tensor read."""


class Point(NamedTuple):
    """Where a block class is priced: atom sizes, degree of the axis, bytes of an element of the training dtype."""

    sizes: Floats
    degree: int
    width: float


class GemmKey(NamedTuple):
    """Products that one call prices."""

    layout: Literal["forward", "dgrad", "wgrad"]
    grouped: bool
    dtype: str


class AttentionKey(NamedTuple):
    """Attention calls that one call prices."""

    phase: Literal["forward", "backward"]
    causal: bool
    head_dim: int


@dataclass
class _Products:
    written: Amounts
    columns: Amounts
    batch: Amounts
    flops: Amounts


class KernelList:
    """Kernels of some operators of a layout, compiled for repeated pricing."""

    def __init__(
        self, operators: Iterable[Operator], layout: Layout, follows: dict[int, str | None], kernels: Kernels
    ) -> None:
        self.layout, self.follows = layout, follows
        self.tensors = layout.block_class.tensor_by_id
        self.attention_kernel = ATTENTION_KERNEL[kernels]
        self.kernels = kernels_of(operators, layout, fuse=kernels != "eager")

    @property
    def launches(self) -> int:
        """Kernels that the host issues."""
        return len(self.kernels)

    def seconds(self, point: Point, chip: Chip, dtype: str) -> float:
        """Device seconds of all kernels, one after another."""
        total = 0.0
        for key, products in self._products.items():
            total += self._gemm_seconds(key, products, point, chip, dtype)
        for attention, (flops, moved, queries) in self._attention.items():
            total += float(
                np.sum(
                    attention_seconds(
                        chip,
                        flops.evaluate(*point),
                        moved.evaluate(*point),
                        phase=attention.phase,
                        seq=queries.evaluate(*point),
                        head_dim=attention.head_dim,
                        causal=attention.causal,
                        dtype=dtype,
                        kernel=self.attention_kernel,
                    )
                )
            )
        for kind, moved in self._pointwise.items():
            total += float(np.sum(pointwise_seconds(chip, moved.evaluate(*point), kind)))
        return total

    def _gemm_seconds(self, key: GemmKey, products: _Products, point: Point, chip: Chip, dtype: str) -> float:
        columns, batch = products.columns.evaluate(*point), products.batch.evaluate(*point)
        written, flops = products.written.evaluate(*point), products.flops.evaluate(*point)
        rows = written / (columns * batch)
        summed = flops / (2.0 * written)
        seconds = gemm_seconds(
            chip, rows, columns, summed, key.dtype or dtype, layout=key.layout, batch=batch, grouped=key.grouped
        )
        return float(np.sum(seconds))

    @cached_property
    def _products(self) -> dict[GemmKey, _Products]:
        found: dict[GemmKey, list[Operator]] = {}
        for kernel in self.kernels:
            if kernel.kind == "gemm" and kernel.operators[0].executed_flops:
                found.setdefault(self._gemm_key(kernel.operators[0]), []).append(kernel.operators[0])
        return {key: self._compile_products(operators) for key, operators in found.items()}

    def _gemm_key(self, operator: Operator) -> GemmKey:
        grouped = base_name(operator.name) in RAGGED
        dtype = {"float32": "fp32", "float64": "fp64"}.get(self.tensors[operator.writes[0]].dtype, "")
        if operator.phase == "forward":
            return GemmKey("forward", grouped, dtype)
        summed = [dim for dim in operator.local_dims if dim.role == "summed"]
        over_tokens = any(self.follows[atom] is not None for dim in summed for atom in self._atoms(dim))
        return GemmKey("wgrad" if over_tokens else "dgrad", grouped, dtype)

    def _compile_products(self, operators: list[Operator]) -> _Products:
        found = _Products(*(Amounts(len(operators)) for _ in range(4)))
        for owner, operator in enumerate(operators):
            write = operator.writes[0]
            divided = self.layout.placements[write].divided
            found.written.add(owner, self.tensors[write].atoms, divided=divided)
            self._add_flops(found.flops, owner, operator)
            for amounts, (atoms, cut) in zip(
                (found.columns, found.batch), self._columns_and_batch(operator), strict=True
            ):
                amounts.add(owner, atoms, divided=cut)
        return found

    def _columns_and_batch(
        self, operator: Operator
    ) -> tuple[tuple[tuple[int, ...], bool], tuple[tuple[int, ...], bool]]:
        """Atoms of n and of the batch of a product, and whether the operator divides one of them."""
        first = OPERANDS.get(base_name(operator.name), 0)
        left, right = operator.reads[first], operator.reads[min(first + 1, len(operator.reads) - 1)]
        chosen = self.layout.divided[operator.id]
        columns: list[LocalDim] = []
        batch: list[LocalDim] = []
        for dim in operator.local_dims:
            held = {position.tensor for position in dim.reads}
            if dim.writes and right in held:
                (batch if left in held else columns).append(dim)
            elif dim.role == "whole" and base_name(operator.name) in RAGGED:
                batch.append(dim)
        if not columns:
            last = self.tensors[operator.writes[0]].dims[-1:]
            return (sum(last, ()), False), _product(batch, chosen, self)
        return _product(columns, chosen, self), _product(batch, chosen, self)

    def _atoms(self, dim: LocalDim) -> tuple[int, ...]:
        return tuple({self.tensors[p.tensor].dims[p.dim][p.atom] for p in (*dim.reads, *dim.writes)})

    def _add_flops(self, amounts: Amounts, owner: int, operator: Operator) -> None:
        chosen = self.layout.divided[operator.id]
        atoms = set() if chosen is None else set(self._atoms(chosen))
        for term in operator.executed_flops:
            divided = bool(atoms.intersection(term.atoms))
            amounts.add(owner, term.atoms, coefficient=term.coefficient, divided=divided)

    @cached_property
    def _attention(self) -> dict[AttentionKey, tuple[Amounts, Amounts, Amounts]]:
        found: dict[AttentionKey, list[Operator]] = {}
        for kernel in self.kernels:
            if kernel.kind == "attention":
                operator = kernel.operators[0]
                head_dim = int(operator.attributes.get("head_dim", 128))
                key = AttentionKey(operator.phase, bool(operator.attributes.get("causal", False)), head_dim)
                found.setdefault(key, []).append(operator)
        compiled = {}
        for key, operators in found.items():
            flops, moved, queries = (Amounts(len(operators)) for _ in range(3))
            for owner, operator in enumerate(operators):
                self._add_flops(flops, owner, operator)
                self._add_own_traffic(moved, owner, operator)
                query = self.tensors[operator.reads[0 if operator.phase == "forward" else 1]]
                queries.add(owner, query.dims[-2] if len(query.dims) > 1 else ())
            compiled[key] = (flops, moved, queries)
        return compiled

    @cached_property
    def _pointwise(self) -> dict[str, Amounts]:
        found: dict[str, list[Kernel]] = {}
        for kernel in self.kernels:
            if kernel.kind not in ("gemm", "attention"):
                found.setdefault(kernel.kind, []).append(kernel)
        compiled = {}
        for kind, kernels in found.items():
            compiled[kind] = Amounts(len(kernels))
            for owner, kernel in enumerate(kernels):
                if len(kernel.operators) == 1:
                    self._add_own_traffic(compiled[kind], owner, kernel.operators[0])
                else:
                    self._add_outside_traffic(compiled[kind], owner, kernel)
        return compiled

    def _add_own_traffic(self, amounts: Amounts, owner: int, operator: Operator) -> None:
        """Everything an operator moves: as the graph says, else every tensor once."""
        if operator.traffic is None:
            for tensor in operator.reads:
                self._add_tensor(amounts, owner, tensor, self.layout.read[operator.id, tensor])
            for tensor in operator.writes:
                self._add_tensor(amounts, owner, tensor, self.layout.placements[tensor].divided)
            return
        chosen = self.layout.divided[operator.id]
        atoms = set() if chosen is None else set(self._atoms(chosen))
        for dtype, term in operator.traffic:
            self._add_bytes(amounts, owner, term.atoms, dtype, bool(atoms.intersection(term.atoms)), term.coefficient)

    def _add_outside_traffic(self, amounts: Amounts, owner: int, kernel: Kernel) -> None:
        """What enters a fused kernel and what leaves it; each storage once."""
        storage = self.layout.storage
        inside = {operator.id for operator in kernel.operators}
        made = {storage[tensor] for operator in kernel.operators for tensor in operator.writes}
        counted: set[int] = set()
        for operator in kernel.operators:
            for tensor in operator.reads:
                if storage[tensor] not in made | counted:
                    counted.add(storage[tensor])
                    self._add_tensor(amounts, owner, tensor, self.layout.read[operator.id, tensor])
            for tensor in operator.writes:
                if tensor in self._leaving or self._readers.get(storage[tensor], set()) - inside:
                    self._add_tensor(amounts, owner, tensor, self.layout.placements[tensor].divided)

    def _add_tensor(self, amounts: Amounts, owner: int, tensor: int, divided: bool) -> None:
        found: Tensor = self.tensors[tensor]
        self._add_bytes(amounts, owner, found.atoms, found.dtype, divided, 1.0)

    def _add_bytes(
        self, amounts: Amounts, owner: int, atoms: tuple[int, ...], dtype: str, divided: bool, times: float
    ) -> None:
        width = 1 if dtype == "compute" else BYTES_PER_ELEMENT[dtype]
        amounts.add(owner, atoms, coefficient=times * width, divided=divided, compute=dtype == "compute")

    def inside_kernels(self) -> Iterator[int]:
        """Storages that live in registers only: made and read within one fused kernel."""
        storage = self.layout.storage
        for kernel in self.kernels:
            inside = {operator.id for operator in kernel.operators}
            for tensor in (tensor for operator in kernel.operators for tensor in operator.writes):
                if tensor not in self._leaving and not self._readers.get(storage[tensor], set()) - inside:
                    yield storage[tensor]

    @cached_property
    def _readers(self) -> dict[int, set[int]]:
        """Storage -> operators that read it, views apart."""
        readers: dict[int, set[int]] = {}
        for operator in self.layout.block_class.operators:
            if kind_of(operator) != "view":
                for tensor in operator.reads:
                    readers.setdefault(self.layout.storage[tensor], set()).add(operator.id)
        return readers

    @cached_property
    def _leaving(self) -> set[int]:
        """Tensors that must reach memory: saved, handed on, or read by no operator (gradients)."""
        block_class = self.layout.block_class
        leaving = {tensor.id for tensor in block_class.tensors if tensor.saved} | set(block_class.outputs)
        storage = self.layout.storage
        return leaving | {t for op in block_class.operators for t in op.writes if storage[t] not in self._readers}


def _product(dims: list[LocalDim], chosen: LocalDim | None, owner: KernelList) -> tuple[tuple[int, ...], bool]:
    atoms = tuple(atom for dim in dims for atom in owner._atoms(dim)[:1])
    return atoms, chosen is not None and any(dim.name == chosen.name for dim in dims)
