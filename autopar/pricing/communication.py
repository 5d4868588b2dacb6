"""Collectives of a block: conversions of its division, exchanges of keys and values, rows sent to experts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Literal, cast

from autopar.documents.graph import Term
from autopar.documents.plan import Collective
from autopar.pricing.local import Local, at
from cost_models.collectives import Kind, collective_seconds
from cost_models.overlap import overlap_fraction, unslowed
from hardware_profiles.cluster import Group


class Communication(Local):
    """What ranks of tp, cp and ep exchange inside a block."""

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
            size = at(self._bytes(conversion.site.tensor), number)
            if kind not in ("identity", "slice"):
                # the gradient of a column-wise linear's input: nothing in its own backward waits for it
                hides = phase == "backward" and conversion.target.kind == "R*"
                (beside if hides else moved).setdefault(kind, []).append(size)
            is_gathered = conversion.source.kind == "S" and conversion.target.kind == "R*"
            if phase == "backward" and is_gathered and not self.executor.saves_gathered_input:
                beside.setdefault("all_gather", []).append(size)
        for use in self.division.composites:
            if again is not None and use.operator not in again:
                continue
            for when, kind, tensor in use.collectives:
                if when == phase:
                    moved.setdefault(kind, []).append(self._composite_bytes(use.operator, tensor, number))
        overlap = overlap_fraction("tp", self.setting.executor, self.setting.chip)
        found = [self._collective(kind, sizes, overlap) for kind, sizes in moved.items()]
        overlap = max(overlap, unslowed(self.executor.tp_backward_overlap, self.setting.chip))
        found += [self._collective(kind, sizes, overlap) for kind, sizes in beside.items()]
        return (
            *found,
            *self._context_collectives(phase, number, again),
            *self._expert_collectives(number, again),
        )

    def _expert_collectives(self, number: int, again: frozenset[int] | None) -> Iterator[Collective]:
        """Rows sent to their experts and back: the input of the first grouped product, the output of the last."""
        grouped = self.grouped
        if not grouped or self.setting.ep == 1 or self.setting.ep_group is None:
            return
        for operator, tensor in ((grouped[0], grouped[0].reads[0]), (grouped[-1], grouped[-1].writes[0])):
            if again is None or operator.id in again:
                rows = at(self._bytes(tensor), number)
                size = rows / self._senders()
                group = self.setting.ep_group
                if group.nodes > 1 and self.executor.sends_rows_once_per_node:
                    group = self._once_per_node(group, size, number)
                seconds = collective_seconds("all_to_all", size, group, self.setting.chip)
                overlap = overlap_fraction("ep", self.setting.executor, self.setting.chip)
                yield Collective.model_construct(
                    axis="ep", kind="all_to_all", count=1, bytes=size, seconds=float(seconds), overlap=overlap
                )
                if self.setting.etp > 1 and self._senders() > 1:
                    yield self._gathered_rows(rows, number)

    def _senders(self) -> int:
        """How many tp ranks send a part of the rows each: all, but where experts are divided and tokens are not."""
        apart = self.setting.etp == 1 or self.division.boundary == "sequence"
        return self.setting.degree if apart else 1

    def _gathered_rows(self, rows: float, number: int) -> Collective:
        """Put rows that arrive in parts together where tp divides experts, beyond the tokens that were gathered before.

        On the way back, and in backward, they are scattered: as many bytes.
        """
        tokens = at(self._bytes(self.block_class.inputs[0]), number) if self.block_class.inputs else 0.0
        return self._collective("all_gather", [max(rows - tokens, 0.0)], 0.0)

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
            own = sum(at(self._bytes(read), number) for read in operator.reads[1:3]) * self._share(operator)
            full = own * self.setting.cp
            moved: list[tuple[Kind, int, float]] = [("all_gather", 1, full)]
            if phase == "backward" and self.executor.ring_in_fp32:
                moved.append(("send", self.setting.cp, own * 4 / self.width))
            elif phase == "backward":
                moved.append(("reduce_scatter", 1, full))
            for kind, count, size in moved:
                yield Collective.model_construct(
                    axis="cp",
                    kind=kind,
                    count=count,
                    bytes=size,
                    seconds=count * float(collective_seconds(kind, size, self.setting.cp_group, self.setting.chip)),
                    overlap=overlap_fraction("cp", self.setting.executor, self.setting.chip),
                )

    def _touching(self, tensor: int) -> set[int]:
        """Forward operators that write or read a tensor."""
        return self._touches.get(tensor, set())

    @cached_property
    def _touches(self) -> dict[int, set[int]]:
        found: dict[int, set[int]] = {}
        for operator in self.block_class.operators:
            if operator.phase == "forward":
                for tensor in (*operator.reads, *operator.writes):
                    found.setdefault(tensor, set()).add(operator.id)
        return found

    def _composite_bytes(self, operator: int, tensor: int, number: int) -> float:
        """The tensor named, or (-1) one fp32 number per row of the operator's first write."""
        if tensor >= 0:
            return at(self._bytes(tensor), number)
        rows = self.block_class.operator_by_id[operator]
        first = self.block_class.tensor_by_id[rows.reads[0]]
        return 4 * at(Term(coefficient=1.0, atoms=sum(first.dims[:-1], ())).value(self.sizes), number)

    def _once_per_node(self, group: Group, size: float, number: int) -> Group:
        """The group with as much more network as copies of a row for one node are saved.

        Of the `k` rows of a token (k - 1) / k would leave for other nodes; sent once to each node that any of them needs it is
        (nodes - 1) (1 - (1 - 1 / nodes)^k) of them (hierarchical dispatch: DeepEP, HybridEP).
        """
        tokens = at(self._bytes(self.block_class.inputs[0]), number) if self.block_class.inputs else size
        rows, nodes = max(size * self._senders() / tokens, 1.0), group.nodes
        copies, once = rows * (nodes - 1) / nodes, (nodes - 1) * (1 - (1 - 1 / nodes) ** rows)
        return group.model_copy(
            update={"inter_bytes_per_second": group.inter_bytes_per_second * max(copies / once, 1.0)}
        )

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
