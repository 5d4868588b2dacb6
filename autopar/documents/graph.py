"""The Graph: one training step of a model as operators over indices, without torch.

    tensor dim      = a list of atoms, outer to inner, e.g. [batch][sequence] after a flatten
    operator cost   = sum over terms of coefficient * product of the sizes of the term's atoms
    block class     = blocks with identical graphs; operators and tensors are nested in their class
    chain           = a ModuleList of blocks, in order, with its prologue (embedding) and epilogue (head, loss)

Sizes at another micro-batch or sequence length follow from the atoms that `follows` names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from math import prod
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from autopar.documents import graph_checks
from autopar.documents.base import Amount, Count, Document
from hardware_profiles.schema import Schema

BYTES_PER_ELEMENT = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
    "complex64": 8, "complex128": 16,
}  # fmt: skip


class Atom(Schema):
    """The smallest piece of a dim that is never split further; `size` is the captured one."""

    id: int
    size: Annotated[int, Field(ge=0)]
    name: str
    follows: Literal["batch", "sequence", "tokens"] | None = None
    """The workload size this atom is proportional to (tokens: batch times sequence); None: fixed by the model."""
    plus: int = 0
    """What is added to the proportional part: 1 for keys with a learned sink beside the sequence, -1 for shifted labels."""


class Term(Schema):
    """``coefficient * prod(sizes of atoms)``; an atom may stand twice (query and key positions)."""

    coefficient: Amount
    atoms: tuple[int, ...] = ()

    def value(self, sizes: Mapping[int, float]) -> float:
        """The term at the given atom sizes."""
        return self.coefficient * prod(sizes[atom] for atom in self.atoms)


class Tensor(Schema):
    """A tensor of one block class. `dtype` is ``compute`` where it follows the training dtype."""

    id: int
    dims: tuple[tuple[int, ...], ...]
    segments: dict[int, tuple[tuple[int, ...], ...]] = {}
    """dim -> the atoms of each part, where a dim concatenates unlike parts (fused QKV); `dims` then has one atom."""
    dtype: str = "compute"
    parameter: str | None = None
    """Name of the parameter relative to its block (prologue and epilogue: the full name)."""
    saved: bool = False
    """Kept from forward to backward; of the views of one storage exactly one is marked, parameters never."""

    @property
    def atoms(self) -> tuple[int, ...]:
        """All atoms, dim by dim."""
        return tuple(atom for dim in self.dims for atom in dim)

    def elements(self, sizes: Mapping[int, float]) -> float:
        """Number of elements at the given atom sizes."""
        return prod(sizes[atom] for atom in self.atoms)

    def bytes(self, sizes: Mapping[int, float], compute_bytes: int) -> float:
        """Bytes at the given sizes; `compute_bytes` per element of the training dtype."""
        return self.elements(sizes) * element_bytes(self.dtype, compute_bytes)


def element_bytes(dtype: str, compute_bytes: int) -> int:
    """Bytes of one element; ``compute`` stands for the training dtype."""
    return compute_bytes if dtype == "compute" else BYTES_PER_ELEMENT[dtype]


class Position(Schema):
    """Where an operator-local dim appears: the tensor, its dim, and which atom within that dim."""

    tensor: int
    dim: int
    atom: int = 0


class Composite(Schema):
    """A way to divide a `whole` dim all the same, at the price of collectives inside the operator.

    `collectives` are (phase, kind, tensor whose full bytes travel).
    """

    name: str
    """E.g. vocab_parallel, all_gather_kv, ulysses, replicated_kv."""
    collectives: tuple[tuple[Literal["forward", "backward"], str, int], ...] = ()


class LocalDim(Schema):
    """A dim of one operator: one letter of its einsum.

    parallel: appears in the writes; summed: contracted, dividing it leaves a partial sum; whole: not divided.
    """

    name: str
    role: Literal["parallel", "summed", "whole"]
    reads: tuple[Position, ...] = ()
    writes: tuple[Position, ...] = ()
    composites: tuple[Composite, ...] = ()


class Operator(Schema):
    """One aten operator (or one routed attention call) in execution order."""

    id: int
    phase: Literal["forward", "backward"]
    name: str
    """aten name, e.g. ``aten.mm``; ``autopar.attention`` for a routed attention call."""
    module: str = ""
    """FQN within the block; empty for the block itself."""
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    local_dims: tuple[LocalDim, ...] = ()
    model_flops: tuple[Term, ...] = ()
    """Matmuls and convolutions only, full attention, backward twice forward: for MFU and closed forms."""
    executed_flops: tuple[Term, ...] = ()
    """What kernels do (causal skips, flash backward 2.5x): this is priced."""
    traffic: tuple[tuple[str, Term], ...] | None = None
    """(dtype, elements) moved through memory; None: all reads and writes once. Views move nothing: an empty tuple."""
    forward: int | None = None
    """For a backward operator: the id of the forward operator it differentiates, where known."""
    attributes: dict[str, int | float | bool | str] = {}
    """Facts that a kernel's price depends on, e.g. causal, head_dim, window."""


