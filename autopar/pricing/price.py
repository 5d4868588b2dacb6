"""One block of a class on one rank, one micro-batch: seconds, bytes, collectives.

    overhead of an action = max(0, host seconds to issue its kernels - device seconds): the device waits for the host
    saved bytes           = each saved tensor in the placement in which backward reads it
    recompute             = forward kernels run again, and the collectives between them

A layout is compiled once per division and kernels, then priced at any micro-batch, sequence length and degree.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal

from autopar.documents.graph import Graph, RecomputeOption
from autopar.documents.plan import Collective
from autopar.pricing.amounts import Amounts, Floats, size_vector
from autopar.pricing.division import Division
from autopar.pricing.kernels import KernelList, Point
from autopar.pricing.layout import Layout, layout_of
from autopar.pricing.memory import output_amounts, parameter_amounts, saved_amounts, workspace_of
from autopar.pricing.movements import MovementList, Prices, repeated
from autopar.pricing.options import facts_of
from cost_models.compute import Kernels, element_bytes, host_seconds
from hardware_profiles.chip import Chip
from hardware_profiles.cluster import Group

REMEMBERED = 256
Mode = Literal["none", "selective", "full"]
MODES: dict[str, Mode] = {"none": "none", "full": "full"}
"""Modes by the name of the menu's entry; all others are selective."""


@dataclass(frozen=True)
class RecomputePrice:
    """One entry of a class's recompute menu, per micro-batch."""

    saved_bytes: float
    """Kept from forward to backward."""
    seconds: float
    """Forward run again before backward, collectives apart."""
    collectives: tuple[Collective, ...]
    mode: Mode
    keep: tuple[str, ...]
    live_bytes: float
    """What stands again while this block's backward runs, beyond `saved_bytes`."""
    overhead_seconds: float


@dataclass(frozen=True)
class BlockPrice:
    """One block on one rank, one micro-batch. Seconds of collectives stand in them, not in forward and backward."""

    forward_seconds: float
    backward_seconds: float
    forward_overhead_seconds: float
    backward_overhead_seconds: float
    forward_collectives: tuple[Collective, ...]
    backward_collectives: tuple[Collective, ...]
    recompute: dict[str, RecomputePrice]
    parameter_elements: float
    """Trainable, local."""
    frozen_elements: float
    parameter_tensors: int
    workspace_bytes: float
    """Peak of what backward holds beside saved tensors, parameters and their gradients."""
    output_bytes: float
    """Hidden state handed to the next block, local."""
    embedding_elements: float = 0.0
    """Of the trainable ones, those read by row (an embedding): their gradients are not a matmul's."""


def price_block(
    graph: Graph,
    class_name: str,
    division: Division,
    *,
    degree: int,
    micro_batch: int,
    seq_len: int,
    dtype: str,
    kernels: Kernels,
    chip: Chip,
    group: Group,
    sp: bool = False,
) -> BlockPrice:
    """Price one block of a class.

    Args:
        graph: the model.
        class_name: which class.
        division: how it is divided; `sp` must agree with its boundary.
        degree: ranks on the division's axis; the division must allow it (`divides`).
        micro_batch: sequences per micro-batch.
        seq_len: tokens per sequence on this rank's cp part.
        dtype: training dtype.
        kernels: eager, compiled or fused.
        chip: the device.
        group: what a collective on the axis sees (`Topology.strided`).
        sp: whether the boundary is divided on the sequence.

    """
    assert division.block_class == class_name, (division.block_class, class_name)
    assert sp == (division.boundary == "sequence"), "the division's boundary and sp differ"
    compiled = _compiled(graph, division, kernels)
    return compiled.price(size_vector_of(graph, micro_batch, seq_len), degree, dtype, chip, group)


