"""The priced divisions of every class: which tp degrees there are, and what a block then costs at every micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

from autopar.documents.graph import Graph
from autopar.planner.request import Request
from autopar.planner.sharding import divisions
from autopar.planner.space import Inside, divisors
from autopar.pricing import BlockPrice, Boundary, Division, Setting, State, expert_atoms, price_block, undivided
from hardware_profiles.chip import Chip
from hardware_profiles.topology import Topology


class PriceList:
    """Divisions and prices of a graph on a cluster, made when first asked for."""

    def __init__(self, graph: Graph, topology: Topology, chip: Chip, request: Request) -> None:
        self.graph, self.topology, self.chip, self.request = graph, topology, chip, request
        self.micro_batches = tuple(b for b in divisors(request.global_batch) if request.allows("micro_batch", b))
        self._divisions: dict[tuple[str, bool], dict[int, Division]] = {}
        self._prices: dict[tuple[str, Inside], dict[int, BlockPrice]] = {}
        self._ends = {end for chain in graph.chains for end in (chain.prologue, chain.epilogue) if end}
        self.experts = {name: expert_atoms(block_class) for name, block_class in graph.class_by_name.items()}
        """Class -> its indices of experts."""

    def degrees(self) -> dict[int, tuple[bool, ...]]:
        """Degree of tp -> which of sp (False, True) every class has a division for.

        Degrees stay within the devices that reach each other without the network, unless one is fixed.
        """
        most = self.request.value("tp") or self.topology.devices_in_reach
        wanted = [d for d in divisors(self.topology.devices) if 1 < d <= most and self.request.allows("tp", d)]
        if "tp" in self.request.forbidden:
            wanted = []
        found: dict[int, tuple[bool, ...]] = {1: (False,)} if self.request.allows("tp", 1) else {}
        for sp in (False, True):
            if wanted and self.request.allows("sp", int(sp)) and not (sp and "sp" in self.request.forbidden):
                for degree in self._common([d for d in wanted if self._may(d, sp)], sp):
                    found[degree] = (*found.get(degree, ()), sp)
        return found

    @property
    def expert_count(self) -> int:
        """Routed experts of a block; of several kinds of block what divides the numbers of all; 0 without any."""
        sizes = self.graph.sizes()
        return gcd(*(sizes[atom] for atoms in self.experts.values() for atom in atoms))

    def _may(self, degree: int, sp: bool) -> bool:
        """Whether a dry run left it in; sequences that cross boundaries divided must divide evenly."""
        return (degree, sp) not in self.request.refused and (not sp or self.request.seq_len % degree == 0)

    def _common(self, degrees: Sequence[int], sp: bool) -> list[int]:
        """Degrees at which every class has a division; blocks first, then the ends with most work."""
        boundary: Boundary = "sequence" if sp else "replicated"
        left = list(degrees)
        pinned: dict[int, dict[str, State]] = {degree: {} for degree in degrees}
        for name in sorted(self.graph.class_counts, key=self._order):
            if not left:
                break
            is_end = name in self._ends
            found = divisions(
                self.graph,
                name,
                boundary,
                left,
                self.request.seq_len,
                is_end or bool(self.experts[name]),  # a router may stay whole
                pinned if is_end else None,
                self.request.loss_parallel,
                self.request.whole_prologue,
                {degree: self._whole_modules(name, degree) for degree in left},
            )
            self._divisions[name, sp] = found
            left = [degree for degree in left if degree in found]
            if is_end:
                # A parameter that two ends share (tied embeddings) is stored as the first of them decides.
                for degree in left:
                    pinned[degree] |= self._states(name, found[degree])
        return left

    def _whole_modules(self, name: str, degree: int) -> frozenset[str]:
        """Modules of a class that stay whole at a degree, named within the block."""
        blocks = [(f"{block}.", chain.block_class_of(number)) for chain in self.graph.chains
                  for number, block in enumerate(chain.modules)]  # fmt: skip
        found = set()
        for tp, module in self.request.whole_modules:
            prefix, owner = next(((b, c) for b, c in blocks if module.startswith(b)), ("", ""))
            if tp == degree and (owner == name or (not owner and name in self._ends)):
                found.add(module.removeprefix(prefix))
        return frozenset(found)

    def _order(self, name: str) -> tuple[bool, float]:
        block_class = self.graph.class_by_name[name]
        return name in self._ends, -block_class.flops("executed", self.graph.sizes(1, self.request.seq_len))

    def _states(self, name: str, division: Division) -> dict[str, State]:
        parameters = self.graph.class_by_name[name].parameters
        held = [(p.name, p.tensor) for p in parameters if p.tensor is not None]
        return {own: division.states[tensor] for own, tensor in held if tensor in division.states}

    def division(self, class_name: str, tp: int, sp: bool) -> Division:
        """The division of a class at a degree that `degrees` names."""
        return undivided(class_name) if tp == 1 else self._divisions[class_name, sp][tp]

    def share_divisions(self, other: PriceList) -> None:
        """Take over the divisions of a list for the same classes: they depend on neither sizes nor cluster."""
        self._divisions = other._divisions

    def has_division(self, class_name: str, tp: int, sp: bool) -> bool:
        """Whether a class has a division at a degree."""
        return tp == 1 or tp in self._divisions.get((class_name, sp), {})

    def price(self, class_name: str, inside: Inside, micro_batch: int) -> BlockPrice:
        """The price of a block at one micro-batch size."""
        if not self.experts[class_name]:
            inside = inside._replace(ep=1, etp=inside.tp)
        key = (class_name, inside)
        if key not in self._prices:
            prices = price_block(
                self.graph,
                class_name,
                self.division(class_name, inside.tp, inside.sp),
                self._setting(inside),
                self.micro_batches,
            )
            self._prices[key] = dict(zip(self.micro_batches, prices, strict=True))
        return self._prices[key][micro_batch]

    def _setting(self, inside: Inside) -> Setting:
        tp, _, cp, ep, etp = inside
        return Setting(
            chip=self.chip,
            dtype=self.request.dtype,
            kernels=self.request.kernels,
            degree=tp,
            group=self.topology.strided(tp, 1),
            seq_len=self.request.seq_len,
            executor=self.request.executor,
            cp=cp,
            cp_group=self.topology.strided(cp, tp),
            ep=ep,
            ep_group=self.topology.strided(ep, etp),
            etp=etp,
            imbalance=min(self.request.moe_imbalance, ep),
        )
