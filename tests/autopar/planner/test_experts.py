"""Experts of grouped products over tp, ep and etp: what ranks hold and exchange, what is refused, who carries it out."""

import json
import re

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

import autopar
from autopar.api import dry_run
from autopar.documents import Graph
from autopar.errors import NoPlanFits, RequestError
from autopar.runtime.mesh import require_runnable

CONFIG = {
    "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "vocab_size": 512, "hidden_size": 64, "head_dim": 16,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    "num_local_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
SEQ_LEN = 64
DENSE = Graph.load("tests/fixtures/graph.json")


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    config = tmp_path_factory.mktemp("mixtral") / "config.json"
    config.write_text(json.dumps(CONFIG))
    return autopar.capture(config, seq_len=SEQ_LEN)


@pytest.fixture(scope="module")
def sizes():
    """Name -> elements, of torch's own model."""
    with torch.device("meta"):
        model = MixtralForCausalLM(MixtralConfig(**CONFIG))
    return {name: parameter.numel() for name, parameter in model.named_parameters()}


def planned(graph, fixed, devices=8, batch=16, **words):
    rest = {"pp": 1, "micro_batch": 1, "zero": 0, "recompute": "none", "schedule": "1f1b"}
    return autopar.plan(graph, "h100x8", global_batch=batch, devices=devices, fixed=rest | fixed, **words)


def collectives(plan, axis):
    (stage,) = plan.costs
    found = (*stage.chunks[0].forward.collectives, *stage.chunks[0].backward.collectives)
    return [item for item in found if item.axis == axis]


@pytest.mark.parametrize(
    ("tp", "ep", "etp"),
    [(2, 1, 2), (4, 1, 4), (1, 4, 1), (1, 8, 1), (2, 2, 2), (2, 4, 2), (2, 8, 1), (4, 2, 1), (4, 1, 1)],
)
def test_experts_are_held_as_the_plan_places_them(graph, sizes, tp, ep, etp):
    """A rank holds 1 / (ep etp) of the experts; master weights take 4 bytes an element (Rajbhandari et al., 1910.02054)."""
    plan = planned(graph, {"tp": tp, "ep": ep, "etp": etp})
    assert (plan.mesh.tp, plan.mesh.ep, plan.mesh.etp) == (tp, ep, etp)
    held = experts = 0.0
    for name, elements in sizes.items():
        placed = plan.placements[re.sub(r"\.\d+\.", ".*.", name)]
        own = elements
        for axis, degree in (("tp", tp), ("ep", ep)):
            own /= degree if placed.get(axis, "Replicate") != "Replicate" else 1
        held += own
        experts += own if "experts" in name else 0
    assert experts == sum(n for name, n in sizes.items() if "experts" in name) / (ep * etp)
    assert plan.costs[0].memory["parameters"] == pytest.approx(4 * held, rel=1e-9)


@pytest.mark.parametrize(("tp", "ep", "etp"), [(1, 2, 1), (1, 8, 1), (2, 4, 2), (2, 8, 1)])
def test_states_of_experts_are_divided_over_the_ranks_that_hold_the_same_ones(graph, sizes, tp, ep, etp):
    # Each expert element is held by devices / (ep etp) ranks, so ZeRO-1 leaves 1 / devices of all experts on each, whatever ep:
    # two moments of 4 bytes, as for the rest over dp.
    plan = planned(graph, {"tp": tp, "ep": ep, "etp": etp, "zero": 1})
    shared = 0.0
    for name, elements in sizes.items():
        if "experts" not in name:
            placed = plan.placements[re.sub(r"\.\d+\.", ".*.", name)].get("tp", "Replicate")
            shared += elements / (tp if placed != "Replicate" else 1)
    experts = sum(n for name, n in sizes.items() if "experts" in name)
    assert plan.costs[0].memory["states"] == pytest.approx(8 * (shared / plan.mesh.dp + experts / 8), rel=1e-9)


@pytest.mark.parametrize(("tp", "ep", "etp"), [(1, 2, 1), (1, 8, 1), (2, 4, 2), (2, 8, 1)])
def test_every_routed_row_goes_out_and_back_in_each_pass(graph, tp, ep, etp):
    # tokens * top-k rows of the hidden size in 2 bytes; without etp each tp rank sends its part of them.
    plan = planned(graph, {"tp": tp, "ep": ep, "etp": etp})
    moved = collectives(plan, "ep")
    rows = SEQ_LEN * CONFIG["num_experts_per_tok"] / (tp if etp == 1 else 1)
    assert sum(item.count for item in moved) == 4 * CONFIG["num_hidden_layers"]
    assert {item.bytes for item in moved} == {rows * CONFIG["hidden_size"] * 2}
    assert {(item.axis, item.forward) for item in plan.conversions} >= {("ep", "all_to_all")}
    assert collectives(planned(graph, {"tp": tp, "ep": 1}), "ep") == []


def test_gradients_of_experts_that_only_one_rank_holds_are_not_reduced(graph):
    whole, spread = (planned(graph, {"tp": 1, "ep": ep}).costs[0].chunks[0].reduce_seconds for ep in (1, 8))
    assert spread < whole


def test_keys_and_values_of_a_divided_sequence_are_gathered(graph):
    # Forward an all-gather, backward it and a reduce-scatter, of both for all of the sequence: 4 heads of 16 in 2 bytes.
    plan = planned(graph, {"tp": 1, "cp": 4, "dp": 2})
    moved = collectives(plan, "cp")
    assert plan.mesh.cp == 4
    assert {item.bytes for item in moved} == {2 * SEQ_LEN * 4 * 16 * 2}
    assert sum(item.count for item in moved) == 3 * CONFIG["num_hidden_layers"]
    held = [
        planned(graph, {"tp": 1, "cp": cp, "dp": 2}, devices=2 * cp).costs[0].chunks[0].activation_bytes
        for cp in (1, 4)
    ]
    assert held[1] == pytest.approx(held[0] / 4, rel=1e-3)  # but for the numbers of rows of each expert


# Routers that are not balanced.


def test_an_imbalance_lengthens_what_the_most_loaded_rank_does_and_exchanges(graph):
    even, uneven = (planned(graph, {"tp": 1, "ep": 4}, moe_imbalance=f) for f in (1.0, 1.5))
    assert {item.bytes for item in collectives(uneven, "ep")} == {1.5 * item.bytes for item in collectives(even, "ep")}
    assert 1 < uneven.predicted.step_seconds / even.predicted.step_seconds < 1.5
    assert uneven.costs[0].chunks[0].activation_bytes > even.costs[0].chunks[0].activation_bytes
    assert uneven.options["moe_imbalance"] == 1.5 and any("1.5 times the mean" in note for note in uneven.notes)
    assert "moe_imbalance=1.5" in autopar.explain(uneven)


def test_a_rank_never_gets_more_than_all_tokens(graph):
    all_on_one, more = (
        planned(graph, {"tp": 1, "ep": 4}, moe_imbalance=f).predicted.step_seconds for f in (4.0, 100.0)
    )
    assert all_on_one == more


def test_ranks_with_all_experts_are_balanced_whatever_the_router_does(graph):
    even, uneven = (planned(graph, {"tp": 1, "ep": 1}, moe_imbalance=f).predicted.step_seconds for f in (1.0, 3.0))
    assert even == uneven


# What is refused, and who carries the rest out.


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"fixed": {"ep": 3}}, r"ep\(3\) does not divide the 8 experts"),
        ({"fixed": {"ep": 16}}, r"ep\(16\) does not divide the 8 experts"),
        (
            {"fixed": {"ep": 8, "pp": 2, "tp": 1}},
            r"ep\(8\) \* etp\(1\) does not divide dp\(4\) \* cp\(1\) \* tp\(1\) = 4",
        ),
        ({"fixed": {"tp": 4, "etp": 2}}, r"etp\(2\) must be 1 or tp\(4\)"),
        ({"fixed": {"cp": 3}}, r"cp\(3\) .*does not divide the 8 devices"),
        ({"fixed": {"cp": 4}, "seq_len": 36}, r"seq_len\(36\) is not a multiple of 2 \* cp\(4\)"),
        ({"fixed": {"ep": 0}}, "ep=0: must be at least 1"),
        ({"fixed": {"ep": 2}, "forbid": ("ep",)}, "ep is both forbidden and fixed to 2"),
        ({"moe_imbalance": 0.5}, "moe imbalance 0.5: .*at least 1"),
        ({"moe_imbalance": float("nan")}, "moe imbalance nan"),
        ({"target": "megatrom"}, "target megatrom: unknown .did you mean 'megatron'"),
    ],
)
def test_what_cannot_be_is_refused_with_its_arithmetic(graph, words, said):
    with pytest.raises(RequestError, match=said):
        autopar.plan(graph, "h100x8", global_batch=16, **words)


