"""What each forward operator of a block class may do over the tp axis.

Divide one of its local dims, parallel or summed (a whole one where a composite divides it all the same); or run whole, with
whole gradients (R) or with a rank's own share of them (R*). An option says in which state every read and write then is.

The batch is not offered (that is dp). A dim is divided along its outermost index only, batch aside: what a rank holds is
then contiguous. Matrices are stored divided, unless they may stay whole; small ones may be whole within the class's limit
(`Options.limit`), and all of a module whose code accepts no part of its tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autopar.documents.graph import BlockClass, Graph, LocalDim, Operator
from autopar.planner.linear import shares_of
from autopar.planner.sites import entries, within
from autopar.pricing.division import (
    PARTIAL,
    WHOLE,
    WHOLE_PARTIAL_GRADIENT,
    Boundary,
    State,
    divided_atom,
    is_view,
    position_state,
)

CARRIED_OUT = ("vocab_parallel",)
"""Composites that the runtime carries out."""
LEAST_DIVIDED = 0.9
"""Of a class's elements in matrices: below this share a division over tp saves too little memory to be one."""
LOOKUP = "aten.embedding"
"""The operator whose matrix may be divided along its rows: each rank then looks up its own, the others are zeros."""


@dataclass(frozen=True)
class Option:
    """One way to run an operator: the states of its reads and writes."""

    dim: int | None
    reads: dict[int, State]
    writes: dict[int, State]
    share: float
    composite: str = ""


