"""One configuration made concrete: bounds from its totals, its best stages, and what each stage then costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from autopar.documents.graph import Graph
from autopar.planner.bills import Bills, Holding, Known, holding
from autopar.planner.columns import Column, Menu, best_mix, column, layers_of
from autopar.planner.edges import carried_bytes
from autopar.planner.estimate import Pipeline, StageChoice, chunk_sizes
from autopar.planner.pricelist import PriceList
from autopar.planner.request import Request
from autopar.planner.space import Configuration, Inside
from autopar.planner.stages import Answer, solve_any, solve_equal
from autopar.pricing.division import divided_atom
from cost_models.compute import element_bytes
from hardware_profiles.chip import Chip
from hardware_profiles.topology import Topology


@dataclass(frozen=True)
class Shortfall:
    """By how much, where and in what a stage does not fit."""

    excess_bytes: float
    stage: int
    term: str


@dataclass(frozen=True)
class Totals:
    """Seconds per micro-batch of every layer with its ends, and parameters of all."""

    works: tuple[float, ...]
    parameters: float
    experts: float
    """Of the parameters."""
    forward_share: float
    """Of all work."""

    @cached_property
    def work(self) -> float:
        """Of all layers."""
        return sum(self.works)


class Model:
    """What all configurations of a search share."""

    def __init__(self, graph: Graph, topology: Topology, chip: Chip, capacity: float, request: Request) -> None:
        self.graph, self.topology, self.chip, self.capacity, self.request = graph, topology, chip, capacity, request
        self.layers = layers_of(graph)
        self.prices = PriceList(graph, topology, chip, request)
        self.modes = self._modes()
        self._columns: dict[tuple[str, Inside, int], Column] = {}
        self._totals: dict[tuple[Inside, int], Totals] = {}
        self._carried: dict[tuple[int, int], tuple[float, ...]] = {}
        self.known: Known = {}

    @cached_property
    def is_equal(self) -> bool:
        """Whether all blocks are of one class, with ends only at the two ends."""
        classes = {layer.block_class for layer in self.layers}
        inner = any(layer.before for layer in self.layers[1:]) or any(layer.after for layer in self.layers[:-1])
        return len(classes) == 1 and not inner

    @cached_property
    def is_divisible_by_cp(self) -> bool:
        """Whether positions of a sequence meet each other in fused attention only: its keys and values are what cp exchanges."""
        follows = {atom.id: atom.follows for atom in self.graph.indices}
        return not any(
            operator.model_flops
            and not operator.name.startswith("autopar.attention")
            and "grouped" not in operator.name
            and any(
                dim.role != "parallel" and follows.get(divided_atom(block_class, dim) or -1) == "sequence"
                for dim in operator.local_dims
            )
            for block_class in map(self.graph.class_by_name.__getitem__, {layer.block_class for layer in self.layers})
            for operator in block_class.operators
            if operator.phase == "forward"
        )

    def _modes(self) -> tuple[str, ...]:
        fixed = self.request.fixed.get("recompute")
        if fixed is not None:
            return (str(fixed),)
        return ("none",) if "recompute" in self.request.forbidden else ("none", "selective", "full")

    def column(self, class_name: str, inside: Inside, micro_batch: int) -> Column:
        """A class under what divides it."""
        key = (class_name, inside, micro_batch)
        if key not in self._columns:
            is_end = all(layer.block_class != class_name for layer in self.layers)
            price = self.prices.price(class_name, inside, micro_batch)
            self._columns[key] = column(price, ("none",) if is_end else self.modes)
        return self._columns[key]

    def totals(self, inside: Inside, micro_batch: int) -> Totals:
        """Sums over all layers without recompute beyond what every entry of the menu costs."""
        key = (inside, micro_batch)
        if key not in self._totals:
            kinds = [(layer.block_class, *layer.before, *layer.after) for layer in self.layers]
            each = {kind: [self.column(name, *key) for name in kind] for kind in set(kinds)}
            work = {kind: sum(_least(item) for item in columns) for kind, columns in each.items()}
            works = tuple(work[kind] for kind in kinds)
            every = [item for kind in kinds for item in each[kind]]
            self._totals[key] = Totals(
                works,
                parameters=sum(item.price.parameter_elements for item in every),
                experts=sum(item.price.expert_elements for item in every),
                forward_share=sum(item.forward for item in every) / sum(works),
            )
        return self._totals[key]

    def carried(self, micro_batch: int, cp: int) -> tuple[float, ...]:
        """Bytes that cross each cut beside the hidden state."""
        if (micro_batch, cp) not in self._carried:
            width = max(2, int(element_bytes(self.request.dtype)))
            self._carried[micro_batch, cp] = carried_bytes(self.graph, micro_batch, self.request.seq_len // cp, width)
        return self._carried[micro_batch, cp]


def _least(item: Column) -> float:
    """Seconds of a class per micro-batch at the cheapest entry of its menu."""
    return item.forward + item.backward + float(item.menu.seconds.min())


class Case:
    """A configuration of a model."""

    def __init__(self, model: Model, configuration: Configuration) -> None:
        self.model, self.c = model, configuration
        self.bills = Bills(configuration, model.request, model.topology, model.chip, model.capacity, model.known)
        self._choices: dict[object, StageChoice | None] = {}

    @cached_property
    def pipeline(self) -> Pipeline:
        """The objective's constants."""
        hidden = self.column(self.model.layers[0].block_class).price.output_bytes
        c = self.c
        send = self.bills.send_seconds(hidden + max(self.carried, default=0.0))
        return Pipeline(c.pp, c.micro_batches, c.virtual_stages, send, c.schedule, self.totals.forward_share)

    @cached_property
    def carried(self) -> tuple[float, ...]:
        """Bytes that cross each cut beside the hidden state; whole on every tp rank."""
        return self.model.carried(self.c.micro_batch, self.c.cp) if self.c.pp > 1 else ()

    def column(self, class_name: str) -> Column:
        """A class under this configuration."""
        return self.model.column(class_name, self.c.inside, self.c.micro_batch)

    @cached_property
    def totals(self) -> Totals:
        """Sums over the model."""
        return self.model.totals(self.c.inside, self.c.micro_batch)

    @cached_property
    def surely_too_large(self) -> float:
        """Bytes by which an average stage's states alone exceed what may be allocated (negative: they fit)."""
        totals, pp = self.totals, self.c.pp
        held = sum(self.bills.states(Holding(totals.parameters / pp, experts=totals.experts / pp)).values())
        return held - self.bills.allocatable

    # Stages.

    def solve(self, limit: float, within: float = 0.0) -> Answer | None:
        """The best stages, to `within` (a fraction), if their step stays below `limit`; None where nothing fits or can win."""
        blocks = len(self.model.layers)
        most = self.pipeline.most_work(limit, self.totals.work)
        if self.model.is_equal:
            return solve_equal(self.pipeline, blocks, self.equal_choice, most, within)
        return solve_any(self.pipeline, blocks, self.choice, most)

    def equal_choice(self, stage: int, k: int) -> StageChoice | None:
        """A stage of k equal blocks."""
        before = self.model.layers[0].before if stage == 0 else ()
        after = self.model.layers[-1].after if stage == self.c.pp - 1 else ()
        return self._choice(stage, {self.model.layers[0].block_class: k}, (*before, *after))

    def choice(self, stage: int, first: int, end: int) -> StageChoice | None:
        """A stage of blocks first..end-1."""
        counts: dict[str, int] = {}
        for layer in self.model.layers[first:end]:
            counts[layer.block_class] = counts.get(layer.block_class, 0) + 1
        return self._choice(stage, counts, self.ends_of(first, end))

    def ends_of(self, first: int, end: int) -> tuple[str, ...]:
        """Prologues and epilogues that come with blocks first..end-1."""
        return tuple(name for layer in self.model.layers[first:end] for name in (*layer.before, *layer.after))

    def _choice(self, stage: int, counts: dict[str, int], ends: tuple[str, ...]) -> StageChoice | None:
        sizes = chunk_sizes(sum(counts.values()), self.pipeline, stage)
        key = (self.bills.weight(stage, sizes), sizes, tuple(counts.items()), ends)
        if key not in self._choices:
            self._choices[key] = self._make_choice(stage, sizes, counts, ends)
        return self._choices[key]

    def _make_choice(
        self, stage: int, sizes: tuple[int, ...], counts: dict[str, int], ends: tuple[str, ...]
    ) -> StageChoice | None:
        held = self.held(counts, ends)
        budget = self.bills.allocatable - self.bills.static(held) - self.ends_bytes(stage, ends)
        mixed = self._mix(counts, budget, self.bills.weight(stage, sizes))
        if mixed is None:
            return None
        extra, mix = mixed
        forward, backward = self.actions(counts, ends, extra)
        dp = self.bills.data_parallel(held)
        work = self.bills.per_micro_batch(forward, backward, dp)
        once = self.bills.once(forward, backward, dp, held)
        return StageChoice(self._by_chunk(stage, sizes, work, ends), once, mix)

    def _by_chunk(self, stage: int, sizes: tuple[int, ...], work: float, ends: Sequence[str]) -> tuple[float, ...]:
        """A stage's work by chunk: blocks alike, embedding in the first and head in the last."""
        at_ends = sum(self.column(name).forward + self.column(name).backward for name in ends)
        place = len(sizes) - 1 if stage == self.c.pp - 1 else 0
        each = (work - at_ends) / sum(sizes)
        return tuple(each * size + (at_ends if chunk == place else 0.0) for chunk, size in enumerate(sizes))

    def weight(self, stage: int, blocks: int) -> float:
        """Kept micro-batches per block."""
        return self.bills.weight(stage, chunk_sizes(blocks, self.pipeline, stage))

    def ends_bytes(self, stage: int, ends: Sequence[str]) -> float:
        """What embedding and head keep: at their own chunk's count of micro-batches (the first, the last)."""
        chunk = self.c.virtual_stages - 1 if stage == self.c.pp - 1 else 0
        count = self.bills.most_in_flight(stage)[chunk]
        return sum(float(self.column(name).menu.saved_bytes[0]) * count for name in ends)

    def actions(self, counts: dict[str, int], ends: Sequence[str], extra: float) -> tuple[float, float]:
        """Seconds of a forward and of a backward of a stage."""
        columns = [(self.column(name), count) for name, count in counts.items()]
        columns += [(self.column(name), 1) for name in ends]
        return (
            sum(item.forward * count for item, count in columns),
            sum(item.backward * count for item, count in columns) + extra,
        )

    def held(self, counts: dict[str, int], ends: Sequence[str]) -> Holding:
        """What a stage holds."""
        return holding(
            [
                *((self.column(name), count) for name, count in counts.items()),
                *((self.column(name), 1) for name in ends),
            ]
        )

    def _mix(
        self, counts: dict[str, int], budget: float, weight: float
    ) -> tuple[float, tuple[tuple[str, tuple[int, ...]], ...]] | None:
        """Recompute of a stage: an exact mix for one class; for several, one entry for all blocks of a class.

        Interleaved stages take one entry for all their blocks, so that what is kept follows from the chunks' sizes.
        """
        if len(counts) == 1 and self.c.virtual_stages == 1:
            ((name, count),) = counts.items()
            mixed = best_mix(self.column(name).menu, count, budget, weight)
            return None if mixed is None else (mixed[0], ((name, mixed[1]),))
        best: tuple[float, tuple[tuple[str, tuple[int, ...]], ...]] | None = None
        menus = [(name, count, self.column(name).menu) for name, count in counts.items()]
        for picks in product(*(range(len(menu.names)) for _, _, menu in menus)):
            kept = (
                sum(menu.saved_bytes[pick] * count for (_, count, menu), pick in zip(menus, picks, strict=True))
                * weight
            )
            extra = sum(menu.seconds[pick] * count for (_, count, menu), pick in zip(menus, picks, strict=True))
            if kept <= budget and (best is None or extra < best[0]):
                mix = tuple(
                    (name, _one_hot(menu, pick, count)) for (name, count, menu), pick in zip(menus, picks, strict=True)
                )
                best = (float(extra), mix)
        return best

    # Why not.

    def shortfall(self) -> Shortfall:
        """The stage that lacks most when blocks are spread evenly and recompute is at its leanest."""
        blocks, p = len(self.model.layers), self.c.pp
        bounds = [blocks * i // p for i in range(p + 1)]
        found = []
        for stage, (first, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
            counts: dict[str, int] = {}
            for layer in self.model.layers[first:end]:
                counts[layer.block_class] = counts.get(layer.block_class, 0) + 1
            ends = self.ends_of(first, end)
            terms = self.bills.states(self.held(counts, ends)) | {"workspace": self.held(counts, ends).workspace}
            leanest = sum(self.column(name).menu.saved_bytes[-1] * count for name, count in counts.items())
            terms["activations"] = leanest * self.weight(stage, end - first) + self.ends_bytes(stage, ends)
            excess = sum(terms.values()) - self.bills.allocatable
            found.append(Shortfall(excess, stage, max(terms, key=lambda name: terms[name])))
        return max(found, key=lambda item: item.excess_bytes)


def _one_hot(menu: Menu, pick: int, count: int) -> tuple[int, ...]:
    return tuple(count if number == pick else 0 for number in range(len(menu.names)))
