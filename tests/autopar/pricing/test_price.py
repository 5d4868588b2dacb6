"""Prices of captured blocks against closed forms of the papers."""

import numpy as np
import pytest

from autopar.pricing.kernels import Point
from autopar.pricing.price import Compiled, size_vector_of
from tests.autopar.captured import block, division, graph, price

GPT = "gpt3_175b"
SEQ, HIDDEN, HEADS = 2048, 12288, 96
SBH = SEQ * HIDDEN


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_saved_bytes_of_gpt_under_sequence_parallelism_are_korthikantis_with_gathered_inputs(degree):
    # arXiv 2205.05198, Table 2, flash attention: 34 sbh / t; torch keeps the two gathered inputs whole: 2 * 2 sbh (1 - 1/t)
    expected = SBH * (34 / degree + 4 * (1 - 1 / degree))
    assert price(GPT, block(GPT), "sequence", degree, seq=SEQ).recompute["none"].saved_bytes == pytest.approx(
        expected, rel=0.005
    )


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_saved_bytes_of_gpt_under_tensor_parallelism_are_korthikantis(degree):
    expected = SBH * (10 + 24 / degree)
    assert price(GPT, block(GPT), "replicate", degree, seq=SEQ).recompute["none"].saved_bytes == pytest.approx(
        expected, rel=0.005
    )


def test_full_recompute_keeps_the_block_input():
    assert price(GPT, block(GPT), "replicate", 8, seq=SEQ).recompute["full"].saved_bytes == 2 * SBH
    assert price(GPT, block(GPT), "sequence", 8, seq=SEQ).recompute["full"].saved_bytes == 2 * SBH / 8


def test_undivided_saved_bytes_are_the_graphs_own():
    found = graph(GPT)
    expected = found.class_by_name[block(GPT)].saved_bytes(found.sizes(1, SEQ), 2)
    assert price(GPT, block(GPT), "replicate", 1, seq=SEQ).recompute["none"].saved_bytes == pytest.approx(expected)


@pytest.mark.parametrize("boundary", ["replicate", "sequence"])
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_ranks_together_do_the_undivided_flops(boundary, phase):
    name = "llama3_8b"
    found = graph(name)
    compiled = Compiled(found, division(name, block(name), boundary, 8), "eager")
    sizes = size_vector_of(found, 1, 4096)
    local = sum(
        float(np.sum(products.flops.evaluate(*Point(sizes, 8, 2.0))))
        for products in compiled.phases[phase]._products.values()
    )
    local += sum(
        float(np.sum(flops.evaluate(*Point(sizes, 8, 2.0)))) for flops, *_ in compiled.phases[phase]._attention.values()
    )
    whole = found.class_by_name[block(name)].flops("executed", found.sizes(1, 4096), phase)
    assert local * 8 == pytest.approx(whole)


def test_a_rank_holds_its_share_of_the_matrices_and_whole_norms():
    h, f = 4096, 14336
    matrices = 2 * h * h + 2 * h * 1024 + 3 * h * f
    assert price("llama3_8b", block("llama3_8b"), "sequence", 4).parameter_elements == matrices / 4 + 2 * h


def test_the_hidden_state_handed_on_is_divided_on_the_sequence_only_under_sequence_parallelism():
    assert price(GPT, block(GPT), "replicate", 8, seq=SEQ).output_bytes == 2 * SBH
    assert price(GPT, block(GPT), "sequence", 8, seq=SEQ).output_bytes == 2 * SBH / 8


def test_each_collective_of_a_block_carries_one_hidden_state():
    found = price(GPT, block(GPT), "sequence", 8, seq=SEQ)
    for item in (*found.forward_collectives, *found.backward_collectives):
        assert (item.axis, item.count, item.bytes) == ("tp", 2, 2 * SBH)


def test_vocabulary_parallel_loss_reduces_three_numbers_a_row():
    # COSTS: three all-reduces of 4 bytes a token (Shoeybi et al. 2019, section 3: the loss is fused with the logits)
    found = price("llama3_8b", "epilogue", "replicate", 8)
    assert [(c.kind, c.count, c.bytes) for c in found.forward_collectives] == [("all_reduce", 3, 4 * 4096)]


def test_fusing_launches_less_and_takes_less_time():
    eager, compiled = (price("llama3_8b", block("llama3_8b"), "replicate", 1, kernels=k) for k in ("eager", "compiled"))
    assert compiled.forward_seconds < eager.forward_seconds
    assert compiled.backward_seconds < eager.backward_seconds
    assert compiled.workspace_bytes <= eager.workspace_bytes


def test_a_block_is_no_faster_than_its_flops_at_peak():
    found = graph("llama3_8b")
    whole = found.class_by_name[block("llama3_8b")].flops("executed", found.sizes(1, 4096), "forward")
    assert price("llama3_8b", block("llama3_8b"), "replicate", 1).forward_seconds > whole / 989.5e12


def test_small_blocks_wait_for_the_host():
    tiny = price("tiny_llama", block("tiny_llama"), "replicate", 1, seq=16)
    assert tiny.forward_overhead_seconds > 0.5 * tiny.forward_seconds
    assert price("llama3_8b", block("llama3_8b"), "replicate", 1).forward_overhead_seconds == 0


def test_full_recompute_repeats_forward_and_its_collectives():
    found = price(GPT, block(GPT), "replicate", 8, seq=SEQ)
    again = found.recompute["full"]
    assert 0.9 * found.forward_seconds < again.seconds <= found.forward_seconds
    assert [(c.kind, c.count) for c in again.collectives] == [("all_reduce", 2)]


def test_saved_bytes_grow_with_the_micro_batch():
    one, two = (
        price(GPT, block(GPT), "sequence", 8, seq=SEQ, micro_batch=m).recompute["none"].saved_bytes for m in (1, 2)
    )
    assert two == pytest.approx(2 * one)
