"""The recompute menu: what is kept suffices to run what is run again, and frees what it says."""

from __future__ import annotations

import pytest

from autopar.documents.graph import BlockClass
from autopar.tracer import capture
from tests.models import GptLayer, Stack, hidden_states


@pytest.fixture(scope="module", params=["explicit", "fused", "llama", "custom"])
def block(request) -> BlockClass:
    if request.param in ("llama", "custom"):
        name = {"llama": "tiny_llama", "custom": "custom_attention"}[request.param]
        return capture(f"examples/{name}.py").class_by_name["layers.*"]
    fused = request.param == "fused"
    return capture(Stack(lambda: GptLayer(64, 4, fused), 64, 4), hidden_states(64), seq_len=32).class_by_name[
        "layers.*"
    ]


def test_what_is_kept_and_run_again_gives_everything_that_backward_needs(block):
    forward = [operator for operator in block.operators if operator.phase == "forward"]
    written = {tensor for operator in forward for tensor in operator.writes}
    for option in block.recompute:
        given = {tensor.id for tensor in block.tensors if tensor.id not in written}
        # Views of what is kept cost nothing and are always there.
        available = given | set(option.saved)
        for operator in forward:
            if operator.id in option.operators or operator.traffic == ():
                if operator.id in option.operators:
                    missing = set(operator.reads) - available
                    assert not missing, (option.name, operator.name, missing)
                if set(operator.reads) <= available:
                    available |= set(operator.writes)
        needed = {tensor.id for tensor in block.tensors if tensor.saved} - set(option.saved)
        assert needed <= available, option.name


def test_the_menu_goes_from_most_memory_to_least(block):
    sizes = {atom: 1.0 for tensor in block.tensors for atom in tensor.atoms}
    names = [option.name for option in block.recompute]
    assert names[0] == "none"
    assert names[-1] == "full"
    kept = [sum(block.tensor_by_id[t].bytes(sizes, 2) for t in option.saved) for option in block.recompute]
    assert kept == sorted(kept, reverse=True)
    assert block.recompute[-1].saved == block.inputs[:1]


def test_selective_never_runs_a_contraction_of_weights_again(block):
    for option in block.recompute[1:-1]:
        for number in option.operators:
            operator = block.operator_by_id[number]
            weights = any(block.tensor_by_id[read].parameter for read in operator.reads)
            assert not (weights and operator.model_flops)


def test_what_is_kept_is_named_by_module_and_ordinal(block):
    ordinal: dict[str, int] = {}
    names = set()
    for operator in block.operators:
        if operator.phase == "forward":
            number = ordinal.get(operator.module, 0)
            ordinal[operator.module] = number + 1
            names.add(f"{operator.module}#{number}")
    for option in block.recompute:
        assert set(option.keep) <= names
        assert bool(option.keep) == option.name.startswith("selective")
