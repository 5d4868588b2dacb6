"""The ways in which one forward operator can run on an axis: which placements it takes and which it gives.

    whole        REPLICATE in, REPLICATE out                      pass shared   SHARED in, SHARED out
    divide d     tensors with d: shard; without: SHARED in        pass partial  PARTIAL in, PARTIAL out (linear only)
                 written without d (d was summed): PARTIAL
    composite    a dim that is otherwise whole, with collectives inside the operator; replicated_kv: query heads only

An operator that reads a block matrix divides a dim of that matrix or runs whole: dividing only its tokens would gather
the weight on this axis, which is ZeRO-3, not this axis's business. The batch is never divided here, the sequence only under a
sequence-divided boundary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import get_args

from autopar.documents.graph import BlockClass, Composite, Graph, LocalDim, Operator
from autopar.pricing.division import (
    PARTIAL,
    PASS_PARTIAL,
    PASS_SHARED,
    REPLICATE,
    SHARED,
    Boundary,
    CollectiveKind,
    Placement,
    shard,
)
from autopar.pricing.kinds import LINEAR, base_name, kind_of

CONTEXT_COMPOSITES = frozenset(("all_gather_kv", "ulysses"))
"""Composites of the sequence: they belong to the cp axis."""
VOCABULARY = "vocab_parallel"
REPLICATED_KV = "replicated_kv"
"""More ranks than key and value heads: query heads divided, keys and values whole with partial gradients."""


@dataclass(frozen=True)
class Option:
    """One way to run an operator: read tensor -> placement, written tensor -> placement."""

    choice: str | None
    reads: dict[int, Placement]
    writes: dict[int, Placement]
    dim: LocalDim | None = None
    composite: Composite | None = None
    inside: tuple[tuple[str, CollectiveKind, int], ...] = ()
    """Collectives inside the operator: (phase, kind, tensor)."""


@dataclass(frozen=True)
class Facts:
    """What a class's options depend on: computed once per class and boundary."""

    block_class: BlockClass
    boundary: Boundary
    follows: dict[int, str | None]
    """Atom -> batch, sequence or None."""
    constants: frozenset[int]
    """Tensors without a gradient: whole is whole."""
    parameters: frozenset[int]
    matrices: frozenset[int]
    hidden_in: int | None
    """The hidden state that enters (None for a prologue)."""
    carried: tuple[int, ...] = ()
    """Further inputs that carry a gradient (an encoder's output): placed like the boundary."""
    hidden_out: int | None = None
    vocabulary: frozenset[int] = frozenset()
    """Atoms that need not divide evenly."""
    uncut: frozenset[int] = frozenset()
    """Atoms that attention holds whole: head dims."""

    def boundary_placement(self, tensor: int) -> Placement:
        """Placement of a hidden state at the class's boundary."""
        if self.boundary == "sequence":
            for number, dim in enumerate(self.block_class.tensor_by_id[tensor].dims):
                for place, atom in enumerate(dim):
                    if self.follows[atom] == "sequence":
                        return shard(number, place)
        return REPLICATE


def facts_of(graph: Graph, class_name: str, boundary: Boundary) -> Facts:
    """Facts of a class under a boundary."""
    block_class = graph.class_by_name[class_name]
    tensors = block_class.tensor_by_id
    follows: dict[int, str | None] = {atom.id: atom.follows for atom in graph.indices}
    parameters = frozenset(tensor.id for tensor in block_class.tensors if tensor.parameter is not None)
    views = _views_of(block_class, parameters)
    matrices = frozenset(t for t in views if len(tensors[t].dims) >= 2)
    prologues = {chain.prologue for chain in graph.chains}
    epilogues = {chain.epilogue for chain in graph.chains}
    inputs = block_class.inputs
    hidden_in = inputs[0] if inputs and class_name not in prologues and floating(tensors[inputs[0]].dtype) else None
    carried_dims = [edge.dims for edge in graph.edges if edge.gradient]
    carried = tuple(t for t in inputs if t != hidden_in and tensors[t].dims in carried_dims)
    batched = [t for t in carried if any(follows[atom] == "batch" for atom in tensors[t].atoms)]
    live = set(parameters) | set(carried) | ({hidden_in} if hidden_in is not None else set())
    for operator in block_class.operators:
        if operator.phase == "forward" and live.intersection(operator.reads):
            live.update(tensor for tensor in operator.writes if floating(tensors[tensor].dtype))
    return Facts(
        block_class=block_class,
        boundary=boundary,
        follows=follows,
        constants=frozenset(tensors) - live,
        parameters=frozenset(views),
        matrices=matrices,
        hidden_in=hidden_in,
        carried=tuple(batched),
        hidden_out=None if class_name in epilogues else _hidden_state(block_class, follows),
        vocabulary=frozenset(_atoms(block_class, _is_vocabulary)),
        uncut=frozenset(atom for atom in _atoms(block_class, _is_head_dim) if follows[atom] is None),
    )


