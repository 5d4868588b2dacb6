"""A block class on one rank: its operators at sizes, and which tensors are there whole or in parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from autopar.documents.graph import BlockClass, Graph, Operator, RecomputeOption
from autopar.pricing.bill import Setting
from autopar.pricing.division import Division, divided_atom
from autopar.pricing.fusion import external_tensors, fusion_groups
from autopar.pricing.work import Amount, Work, work_of
from cost_models.compute import element_bytes
from cost_models.executors import executor

_Atoms = tuple[tuple[int, int | tuple[int, ...]], ...]
"""Atom -> its size, or its sizes for each micro-batch."""


@dataclass(frozen=True)
class _Sized:
    """A class at sizes: its works and kernels, shared by all divisions."""

    sizes: Mapping[int, Amount]
    works: tuple[Work, ...]
    forward: tuple[tuple[Work, ...], ...]
    backward: tuple[tuple[Work, ...], ...]
    external: Mapping[int, tuple[int, ...]] = field(default_factory=dict)


def _sized(block_class: BlockClass, atoms: _Atoms, width: int, fuse: bool) -> _Sized:
    sizes: dict[int, Amount] = {
        atom: np.array(size, dtype=float) if isinstance(size, tuple) else float(size) for atom, size in atoms
    }
    works = tuple(work_of(block_class, operator, sizes, width) for operator in block_class.operators)
    kernels: list[tuple[tuple[Work, ...], ...]] = []
    external: dict[int, tuple[int, ...]] = {}
    for phase in ("forward", "backward"):
        own = [work for work in works if work.operator.phase == phase]
        groups = fusion_groups(block_class, own) if fuse else [[work] for work in own]
        for group in groups:
            if len(group) > 1:
                external[group[0].operator.id] = external_tensors(block_class, group)
        kernels.append(tuple(tuple(group) for group in groups))
    return _Sized(sizes, works, kernels[0], kernels[1], external)


class Local:
    """Shared by everything that prices a block: sizes, divided operators, bytes of tensors on one rank."""

    def __init__(
        self, graph: Graph, class_name: str, division: Division, setting: Setting, micro_batches: tuple[int, ...]
    ) -> None:
        self.block_class = graph.class_by_name[class_name]
        self.division, self.setting, self.micro_batches = division, setting, micro_batches
        self.executor = executor(setting.executor)
        self.is_end = any(class_name in (chain.prologue, chain.epilogue) for chain in graph.chains)
        self.width = int(element_bytes(setting.activations))
        self.experts = expert_atoms(self.block_class)
        self.sized = _sized_for(graph, self.block_class, setting, micro_batches, self.width, self.experts)
        self.sizes = self.sized.sizes
        self.divided = self._divided_atoms()
        self.workload_atoms = {atom.id for atom in graph.indices if atom.follows is not None}
        self.expert_rows = self._expert_rows() if setting.imbalance > 1 else frozenset()

    def _divided_atoms(self) -> dict[int, int]:
        """Operator -> the atom it is divided along, backward operators as their forward one."""
        found: dict[int, int] = {}
        for operator in self.block_class.operators:
            origin = operator.id if operator.phase == "forward" else operator.forward
            if origin is not None and origin in self.division.divided:
                forward = self.block_class.operator_by_id[origin]
                atom = divided_atom(self.block_class, forward.local_dims[self.division.divided[origin]])
                if atom is not None:
                    found[operator.id] = atom
        return found

    def _expert_rows(self) -> frozenset[int]:
        """Tensors with rows that other ranks sent, from the first grouped product to the last and back."""
        grouped = self.grouped
        inside = range(grouped[0].id, grouped[-1].id + 1) if grouped else range(0)
        touched = {
            tensor
            for operator in self.block_class.operators
            if (operator.id if operator.phase == "forward" else operator.forward) in inside
            for tensor in (*operator.reads, *operator.writes)
        }
        return frozenset(t for t in touched if self.workload_atoms & set(self.block_class.tensor_by_id[t].atoms))

    @property
    def grouped(self) -> list[Operator]:
        """The products of routed rows with their experts' matrices, forward."""
        return [op for op in self.block_class.operators if op.phase == "forward" and "grouped" in op.name]

    def _share(self, operator: Operator) -> float:
        return 1.0 / self.setting.degree if operator.id in self.divided else 1.0

    def _moved(self, work: Work) -> Amount:
        """Bytes of a pointwise operator: tensors without the divided atom are moved whole."""
        atom = self.divided.get(work.operator.id)
        tensors = dict.fromkeys((*work.operator.reads, *work.operator.writes))
        if work.operator.traffic is not None or (atom is None and self.expert_rows.isdisjoint(tensors)):
            return work.bytes * self._share(work.operator)
        return sum((self._bytes(tensor) / self._divisor(tensor, atom) for tensor in tensors), 0.0)

    def _local_bytes(self, tensor: int, group: list[Work]) -> Amount:
        atoms = {self.divided[work.operator.id] for work in group if work.operator.id in self.divided}
        own = self.block_class.tensor_by_id[tensor].atoms
        return self._bytes(tensor) / (self.setting.degree if atoms & set(own) else 1)

    def _divisor(self, tensor: int, atom: int | None) -> int:
        return self.setting.degree if atom in self.block_class.tensor_by_id[tensor].atoms else 1

    def _bytes(self, tensor: int) -> Amount:
        found = self.block_class.tensor_by_id[tensor].bytes(self.sizes, self.width)
        return found * self.setting.imbalance if tensor in self.expert_rows else found

    def _saved(self, option: RecomputeOption) -> Amount:
        """Bytes kept; of matrix products that selective recompute runs again all the same, their share is not."""
        again = self.executor.selective_products if option.name.startswith("selective") else 0.0
        products = {write for work in self.sized.works if work.kind == "matmul" for write in work.operator.writes}
        return sum(
            (
                self._stored(tensor) * self._kept_width(tensor) * (1 - again * (tensor in products))
                for tensor in option.saved
            ),
            0.0,
        )

    def _kept_width(self, tensor: int) -> float:
        """A fused loss keeps its scores as they came, in the compute dtype, not widened."""
        scores = self.is_end and self.block_class.tensor_by_id[tensor].dtype == "float32"
        is_large = scores and len(self.block_class.tensor_by_id[tensor].atoms) > 2
        return self.width / 4 if is_large and self.executor.fused_loss else 1.0

    def _scores_tensor(self) -> int | None:
        """What a model's end hands to its loss: the largest result of its products."""
        works = self.sized.works if self.is_end else ()
        products = [work for work in works if work.kind == "matmul" and work.operator.phase == "forward"]
        written = [tensor for work in products for tensor in work.operator.writes]
        return max(written, key=lambda tensor: float(np.max(self._bytes(tensor))), default=None)

    def _scores(self) -> Amount:
        """Bytes of the scores on this rank."""
        tensor = self._scores_tensor()
        return 0.0 if tensor is None else self._stored(tensor)

    def _stored(self, tensor: int) -> Amount:
        state = self.division.states.get(tensor)
        whole = state is None or state.kind != "S"
        whole = whole or (tensor in self.division.gathered and self.executor.saves_gathered_input)
        return self._bytes(tensor) / (1 if whole else self.setting.degree)

    def _parameters(self, trainable: bool, experts: bool = False) -> float:
        total = 0.0
        for parameter in self.block_class.parameters:
            if parameter.trainable == trainable and parameter.tensor is not None:
                state = self.division.states.get(parameter.tensor)
                is_divided = state is not None and state.kind == "S"
                if self.experts & set(self.block_class.tensor_by_id[parameter.tensor].atoms):
                    # without tp inside experts, tp ranks hold experts of their own: ep counts them
                    total += parameter.elements / (self.setting.etp if is_divided else 1) / self.setting.ep
                elif not experts:
                    total += parameter.elements / (self.setting.degree if is_divided else 1)
        return total


