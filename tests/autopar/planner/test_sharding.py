"""L0: Megatron's division comes out without a model's name, and the integer programme equals brute force."""

from collections import Counter
from itertools import product

import pytest

from autopar.documents.plan import SegmentPlacement
from autopar.planner.division_ilp import Problem, Regime, optimum
from autopar.planner.relations import collapse, flatten
from autopar.planner.sharding import allowed_degrees, divisions, plan_conversions, plan_placements, undivided
from autopar.pricing import divides
from autopar.pricing.layout import layout_of
from tests.autopar.captured import EXAMPLES, block, division, graph, price

MODELS = ("gpt3_175b", "llama3_8b", "llama31_70b", "llama31_405b")
NVLINK = 4.5e11


def _counts(movements, phase):
    return Counter(movement.kind for movement in movements if movement.phase == phase)


@pytest.mark.parametrize("degree", [2, 4, 8])
@pytest.mark.parametrize("name", MODELS)
def test_megatron_with_sequence_parallelism_comes_out(name, degree):
    # Korthikanti et al. 2022 (arXiv 2205.05198), section 4.2.2: two all-gathers and two reduce-scatters each way
    found = price(name, block(name), "sequence", degree)
    for collectives in (found.forward_collectives, found.backward_collectives):
        assert {item.kind: item.count for item in collectives} == {"all_gather": 2, "reduce_scatter": 2}


@pytest.mark.parametrize("name", MODELS)
def test_megatron_without_sequence_parallelism_comes_out(name):
    # Shoeybi et al. 2019 (arXiv 1909.08053), section 3: two all-reduces each way
    movements = layout_of(graph(name), division(name, block(name), "replicate", 8)).movements
    assert _counts(movements, "forward") == _counts(movements, "backward") == {"all_reduce": 2}


def test_llama_parameters_are_placed_column_then_row_wise():
    assert plan_placements(graph("llama3_8b"), division("llama3_8b", block("llama3_8b"), "sequence", 4)) == {
        "attention_norm.weight": "Replicate",
        "attention.q_proj.weight": "Shard(0)",
        "attention.k_proj.weight": "Shard(0)",
        "attention.v_proj.weight": "Shard(0)",
        "attention.o_proj.weight": "Shard(1)",
        "ffn_norm.weight": "Replicate",
        "ffn.gate_proj.weight": "Shard(0)",
        "ffn.up_proj.weight": "Shard(0)",
        "ffn.down_proj.weight": "Shard(1)",
    }


def test_fused_qkv_is_divided_part_by_part():
    placements = plan_placements(graph("gpt3_175b"), division("gpt3_175b", block("gpt3_175b"), "sequence", 8))
    assert placements["attention.qkv.weight"] == SegmentPlacement(dim=0, segments=(12288, 12288, 12288))
    assert placements["attention.out.bias"] == "Replicate"


def test_conversions_name_sites_of_the_chain():
    found = plan_conversions(division("llama3_8b", block("llama3_8b"), "sequence", 4), "layers.*")
    assert [(item.site.module, item.forward, item.dim) for item in found] == [
        ("layers.*.attention_norm", "all_gather", 1),
        ("layers.*.attention.o_proj", "reduce_scatter", 1),
        ("layers.*.ffn_norm", "all_gather", 1),
        ("layers.*.ffn.down_proj", "reduce_scatter", 1),
    ]


def test_more_ranks_than_key_heads_only_with_replicated_keys():
    name = "llama3_8b"
    at_8, at_16 = (division(name, block(name), "replicate", degree) for degree in (8, 16))
    assert not divides(graph(name), at_8, 16)
    assert divides(graph(name), at_16, 16)
    placements = plan_placements(graph(name), at_16)
    assert placements["attention.k_proj.weight"] == placements["attention.v_proj.weight"] == "Replicate"
    assert placements["attention.q_proj.weight"] == "Shard(0)"
    assert _counts(layout_of(graph(name), at_16).movements, "forward") == {"all_reduce": 2}


def test_heads_that_do_not_divide_are_not_offered():
    found = division("llama3_8b", block("llama3_8b"), "replicate", 4)
    assert allowed_degrees(graph("llama3_8b"), found, (1, 2, 3, 4, 6, 8)) == [1, 2, 4, 8]


def test_the_sequence_must_divide_under_sequence_parallelism():
    found = division("gpt3_175b", block("gpt3_175b"), "sequence", 4)
    assert divides(graph("gpt3_175b"), found, 4, seq=2048)
    assert not divides(graph("gpt3_175b"), found, 4, seq=2050)


def test_vocabularies_need_not_divide():
    name = "llama3_8b"
    head = division(name, "epilogue", "replicate", 8)
    assert plan_placements(graph(name), head)["head.weight"] == "Shard(0)"
    assert divides(graph(name), head, 7)


def test_embedding_and_head_are_vocabulary_parallel_with_sequence_parallel_ends():
    name = "llama31_70b"
    assert _counts(layout_of(graph(name), division(name, "prologue", "sequence", 8)).movements, "forward") == {
        "reduce_scatter": 1
    }
    head = layout_of(graph(name), division(name, "epilogue", "sequence", 8)).movements
    assert _counts(head, "forward") == {"all_gather": 1, "all_reduce": 3}
    assert _counts(head, "backward") == {"reduce_scatter": 1, "all_reduce": 1}


def test_the_list_holds_the_undivided_block_and_distinct_divisions():
    name = "tiny_llama"
    found = divisions(graph(name), block(name), "replicate")
    assert found[0].trivial
    assert found[0] == undivided(graph(name), block(name))
    assert all(one != other for i, one in enumerate(found) for other in found[:i])
    assert any(divides(graph(name), item, 2) and not item.trivial for item in found)


def test_no_module_of_the_division_knows_a_model():
    package = EXAMPLES.parent / "autopar"
    text = "".join(path.read_text() for folder in ("planner", "pricing") for path in (package / folder).glob("*.py"))
    assert not [word for word in ("llama", "gpt3", "mixtral", "q_proj_", "deepseek") if word in text.lower()]


@pytest.mark.parametrize("boundary", ["replicate", "sequence"])
@pytest.mark.parametrize("class_name", ["prologue", "epilogue"])
@pytest.mark.parametrize("bandwidth", [1e9, 1e11, 1e14])
def test_the_optimum_equals_brute_force(class_name, boundary, bandwidth):
    problem = Problem(graph("tiny_llama"), class_name, boundary)
    regime = Regime(2, bandwidth)
    relations = problem.relations(regime)
    found = optimum(collapse(relations))
    leaves = [leaf for chosen in found for leaf in flatten(chosen)]
    cost = {id(row.chosen): row.cost for relation in relations for row in relation.rows if row.chosen is not None}
    assert sum(cost[id(leaf)] for leaf in leaves) == pytest.approx(_brute_force(relations), rel=1e-9)


def _brute_force(relations):
    """Least cost over all assignments, by extending every consistent one relation by relation; no cost prunes any."""
    partial = [({}, 0.0)]
    for relation in relations:
        extended = {}
        last_use = {v for later in relations[relations.index(relation) + 1 :] for v in later.variables}
        for (assigned, cost), row in product(partial, relation.rows):
            values = dict(zip(relation.variables, row.values, strict=True))
            if any(assigned.get(variable, value) != value for variable, value in values.items()):
                continue
            kept = {variable: value for variable, value in {**assigned, **values}.items() if variable in last_use}
            key = tuple(sorted(kept.items()))
            total = cost + row.cost
            if key not in extended or total < extended[key][1]:
                extended[key] = (kept, total)
        partial = list(extended.values())
    return min(cost for _, cost in partial)