@pytest.mark.parametrize("words", [{"fixed": {"ep": 2}}, {"moe_imbalance": 1.5}])
def test_a_model_without_experts_has_nothing_to_spread(words):
    with pytest.raises(RequestError, match=r"the model has none|has no routed experts"):
        autopar.plan(DENSE, "h100x8", global_batch=16, **words)


@pytest.mark.parametrize(
    ("fixed", "said"), [({"ep": 4}, "ep=4"), ({"cp": 2}, "cp=2"), ({"tp": 2, "etp": 1, "sp": 0}, "etp=1 under tp=2")]
)
def test_a_plan_that_run_does_not_carry_out_says_so_and_is_refused_by_it(graph, fixed, said):
    plan = planned(graph, {"tp": 1} | fixed)
    assert plan.export_only and any(note.startswith("not runnable by autopar run") for note in plan.notes)
    with pytest.raises(RequestError, match=said):
        require_runnable(plan)
    with pytest.raises(RequestError, match=said):
        dry_run(plan, "config.json")


def test_by_default_the_search_stays_within_what_run_carries_out(graph):
    plan = autopar.plan(graph, "h100x8", global_batch=16)
    assert plan.certificate.space["ep"] == plan.certificate.space["cp"] == [1]
    assert not plan.export_only
    require_runnable(plan)


