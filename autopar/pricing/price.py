"""The one price list: a block class under a division of its indices, in seconds and bytes.

action        sum of its kernels' device seconds; what the host needs more than that is overhead
kernel        its operator's work over `degree` where the operator is divided, whole where not
backward      an operator of the backward pass is divided as its forward operator is, along the same index
saved bytes   a kept tensor over `degree` where every operator that keeps it sees it divided; a gathered copy counts whole
collectives   the division's conversions, and their adjoints on the way back
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import numpy as np

from autopar.documents.graph import BlockClass, Graph, Operator, RecomputeOption, Term
from autopar.documents.plan import Collective
from autopar.pricing.division import Division, divided_atom, is_view
from autopar.pricing.fusion import external_tensors, fusion_groups
from autopar.pricing.work import Amount, Work, work_of
from cost_models.collectives import Kind, collective_seconds
from cost_models.compute import (
    ATTENTION_KERNEL,
    HOST_FACTOR,
    Kernels,
    attention_seconds,
    element_bytes,
    gemm_seconds,
    host_seconds,
    pointwise_seconds,
)
from cost_models.executors import executor
from cost_models.overlap import overlap_fraction
from hardware_profiles.chip import Chip
from hardware_profiles.cluster import Group

VIEW_HOST_SHARE = 0.3
"""Host work of a view against that of an operator with a kernel."""


@dataclass(frozen=True)
class RecomputePrice:
    """One entry of the recompute menu: bytes kept per micro-batch, extra seconds in backward, collectives run again."""

    mode: Literal["none", "selective", "full"]
    keep: tuple[str, ...]
    saved_bytes: float
    seconds: float
    collectives: tuple[Collective, ...] = ()
    overhead_seconds: float = 0.0
    """Of the host, beyond the device's."""


@dataclass(frozen=True)
class BlockPrice:
    """One block of a class on one rank, for one micro-batch."""

    forward_seconds: float
    backward_seconds: float
    forward_overhead_seconds: float
    backward_overhead_seconds: float
    forward_collectives: tuple[Collective, ...]
    backward_collectives: tuple[Collective, ...]
    recompute: Mapping[str, RecomputePrice]
    parameter_elements: float
    """On this rank, trainable."""
    frozen_elements: float = 0.0
    expert_elements: float = 0.0
    """Of the trainable ones, those that are divided over ep."""
    workspace_bytes: float = 0.0
    """Most bytes of passing tensors alive at once in backward."""
    output_bytes: float = 0.0
    """What is handed to the next block."""


@dataclass(frozen=True)
class Setting:
    """What a price depends on beside the class and its division."""

    chip: Chip
    dtype: str
    kernels: Kernels
    degree: int
    group: Group
    seq_len: int
    executor: str = "autopar"
    """Whose habits (`cost_models.executors`)."""
    cp: int = 1
    """Ranks that share each sequence, and what they see of each other."""
    cp_group: Group | None = None
    ep: int = 1
    """Ranks that share the experts, what they see of each other, and the degree of tp inside an expert."""
    ep_group: Group | None = None
    etp: int = 1

    @property
    def activations(self) -> str:
        """The dtype of activations: linear layers alone compute in fp8 or less."""
        return self.dtype if element_bytes(self.dtype) >= 2 else "bf16"


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


def price_block(
    graph: Graph, class_name: str, division: Division, setting: Setting, micro_batches: Sequence[int]
) -> list[BlockPrice]:
    """The price of one block for each micro-batch size (sequences)."""
    return _Pricer(graph, class_name, division, setting, tuple(micro_batches)).prices()


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


