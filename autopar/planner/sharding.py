"""L0: which index each operator of a block class divides over the tp axis.

    minimise    sum over operators and options x[o, c] seconds(o, c)  +  sum over conversions y seconds(y)
    such that   each operator takes one option;
                every reader finds its tensor in the state its option needs: as produced, or as converted at a site
                between producer and reader;
                parameters are stored as their readers need them: matrices divided, vectors whole.

An option of an operator is a parallel or summed local dim (a whole one where a composite divides it all the same), or to
run whole, with whole gradients (R) or with a rank's own share of them (R*). The batch is not offered (that is dp), weights are
never gathered (that is ZeRO), and a block's boundary has one state going in and coming out: whole, or divided along the sequence.
Solved once per class, boundary and set of indices that a degree divides evenly: the answer is free of sizes. Small matrices
may be whole where that is cheaper (down-projections of latent attention, routers), up to a tenth of the class's elements. Where
no division of that kind exists, as few matrices as possible stay whole: of an embedding or a head any (a vocabulary that does
not divide), of a block small ones, for a block that tp hardly divides is not divided at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import pulp

from autopar.documents.graph import BlockClass, Graph, Parameter
from autopar.planner.options import LEAST_DIVIDED, Option, Options
from autopar.planner.sites import Link, links, place_of, repeated
from autopar.planner.solver import solve
from autopar.pricing.division import (
    FORWARD,
    PARTIAL,
    WHOLE,
    Boundary,
    CompositeUse,
    Division,
    SiteConversion,
    State,
    is_view,
)
from autopar.pricing.work import kind_of, work_of

FLOPS_PER_SECOND, BYTES_PER_SECOND, LINK_BYTES_PER_SECOND = 500e12, 2e12, 300e9
"""A typical device: only ratios matter, and the answers are priced again on the real one."""
EPSILON_SECONDS = 1e-9
"""A conversion that moves nothing still costs this, so that none stands where none is needed."""

HEADS = 1
"""The dim of an attention call's arguments that numbers heads."""

WHOLE_SECONDS_PER_BYTE = 1e-6
"""What a matrix kept whole counts where any may stay so: far above what dividing it can cost, so that as few as can be do."""

NANOSECONDS = 1e9
"""Solvers compare to absolute tolerances near 1e-6: in seconds every division of a small block would look optimal."""

Pinned = Mapping[int, Mapping[str, State]]
"""Degree -> parameter -> its state."""


def divisions(
    graph: Graph,
    class_name: str,
    boundary: Boundary,
    degrees: Sequence[int],
    seq_len: int,
    may_stay_whole: bool = False,
    pinned: Pinned | None = None,
    loss_parallel: bool = True,
    whole_prologue: bool = False,
    whole_modules: Mapping[int, frozenset[str]] | None = None,
) -> dict[int, Division]:
    """Degree -> the cheapest division of a class, for the degrees that have one.

    `pinned`: degree -> states that parameters have in another class (tied ones). `loss_parallel`: the loss may see logits
    divided along the vocabulary. `whole_prologue`: sequences are divided from the first block on, not before.
    `whole_modules`: degree -> modules of the class whose code accepts no part of its tensors.
    """
    sizes = graph.sizes(1, seq_len)
    tensors = graph.class_by_name[class_name].tensors
    divisible = {atoms[0] for tensor in tensors for atoms in tensor.dims if atoms}
    by_pattern: dict[tuple[frozenset[int], tuple[tuple[str, State], ...], frozenset[str]], list[int]] = {}
    for degree in degrees:
        pattern = frozenset(atom for atom in divisible if sizes[atom] % degree == 0)
        states = tuple(sorted((pinned or {}).get(degree, {}).items()))
        kept = (whole_modules or {}).get(degree, frozenset())
        by_pattern.setdefault((pattern, states, kept), []).append(degree)
    found: dict[int, Division] = {}
    for (_, states, kept), alike in by_pattern.items():
        softened = (loss_parallel, whole_prologue, kept)
        division = divide(graph, class_name, boundary, max(alike), seq_len, False, dict(states), *softened)
        if division is None:
            relaxed = divide(graph, class_name, boundary, max(alike), seq_len, True, dict(states), *softened)
            if relaxed is not None and (may_stay_whole or _mostly_divided(graph.class_by_name[class_name], relaxed)):
                division = relaxed
        if division is not None and (may_stay_whole or not kept or _held(graph.class_by_name[class_name], division)):
            found.update(dict.fromkeys(alike, division))
    return found


