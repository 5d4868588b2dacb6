"""Bytes of one block on one rank: what is saved, what stands for a while in backward, parameters, output."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from autopar.documents.graph import BYTES_PER_ELEMENT, BlockClass, RecomputeOption, Tensor
from autopar.pricing.amounts import Amounts
from autopar.pricing.division import Division
from autopar.pricing.kernels import KernelList, Point
from autopar.pricing.kinds import base_name, kind_of
from autopar.pricing.layout import Layout, Movement


def add_tensor(amounts: Amounts, owner: int, tensor: Tensor, divided: bool) -> None:
    """A tensor's bytes on one rank."""
    width = 1 if tensor.dtype == "compute" else BYTES_PER_ELEMENT[tensor.dtype]
    amounts.add(owner, tensor.atoms, coefficient=width, divided=divided, compute=tensor.dtype == "compute")


def saved_amounts(option: RecomputeOption, layout: Layout, repeated: Iterable[Movement]) -> Amounts:
    """Bytes an entry of the recompute menu keeps.

    Kept as backward reads it: torch's sequence parallelism keeps what was gathered, not the part. Where the gathering runs
    again, what was there before it is kept.
    """
    before = {layout.storage[movement.tensor] for movement in repeated if movement.tensor >= 0}
    amounts = Amounts(1)
    for number in option.saved:
        tensor = layout.block_class.tensor_by_id[number]
        storage = layout.storage[number]
        produced = {layout.placements[number].divided} if number in layout.placements else {False}
        for divided in produced if storage in before else layout.kept.get(storage, produced):
            add_tensor(amounts, 0, tensor, divided)
    return amounts


def parameter_amounts(block_class: BlockClass, division: Division) -> Amounts:
    """Elements on one rank: trainable, frozen, and trainable ones read by row."""
    rows = {tensor for op in block_class.operators if base_name(op.name) == "embedding" for tensor in op.reads[:1]}
    amounts = Amounts(3)
    for parameter in block_class.parameters:
        if parameter.tensor is None:
            amounts.add(0 if parameter.trainable else 1, (), coefficient=parameter.elements)
            continue
        atoms = block_class.tensor_by_id[parameter.tensor].atoms
        divided = division.placements[parameter.tensor].divided
        amounts.add(0 if parameter.trainable else 1, atoms, divided=divided)
        if parameter.trainable and parameter.tensor in rows:
            amounts.add(2, atoms, divided=divided)
    return amounts


def output_amounts(block_class: BlockClass, hidden: int | None, division: Division) -> Amounts:
    """Bytes of the hidden state as it leaves."""
    amounts = Amounts(1)
    if hidden is not None:
        add_tensor(amounts, 0, block_class.tensor_by_id[hidden], division.boundary == "sequence")
    return amounts


class Workspace:
    """Gradients and temporaries alive over the backward operators."""

    def __init__(self, count: int, steps: int) -> None:
        self.amounts = Amounts(count)
        self.born = np.zeros(count, dtype=np.intp)
        self.dies = np.zeros(count, dtype=np.intp)
        self.steps = steps

    def peak(self, point: Point) -> float:
        """The most bytes alive at once."""
        if not self.steps or not len(self.born):
            return 0.0
        sizes = self.amounts.evaluate(*point)
        alive = np.bincount(self.born, weights=sizes, minlength=self.steps + 1)
        alive -= np.bincount(self.dies + 1, weights=sizes, minlength=self.steps + 1)[: self.steps + 1]
        return float(np.cumsum(alive).max())


def workspace_of(layout: Layout, backward: KernelList) -> Workspace:
    """Liveness of what backward makes: from the operator that writes a storage to the last that reads it."""
    operators = [op for op in layout.block_class.operators if op.phase == "backward"]
    forward = {t for op in layout.block_class.operators if op.phase == "forward" for t in (*op.reads, *op.writes)}
    hidden = set(backward.inside_kernels())
    storage = layout.storage
    place = {op.id: step for step, op in enumerate(operators)}
    last: dict[int, int] = {}
    first: dict[int, tuple[int, int, bool]] = {}
    for step, operator in enumerate(operators):
        for tensor in operator.reads:
            last[storage[tensor]] = step
            if tensor not in forward:
                first.setdefault(storage[tensor], (0, tensor, layout.read[operator.id, tensor]))
        if kind_of(operator) != "view":
            for tensor in operator.writes:
                first[storage[tensor]] = (step, tensor, layout.placements[tensor].divided)
    made = [(root, *item) for root, item in first.items() if root not in forward and root not in hidden]
    gathered = [m for m in layout.movements if m.phase == "backward" and m.kind == "all_gather" and m.tensor >= 0]
    workspace = Workspace(len(made) + len(gathered), len(operators) + 1)
    for owner, (root, step, tensor, divided) in enumerate(made):
        add_tensor(workspace.amounts, owner, layout.block_class.tensor_by_id[tensor], divided)
        workspace.born[owner], workspace.dies[owner] = step, max(step, last.get(root, step))
    for owner, movement in enumerate(gathered, start=len(made)):
        add_tensor(workspace.amounts, owner, layout.block_class.tensor_by_id[movement.tensor], False)
        step = place[movement.before]
        workspace.born[owner], workspace.dies[owner] = step, max(step, last.get(storage[movement.tensor], step))
    return workspace
