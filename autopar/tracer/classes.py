"""One part of a recording as a block class: its own numbering, its indices, its sites, its recompute menu."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from autopar.documents.graph import BlockClass, Operator, Parameter, Site, Tensor, Term
from autopar.tracer.indices import Analysis, AtomTable, flop_terms, local_dims
from autopar.tracer.partition import Part, Partition
from autopar.tracer.recompute import recompute_menu
from autopar.tracer.recording import ModuleCall, OperatorRecord, TensorRecord
from autopar.tracer.rules import base_name


@dataclass
class Whole:
    """What all parts of one recording share."""

    found: Analysis
    divided: Partition
    table: AtomTable
    compute_dtype: str
    trainable: dict[str, bool]
    """By parameter name."""

    def readers_outside(self, part: Part) -> set[int]:
        """Tensors that forward operators of other parts read."""
        own = {operator.id for operator in part.operators}
        return {
            tensor
            for operator in self.found.recording.operators
            if operator.phase == "forward" and operator.id not in own
            for tensor in operator.reads
        }

    def dtype(self, record: TensorRecord) -> str:
        """``compute`` where it is the training dtype."""
        return "compute" if record.dtype == self.compute_dtype else record.dtype


def build_class(whole: Whole, part: Part, name: str) -> BlockClass:
    """The block class of a part, tensors and operators numbered from 0."""
    return _Builder(whole, part).build(name)


class _Builder:
    def __init__(self, whole: Whole, part: Part) -> None:
        self.whole, self.part = whole, part
        self.records = whole.found.recording.tensors
        self.ids: dict[int, int] = {}
        self.operator_ids = {operator.id: number for number, operator in enumerate(part.operators)}
        for operator in part.operators:
            for tensor in (*operator.reads, *operator.writes):
                self.ids.setdefault(tensor, len(self.ids))
        for tensor in sorted(part.saved):
            self.ids.setdefault(tensor, len(self.ids))

    def build(self, name: str) -> BlockClass:
        operators = tuple(self.operator(number, operator) for number, operator in enumerate(self.part.operators))
        tensors = tuple(self.tensor(tensor, number) for tensor, number in self.ids.items())
        written = {tensor for op in self.part.operators if op.phase == "forward" for tensor in op.writes}
        read_outside = self.whole.readers_outside(self.part)
        inputs = self.inputs(written)
        storages = {number: self.records[tensor].storage for tensor, number in self.ids.items()}
        return BlockClass(
            name=name,
            tensors=tensors,
            operators=operators,
            inputs=inputs,
            outputs=tuple(number for tensor, number in self.ids.items() if tensor in written & read_outside),
            parameters=tuple(self.parameters()),
            sites=tuple(dict.fromkeys(self.sites())),
            recompute=recompute_menu(tensors, operators, inputs, storages)[: None if self.part.prefix else 1],
        )

    def operator(self, number: int, operator: OperatorRecord) -> Operator:
        found, table = self.whole.found, self.whole.table
        model, executed = flop_terms(found, operator.id, table)
        return Operator(
            id=number,
            phase=operator.phase,
            name=base_name(operator.name),
            module=self.relative(operator.module),
            reads=tuple(self.ids[tensor] for tensor in operator.reads),
            writes=tuple(self.ids[tensor] for tensor in operator.writes),
            local_dims=local_dims(found, operator.id, self.ids),
            model_flops=model,
            executed_flops=executed,
            traffic=self.traffic(operator),
            forward=self.operator_ids.get(operator.forward) if operator.forward is not None else None,
            attributes=self.attributes(operator),
        )

    def traffic(self, operator: OperatorRecord) -> tuple[tuple[str, Term], ...] | None:
        moves = self.whole.found.rules[operator.id].moves
        if moves is None:
            return None
        return tuple(
            (self.whole.dtype(self.records[tensor]), Term(coefficient=times, atoms=sum(self.dims(tensor), ())))
            for tensor, times in moves
        )

    def attributes(self, operator: OperatorRecord) -> dict[str, int | float | bool | str]:
        if not operator.name.startswith("autopar.attention"):
            return {}
        q = self.records[operator.reads[1 if "backward" in operator.name else 0]]
        return {"causal": bool(operator.args[-1]), "head_dim": q.shape[-1]}

    def tensor(self, tensor: int, number: int) -> Tensor:
        record, found = self.records[tensor], self.whole.found
        segments = {}
        for dim, nodes in enumerate(found.atoms_of(tensor)):
            if len(nodes) == 1 and nodes[0] in found.segments:
                segments[dim] = tuple(self.whole.table.ids(found.at(place)) for place in found.segments[nodes[0]])
        return Tensor(
            id=number,
            dims=self.dims(tensor),
            segments=segments,
            dtype=self.whole.dtype(record),
            parameter=None if record.parameter is None else self.relative(record.parameter),
            saved=tensor in self.part.saved,
        )

    def dims(self, tensor: int) -> tuple[tuple[int, ...], ...]:
        return tuple(self.whole.table.ids(nodes) for nodes in self.whole.found.atoms_of(tensor))

    def inputs(self, written: set[int]) -> tuple[int, ...]:
        order = [tensor for call in self.calls() if call.module == self.part.prefix for tensor in call.inputs]
        order += [tensor for op in self.part.operators if op.phase == "forward" for tensor in op.reads]
        return tuple(
            self.ids[tensor]
            for tensor in dict.fromkeys(order)
            if tensor in self.ids and tensor not in written and self.records[tensor].parameter is None
        )

    def parameters(self) -> Iterator[Parameter]:
        named: dict[str, int] = {}
        for tensor in self.ids:
            name = self.records[tensor].parameter
            if name is not None:
                named.setdefault(name, tensor)
        for name, tensor in named.items():
            yield Parameter(
                name=self.relative(name),
                shape=self.records[tensor].shape,
                dtype=self.whole.dtype(self.records[tensor]),
                trainable=self.whole.trainable[name],
                tensor=self.ids[tensor],
            )

    def calls(self) -> Iterable[ModuleCall]:
        """Module calls that lie wholly in this part."""
        for call in self.whole.found.recording.calls:
            owners = {self.whole.divided.owner.get(n) for n in (call.first_operator, call.last_operator)}
            if owners == {self.part.name} and call.last_operator >= call.first_operator:
                yield call

    def sites(self) -> Iterator[Site]:
        for call in self.calls():
            for where, tensors in (("input", call.inputs), ("output", call.outputs)):
                for argument, tensor in enumerate(tensors):
                    # What a module merely hands on would change for its readers outside too.
                    handed_on = where == "input" and tensor in call.outputs
                    if tensor in self.ids and not handed_on:
                        yield self.site(call.module, where, argument, tensor)
        for operator in self.part.operators:
            if operator.name.startswith("autopar.attention."):
                for argument, tensor in enumerate(operator.reads[:3]):
                    yield self.site(operator.module, "attention", argument, tensor)

    def site(self, module: str, where: str, argument: int, tensor: int) -> Site:
        return Site.model_validate(
            {"module": self.relative(module), "where": where, "argument": argument, "tensor": self.ids[tensor]}
        )

    def relative(self, name: str) -> str:
        """A module's or parameter's name within the block; the full one in prologue and epilogue."""
        return name.removeprefix(self.part.prefix).removeprefix(".") if self.part.prefix else name