def _hidden_state(block_class: BlockClass, follows: dict[int, str | None]) -> int | None:
    """The output that goes from block to block: the first that grows with the batch."""
    tensors = [block_class.tensor_by_id[output] for output in block_class.outputs]
    growing = [t.id for t in tensors if floating(t.dtype) and any(follows[atom] == "batch" for atom in t.atoms)]
    return growing[0] if growing else None


def _atoms(block_class: BlockClass, wanted: Callable[[Operator, LocalDim], bool]) -> Iterator[int]:
    """Atoms of every local dim that answers a description."""
    tensors = block_class.tensor_by_id
    for operator in block_class.operators:
        for dim in operator.local_dims:
            if wanted(operator, dim):
                yield from (tensors[p.tensor].dims[p.dim][p.atom] for p in (*dim.reads, *dim.writes))


def _is_vocabulary(operator: Operator, dim: LocalDim) -> bool:
    return any(composite.name == VOCABULARY for composite in dim.composites)


def _is_head_dim(operator: Operator, dim: LocalDim) -> bool:
    return kind_of(operator) == "attention" and dim.role == "whole"


def floating(dtype: str) -> bool:
    """Whether a tensor of this dtype carries a gradient."""
    return dtype == "compute" or dtype.startswith(("float", "bfloat", "complex"))


def _views_of(block_class: BlockClass, tensors: frozenset[int]) -> set[int]:
    """The tensors and everything that is only a view of them, in forward."""
    views = set(tensors)
    for operator in block_class.operators:
        if operator.phase == "forward" and kind_of(operator) == "view" and views.issuperset(operator.reads):
            views.update(operator.writes if operator.reads else ())
    return views


def options_of(operator: Operator, facts: Facts) -> list[Option]:
    """Every way to run a forward operator."""
    options = [_uniform(operator, facts, None, REPLICATE)]
    constant = all(tensor in facts.constants for tensor in operator.writes)
    stored = all(tensor in facts.parameters for tensor in operator.reads) and bool(operator.reads)
    matrix = bool(facts.matrices.intersection(operator.reads)) and not stored
    if not constant and not stored:
        options.append(_uniform(operator, facts, PASS_SHARED, SHARED))
        if base_name(operator.name) in LINEAR:
            options.append(_uniform(operator, facts, PASS_PARTIAL, PARTIAL))
    for dim in operator.local_dims:
        if not _offered(dim, facts) or (matrix and not _divides_matrix(dim, operator, facts)):
            continue
        if dim.role != "whole":
            option = _divided(operator, facts, dim)
            if option is not None:
                options.append(option)
        for composite in dim.composites:
            if composite.name not in CONTEXT_COMPOSITES:
                options += _composite(operator, facts, dim, composite)
    return options


def _offered(dim: LocalDim, facts: Facts) -> bool:
    tensors = facts.block_class.tensor_by_id
    follows = {facts.follows[tensors[p.tensor].dims[p.dim][p.atom]] for p in (*dim.reads, *dim.writes)}
    if not (dim.reads or dim.writes) or follows & {"batch", "tokens"}:
        return False
    return facts.boundary == "sequence" or "sequence" not in follows


