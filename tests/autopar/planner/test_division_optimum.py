"""L0: Megatron's division comes out of captured graphs without a model's name, and is the optimum that brute force finds."""

from __future__ import annotations

from collections import Counter
from functools import cache
from itertools import product
from pathlib import Path

import pytest

from autopar.planner.options import Options
from autopar.planner.sharding import _Programme, divide, divisions
from autopar.pricing import Division, Setting, State, price_block
from autopar.pricing.division import FORWARD
from autopar.tracer import capture
from hardware_profiles.profile import load_cluster
from hardware_profiles.topology import Topology

EXAMPLES = Path(__file__).parents[3] / "examples"
MODELS = ("gpt3_175b", "llama3_8b", "llama31_70b", "llama31_405b")
SEQ = 4096


@cache
def graph(name):
    return capture(str(EXAMPLES / f"{name}.py"))


def blocks(name):
    return graph(name).chains[0].runs[0].block_class


@cache
def division(name, boundary, degree, class_name="") -> Division:
    found = divide(graph(name), class_name or blocks(name), boundary, degree, SEQ)
    assert found is not None
    return found


def counts(found):
    forward = Counter(c.forward for c in found.conversions if c.forward not in ("identity", "slice"))
    backward = Counter(c.backward for c in found.conversions if c.backward not in ("identity", "slice"))
    return dict(forward), dict(backward)


@pytest.mark.parametrize("degree", [2, 4, 8])
@pytest.mark.parametrize("name", MODELS)
def test_megatron_with_sequence_parallelism_comes_out(name, degree):
    # Korthikanti et al. 2022 (arXiv 2205.05198), section 4.2.2: two all-gathers and two reduce-scatters each way.
    each_way = {"all_gather": 2, "reduce_scatter": 2}
    assert counts(division(name, "sequence", degree)) == (each_way, each_way)


@pytest.mark.parametrize("name", MODELS)
def test_megatron_without_sequence_parallelism_comes_out(name):
    # Shoeybi et al. 2019 (arXiv 1909.08053), section 3: two all-reduces each way.
    assert counts(division(name, "replicated", 8)) == ({"all_reduce": 2}, {"all_reduce": 2})


def test_llama_matrices_are_divided_column_then_row_wise():
    found = division("llama3_8b", "sequence", 8)
    stored = {p.name: found.states[p.tensor] for p in graph("llama3_8b").class_by_name[found.block_class].parameters}
    columns = ("attention.q_proj", "attention.k_proj", "attention.v_proj", "ffn.gate_proj", "ffn.up_proj")
    assert all(stored[f"{module}.weight"] == State("S", 0, 0) for module in columns)
    assert all(stored[f"{module}.weight"] == State("S", 1, 0) for module in ("attention.o_proj", "ffn.down_proj"))
    assert all(stored[f"{module}.weight"].kind != "S" for module in ("attention_norm", "ffn_norm"))


def test_embedding_and_head_are_vocabulary_parallel_and_scatter_into_the_sequence():
    name = "llama31_70b"
    assert counts(division(name, "sequence", 8, "prologue")) == ({"reduce_scatter": 1}, {"all_gather": 1})
    head = division(name, "sequence", 8, "epilogue")
    assert counts(head) == ({"all_gather": 1}, {"reduce_scatter": 1})
    # Three all-reduces of one number a row forward (maximum, sum, picked logit), one backward.
    inside = Counter((phase, kind) for use in head.composites for phase, kind, _ in use.collectives)
    assert inside[("forward", "all_reduce")] == 3


def test_a_degree_that_heads_do_not_divide_by_has_no_division():
    offered = divisions(graph("llama3_8b"), blocks("llama3_8b"), "replicated", (2, 3, 4, 6, 8), SEQ)
    assert sorted(offered) == [2, 4, 8]