class Site(Schema):
    """A place where the runtime can put a collective: a tensor entering or leaving a module, or the attention call."""

    module: str
    where: Literal["input", "output", "attention"]
    argument: int = 0
    tensor: int
    """The tensor, as produced, whose placement may change here."""


class Parameter(Schema):
    """A parameter; `name` is relative to its block inside a class, full in `Graph.parameters`."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "compute"
    trainable: bool = True
    tensor: int | None = None

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)


class RecomputeOption(Schema):
    """One entry of a class's recompute menu: what stays and what is run again.

    `saved` are the tensors kept (block inputs included), `operators` the forward operators executed again. `keep` names
    the kept outputs as ``module#n``: the n-th aten operator, in forward order, within that module of the block.
    """

    name: str
    """none, full, or selective, selective-2, ... ordered by bytes freed per recomputed FLOP."""
    keep: tuple[str, ...] = ()
    saved: tuple[int, ...] = ()
    operators: tuple[int, ...] = ()


class BlockClass(Schema):
    """Blocks with identical graphs, or a prologue or epilogue (count 1)."""

    name: str
    tensors: tuple[Tensor, ...]
    operators: tuple[Operator, ...]
    inputs: tuple[int, ...] = ()
    """Tensors from other blocks; the first is the hidden state where there is one."""
    outputs: tuple[int, ...] = ()
    parameters: tuple[Parameter, ...] = ()
    sites: tuple[Site, ...] = ()
    recompute: tuple[RecomputeOption, ...] = ()

    @cached_property
    def tensor_by_id(self) -> dict[int, Tensor]:
        """Tensors by id."""
        return {tensor.id: tensor for tensor in self.tensors}

    @cached_property
    def operator_by_id(self) -> dict[int, Operator]:
        """Operators by id."""
        return {operator.id: operator for operator in self.operators}

    @cached_property
    def viewed(self) -> dict[int, int]:
        """Of a tensor that an operator which moves nothing made: the one it is made of."""
        return {op.writes[0]: op.reads[0] for op in self.operators if op.traffic == () and op.reads and op.writes}

    def saved_bytes(self, sizes: Mapping[int, float], compute_bytes: int) -> float:
        """Bytes kept from forward to backward by one undivided block without recompute."""
        return sum(tensor.bytes(sizes, compute_bytes) for tensor in self.tensors if tensor.saved)

    def flops(self, which: Literal["model", "executed"], sizes: Mapping[int, float], phase: str | None = None) -> float:
        """FLOPs of one undivided block, of one phase or of both."""
        return sum(
            term.value(sizes)
            for operator in self.operators
            if phase in (None, operator.phase)
            for term in (operator.model_flops if which == "model" else operator.executed_flops)
        )


class Run(Schema):
    """`count` consecutive blocks of one class, from block `first` of the chain."""

    block_class: str
    first: int
    count: int


class Chain(Schema):
    """A ModuleList: its blocks in order and what is fixed to its ends."""

    name: str
    """FQN of the ModuleList."""
    modules: tuple[str, ...]
    """FQN of every block; its length is the number of blocks."""
    runs: tuple[Run, ...]
    prologue: str | None = None
    epilogue: str | None = None

    @property
    def count(self) -> int:
        """Number of blocks."""
        return len(self.modules)

    def block_class_of(self, block: int) -> str:
        """The class of a block, 0-based."""
        for run in self.runs:
            if run.first <= block < run.first + run.count:
                return run.block_class
        raise IndexError(block)


class Edge(Schema):
    """A tensor from one block to a later one that is not its neighbour; a pipeline cut between them pays for it.

    Ends are ``chain:block``, ``chain:prologue`` or ``chain:epilogue``; `to_last` is the furthest reader.
    """

    dims: tuple[tuple[int, ...], ...]
    dtype: str = "compute"
    source: str
    to_first: str
    to_last: str
    gradient: bool = False
    recomputable: bool = False
    """Every stage can compute it from the inputs (rotary tables, masks), so a cut costs nothing."""


class Note(Schema):
    """Something a reader of the plan must know about the model."""

    kind: Literal["no_rule", "unresolved", "mixes_batch", "unrolls_sequence", "assumption", "other"]
    where: str
    message: str


class ModelInfo(Schema):
    """Which model; `hash` covers parameters and structure, not the file's text."""

    spec: str
    hash: str
    parameters: int
    """Elements, tied ones counted once."""