def test_a_target_widens_the_space_and_keeps_its_own_rules(graph):
    plan = autopar.plan(graph, "h100x8", global_batch=16, target="megatron")
    space = plan.certificate.space
    assert space["ep"] == [1, 2, 4, 8] and space["cp"] == [1, 2, 4, 8]
    assert space["zero"] == [0, 1] and "gpipe" not in space["schedule"]
    assert plan.export_only and any("made and priced for megatron" in note for note in plan.notes)
    with pytest.raises(RequestError, match="made and priced for megatron"):
        require_runnable(plan.model_copy(update={"mesh": plan.mesh.model_copy(update={"ep": 1, "cp": 1})}))


def test_expert_parallelism_pays_where_published_recipes_use_it(tmp_path):
    # Mixtral 8x7B (Jiang et al., 2401.04088, table 1): Megatron's recipe for 64 H100 is tp=1 pp=4 ep=8, interleaved.
    large = {
        "hidden_size": 4096, "head_dim": 128, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 32768,
    }  # fmt: skip
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG | large))
    graph = autopar.capture(config, seq_len=4096)

    def best(**fixed):
        fixed = {"cp": 1} | fixed
        return autopar.plan(graph, "h100x64", global_batch=256, seq_len=4096, fixed=fixed, target="megatron")

    with pytest.raises(NoPlanFits, match="lacks"):
        best(pp=4, tp=1, ep=1)
    steps = [best(pp=4, tp=1, ep=ep).predicted.step_seconds for ep in (2, 4, 8)]
    assert steps == sorted(steps, reverse=True)
    mesh = best().mesh
    assert (mesh.pp, mesh.tp, mesh.ep) == (4, 1, 8)