def _sized_for(
    graph: Graph,
    block_class: BlockClass,
    setting: Setting,
    micro_batches: tuple[int, ...],
    width: int,
    experts: frozenset[int],
) -> _Sized:
    each = [graph.sizes(micro_batch, setting.seq_len // setting.cp) for micro_batch in micro_batches]
    each = [{atom: size // setting.ep if atom in experts else size for atom, size in sizes.items()} for sizes in each]
    atoms = tuple(
        (atom, size if all(other[atom] == size for other in each) else tuple(other[atom] for other in each))
        for atom, size in each[0].items()
    )
    key = (id(block_class), atoms, width, setting.kernels)
    if key not in _CACHE:
        if len(_CACHE) >= CACHED_SIZES:
            _CACHE.clear()
        _CACHE[key] = (block_class, _sized(block_class, atoms, width, setting.kernels != "eager"))
    return _CACHE[key][1]


def expert_atoms(block_class: BlockClass) -> frozenset[int]:
    """Indices that number the matrices of grouped products."""
    return frozenset(
        dims[0][0]
        for operator in block_class.operators
        if operator.phase == "forward" and "grouped" in operator.name
        for dims in (block_class.tensor_by_id[read].dims for read in operator.reads)
        if len(dims) == 3 and dims[0]
    )


CACHED_SIZES = 64
_CACHE: dict[Any, tuple[BlockClass, _Sized]] = {}
"""By identity: hashing a class of hundreds of operators costs more than pricing it. Held, so that its id stays its own."""


def at(value: Amount, number: int) -> float:
    """The amount at one of the micro-batch sizes."""
    return float(value[number]) if np.ndim(value) else float(value)
