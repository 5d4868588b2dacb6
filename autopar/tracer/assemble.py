"""From recordings to a Graph: block classes, chains, edges, parameters, notes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from torch import nn

from autopar.documents.graph import BlockClass, Captured, Chain, Edge, Graph, ModelInfo, Note, Parameter, Run
from autopar.tracer.batch_mixing import mixing_notes
from autopar.tracer.blocks import BlockList
from autopar.tracer.classes import Whole, build_class
from autopar.tracer.indices import Analysis, AtomTable, name_followers
from autopar.tracer.partition import WHOLE_MODEL, partition


def assemble(
    model: nn.Module,
    lists: list[BlockList],
    first: Analysis,
    second: Analysis,
    sizes: tuple[tuple[int, int], tuple[int, int]],
    dtype: str,
    spec: str,
) -> Graph:
    """The Graph of a model from its recording at ``sizes[0]`` = (batch, seq); `second` was recorded at ``sizes[1]``."""
    (batch, seq), (_, other_seq) = sizes
    used = [blocks for blocks in lists if any(call.module in blocks.modules for call in first.recording.calls)]
    divided = partition(first.recording, used)
    names = _names(model)
    trainable = {first_name: parameter.requires_grad for parameter, (first_name, *_) in names.items()}
    whole = Whole(first, divided, AtomTable(), dtype, trainable)
    classes, chains = _chains(whole, used)
    notes = list(_notes(first))
    if not lists:
        message = "no ModuleList of equal blocks was found, so there is nothing to cut a pipeline at"
        notes.append(Note(kind="other", where="model", message=message))
    notes += name_followers(whole.table, first, second, sizes)
    notes += mixing_notes(first, whole.table)
    if other_seq == seq:
        message = f"takes sequences of {seq} only: what follows the sequence length is not known"
        notes.append(Note(kind="unrolls_sequence", where="model", message=message))
    return Graph(
        model=model_info(model, spec),
        captured=Captured(batch=batch, seq=seq, dtype=dtype),
        indices=tuple(whole.table.atoms.values()),
        block_classes=tuple(classes.values()),
        chains=chains,
        edges=tuple(_edges(whole, used)) if used else (),
        parameters=tuple(
            Parameter(name=name, shape=tuple(p.shape), dtype=_dtype(p, dtype), trainable=p.requires_grad)
            for p, (name, *_) in names.items()
        ),
        tied=tuple(tuple(group) for group in names.values() if len(group) > 1),
        notes=tuple(notes),
    )


def _chains(whole: Whole, lists: list[BlockList]) -> tuple[dict[str, BlockClass], tuple[Chain, ...]]:
    """Block classes by name, equal blocks sharing one, and the chains made of them."""
    parts = whole.divided.parts
    classes: dict[str, BlockClass] = {}
    if not lists:
        classes[WHOLE_MODEL] = build_class(whole, parts[WHOLE_MODEL], WHOLE_MODEL)
        run = Run(block_class=WHOLE_MODEL, first=0, count=1)
        return classes, (Chain(name="", modules=("",), runs=(run,)),)
    names: dict[str, str] = {}
    chains = []
    for number, blocks in enumerate(lists):
        runs = []
        for repeats in blocks.repeats:
            if repeats.digest not in names:
                part = parts[blocks.modules[blocks.described_by(repeats.digest)]]
                name = names[repeats.digest] = _class_name(blocks.name, len(names))
                classes[name] = build_class(whole, part, name)
            runs.append(Run(block_class=names[repeats.digest], first=repeats.first, count=repeats.count))
        ends = whole.divided.ends(number)
        for end in ends:
            if end is not None:
                classes[end] = build_class(whole, parts[end], end)
        chains.append(
            Chain(name=blocks.name, modules=blocks.modules, runs=tuple(runs), prologue=ends[0], epilogue=ends[1])
        )
    return classes, tuple(chains)


def _class_name(container: str, number: int) -> str:
    return f"{container}.*" if number == 0 else f"{container}.*/{number}"


def _edges(whole: Whole, lists: list[BlockList]) -> Iterator[Edge]:
    """Tensors read by a part that does not follow the one that made them, in the order of execution.

    A block that stands for others reads for the last of them.
    """
    made, read = _traffic_between_parts(whole)
    order = {part: number for number, part in enumerate(whole.divided.parts)}
    learned = _depend_on_parameters(whole)
    ends = _End(lists)
    calls = [call for call in whole.found.recording.calls if call.inputs]
    hidden = {call.module: call.inputs[0] for call in calls if call.inputs[0] not in call.inputs[1:]}
    for tensor, readers in read.items():
        source = made[tensor]
        later = sorted(readers, key=order.__getitem__)
        neighbour = order[later[-1]] <= order[source] + 1
        # The neighbour may stand for blocks further on: each of those reads its own hidden state, but all else as it does.
        if neighbour and (tensor == hidden.get(later[-1]) or ends.last(later[-1]) == ends.first(later[-1])):
            continue
        record = whole.found.recording.tensors[tensor]
        yield Edge(
            dims=tuple(whole.table.ids(nodes) for nodes in whole.found.atoms_of(tensor)),
            dtype=whole.dtype(record),
            source=ends.first(source),
            to_first=ends.first(later[0]),
            to_last=ends.last(later[-1]),
            gradient=tensor in learned and "float" in record.dtype,
            recomputable=tensor not in learned,
        )


def _traffic_between_parts(whole: Whole) -> tuple[dict[int, str], dict[int, set[str]]]:
    """Who made every tensor in forward, and which other parts read it."""
    made: dict[int, str] = {}
    read: dict[int, set[str]] = {}
    for operator in whole.found.recording.operators:
        part = whole.divided.owner[operator.id]
        if operator.phase == "forward":
            for tensor in operator.reads:
                if made.get(tensor, part) != part:
                    read.setdefault(tensor, set()).add(part)
            made.update(dict.fromkeys(operator.writes, part))
    return made, read


class _End:
    """Names the ends of an edge: ``chain:block``, ``chain:prologue``, ``chain:epilogue``."""

    def __init__(self, lists: list[BlockList]) -> None:
        self.lists = lists
        self.place = {name: (blocks, number) for blocks in lists for number, name in enumerate(blocks.modules)}

    def first(self, part: str) -> str:
        """A part as the source or first reader."""
        if part in self.place:
            blocks, number = self.place[part]
            return f"{blocks.name}:{number}"
        if part == "epilogue":
            return f"{self.lists[-1].name}:epilogue"
        return f"{self.lists[int(part.removeprefix('prologue') or 0)].name}:prologue"

    def last(self, part: str) -> str:
        """A part as the last reader: the last block that it stands for."""
        if part not in self.place:
            return self.first(part)
        blocks, number = self.place[part]
        digest = blocks.digests[number]
        return f"{blocks.name}:{blocks.members[digest][-1] if number == blocks.described_by(digest) else number}"


def _depend_on_parameters(whole: Whole) -> set[int]:
    """Tensors computed, directly or not, from a parameter."""
    records = whole.found.recording.tensors
    learned = {tensor for tensor, record in records.items() if record.parameter is not None}
    for operator in whole.found.recording.operators:
        if learned.intersection(operator.reads):
            learned.update(operator.writes)
    return learned


def _notes(found: Analysis) -> Iterator[Note]:
    for module, message in dict.fromkeys(found.recording.assumed):
        yield Note(kind="assumption", where=module or "model", message=message)
    for name, module in found.without_rule.items():
        yield Note(kind="no_rule", where=module or "model", message=f"{name} has no rule and is kept whole")


def _names(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """All names of every parameter."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return names


def _dtype(parameter: nn.Parameter, compute: str) -> str:
    name = str(parameter.dtype).removeprefix("torch.")
    return "compute" if name == compute else name


def model_info(model: nn.Module, spec: str) -> ModelInfo:
    """Which model it is: its parameters and structure."""
    names = _names(model)
    return ModelInfo(spec=spec, hash=_hash(model, names), parameters=sum(p.numel() for p in names))


def _hash(model: nn.Module, names: dict[nn.Parameter, list[str]]) -> str:
    """A digest of parameters and structure, the same for any batch, sequence, dtype and file."""
    lines = [
        *(f"{' '.join(group)} {tuple(p.shape)} {p.requires_grad}" for p, group in names.items()),
        *(f"{name}: {type(module).__qualname__}" for name, module in model.named_modules()),
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
