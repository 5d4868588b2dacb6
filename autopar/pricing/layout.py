"""From a division of the forward operators to the whole block: what every backward operator divides, which
collectives run, and in which placement each saved tensor is kept.

Saved tensors keep the placement in which forward read them; a gradient has the placement adjoint to its tensor's. A
backward operator divides the dim on which its saved tensors and parameters are divided; failing these, the dim that shares an
atom with the one its forward operator divided; failing that, the dim on which its gradients arrive divided. Gradients in another
placement are converted, which is the adjoint of a forward conversion.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from autopar.documents.graph import BlockClass, Graph, LocalDim, Operator
from autopar.pricing.division import (
    PARTIAL,
    PASS_SHARED,
    REPLICATE,
    CollectiveKind,
    Division,
    Placement,
    gradient,
    shard,
    value_collective,
)
from autopar.pricing.kinds import LINEAR, base_name, kind_of
from autopar.pricing.options import Facts, Option, divided_by, facts_of, inside, options_of
from autopar.pricing.versions import Version, versions_of


@dataclass(frozen=True)
class Movement:
    """A collective within a block: the full bytes of `tensor` travel."""

    phase: str
    kind: CollectiveKind
    tensor: int
    before: int
    """The operator that needs it, or -1 at the block's end."""
    source: int = -1
    """The operator that wrote the tensor, -1 for an input."""


@dataclass
class Layout:
    """The block on one rank."""

    block_class: BlockClass
    divided: dict[int, LocalDim | None] = field(default_factory=dict)
    """Operator -> the dim it divides; None: whole."""
    placements: dict[int, Placement] = field(default_factory=dict)
    """Tensor -> placement as produced, gradients as values."""
    movements: list[Movement] = field(default_factory=list)
    read: dict[tuple[int, int], bool] = field(default_factory=dict)
    """(operator, tensor) -> whether the operator reads only this rank's part."""
    crossing: set[tuple[int, int]] = field(default_factory=set)
    """(operator, tensor) reads that wait for a collective: no kernel is fused across them."""
    kept: dict[int, set[bool]] = field(default_factory=dict)
    """Storage -> whether backward reads it divided, whole, or both."""

    @cached_property
    def storage(self) -> dict[int, int]:
        """Tensor -> the tensor whose storage it is a view of."""
        return storages(self.block_class)


def storages(block_class: BlockClass) -> dict[int, int]:
    """Tensor -> the first tensor of its storage, views followed back."""
    root = {tensor.id: tensor.id for tensor in block_class.tensors}
    for operator in block_class.operators:
        if kind_of(operator) == "view" and operator.reads:
            for tensor in operator.writes:
                root[tensor] = root[operator.reads[0]]
    return root


def layout_of(graph: Graph, division: Division) -> Layout:
    """The layout of a class under a division."""
    facts = facts_of(graph, division.block_class, division.boundary)
    layout = Layout(facts.block_class)
    layout.placements.update(division.placements)
    forward = _forward(layout, division, facts)
    _Backward(layout, facts, forward).run()
    return layout


@dataclass(frozen=True)
class _Chosen:
    options: dict[int, Option]
    read: dict[tuple[int, int], Placement]
    """(operator, tensor) -> the placement in which it is read."""


def _forward(layout: Layout, division: Division, facts: Facts) -> _Chosen:
    versions = versions_of(facts.block_class)
    changed = {(c.site.tensor, c.site.module, c.site.where): c for c in division.conversions}
    placed: dict[Version, Placement] = {}
    writer = {t: op.id for op in facts.block_class.operators if op.phase == "forward" for t in op.writes}
    readers: dict[Version, int] = {}
    for (reader, tensor), version in versions.read.items():
        readers.setdefault(version, reader)
        placed.setdefault(Version(tensor), division.placements[tensor])
    for tensor in versions.leaving:
        placed.setdefault(Version(tensor), division.placements[tensor])
    for edge in versions.edges:
        conversion = changed.get((edge.site.tensor, edge.site.module, edge.site.where))
        placed[edge.child] = placed[edge.parent] if conversion is None else conversion.target
        kind = value_collective(placed[edge.parent], placed[edge.child])
        if kind is not None:
            tensor = edge.site.tensor
            movement = Movement("forward", kind, tensor, readers.get(edge.child, -1), writer.get(tensor, -1))
            layout.movements.append(movement)
    read = {key: placed[version] for key, version in versions.read.items()}
    options: dict[int, Option] = {}
    for operator in facts.block_class.operators:
        if operator.phase == "forward":
            option = _match(operator, facts, division, read)
            options[operator.id] = option
            layout.divided[operator.id] = option.dim
            for tensor, placement in option.reads.items():
                layout.read[operator.id, tensor] = placement.divided
                if value_collective(_value(division.placements[tensor]), _value(placement)) is not None:
                    layout.crossing.add((operator.id, tensor))
            layout.movements += [
                Movement(phase, kind, tensor, operator.id, operator.id) for phase, kind, tensor in option.inside
            ]
    return _Chosen(options, read)


def _match(operator: Operator, facts: Facts, division: Division, read: dict[tuple[int, int], Placement]) -> Option:
    """The option that a division chose for an operator: same choice, same placements."""
    for option in options_of(operator, facts):
        if (
            option.choice == division.choices[operator.id]
            and all(read[operator.id, tensor] == placement for tensor, placement in option.reads.items())
            and all(division.placements[tensor] == placement for tensor, placement in option.writes.items())
        ):
            return option
    raise ValueError(f"{division.block_class}: operator {operator.id} {operator.name} cannot run as the division says")


