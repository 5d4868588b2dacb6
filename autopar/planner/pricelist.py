"""The priced divisions of every class: which tp degrees there are, and what a block then costs at every micro-batch."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.documents.graph import Graph
from autopar.planner.request import Request
from autopar.planner.sharding import division_by_degree, undivided
from autopar.planner.space import divisors
from autopar.pricing import BlockPrice, Boundary, Division, price_block
from hardware_profiles.chip import Chip
from hardware_profiles.topology import Topology


class PriceList:
    """Divisions and prices of a graph on a cluster, made when first asked for."""

    def __init__(self, graph: Graph, topology: Topology, chip: Chip, request: Request) -> None:
        self.graph, self.topology, self.chip, self.request = graph, topology, chip, request
        self.micro_batches = tuple(b for b in divisors(request.global_batch) if request.allows("micro_batch", b))
        self._divisions: dict[tuple[str, bool], dict[int, Division]] = {}
        self._prices: dict[tuple[str, int, bool, int], BlockPrice] = {}
        ends = {end for chain in graph.chains for end in (chain.prologue, chain.epilogue) if end}
        self._ends = ends

    def degrees(self) -> dict[int, tuple[bool, ...]]:
        """Tp degree -> which of sp (False, True) every class has a division for."""
        wanted = [d for d in divisors(self.topology.devices) if d > 1 and self.request.allows("tp", d)]
        if "tp" in self.request.forbidden:
            wanted = []
        found: dict[int, tuple[bool, ...]] = {1: (False,)} if self.request.allows("tp", 1) else {}
        for sp in (False, True):
            if wanted and self.request.allows("sp", int(sp)) and not (sp and "sp" in self.request.forbidden):
                for degree in self._common(wanted, sp):
                    found[degree] = (*found.get(degree, ()), sp)
        return found

    def _common(self, degrees: Sequence[int], sp: bool) -> list[int]:
        left = list(degrees)
        blocks_first = sorted(self.graph.class_counts, key=lambda name: name in self._ends)
        for name in blocks_first:
            if left:
                boundary: Boundary = "sequence" if sp else "replicate"
                found = division_by_degree(
                    self.graph, name, boundary, left, self.request.seq_len, may_stay_whole=name in self._ends
                )
                self._divisions[name, sp] = found
                left = [degree for degree in left if degree in found]
        return left

    def division(self, class_name: str, tp: int, sp: bool) -> Division:
        """The division of a class at a degree that `degrees` names."""
        if tp > 1:
            return self._divisions[class_name, sp][tp]
        return self._divisions.setdefault((class_name, False), {}).setdefault(1, undivided(self.graph, class_name))

    def price(self, class_name: str, tp: int, sp: bool, micro_batch: int) -> BlockPrice:
        """The price of a block at one micro-batch size, worked out when first asked for."""
        key = (class_name, tp, sp, micro_batch)
        if key not in self._prices:
            self._prices[key] = price_block(
                self.graph,
                class_name,
                self.division(class_name, tp, sp),
                degree=tp,
                micro_batch=micro_batch,
                seq_len=self.request.seq_len,
                dtype=self.request.dtype,
                kernels=self.request.kernels,
                chip=self.chip,
                group=self.topology.strided(tp, 1),
                sp=sp,
            )
        return self._prices[key]