class Compiled:
    """A layout with everything that does not depend on sizes worked out."""

    def __init__(self, graph: Graph, division: Division, kernels: Kernels) -> None:
        self.graph, self.division, self.kernels = graph, division, kernels
        self.layout: Layout = layout_of(graph, division)
        block_class = self.layout.block_class
        follows: dict[int, str | None] = {atom.id: atom.follows for atom in graph.indices}
        self.phases = {
            phase: KernelList([op for op in block_class.operators if op.phase == phase], self.layout, follows, kernels)
            for phase in ("forward", "backward")
        }
        axis = division.axis
        self.movements = {
            phase: MovementList([m for m in self.layout.movements if m.phase == phase], block_class, axis)
            for phase in ("forward", "backward")
        }
        self.again: dict[str, tuple[RecomputeOption, KernelList, MovementList, Amounts]] = {}
        for option in block_class.recompute:
            operators = [block_class.operator_by_id[number] for number in option.operators]
            moved = repeated(option, self.layout)
            self.again[option.name] = (
                option,
                KernelList(operators, self.layout, follows, kernels),
                MovementList(moved, block_class, axis),
                saved_amounts(option, self.layout, moved),
            )
        self.parameters = parameter_amounts(block_class, division)
        self.workspace = workspace_of(self.layout, self.phases["backward"])
        facts = facts_of(graph, division.block_class, division.boundary)
        self.output = output_amounts(block_class, facts.hidden_out, division)

    def price(self, sizes: Floats, degree: int, dtype: str, chip: Chip, group: Group) -> BlockPrice:
        """The price at a point."""
        # Tensors of fp8 training are kept in 16 bits: only products run in 8.
        known = _prices(group, chip)
        point = Point(sizes, degree, max(2.0, element_bytes(dtype)))
        seconds, overhead, collectives = {}, {}, {}
        for phase, kernel_list in self.phases.items():
            seconds[phase] = kernel_list.seconds(point, chip, dtype)
            collectives[phase] = self.movements[phase].price(point, known)
            overhead[phase] = self._overhead(kernel_list, seconds[phase], collectives[phase], chip)
        trainable, frozen, rows = self.parameters.evaluate(*point)
        return BlockPrice(
            forward_seconds=seconds["forward"],
            backward_seconds=seconds["backward"],
            forward_overhead_seconds=overhead["forward"],
            backward_overhead_seconds=overhead["backward"],
            forward_collectives=collectives["forward"],
            backward_collectives=collectives["backward"],
            recompute=self._recompute(point, chip, dtype, known),
            parameter_elements=float(trainable),
            frozen_elements=float(frozen),
            parameter_tensors=sum(parameter.trainable for parameter in self.layout.block_class.parameters),
            workspace_bytes=self.workspace.peak(point),
            output_bytes=float(self.output.evaluate(*point)[0]),
            embedding_elements=float(rows),
        )

    def _recompute(self, point: Point, chip: Chip, dtype: str, known: Prices) -> dict[str, RecomputePrice]:
        prices = {}
        whole = 0.0
        for name, (option, kernel_list, moved, saved) in self.again.items():
            bytes_ = float(saved.evaluate(*point)[0])
            whole = bytes_ if name == "none" else max(whole, bytes_)
            seconds = kernel_list.seconds(point, chip, dtype)
            collectives = moved.price(point, known)
            prices[name] = RecomputePrice(
                saved_bytes=bytes_,
                seconds=seconds,
                collectives=collectives,
                mode=MODES.get(name, "selective"),
                keep=option.keep,
                live_bytes=max(0.0, whole - bytes_),
                overhead_seconds=self._overhead(kernel_list, seconds, collectives, chip),
            )
        return prices

    def _overhead(
        self, kernel_list: KernelList, seconds: float, collectives: tuple[Collective, ...], chip: Chip
    ) -> float:
        device = seconds + sum(item.seconds for item in collectives)
        return max(0.0, float(host_seconds(chip, kernel_list.launches, self.kernels)) - device)


_COMPILED: OrderedDict[tuple[int, int, str], Compiled] = OrderedDict()


def _compiled(graph: Graph, division: Division, kernels: Kernels) -> Compiled:
    """Compiled layouts by identity; each keeps its graph and division alive, so that an id is not used again."""
    key = (id(graph), id(division), kernels)
    if key not in _COMPILED:
        _COMPILED[key] = Compiled(graph, division, kernels)
        if len(_COMPILED) > REMEMBERED:
            _COMPILED.popitem(last=False)
    _COMPILED.move_to_end(key)
    return _COMPILED[key]


_PRICES: OrderedDict[tuple[int, int], Prices] = OrderedDict()


def _prices(group: Group, chip: Chip) -> Prices:
    """Prices of collectives by identity of group and chip, kept like compiled layouts."""
    key = (id(group), id(chip))
    if key not in _PRICES:
        _PRICES[key] = Prices(group, chip)
        if len(_PRICES) > REMEMBERED:
            _PRICES.popitem(last=False)
    return _PRICES[key]


def size_vector_of(graph: Graph, micro_batch: int, seq_len: int) -> Floats:
    """Atom sizes at a micro-batch and sequence length, by atom id."""
    return size_vector(graph.sizes(micro_batch, seq_len))