class Options:
    """A block class at one degree and boundary, with the options of every forward operator."""

    def __init__(
        self,
        graph: Graph,
        class_name: str,
        boundary: Boundary,
        degree: int,
        seq_len: int,
        may_stay_whole: bool,
        pinned: Mapping[str, State],
        loss_parallel: bool,
        whole_prologue: bool = False,
        whole_modules: frozenset[str] = frozenset(),
    ) -> None:
        self.block_class: BlockClass = graph.class_by_name[class_name]
        self.boundary, self.degree = boundary, degree
        self.may_stay_whole, self.pinned, self.loss_parallel = may_stay_whole, pinned, loss_parallel
        self.whole_modules = whole_modules
        self.entries = entries(graph, class_name)
        self.divides_sequence = boundary == "sequence" and not (whole_prologue and self.entries)
        self.follows = {atom.id: atom.follows for atom in graph.indices}
        self.sizes = graph.sizes(1, seq_len)
        self.forward = [operator for operator in self.block_class.operators if operator.phase == "forward"]
        self.learned = _learned(graph, self.block_class, self.forward)
        self.writers = {tensor: operator for operator in self.forward for tensor in operator.writes}
        self.writer = {tensor: operator.id for tensor, operator in self.writers.items()}
        self.summable = self._summable()
        self.limit = (1 - LEAST_DIVIDED) * self._elements_to_divide()
        """Of elements in matrices that may be whole because it is cheaper."""
        self.of = {
            operator.id: [option for option in self._options(operator) if self._agrees(option)]
            for operator in self.forward
        }

    def _summable(self) -> set[int]:
        """Tensors that may hold a share of a sum: results of contractions and lookups, and of what is linear in them."""
        found: set[int] = set()
        writers: dict[int, Operator] = {}
        for operator in self.forward:
            sums = bool(operator.model_flops) and any(dim.role == "summed" for dim in operator.local_dims)
            sums = sums or operator.name == LOOKUP
            views = is_view(operator) and not found.isdisjoint(operator.reads[:1])
            if sums or views or any(shared <= found for shared in shares_of(operator, writers)):
                found |= set(operator.writes) & self.learned
            writers |= dict.fromkeys(operator.writes, operator)
        return found

    def _elements_to_divide(self) -> int:
        """Of matrices outside the modules that stay whole."""
        free = [read for op in self.forward if not self.must_be_whole(op) for read in op.reads]
        parameters = {parameter.tensor: parameter for parameter in self.block_class.parameters}
        return sum(parameters[read].elements for read in {*free} & parameters.keys() if len(parameters[read].shape) > 1)

    def must_be_whole(self, operator: Operator) -> bool:
        """Whether it is of a module that stays whole."""
        return any(within(operator.module, module) for module in self.whole_modules)

    def held_whole(self, operator: Operator, option: Option) -> list[int]:
        """Matrices that an option reads whole by choice."""
        if is_view(operator) or self.must_be_whole(operator):
            return []
        return [read for read, state in option.reads.items() if state.kind != "S" and self.is_matrix(read)]

    def _elements(self, tensors: list[int]) -> float:
        return sum(self.block_class.tensor_by_id[tensor].elements(self.sizes) for tensor in tensors)

    def _options(self, operator: Operator) -> Iterator[Option]:
        forced = self.must_be_whole(operator)
        free = is_view(operator) or self.may_stay_whole or forced
        stored = [] if free else [read for read in operator.reads if self.is_matrix(read)]
        if self._elements(stored) <= self.limit:
            yield self._whole(operator, WHOLE)
            yield self._whole(operator, WHOLE_PARTIAL_GRADIENT)
        if forced:
            return
        if is_view(operator) and operator.reads and self.learned.issuperset((operator.reads[0], *operator.writes)):
            yield self._whole(operator, PARTIAL)
        elif not stored:
            yield from self._of_shares(operator)
        for number, dim in enumerate(operator.local_dims):
            atom = divided_atom(self.block_class, dim)
            if atom is None or self.follows[atom] == "batch" or self.sizes[atom] % self.degree:
                continue
            if not self._is_outermost(dim):
                continue
            if self.follows[atom] == "sequence" and not (self.divides_sequence and self._learns(operator)):
                continue
            names = self._composites(operator, dim) if dim.role == "whole" else [""]
            for name in names:
                option = self._divided(operator, number, name)
                if self._storable(option) and all(option.reads[read].kind == "S" for read in stored):
                    yield option

    def _learns(self, operator: Operator) -> bool:
        """Whether a gradient passes through it; tables of positions and masks stay whole along the sequence."""
        return not self.learned.isdisjoint((*operator.reads, *operator.writes))

    def _composites(self, operator: Operator, dim: LocalDim) -> list[str]:
        """Composites offered; an embedding reads a matrix, a loss does not."""
        is_loss = not any(self.is_matrix(read) for read in operator.reads)
        if not (self.loss_parallel if is_loss else operator.name == LOOKUP):
            return []
        return [item.name for item in dim.composites if item.name in CARRIED_OUT]

    def _is_outermost(self, dim: LocalDim) -> bool:
        """Whether only batch stands outside it in every tensor: what a rank holds is then contiguous in a dim."""
        for spot in (*dim.reads, *dim.writes):
            outside = self.block_class.tensor_by_id[spot.tensor].dims[spot.dim][: spot.atom]
            if any(self.follows[atom] != "batch" for atom in outside):
                return False
        return True

    def _agrees(self, option: Option) -> bool:
        """Whether parameters that another class holds too are stored as it stores them."""
        for tensor, state in option.reads.items():
            wanted = self.pinned.get(self.block_class.tensor_by_id[tensor].parameter or "")
            if wanted is not None and (state.kind == "S" or wanted.kind == "S") and state != wanted:
                return False
        return True

    def _whole(self, operator: Operator, state: State) -> Option:
        reads = {read: state if read in self.learned else WHOLE for read in operator.reads}
        writes = {write: state if write in self.learned else WHOLE for write in operator.writes}
        return Option(None, reads, writes, 1.0)

    def _of_shares(self, operator: Operator) -> Iterator[Option]:
        """A linear operator run on shares of sums; what it meets them with then gets a share of its gradient."""
        for shared in shares_of(operator, self.writers):
            if not shared <= self.summable:
                continue
            reads = {
                read: PARTIAL if read in shared else WHOLE_PARTIAL_GRADIENT if read in self.learned else WHOLE
                for read in operator.reads
            }
            yield Option(None, reads, dict.fromkeys(operator.writes, PARTIAL), 1.0)

    def _divided(self, operator: Operator, number: int, composite: str) -> Option:
        dim = operator.local_dims[number]
        reads = {}
        for read in operator.reads:
            spot = position_state(dim, read, writes=False)
            reads[read] = spot or (WHOLE_PARTIAL_GRADIENT if read in self.learned else WHOLE)
        writes = {}
        for write in operator.writes:
            spot = position_state(dim, write, writes=True)
            # What a summed or composite dim leaves, where the dim itself is gone, is a share of a sum; summing one number
            # costs nothing worth a decision.
            is_number = not self.block_class.tensor_by_id[write].atoms
            writes[write] = spot or (PARTIAL if (dim.role == "summed" or composite) and not is_number else WHOLE)
        return Option(number, reads, writes, 1.0 / self.degree, composite)

    def _storable(self, option: Option) -> bool:
        """Parameters are divided only along the outermost atom of a dim: what a rank stores is then contiguous in it."""
        return all(
            state.kind != "S" or state.atom == 0
            for tensor, state in option.reads.items()
            if self.block_class.tensor_by_id[tensor].parameter is not None
        )

    def is_matrix(self, tensor: int) -> bool:
        """A parameter of several dims, or a view of one."""
        behind = [self.block_class.tensor_by_id[one] for one in self.behind(tensor)]
        return any(one.parameter is not None and len(one.dims) > 1 for one in behind)

    def behind(self, tensor: int) -> Iterator[int]:
        """A tensor and what it is a view of."""
        yield tensor
        writer = self.writer.get(tensor)
        while writer is not None and is_view(self.block_class.operator_by_id[writer]):
            tensor = self.block_class.operator_by_id[writer].reads[0]
            yield tensor
            writer = self.writer.get(tensor)

    def boundary_state(self, tensor: int) -> State:
        """Hidden states cross a boundary divided along the sequence, or whole; tables, masks and ids always whole."""
        found = self.block_class.tensor_by_id[tensor]
        spots = [
            State("S", dim, atom)
            for dim, atoms in enumerate(found.dims)
            for atom, number in enumerate(atoms)
            if self.follows[number] == "sequence"
        ]
        # What has two positions is a mask or a bias of pairs.
        return spots[0] if self.boundary == "sequence" and len(spots) == 1 and self._is_hidden(tensor) else WHOLE

    def _is_hidden(self, tensor: int) -> bool:
        """Whether it carries a gradient between blocks: features in floating point that follow the batch."""
        found = self.block_class.tensor_by_id[tensor]
        follows = {self.follows[atom] for atom in found.atoms}
        return found.dtype in ("compute", "float32", "float64") and {"batch", None} <= follows


