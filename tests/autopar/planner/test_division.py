"""L0 on captured models: Megatron's division comes out, with no model's name anywhere."""

from __future__ import annotations

import itertools

import pytest

import autopar
from autopar.documents import Graph
from autopar.documents.plan import SegmentPlacement
from autopar.planner.options import Options
from autopar.planner.placements import _placement
from autopar.planner.sharding import _Programme, divide
from autopar.tracer import capture

SEQ = 4096
MODELS = ("gpt3_175b", "llama3_8b", "llama31_70b", "llama31_405b")
ROW_WISE = ("out.weight", "down.weight", "o_proj.weight", "down_proj.weight")


@pytest.fixture(scope="module", params=MODELS)
def graph(request) -> Graph:
    return capture(f"examples/{request.param}.py")


def block_of(graph):
    return graph.class_by_name[graph.chains[0].runs[0].block_class]


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_a_block_is_divided_as_megatron_divides_it(graph, degree):
    # Korthikanti et al., arXiv 2205.05198, section 4.2.2: column-wise then row-wise, two all-gathers and two reduce-scatters.
    block = block_of(graph)
    division = divide(graph, block.name, "sequence", degree, SEQ)
    forward = sorted(item.forward for item in division.conversions)
    backward = sorted(item.backward for item in division.conversions)
    assert forward == backward == ["all_gather", "all_gather", "reduce_scatter", "reduce_scatter"]
    assert all(item.dim == 1 for item in division.conversions)
    for parameter in block.parameters:
        state = division.states[parameter.tensor]
        if len(parameter.shape) == 2:
            assert (state.kind, state.dim) == ("S", 1 if parameter.name.endswith(ROW_WISE) else 0), parameter.name
        elif "norm" in parameter.name or parameter.name.endswith(("out.bias", "down.bias")):
            assert state.kind != "S", parameter.name
        else:
            assert (state.kind, state.dim) == ("S", 0), parameter.name


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_with_whole_boundaries_it_reduces_twice(graph, degree):
    # Shoeybi et al., arXiv 1909.08053: f and g, an all-reduce each way for attention and feed-forward.
    division = divide(graph, block_of(graph).name, "replicated", degree, SEQ)
    assert sorted(item.forward for item in division.conversions) == ["all_reduce", "all_reduce", "identity", "identity"]
    assert sorted(item.backward for item in division.conversions) == [
        "all_reduce",
        "all_reduce",
        "identity",
        "identity",
    ]


def test_a_fused_projection_is_divided_part_by_part():
    graph = capture("examples/gpt3_175b.py")
    block = block_of(graph)
    division = divide(graph, block.name, "sequence", 8, SEQ)
    fused = next(p for p in block.parameters if p.name == "attention.qkv.weight")

    class OnlyGraph:
        def __init__(self):
            self.graph = graph

    placement = _placement(OnlyGraph(), division, block.name, fused.tensor)
    assert placement == SegmentPlacement(dim=0, segments=(12_288, 12_288, 12_288))


def test_a_plan_says_which_whole_parameters_each_rank_sees_a_share_of():
    # Under sequence parallelism norms see a part of the sequence; a row-wise linear's bias joins a partial sum.
    plan = autopar.plan("examples/gpt3_175b.py", "h100x1024", global_batch=1024, fixed={"tp": 8, "sp": 1})
    block = {name.removeprefix("blocks.*."): kind for name, kind in plan.shares.items() if name.startswith("blocks.*.")}
    norms = dict.fromkeys((f"{n}_norm.{p}" for n in ("attention", "ffn") for p in ("weight", "bias")), "gradient")
    assert block == norms | {"attention.out.bias": "value", "down.bias": "value"}
    gathers = [item for item in plan.conversions if item.forward == "all_gather" and "blocks" in item.site.module]
    assert [item.gradient for item in gathers] == ["share", "share"]
    assert plan.options["loss_parallel"]


def test_more_shards_than_key_heads_are_not_offered():
    graph = capture("examples/llama3_8b.py")
    block = block_of(graph)
    kv = next(p for p in block.parameters if p.name == "attention.k_proj.weight")
    division = divide(graph, block.name, "sequence", 16, SEQ)
    assert division is None or division.states[kv.tensor].dim != 0


def test_the_programme_finds_the_cheapest_of_all_assignments():
    graph = Graph.load("tests/fixtures/graph.json")
    for boundary, degree in itertools.product(("replicated", "sequence"), (2, 4)):
        programme = _Programme(Options(graph, "Mlp", boundary, degree, 4, False, {}, True))
        found = programme.division()
        assert found is not None
        assert cost_of(programme, found) == pytest.approx(cheapest(programme), rel=1e-9)


def cost_of(programme, division) -> float:
    total = sum(
        programme._seconds(
            operator,
            next(
                n for n, o in enumerate(options) if o.dim == division.divided.get(operator) and states_fit(o, division)
            ),
        )
        for operator, options in programme.options.items()
    )
    for item in division.conversions:
        number = next(n for n, link in enumerate(programme.links) if link.site == item.site)
        total += programme._conversion_seconds(number, item.source, item.target)
    return total


def states_fit(option, division) -> bool:
    return all(division.states[tensor] == state for tensor, state in option.writes.items())


def cheapest(programme) -> float:
    """Every choice of options; between a tensor and its readers the cheapest set of links that gives each what it needs."""
    best = float("inf")
    operators = list(programme.options)
    for picks in itertools.product(*(range(len(programme.options[op])) for op in operators)):
        chosen = {op: programme.options[op][n] for op, n in zip(operators, picks, strict=True)}
        total = sum(programme._seconds(op, n) for op, n in zip(operators, picks, strict=True))
        made = {tensor: state for option in chosen.values() for tensor, state in option.writes.items()}
        for tensor in programme.block_class.inputs:
            made[tensor] = programme.offered.boundary_state(tensor)
        for tensor, source in made.items():
            total += cheapest_links(programme, chosen, tensor, source)
            if total >= best:
                break
        best = min(best, total)
    return best


def cheapest_links(programme, chosen, tensor, source) -> float:
    needs = {op: option.reads[tensor] for op, option in chosen.items() if tensor in option.reads}
    wanted = programme.offered.boundary_state(tensor) if tensor in programme.block_class.outputs else None
    own = [n for n, link in enumerate(programme.links) if link.tensor == tensor]
    targets = {*needs.values(), *([wanted] if wanted else [])} - {source}
    best = float("inf")
    for active in itertools.chain.from_iterable(
        itertools.combinations(itertools.product(own, targets), r) for r in range(3)
    ):
        if len({n for n, _ in active}) < len(active):
            continue
        served = True
        for op, need in needs.items():
            on_the_way = [target for n, target in active if op in programme.links[n].readers]
            served &= all(target == need for target in on_the_way) and (bool(on_the_way) or need == source)
        if wanted is not None and wanted != source:
            served &= any(programme.links[n].leaves and target == wanted for n, target in active)
        if served:
            try:
                best = min(best, sum(programme._conversion_seconds(n, source, target) for n, target in active))
            except KeyError:
                continue
    return best
