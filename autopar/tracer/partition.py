"""A recording divided among blocks and the ends of their chains."""

from __future__ import annotations

from dataclasses import dataclass, field

from autopar.tracer.blocks import BlockList
from autopar.tracer.recording import OperatorRecord, Recording

WHOLE_MODEL = "model"


@dataclass
class Part:
    """What one block, or the prologue or epilogue of a chain, executed; `prefix` is the block's module name."""

    name: str
    prefix: str
    operators: list[OperatorRecord] = field(default_factory=list)
    saved: set[int] = field(default_factory=set)
    """Tensors (the first of their storage) that autograd keeps for this part's backward."""


@dataclass
class Partition:
    """Parts by name; `owner` says which part an operator belongs to."""

    lists: list[BlockList]
    parts: dict[str, Part] = field(default_factory=dict)
    owner: dict[int, str] = field(default_factory=dict)

    def ends(self, number: int) -> tuple[str | None, str | None]:
        """Prologue and epilogue of a chain, None where nothing ran."""
        first = prologue_name(number)
        last = "epilogue" if number == len(self.lists) - 1 else None
        return (first if first in self.parts else None), (last if last in self.parts else None)


def prologue_name(number: int) -> str:
    """The name of the part before a chain."""
    return f"prologue{number}" if number else "prologue"


def partition(recording: Recording, lists: list[BlockList]) -> Partition:
    """Give every operator and every saved tensor to a part."""
    found = Partition(lists)
    where = _Where(lists)
    recent = where.outside()
    for operator in recording.operators:
        if operator.phase == "forward":
            recent = where.of(operator.module)
        elif operator.forward is not None:
            recent = found.owner[operator.forward]
        found.owner[operator.id] = recent
        part = found.parts.setdefault(recent, Part(recent, recent if recent in where.chain_of else ""))
        part.operators.append(operator)
    _assign_saved(recording, found, where)
    return found


def _assign_saved(recording: Recording, found: Partition, where: _Where) -> None:
    writer, readers = _by_storage(recording, found)
    for tensor in recording.tensors.values():
        if tensor.saved_by is None:
            continue
        module, number = tensor.saved_by
        owner = where.enclosing(module)
        blocks = [part for part in readers.get(tensor.storage, ()) if part in where.chain_of]
        made_in = writer.get(tensor.storage, prologue_name(0))
        if len(blocks) > 1 and made_in not in where.chain_of:
            # Blocks share it (rotary tables, masks, an encoder's output): kept once, where it was made.
            owner = made_in
        elif owner is None:
            # Outputs are kept after their operator ran, inputs before: take the one of the two that is no block's.
            near = [found.owner[n] for n in (number - 1, number) if n in found.owner]
            owner = next((name for name in near if name not in where.chain_of), None)
        if owner in found.parts:
            found.parts[owner].saved.add(tensor.id)


def _by_storage(recording: Recording, found: Partition) -> tuple[dict[int, str], dict[int, set[str]]]:
    """Which part first wrote a storage in forward, and which parts read it."""
    writer: dict[int, str] = {}
    readers: dict[int, set[str]] = {}
    for operator in recording.operators:
        if operator.phase == "forward":
            for tensor in operator.reads:
                readers.setdefault(recording.tensors[tensor].storage, set()).add(found.owner[operator.id])
            for tensor in operator.writes:
                writer.setdefault(recording.tensors[tensor].storage, found.owner[operator.id])
    return writer, readers


class _Where:
    """Follows execution through the chains."""

    def __init__(self, lists: list[BlockList]) -> None:
        self.lists = lists
        self.chain_of = {module: number for number, blocks in enumerate(lists) for module in blocks.modules}
        self.left = [{module for block, module in enumerate(blocks.modules) if blocks.runs(block)} for blocks in lists]
        self.last: str | None = None

    def of(self, module: str) -> str:
        """The part of a forward operator that ran in `module`."""
        block = self.enclosing(module)
        if block is None:
            return self.outside()
        self.left[self.chain_of[block]].discard(block)
        self.last = block
        return block

    def enclosing(self, module: str) -> str | None:
        """The block that a module lies in."""
        name = module
        while name and name not in self.chain_of:
            name = name.rpartition(".")[0]
        return name or None

    def outside(self) -> str:
        """The part of an operator outside all blocks: before the next chain, after the last, or with the block before it."""
        if not self.lists:
            return WHOLE_MODEL
        if self.last is None:
            return prologue_name(0)
        chain = self.chain_of[self.last]
        if self.left[chain]:
            return self.last
        return prologue_name(chain + 1) if chain + 1 < len(self.lists) else "epilogue"