def _learned(graph: Graph, block_class: BlockClass, forward: list[Operator]) -> set[int]:
    """Tensors that carry a gradient: hidden states, parameters, and what comes of them, here or in an earlier block.

    What is written into a view of a tensor comes to be in that tensor.
    """
    found = {tensor.id for tensor in block_class.tensors if tensor.parameter is not None}
    found |= {tensor for tensor in block_class.inputs[:1] if _is_floating(block_class, tensor)}
    edges = [(edge.dims, edge.dtype) for edge in graph.edges if edge.gradient]
    tensors = [block_class.tensor_by_id[tensor] for tensor in block_class.inputs[1:]]
    found |= {tensor.id for tensor in tensors if (tensor.dims, tensor.dtype) in edges}
    source: dict[int, int] = {}
    for operator in forward:
        if found & set(operator.reads):
            found |= {tensor for tensor in operator.writes if _is_floating(block_class, tensor)}
        if is_view(operator) and operator.reads:
            source |= dict.fromkeys(operator.writes, operator.reads[0])
        elif operator.name.endswith("_") and found & set(operator.writes):
            behind: int | None = operator.reads[0]
            while behind is not None:
                found.add(behind)
                behind = source.get(behind)
    return found


def _is_floating(block_class: BlockClass, tensor: int) -> bool:
    return block_class.tensor_by_id[tensor].dtype.startswith(("compute", "float", "bfloat", "complex"))