def divide(
    graph: Graph,
    class_name: str,
    boundary: Boundary,
    degree: int,
    seq_len: int,
    may_stay_whole: bool = False,
    pinned: Mapping[str, State] | None = None,
    loss_parallel: bool = True,
    whole_prologue: bool = False,
    whole_modules: frozenset[str] = frozenset(),
) -> Division | None:
    """The cheapest division of a class at one degree; None where there is none. `pinned`: states of tied parameters."""
    softened = (loss_parallel, whole_prologue, whole_modules)
    return _Programme(
        Options(graph, class_name, boundary, degree, seq_len, may_stay_whole, pinned or {}, *softened)
    ).division()


def _mostly_divided(block_class: BlockClass, division: Division) -> bool:
    """Whether all but a small part of a class's matrices is stored divided."""
    matrices = [parameter for parameter in block_class.parameters if len(parameter.shape) > 1]
    divided = sum(parameter.elements for parameter in _held(block_class, division))
    return divided >= LEAST_DIVIDED * sum(parameter.elements for parameter in matrices) and bool(matrices)


def _held(block_class: BlockClass, division: Division) -> list[Parameter]:
    """Matrices that are stored divided."""
    matrices = [parameter for parameter in block_class.parameters if len(parameter.shape) > 1]
    return [parameter for parameter in matrices if division.states.get(parameter.tensor or 0, WHOLE).kind == "S"]