class _Backward:
    """Walks the backward operators in order and fills the layout."""

    def __init__(self, layout: Layout, facts: Facts, forward: _Chosen) -> None:
        self.layout, self.facts, self.forward = layout, facts, forward
        self.tensors = facts.block_class.tensor_by_id
        operators = facts.block_class.operators
        self.fixed = {t for op in operators if op.phase == "forward" for t in (*op.reads, *op.writes)}
        self.fixed |= facts.parameters | set(facts.block_class.inputs)
        self.storage = layout.storage
        self.converted: set[tuple[int, str]] = set()
        self.writer: dict[int, int] = {}

    def run(self) -> None:
        for operator in self.facts.block_class.operators:
            if operator.phase == "backward":
                self._step(operator)
                self.writer.update((tensor, operator.id) for tensor in operator.writes)

    def _step(self, operator: Operator) -> None:
        option = self.forward.options.get(-1 if operator.forward is None else operator.forward)
        now = {tensor: self._placement(operator, tensor) for tensor in operator.reads}
        gradients = [tensor for tensor in now if tensor not in self.fixed]
        dim = self._dim(operator, option, now, gradients)
        if dim is not None and option is not None and option.composite is not None:
            dim = divided_by(option.composite, dim, self.facts)
        self.layout.divided[operator.id] = dim
        if dim is not None and dim.role == "whole":
            self.layout.movements += [
                Movement("backward", kind, tensor, operator.id, operator.id)
                for composite in dim.composites[:1]
                for phase, kind, tensor in inside(composite)
                if phase == "backward"
            ]
        held = {} if dim is None else {p.tensor: shard(p.dim, p.atom) for p in dim.reads}
        partial = dim is None and self._passes_partial(operator, option, now, gradients)
        for tensor, placement in now.items():
            target = held.get(tensor, PARTIAL if partial and tensor in gradients else REPLICATE)
            self.layout.read[operator.id, tensor] = target.divided
            self._convert(operator, tensor, placement, target)
            if tensor in self.fixed:
                self.layout.kept.setdefault(self.storage[tensor], set()).add(placement.divided)
        self._write(operator, dim, partial)

    def _placement(self, operator: Operator, tensor: int) -> Placement:
        """Where a read tensor is, as a value."""
        if operator.forward is not None and (operator.forward, tensor) in self.forward.read:
            return _value(self.forward.read[operator.forward, tensor])
        if tensor in self.layout.placements:
            return _value(self.layout.placements[tensor])
        self.layout.placements[tensor] = self._seed(tensor)
        return self.layout.placements[tensor]

    def _seed(self, tensor: int) -> Placement:
        """A gradient that arrives from the next block."""
        out = self.facts.hidden_out
        if out is not None and self.tensors[tensor].dims == self.tensors[out].dims:
            return gradient(self.facts.boundary_placement(out))
        return REPLICATE

    def _dim(
        self, operator: Operator, option: Option | None, now: dict[int, Placement], gradients: list[int]
    ) -> LocalDim | None:
        for tensors in ([t for t in now if t in self.fixed], None):
            if tensors is None:
                dim = self._same_atom(operator, option)
                if dim is not None:
                    return dim
                tensors = gradients if option is None or option.dim is not None else []
            for tensor in tensors:
                dim = _holding(operator, tensor, now[tensor])
                if dim is not None:
                    return dim
        return None

    def _same_atom(self, operator: Operator, option: Option | None) -> LocalDim | None:
        """The one dim that stands for the same atom as the dim its forward operator divided."""
        if option is None or option.dim is None or kind_of(operator) == "view":
            return None
        atoms = self._atoms(option.dim)
        found = [dim for dim in operator.local_dims if self._atoms(dim) & atoms]
        return found[0] if len(found) == 1 else None

    def _atoms(self, dim: LocalDim) -> set[int]:
        return {self.tensors[p.tensor].dims[p.dim][p.atom] for p in (*dim.reads, *dim.writes)}

    def _passes_partial(
        self, operator: Operator, option: Option | None, now: dict[int, Placement], gradients: list[int]
    ) -> bool:
        """Backward operators are linear in their gradients: partial in, partial out, where forward handed it on."""
        if not gradients or any(now[tensor].kind != "partial" for tensor in gradients):
            return False
        return base_name(operator.name) in LINEAR or option is None or option.choice == PASS_SHARED

    def _convert(self, operator: Operator, tensor: int, source: Placement, target: Placement) -> None:
        kind = None if source.divided and target.kind == "partial" else value_collective(source, target)
        key = (self.storage[tensor], kind or "")
        if kind is not None and key not in self.converted:
            self.converted.add(key)
            self.layout.movements.append(Movement("backward", kind, tensor, operator.id, self.writer.get(tensor, -1)))
        if kind is not None:
            self.layout.crossing.add((operator.id, tensor))
        if kind is not None and tensor not in self.fixed:
            self.layout.placements[tensor] = target

    def _write(self, operator: Operator, dim: LocalDim | None, partial: bool) -> None:
        given = {} if dim is None else {p.tensor: shard(p.dim, p.atom) for p in dim.writes}
        rest = PARTIAL if partial or (dim is not None and dim.role != "whole") else REPLICATE
        for tensor in operator.writes:
            self.layout.placements[tensor] = given.get(tensor, rest)
        if operator.reads and kind_of(operator) == "view" and all(t in self.fixed for t in operator.reads):
            self.fixed.update(operator.writes)


def _value(placement: Placement) -> Placement:
    return REPLICATE if placement.kind == "shared" else placement


def _holding(operator: Operator, tensor: int, placement: Placement) -> LocalDim | None:
    """The operator's dim that stands where a tensor is divided."""
    if not placement.divided:
        return None
    for dim in operator.local_dims:
        if any((p.tensor, p.dim, p.atom) == (tensor, placement.dim, placement.atom) for p in dim.reads):
            return dim
    return None