@pytest.mark.parametrize(("boundary", "repeated"), [("replicated", {"all_reduce": 2}), ("sequence", {"all_gather": 2})])
def test_recompute_repeats_the_collectives_between_what_runs_again(boundary, repeated):
    name, cluster = "gpt3_175b", load_cluster("h100x8")
    chip = cluster.node_groups[0].chip
    setting = Setting(chip, "bf16", "eager", 8, Topology(cluster).strided(8, 1), SEQ)
    price = price_block(graph(name), blocks(name), division(name, boundary, 8), setting, [1])[0]
    selective = {item.kind: item.count for item in price.recompute["selective"].collectives}
    assert price.recompute["none"].collectives == ()
    # Norms run again and their outputs, which the matrices need, are gathered again.
    assert repeated.items() <= selective.items()


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("boundary", ["replicated", "sequence"])
@pytest.mark.parametrize("name", ["tiny_llama", "custom_attention"])
def test_the_programme_finds_the_optimum_of_brute_force(name, boundary, degree):
    offered = Options(graph(name), "epilogue", boundary, degree, 64, True, {}, True)
    programme = _Programme(offered)
    found = programme.division()
    assert found is not None
    chosen = {
        op.id: next(
            number
            for number, option in enumerate(offered.of[op.id])
            if option.dim == found.divided.get(op.id)
            and all(found.states[tensor] == state for tensor, state in option.writes.items())
            and all(_seen(found, programme, op.id, tensor) == state for tensor, state in option.reads.items())
        )
        for op in offered.forward
    }
    assert _cost(programme, chosen) == pytest.approx(min(_all_costs(programme)), rel=1e-9)


def _seen(found, programme, reader, tensor):
    """The state in which a reader finds a tensor: parameters as its option stores them."""
    for conversion in found.conversions:
        serving = [link for link in programme.links if link.site == conversion.site and link.tensor == tensor]
        if serving and reader in serving[0].readers:
            return conversion.target
    return found.states[tensor]


def _all_costs(programme):
    """Cost of every consistent assignment of options, none left out for its cost."""
    forward = programme.forward

    def extend(place, chosen):
        if place == len(forward):
            cost = _cost(programme, chosen)
            if cost is not None:
                yield cost
            return
        operator = forward[place]
        for number, option in enumerate(programme.options[operator.id]):
            trial = {**chosen, operator.id: number}
            if all(_reachable(programme, trial, operator.id, t, s) for t, s in option.reads.items()):
                yield from extend(place + 1, trial)

    return list(extend(0, {}))


def _made(programme, chosen, tensor):
    writer = programme.writer.get(tensor)
    return programme._given(tensor) if writer is None else programme.options[writer][chosen[writer]].writes[tensor]


def _reachable(programme, chosen, reader, tensor, state):
    made = _made(programme, chosen, tensor)
    served = any(link.tensor == tensor and reader in link.readers for link in programme.links)
    return made is None or made == state or (served and (made.kind, state.kind) in FORWARD)


def _cost(programme, chosen):
    """Operators, and for every tensor the cheapest set of conversions that gives each reader what it needs; None: none."""
    total = sum(programme._seconds(operator, number) for operator, number in chosen.items())
    for tensor in {t for op in programme.forward for t in op.reads} | set(programme.block_class.outputs):
        made = _made(programme, chosen, tensor)
        if made is None:
            continue
        cheapest = min(_ways(programme, chosen, tensor, made), default=None)
        if cheapest is None:
            return None
        total += cheapest
    return total


def _ways(programme, chosen, tensor, made):
    links = [(n, link) for n, link in enumerate(programme.links) if link.tensor == tensor]
    needs = {
        op.id: programme.options[op.id][chosen[op.id]].reads[tensor] for op in programme.forward if tensor in op.reads
    }
    leaves = tensor in programme.block_class.outputs and tensor in programme.writer
    wanted = programme.offered.boundary_state(tensor)
    targets = {state for state in (*needs.values(), wanted) if (made.kind, state.kind) in FORWARD and state != made}
    for combination in product((None, *targets), repeat=len(links)):
        active = [(n, link, target) for (n, link), target in zip(links, combination, strict=True) if target]
        fits = all(
            {target for _, link, target in active if reader in link.readers}
            in ({state}, set() if made == state else {state})
            for reader, state in needs.items()
        )
        exits = {target for _, link, target in active if link.leaves}
        if fits and (not leaves or (exits or {made}) == {wanted}):
            yield sum(programme._conversion_seconds(n, made, target) for n, _, target in active)