class Captured(Schema):
    """Sizes at which the capture ran."""

    batch: Count
    seq: Count
    dtype: str = "bfloat16"


class Graph(Document):
    """A captured training step."""

    kind: ClassVar[str] = "graph"
    version: ClassVar[int] = 1

    format: str = "autopar-graph/1"
    model: ModelInfo
    captured: Captured
    indices: tuple[Atom, ...]
    block_classes: tuple[BlockClass, ...]
    chains: tuple[Chain, ...]
    edges: tuple[Edge, ...] = ()
    parameters: tuple[Parameter, ...] = ()
    """Every parameter by its full name, tied ones once under their first name."""
    tied: tuple[tuple[str, ...], ...] = ()
    """Groups of full names that are one parameter."""
    notes: tuple[Note, ...] = ()

    def contradictions(self) -> Iterator[str]:
        """References to what is not in the graph."""
        return graph_checks.contradictions(self, ("compute", *BYTES_PER_ELEMENT))

    @cached_property
    def class_by_name(self) -> dict[str, BlockClass]:
        """Block classes by name."""
        return {block_class.name: block_class for block_class in self.block_classes}

    @cached_property
    def class_counts(self) -> dict[str, int]:
        """How often each class occurs in the model, prologues and epilogues included."""
        counts: dict[str, int] = {}
        for chain in self.chains:
            for end in (chain.prologue, chain.epilogue):
                if end is not None:
                    counts[end] = counts.get(end, 0) + 1
            for run in chain.runs:
                counts[run.block_class] = counts.get(run.block_class, 0) + run.count
        return counts

    def length(self, asked: int | None) -> int:
        """Tokens of a sequence where `asked` may be given; 1 for a model whose sizes follow no sequence."""
        return (asked or self.captured.seq) if self.captured.seq > 1 else 1

    def sizes(self, micro_batch: int | None = None, seq: int | None = None) -> dict[int, int]:
        """Atom sizes at a micro-batch (sequences) and sequence length (tokens); default: as captured."""
        now = {"batch": micro_batch or self.captured.batch, "sequence": seq or self.captured.seq}
        then = {"batch": self.captured.batch, "sequence": self.captured.seq}
        for sizes in (now, then):
            sizes["tokens"] = sizes["batch"] * sizes["sequence"]
        return {
            atom.id: atom.size
            if atom.follows is None
            else (atom.size - atom.plus) * now[atom.follows] // then[atom.follows] + atom.plus
            for atom in self.indices
        }

    def flops(self, which: Literal["model", "executed"], batch: int, seq: int, phase: str | None = None) -> float:
        """FLOPs of a forward and backward pass (or one phase) of the whole model over `batch` sequences."""
        sizes = self.sizes(batch, seq)
        return sum(
            count * self.class_by_name[name].flops(which, sizes, phase) for name, count in self.class_counts.items()
        )