class _Pricer:
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

    def prices(self) -> list[BlockPrice]:
        forward = self._seconds(self.sized.forward)
        backward = self._seconds(self.sized.backward)
        forward_host, backward_host = (self._host(phase) for phase in ("forward", "backward"))
        saved = {option.name: self._saved(option.saved) for option in self.block_class.recompute}
        again = {option.name: self._again(option) for option in self.block_class.recompute}
        accumulation = self._accumulation_seconds()
        workspace, output = self._workspace(), self._output()
        result = []
        for number in range(len(self.micro_batches)):
            first, last = self._collectives("forward", number), self._collectives("backward", number)
            result.append(
                BlockPrice(
                    forward_seconds=_at(forward, number),
                    backward_seconds=_at(backward, number) + accumulation,
                    forward_overhead_seconds=max(0.0, forward_host - _at(forward, number)),
                    backward_overhead_seconds=max(0.0, backward_host - _at(backward, number)),
                    forward_collectives=first,
                    backward_collectives=last,
                    recompute={
                        option.name: RecomputePrice(
                            mode=_mode(option.name),
                            keep=option.keep,
                            saved_bytes=_at(saved[option.name], number),
                            seconds=_at(again[option.name][0], number),
                            overhead_seconds=max(0.0, again[option.name][1] - _at(again[option.name][0], number)),
                            collectives=self._collectives("forward", number, frozenset(option.operators)),
                        )
                        for option in self.block_class.recompute
                    },
                    parameter_elements=self._parameters(trainable=True),
                    frozen_elements=self._parameters(trainable=False),
                    expert_elements=self._parameters(trainable=True, experts=True),
                    workspace_bytes=_at(workspace, number),
                    output_bytes=_at(output, number),
                )
            )
        return result

    def _seconds(self, kernels: Iterable[Sequence[Work]]) -> Amount:
        return sum((self._kernel(list(group)) for group in kernels), 0.0)

    def _again(self, option: RecomputeOption) -> tuple[Amount, float]:
        """Seconds of running again what an entry of the menu does not keep: the device's, the host's."""
        wanted = set(option.operators)
        if not wanted:
            return 0.0, 0.0
        if option.name == "full" and not self.executor.recompute_stops_early:
            wanted = {work.operator.id for work in self.sized.works if work.operator.phase == "forward"}
        groups = [[work for work in group if work.operator.id in wanted] for group in self.sized.forward]
        groups = [group for group in groups if group]
        host = self._launching(groups) + self.executor.checkpoint_seconds
        seconds = self._seconds(groups)
        if _mode(option.name) == "selective" and self.executor.selective_products:
            kept = [[work] for work in self.sized.works if work.operator.phase == "forward"]
            kept = [group for group in kept if group[0].kind == "matmul" and group[0].operator.id not in wanted]
            seconds = seconds + self.executor.selective_products * self._seconds(kept)
        return seconds, host

    def _accumulation_seconds(self) -> float:
        """Adding the gradients of a micro-batch to their accumulators, where no product does it."""
        moved = self.executor.accumulation_bytes(self.setting.dtype) * self._parameters(trainable=True)
        return float(pointwise_seconds(self.setting.chip, moved, "add")) if moved else 0.0

    def _kernel(self, group: list[Work]) -> Amount:
        """Device seconds of one kernel on one rank."""
        work, chip = group[0], self.setting.chip
        share = self._share(work.operator)
        if len(group) > 1:
            tensors = self.sized.external[self._leader(group)]
            moved = sum((self._local_bytes(tensor, group) for tensor in tensors), 0.0)
            kind = next((w.kind for w in group if w.kind in ("norm", "softmax", "loss")), group[0].kind)
            return pointwise_seconds(chip, moved, kind)
        if work.kind == "view":
            return 0.0
        if work.kind == "matmul":
            return self._matmul(work)
        if work.kind == "attention":
            attributes = work.operator.attributes
            return attention_seconds(
                chip,
                work.flops * share * self.setting.cp,  # own queries meet every rank's keys
                work.bytes * share,
                phase=work.operator.phase,
                seq=self.setting.seq_len // self.setting.cp,
                head_dim=int(attributes["head_dim"]),
                causal=bool(attributes["causal"]),
                dtype=self.setting.activations,
                kernel=self.executor.attention_kernel or ATTENTION_KERNEL[self.setting.kernels],
            )
        return pointwise_seconds(chip, self._moved(work), work.kind)

    def _leader(self, group: list[Work]) -> int:
        """The first operator of the whole fused group that `group` is (a part of)."""
        ids = {work.operator.id for work in group}
        for kernels in (self.sized.forward, self.sized.backward):
            for whole in kernels:
                if len(whole) > 1 and ids <= {work.operator.id for work in whole}:
                    return whole[0].operator.id
        raise KeyError(ids)

    def _matmul(self, work: Work) -> Amount:
        atom = self.divided.get(work.operator.id)
        letters: dict[str, Amount] = {"m": 1.0, "n": 1.0, "k": 1.0, "b": 1.0}
        pending = atom is not None
        for dim, size, letter in work.dims:
            if pending and divided_atom(self.block_class, dim) == atom:
                size, pending = size / self.setting.degree, False
            letters[letter] = letters[letter] * size
        m, n, k, b = (letters[letter] for letter in "mnkb")
        grouped = "grouped" in work.operator.name
        if grouped:
            m, n, k, b = self._by_expert(m, n, k, work.layout == "wgrad", atom is not None)
        narrow = work.is_linear and not self.is_end
        dtype = self.setting.dtype if narrow else self.setting.activations
        seconds = gemm_seconds(self.setting.chip, m, n, k, dtype, work.layout, b, grouped)
        if dtype != self.setting.activations and work.layout != "wgrad":
            seconds = seconds + self._cast_seconds(work, m * b if grouped else m, n, k)
        return seconds

    def _by_expert(
        self, m: Amount, n: Amount, k: Amount, sums_rows: bool, divided: bool
    ) -> tuple[Amount, Amount, Amount, Amount]:
        """A grouped product as a batch of one product an expert, rows spread evenly.

        Without tp inside experts each tp rank has its own rows for whole matrices instead of all rows for parts of them.
        """
        count = max((self.sizes[expert] for expert in self.experts), default=1.0)
        widen = self.setting.degree if divided and self.setting.etp == 1 else 1
        if sums_rows:
            return m, n * widen, np.maximum(k / count / widen, 1.0), count
        return np.maximum(m / count / widen, 1.0), n * widen, k, count

    def _cast_seconds(self, work: Work, m: Amount, n: Amount, k: Amount) -> Amount:
        """To fp8: the rows that enter a product are read in two bytes and written in one, as they are and transposed for wgrad."""
        rows = m * k if work.layout == "forward" else np.minimum(m * k, m * n)
        return pointwise_seconds(self.setting.chip, 4.0 * rows * self.executor.cast_share, "copy")

    def _share(self, operator: Operator) -> float:
        return 1.0 / self.setting.degree if operator.id in self.divided else 1.0

    def _moved(self, work: Work) -> Amount:
        """Bytes of a pointwise operator: tensors without the divided atom are moved whole."""
        atom = self.divided.get(work.operator.id)
        if atom is None:
            return work.bytes
        if work.operator.traffic is not None:
            return work.bytes / self.setting.degree
        tensors = dict.fromkeys((*work.operator.reads, *work.operator.writes))
        return sum((self._bytes(tensor) / self._divisor(tensor, atom) for tensor in tensors), 0.0)

    def _local_bytes(self, tensor: int, group: list[Work]) -> Amount:
        atoms = {self.divided[work.operator.id] for work in group if work.operator.id in self.divided}
        own = self.block_class.tensor_by_id[tensor].atoms
        return self._bytes(tensor) / (self.setting.degree if atoms & set(own) else 1)

    def _divisor(self, tensor: int, atom: int) -> int:
        return self.setting.degree if atom in self.block_class.tensor_by_id[tensor].atoms else 1

    def _bytes(self, tensor: int) -> Amount:
        return self.block_class.tensor_by_id[tensor].bytes(self.sizes, self.width)

    def _host(self, phase: Literal["forward", "backward"]) -> float:
        """Host seconds of a phase: its kernels and its collectives."""
        kernels = self.sized.forward if phase == "forward" else self.sized.backward
        collectives = sum(item.count for item in self._collectives(phase, 0)) if self.setting.degree > 1 else 0
        return self._launching(kernels) + collectives * self.executor.collective_seconds

    def _launching(self, kernels: Sequence[Sequence[Work]]) -> float:
        views = sum(len(group) == 1 and group[0].kind == "view" for group in kernels)
        count = len(kernels) - views + VIEW_HOST_SHARE * views
        seconds = float(host_seconds(self.setting.chip, count, self.setting.kernels))
        return seconds * self.executor.host_factor / HOST_FACTOR[self.executor.kernels]

    def _saved(self, tensors: tuple[int, ...]) -> Amount:
        return sum((self._stored(tensor) for tensor in tensors), 0.0)

    def _stored(self, tensor: int) -> Amount:
        state = self.division.states.get(tensor)
        whole = state is None or state.kind != "S"
        whole = whole or (tensor in self.division.gathered and self.executor.saves_gathered_input)
        return self._bytes(tensor) / (1 if whole else self.setting.degree)

    def _output(self) -> Amount:
        """The hidden state handed on: the largest output (others are small tables that every stage can make)."""
        outputs = self.block_class.outputs
        if not outputs:
            return 0.0
        return self._stored(max(outputs, key=lambda tensor: float(np.max(self._bytes(tensor)))))

    def _parameters(self, trainable: bool, experts: bool = False) -> float:
        total = 0.0
        for parameter in self.block_class.parameters:
            if parameter.trainable == trainable and parameter.tensor is not None:
                state = self.division.states.get(parameter.tensor)
                elements = parameter.elements / (self.setting.degree if state and state.kind == "S" else 1)
                if self.experts & set(self.block_class.tensor_by_id[parameter.tensor].atoms):
                    # without tp inside experts, tp ranks hold experts of their own: ep counts them
                    total += elements * (self.setting.degree if self.setting.etp == 1 and state else 1) / self.setting.ep
                elif not experts:
                    total += elements
        return total

    def _workspace(self) -> Amount:
        """The most passing bytes alive during backward: gradients and recomputed values, weight gradients apart.

        A gradient gathered for a divided matrix stands whole beside them, one at a time.
        """
        backward = [operator for operator in self.block_class.operators if operator.phase == "backward"]
        last = {
            tensor: number for number, operator in enumerate(backward) for tensor in (*operator.reads, *operator.writes)
        }
        alive: Amount = 0.0
        most: Amount = 0.0
        size: dict[int, Amount] = {}
        for number, operator in enumerate(backward):
            if not is_view(operator) and self._has_rows(operator):
                for tensor in operator.writes:
                    atom = self.divided.get(operator.id)
                    size[tensor] = self._bytes(tensor) / (self._divisor(tensor, atom) if atom is not None else 1)
                    alive = alive + size[tensor]
            most = np.maximum(most, alive)
            for tensor in {*operator.reads, *operator.writes}:
                if last[tensor] == number and tensor in size:
                    alive = alive - size.pop(tensor)
        gathered = [c.site.tensor for c in self.division.conversions if c.backward == "all_gather"]
        return most + max((self._bytes(tensor) for tensor in gathered), key=np.max, default=0.0)

    def _has_rows(self, operator: Operator) -> bool:
        """Whether what it writes grows with the workload: gradients of parameters do not, and are counted elsewhere."""
        return any(self.workload_atoms & set(self.block_class.tensor_by_id[tensor].atoms) for tensor in operator.writes)

    def _collectives(
        self, phase: Literal["forward", "backward"], number: int, again: frozenset[int] | None = None
    ) -> tuple[Collective, ...]:
        """Collectives of a phase; with `again` those that recompute repeats: out of or into an operator that runs again."""
        moved: dict[str, list[float]] = {}
        beside: dict[str, list[float]] = {}
        for conversion in self.division.conversions:
            if again is not None and not again & self._touching(conversion.site.tensor):
                continue
            kind: str = conversion.forward if phase == "forward" else conversion.backward
            size = _at(self._bytes(conversion.site.tensor), number)
            if kind not in ("identity", "slice"):
                # the gradient of a column-wise linear's input: nothing in its own backward waits for it
                hides = phase == "backward" and conversion.target.kind == "R*"
                (beside if hides else moved).setdefault(kind, []).append(size)
            if phase == "backward" and conversion.source.kind == "S" and conversion.target.kind == "R*":
                if not self.executor.saves_gathered_input:
                    beside.setdefault("all_gather", []).append(size)
        for use in self.division.composites:
            if again is not None and use.operator not in again:
                continue
            for when, kind, tensor in use.collectives:
                if when == phase:
                    moved.setdefault(kind, []).append(self._composite_bytes(use.operator, tensor, number))
        overlap = overlap_fraction("tp", self.setting.executor)
        found = [self._collective(kind, sizes, overlap) for kind, sizes in moved.items()]
        overlap = max(overlap, self.executor.tp_backward_overlap)
        found += [self._collective(kind, sizes, overlap) for kind, sizes in beside.items()]
        return (
            *found,
            *self._context_collectives(phase, number, again),
            *self._expert_collectives(number, again),
        )

    def _expert_collectives(self, number: int, again: frozenset[int] | None) -> Iterator[Collective]:
        """Rows sent to their experts and back: the input of the first grouped product, the output of the last."""
        grouped = [op for op in self.block_class.operators if op.phase == "forward" and "grouped" in op.name]
        if not grouped or self.setting.ep == 1 or self.setting.ep_group is None:
            return
        for operator, tensor in ((grouped[0], grouped[0].reads[0]), (grouped[-1], grouped[-1].writes[0])):
            if again is None or operator.id in again:
                own = self.setting.degree if self.setting.etp == 1 else 1
                size = _at(self._bytes(tensor), number) / own
                group = self.setting.ep_group
                if group.nodes > 1 and self.executor.sends_rows_once_per_node:
                    group = self._once_per_node(group, size, number)
                seconds = collective_seconds("all_to_all", size, group, self.setting.chip)
                overlap = overlap_fraction("ep", self.setting.executor)
                yield Collective.model_construct(
                    axis="ep", kind="all_to_all", count=1, bytes=size, seconds=float(seconds), overlap=overlap
                )

    def _context_collectives(
        self, phase: Literal["forward", "backward"], number: int, again: frozenset[int] | None
    ) -> Iterator[Collective]:
        """Keys and values of a divided sequence: gathered for the queries of every rank, their gradients reduced back.

        A ring moves as many bytes as the gather; what it hides behind attention is the executor's `cp_overlap`.
        """
        if self.setting.cp == 1 or self.setting.cp_group is None:
            return
        for operator in self.block_class.operators:
            is_attention = operator.name.startswith("autopar.attention") and operator.phase == "forward"
            if not is_attention or (again is not None and operator.id not in again):
                continue
            own = sum(_at(self._bytes(read), number) for read in operator.reads[1:3]) * self._share(operator)
            kinds: tuple[Kind, ...] = ("all_gather",) if phase == "forward" else ("all_gather", "reduce_scatter")
            for kind in kinds:
                full = own * self.setting.cp
                yield Collective.model_construct(
                    axis="cp",
                    kind=kind,
                    count=1,
                    bytes=full,
                    seconds=float(collective_seconds(kind, full, self.setting.cp_group, self.setting.chip)),
                    overlap=overlap_fraction("cp", self.setting.executor),
                )

    def _touching(self, tensor: int) -> set[int]:
        """Forward operators that write or read a tensor."""
        return {
            operator.id
            for operator in self.block_class.operators
            if operator.phase == "forward" and (tensor in operator.writes or tensor in operator.reads)
        }

    def _composite_bytes(self, operator: int, tensor: int, number: int) -> float:
        """The tensor named, or (-1) one fp32 number per row of the operator's first write."""
        if tensor >= 0:
            return _at(self._bytes(tensor), number)
        rows = self.block_class.operator_by_id[operator]
        first = self.block_class.tensor_by_id[rows.reads[0]]
        return 4 * _at(Term(coefficient=1.0, atoms=sum(first.dims[:-1], ())).value(self.sizes), number)

    def _once_per_node(self, group: Group, size: float, number: int) -> Group:
        """The group with as much more network as copies of a row for one node are saved.

        Of the `k` rows of a token (k - 1) / k would leave for other nodes; sent once to each node that any of them needs it is
        (nodes - 1) (1 - (1 - 1 / nodes)^k) of them (hierarchical dispatch: DeepEP, HybridEP).
        """
        tokens = _at(self._bytes(self.block_class.inputs[0]), number) if self.block_class.inputs else size
        own = self.setting.degree if self.setting.etp == 1 else 1
        rows, nodes = max(size * own / tokens, 1.0), group.nodes
        copies, once = rows * (nodes - 1) / nodes, (nodes - 1) * (1 - (1 - 1 / nodes) ** rows)
        return group.model_copy(update={"inter_bytes_per_second": group.inter_bytes_per_second * max(copies / once, 1.0)})

    def _collective(self, kind: str, sizes: list[float], overlap: float) -> Collective:
        name = cast(Kind, kind)
        seconds = sum(collective_seconds(name, size, self.setting.group, self.setting.chip) for size in sizes)
        return Collective.model_construct(
            axis="tp",
            kind=name,
            count=len(sizes),
            bytes=sum(sizes) / len(sizes),
            seconds=seconds,
            overlap=overlap,
        )


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


def _mode(option: str) -> Literal["none", "selective", "full"]:
    return "none" if option == "none" else "full" if option == "full" else "selective"


def _at(value: Amount, number: int) -> float:
    return float(value[number]) if np.ndim(value) else float(value)
