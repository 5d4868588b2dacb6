"""The one price list: a block class under a division of its indices, in seconds and bytes.

action        sum of its kernels' device seconds; what the host needs more than that is overhead
kernel        its operator's work over `degree` where the operator is divided, whole where not
backward      an operator of the backward pass is divided as its forward operator is, along the same index
saved bytes   a kept tensor over `degree` where every operator that keeps it sees it divided; a gathered copy counts whole
collectives   the division's conversions, and their adjoints on the way back
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from autopar.documents.graph import Graph, Operator
from autopar.pricing.bill import BlockPrice, RecomputePrice, Setting
from autopar.pricing.communication import Communication
from autopar.pricing.division import Division, is_view
from autopar.pricing.kernels import Kernels
from autopar.pricing.local import at
from autopar.pricing.work import Amount


def price_block(
    graph: Graph, class_name: str, division: Division, setting: Setting, micro_batches: Sequence[int]
) -> list[BlockPrice]:
    """The price of one block for each micro-batch size (sequences)."""
    return _Pricer(graph, class_name, division, setting, tuple(micro_batches)).prices()


class _Pricer(Kernels, Communication):
    """The bill of a block for each micro-batch size."""

    def prices(self) -> list[BlockPrice]:
        forward = self._seconds(self.sized.forward)
        backward = self._seconds(self.sized.backward)
        forward_host, backward_host = (self._host(phase) for phase in ("forward", "backward"))
        saved = {option.name: self._saved(option) for option in self.block_class.recompute}
        again = {option.name: self._again(option) for option in self.block_class.recompute}
        accumulation = self._accumulation_seconds()
        workspace, output, scores = self._workspace(), self._output(), self._scores()
        result = []
        for number in range(len(self.micro_batches)):
            first, last = self._collectives("forward", number), self._collectives("backward", number)
            result.append(
                BlockPrice(
                    forward_seconds=at(forward, number),
                    backward_seconds=at(backward, number) + accumulation,
                    forward_overhead_seconds=max(0.0, forward_host - at(forward, number)),
                    backward_overhead_seconds=max(0.0, backward_host - at(backward, number)),
                    forward_collectives=first,
                    backward_collectives=last,
                    recompute={
                        option.name: RecomputePrice(
                            mode=_mode(option.name),
                            keep=option.keep,
                            saved_bytes=at(saved[option.name], number),
                            seconds=at(again[option.name][0], number),
                            overhead_seconds=max(0.0, again[option.name][1] - at(again[option.name][0], number)),
                            collectives=self._collectives("forward", number, frozenset(option.operators)),
                        )
                        for option in self.block_class.recompute
                    },
                    parameter_elements=self._parameters(trainable=True),
                    frozen_elements=self._parameters(trainable=False),
                    expert_elements=self._parameters(trainable=True, experts=True),
                    workspace_bytes=at(workspace, number),
                    output_bytes=at(output, number),
                    scores_bytes=at(scores, number),
                )
            )
        return result

    def _host(self, phase: Literal["forward", "backward"]) -> float:
        """Host seconds of a phase: its kernels and its collectives."""
        kernels = self.sized.forward if phase == "forward" else self.sized.backward
        collectives = sum(item.count for item in self._collectives(phase, 0)) if self.setting.degree > 1 else 0
        return self._launching(kernels) + collectives * self.executor.collective_seconds

    def _output(self) -> Amount:
        """The hidden state handed on: the largest output (others are small tables that every stage can make)."""
        outputs = self.block_class.outputs
        if not outputs:
            return 0.0
        return self._stored(max(outputs, key=lambda tensor: float(np.max(self._bytes(tensor)))))

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
        inside = self._inside_kernels()
        for number, operator in enumerate(backward):
            if not is_view(operator) and self._has_rows(operator):
                for tensor in set(operator.writes) - inside:
                    atom = self.divided.get(operator.id)
                    size[tensor] = self._bytes(tensor) / (self._divisor(tensor, atom) if atom is not None else 1)
                    alive = alive + size[tensor]
            most = np.maximum(most, alive)
            for tensor in {*operator.reads, *operator.writes}:
                if last[tensor] == number and tensor in size:
                    alive = alive - size.pop(tensor)
        gathered = [c.site.tensor for c in self.division.conversions if c.backward == "all_gather"]
        return most + max((self._bytes(tensor) for tensor in gathered), key=np.max, default=0.0)

    def _inside_kernels(self) -> set[int]:
        """Tensors that pass from one operator of a fused kernel to the next and are never in memory."""
        groups = [group for group in self.sized.backward if len(group) > 1]
        written = {tensor for group in groups for work in group for tensor in work.operator.writes}
        return written - {tensor for group in groups for tensor in self.sized.external[group[0].operator.id]}

    def _has_rows(self, operator: Operator) -> bool:
        """Whether what it writes grows with the workload: gradients of parameters do not, and are counted elsewhere."""
        return any(self.workload_atoms & set(self.block_class.tensor_by_id[tensor].atoms) for tensor in operator.writes)


def _mode(option: str) -> Literal["none", "selective", "full"]:
    return "none" if option == "none" else "full" if option == "full" else "selective"