class _Programme:
    """The integer programme of one class."""

    def __init__(self, options: Options) -> None:
        self.offered, self.options = options, options.of
        self.block_class, self.forward, self.writer = options.block_class, options.forward, options.writer
        self.links = links(self.block_class, self.forward, options.entries)

    def division(self) -> Division | None:
        problem = pulp.LpProblem("division", pulp.LpMinimize)
        choose = {
            (operator, number): pulp.LpVariable(f"x_{operator}_{number}", cat="Binary")
            for operator, options in self.options.items()
            for number in range(len(options))
        }
        if any(not options for options in self.options.values()):
            return None
        convert = self._conversions(choose)
        cost = [(choose[key], self._seconds(*key) * NANOSECONDS) for key in choose]
        cost += [
            (variable, self._conversion_seconds(link, source, target) * NANOSECONDS)
            for (link, source, target), variable in convert.items()
        ]
        problem += pulp.LpAffineExpression(cost)
        for operator, options in self.options.items():
            problem += pulp.LpAffineExpression([(choose[operator, number], 1) for number in range(len(options))]) == 1
        self._constrain(problem, choose, convert)
        self._limit_whole(problem, choose)
        self._one_state_each(problem, choose)
        self._alike_at_every_call(problem, convert)
        if solve(problem).status != "optimal":
            return None
        chosen = {operator: options[next(n for n in range(len(options)) if choose[operator, n].value() > 0.5)]
                  for operator, options in self.options.items()}  # fmt: skip
        active = [key for key, variable in convert.items() if variable.value() > 0.5]
        return self._read_off(chosen, active)

    def _produced(self, tensor: int) -> dict[State, list[tuple[int, int]]]:
        """State -> the (operator, option) pairs that produce the tensor so; inputs have the boundary's state."""
        operator = self.writer.get(tensor)
        if operator is None:
            return {}
        states: dict[State, list[tuple[int, int]]] = {}
        for number, option in enumerate(self.options[operator]):
            states.setdefault(option.writes[tensor], []).append((operator, number))
        return states

    def _given(self, tensor: int) -> State | None:
        """The state of a tensor that the class does not make: None for parameters, which are stored as needed."""
        if tensor in self.writer or self.block_class.tensor_by_id[tensor].parameter is not None:
            return None
        return self.offered.boundary_state(tensor)

    def _conversions(
        self, choose: dict[tuple[int, int], pulp.LpVariable]
    ) -> dict[tuple[int, State, State], pulp.LpVariable]:
        """A variable for each link (tensor at a site) and change of state that some producer and some reader could want."""
        variables = {}
        for number, link in enumerate(self.links):
            produced = list(self._produced(link.tensor)) or [self._given(link.tensor) or WHOLE]
            wanted = [option.reads[link.tensor] for reader in link.readers for option in self.options[reader]]
            if link.leaves:
                wanted.append(self.offered.boundary_state(link.tensor))
            wanted = list(dict.fromkeys(wanted))  # in one order, so that of equals the solver takes the same each time
            for source in produced:
                for target in wanted:
                    if source.kind != target.kind and self._can_move(link, source, target):
                        name = f"y_{number}_{_word(source)}_{_word(target)}"
                        variables[number, source, target] = pulp.LpVariable(name, cat="Binary")
        return variables

    def _can_move(self, link: Link, source: State, target: State) -> bool:
        """Whether ranks' parts one after another are the whole, and the model's code need not see the change.

        After an attention call code shapes the result by the arguments it gave: only their number of heads may differ. Tokens
        flattened into one dim are put back by the batch and length read before.
        """
        if (source.kind, target.kind) not in FORWARD:
            return False
        segments = self.block_class.tensor_by_id[link.tensor].segments
        divided = [state for state in (source, target) if state.kind == "S"]
        if any(state.dim in segments or self._is_flattened_sequence(link.tensor, state) for state in divided):
            return False
        return link.site.where != "attention" or all(state.dim == HEADS for state in divided)

    def _is_flattened_sequence(self, tensor: int, state: State) -> bool:
        atom = self.block_class.tensor_by_id[tensor].dims[state.dim][state.atom]
        return state.atom > 0 and self.offered.follows[atom] == "sequence"

    def _constrain(
        self,
        problem: pulp.LpProblem,
        choose: dict[tuple[int, int], pulp.LpVariable],
        convert: dict[tuple[int, State, State], pulp.LpVariable],
    ) -> None:
        by_tensor: dict[int, list[tuple[int, State, State]]] = {}
        for key in convert:
            by_tensor.setdefault(self.links[key[0]].tensor, []).append(key)
        for number, source, target in convert:
            made = self._produced(self.links[number].tensor).get(source)
            if made is not None:
                problem += convert[number, source, target] <= pulp.LpAffineExpression(
                    [(choose[key], 1) for key in made]
                )
        for reader in self.forward:
            for tensor in dict.fromkeys(reader.reads):
                self._reader(problem, choose, convert, reader.id, tensor, by_tensor.get(tensor, []))
        for tensor in self.block_class.outputs:
            if tensor in self.writer:
                wanted = self.offered.boundary_state(tensor)
                for state, made in self._produced(tensor).items():
                    if state != wanted and not self._leaves_converted(tensor, state, wanted, convert):
                        problem += pulp.LpAffineExpression([(choose[key], 1) for key in made]) == 0
                    elif state != wanted:
                        ways = [
                            v
                            for (n, s, t), v in convert.items()
                            if self._is_exit(n, tensor) and (s, t) == (state, wanted)
                        ]
                        problem += pulp.LpAffineExpression([(choose[key], 1) for key in made]) <= pulp.lpSum(ways)

    def _limit_whole(self, problem: pulp.LpProblem, choose: dict[tuple[int, int], pulp.LpVariable]) -> None:
        """Matrices that are whole by choice hold a small part of the class's elements."""
        if self.offered.may_stay_whole:
            return
        held = [
            (choose[operator.id, number], tensor.elements(self.offered.sizes))
            for operator in self.forward
            for number, option in enumerate(self.options[operator.id])
            for tensor in map(self.block_class.tensor_by_id.get, self.offered.held_whole(operator, option))
            if tensor is not None
        ]
        if held:
            scale = max(self.offered.limit, 1.0)
            problem += pulp.LpAffineExpression([(variable, size / scale) for variable, size in held]) <= 1

    def _one_state_each(self, problem: pulp.LpProblem, choose: dict[tuple[int, int], pulp.LpVariable]) -> None:
        """All readers of a parameter find it in one state."""
        for parameter in self.block_class.parameters:
            readers = [operator.id for operator in self.forward if parameter.tensor in operator.reads]
            for other in readers[1:]:
                sides = [self._reading(parameter.tensor or 0, reader, choose) for reader in (readers[0], other)]
                for state in dict.fromkeys((*sides[0], *sides[1])):
                    one, two = (pulp.LpAffineExpression(side.get(state, [])) for side in sides)
                    problem += one == two

    def _alike_at_every_call(
        self, problem: pulp.LpProblem, convert: dict[tuple[int, State, State], pulp.LpVariable]
    ) -> None:
        """A module that runs several times converts the same each time; where one call cannot, none does."""
        for place in repeated(self.block_class):
            calls = [number for number, link in enumerate(self.links) if place_of(link.site) == place]
            changes = dict.fromkeys((source, target) for number, source, target in convert if number in calls)
            for source, target in changes:
                each = [convert.get((number, source, target)) for number in calls]
                for one, other in zip(each, each[1:], strict=False):
                    problem += pulp.lpSum([one] if one else []) == pulp.lpSum([other] if other else [])

    def _reading(
        self, tensor: int, reader: int, choose: dict[tuple[int, int], pulp.LpVariable]
    ) -> dict[State, list[tuple[pulp.LpVariable, int]]]:
        found: dict[State, list[tuple[pulp.LpVariable, int]]] = {}
        for number, option in enumerate(self.options[reader]):
            found.setdefault(option.reads[tensor], []).append((choose[reader, number], 1))
        return found

    def _is_exit(self, number: int, tensor: int) -> bool:
        return self.links[number].tensor == tensor and self.links[number].leaves

    def _leaves_converted(
        self, tensor: int, state: State, wanted: State, convert: dict[tuple[int, State, State], pulp.LpVariable]
    ) -> bool:
        return any(self._is_exit(n, tensor) and (s, t) == (state, wanted) for n, s, t in convert)

    def _reader(
        self,
        problem: pulp.LpProblem,
        choose: dict[tuple[int, int], pulp.LpVariable],
        convert: dict[tuple[int, State, State], pulp.LpVariable],
        reader: int,
        tensor: int,
        keys: list[tuple[int, State, State]],
    ) -> None:
        """What the reader's option needs is there as produced and not converted, or as converted on the way."""
        if self.block_class.tensor_by_id[tensor].parameter is not None:
            return
        own = [key for key in keys if reader in self.links[key[0]].readers]
        produced, given = self._produced(tensor), self._given(tensor)
        needed: dict[State, list[pulp.LpVariable]] = {}
        for number, option in enumerate(self.options[reader]):
            needed.setdefault(option.reads[tensor], []).append(choose[reader, number])
        for state, variables in needed.items():
            there: list[tuple[pulp.LpVariable, int]] = [(choose[key], 1) for key in produced.get(state, [])]
            there += [(convert[key], 1) for key in own if key[2] == state]
            wants = pulp.LpAffineExpression([(variable, 1) for variable in variables])
            problem += wants <= pulp.LpAffineExpression(there) + (1 if given == state else 0)
            # A conversion on the way leaves the reader only its target.
            for key in own:
                if key[2] != state:
                    problem += wants + convert[key] <= 1

    # Costs at the typical device.

    def _seconds(self, operator: int, number: int) -> float:
        found = self.block_class.operator_by_id[operator]
        work = work_of(self.block_class, found, self.offered.sizes, 2)
        option = self.options[operator][number]
        backward = 2 if kind_of(found) in ("matmul", "attention") else 1
        seconds = work.flops / FLOPS_PER_SECOND * (1 + backward) + work.bytes / BYTES_PER_SECOND * 2
        return float(seconds) * option.share + self._kept_whole(operator, option)

    def _kept_whole(self, operator: int, option: Option) -> float:
        """Seconds that count for matrices an option reads whole, where they may be."""
        if not self.offered.may_stay_whole:
            return 0.0
        held = self.offered.held_whole(self.block_class.operator_by_id[operator], option)
        tensors = [self.block_class.tensor_by_id[read] for read in held]
        return WHOLE_SECONDS_PER_BYTE * sum(tensor.bytes(self.offered.sizes, 2) for tensor in tensors)

    def _conversion_seconds(self, number: int, source: State, target: State) -> float:
        conversion = SiteConversion(self.links[number].site, source, target)
        full = self.block_class.tensor_by_id[self.links[number].tensor].bytes(self.offered.sizes, 2)
        part = (self.offered.degree - 1) / self.offered.degree * full / LINK_BYTES_PER_SECOND
        weight = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "identity": 0.0, "slice": 0.0}
        # Of equals, what happens last: code before the first block may read lengths off whole hidden states.
        least = EPSILON_SECONDS / 2 if self.links[number].is_entry else EPSILON_SECONDS
        return part * (weight[conversion.forward] + weight[conversion.backward]) + least

    # The answer.

    def _read_off(self, chosen: dict[int, Option], active: list[tuple[int, State, State]]) -> Division:
        states: dict[int, State] = {}
        for operator in self.forward:
            option = chosen[operator.id]
            for tensor in operator.reads:
                given = self._given(tensor)
                if self.block_class.tensor_by_id[tensor].parameter is not None:
                    states.setdefault(tensor, option.reads[tensor])
                elif given is not None:
                    states.setdefault(tensor, given)
            states.update(option.writes)
        gathered = {
            behind
            for operator in self.forward
            if not is_view(operator)
            for tensor in operator.reads
            for behind in self.offered.behind(tensor)
            if chosen[operator.id].reads[tensor].kind in ("R", "R*") and states.get(behind, WHOLE).kind == "S"
        }
        composites = tuple(
            CompositeUse(operator, option.composite, self._composite_collectives(operator, option))
            for operator, option in chosen.items()
            if option.composite and option.dim is not None
        )
        return Division(
            block_class=self.block_class.name,
            boundary=self.offered.boundary,
            divided={operator: option.dim for operator, option in chosen.items() if option.dim is not None},
            states=states,
            gathered=frozenset(gathered),
            conversions=tuple(
                SiteConversion(self.links[number].site, source, target) for number, source, target in active
            ),
            composites=tuple(use for use in composites if use.collectives),
        )

    def _composite_collectives(
        self, operator: int, option: Option
    ) -> tuple[tuple[Literal["forward", "backward"], str, int], ...]:
        """Collectives inside the operator; those that a conversion of its partial output stands for are left to it."""
        assert option.dim is not None
        dim = self.block_class.operator_by_id[operator].local_dims[option.dim]
        composite = next(item for item in dim.composites if item.name == option.composite)
        return tuple(item for item in composite.collectives if option.writes.get(item[2]) != PARTIAL)


def _word(state: State) -> str:
    return state.kind.replace("*", "x") + (f"{state.dim}{state.atom}" if state.kind == "S" else "")