def _divides_matrix(dim: LocalDim, operator: Operator, facts: Facts) -> bool:
    held = {position.tensor for position in dim.reads}
    return all(tensor in held for tensor in operator.reads if tensor in facts.matrices)


def _uniform(operator: Operator, facts: Facts, choice: str | None, placement: Placement) -> Option:
    fixed = facts.constants | facts.parameters
    return Option(
        choice,
        {tensor: REPLICATE if tensor in fixed else placement for tensor in operator.reads},
        {tensor: REPLICATE if tensor in fixed else placement for tensor in operator.writes},
    )


def _divided(operator: Operator, facts: Facts, dim: LocalDim) -> Option | None:
    held, given = _positions(dim)
    if held is None or given is None:
        return None
    return Option(
        dim.name,
        {tensor: held.get(tensor) or _without(tensor, facts) for tensor in operator.reads},
        {tensor: given.get(tensor) or (REPLICATE if tensor in facts.constants and dim.role != "summed" else PARTIAL)
         for tensor in operator.writes},
        dim,
    )  # fmt: skip


def _composite(operator: Operator, facts: Facts, dim: LocalDim, composite: Composite) -> list[Option]:
    """The composite with its collectives inside, and with a summed output left to the next site where it is one."""
    dim = divided_by(composite, dim, facts)
    held, given = _positions(dim)
    if held is None or given is None:
        return []
    choice = f"{dim.name}:{composite.name}"
    whole = REPLICATE if composite.collectives else SHARED
    reads = {tensor: held.get(tensor) or (REPLICATE if _fixed(tensor, facts) else whole) for tensor in operator.reads}
    writes = {tensor: given.get(tensor, REPLICATE) for tensor in operator.writes}
    collectives = inside(composite)
    options = [Option(choice, reads, writes, dim, composite, collectives)]
    summed = {
        tensor
        for phase, kind, tensor in collectives
        if (phase, kind) == ("forward", "all_reduce") and tensor in operator.writes and tensor not in given
    }
    if summed:
        rest = tuple(item for item in collectives if item[2] not in summed or item[0] != "forward")
        left = {tensor: PARTIAL if tensor in summed else placement for tensor, placement in writes.items()}
        options.append(Option(choice, reads, left, dim, composite, rest))
    return options


def inside(composite: Composite) -> tuple[tuple[str, CollectiveKind, int], ...]:
    """A composite's collectives: (phase, kind, tensor); -1 stands for one number a row."""
    kinds: dict[str, CollectiveKind] = {kind: kind for kind in get_args(CollectiveKind)}
    return tuple((phase, kinds[kind], tensor) for phase, kind, tensor in composite.collectives)


def divided_by(composite: Composite, dim: LocalDim, facts: Facts) -> LocalDim:
    """The places that a composite divides: replicated_kv only tensors with all query heads, [group][repeat]."""
    if composite.name != REPLICATED_KV:
        return dim
    tensors = facts.block_class.tensor_by_id
    places = (*dim.reads, *dim.writes)
    most = max(len(tensors[p.tensor].dims[p.dim]) for p in places)
    kept = [tuple(p for p in side if len(tensors[p.tensor].dims[p.dim]) == most) for side in (dim.reads, dim.writes)]
    return dim.model_copy(update={"reads": kept[0], "writes": kept[1]})


def _fixed(tensor: int, facts: Facts) -> bool:
    return tensor in facts.constants or tensor in facts.parameters


def _without(tensor: int, facts: Facts) -> Placement:
    return REPLICATE if _fixed(tensor, facts) else SHARED


def _positions(dim: LocalDim) -> tuple[dict[int, Placement] | None, dict[int, Placement] | None]:
    """Tensor -> shard, for reads and writes; None where a tensor holds the dim twice."""
    found: list[dict[int, Placement] | None] = []
    for positions in (dim.reads, dim.writes):
        placements = {position.tensor: shard(position.dim, position.atom) for position in positions}
        found.append(placements if len(placements) == len(positions) else None)
    return found[0], found[1]
