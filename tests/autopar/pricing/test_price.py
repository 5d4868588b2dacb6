"""Prices of a plain GPT layer under Megatron's division, against published closed forms and conservation laws."""

from __future__ import annotations

from math import prod

import pytest
import torch
from torch import nn

from autopar.planner.sharding import divide
from autopar.pricing import Setting, price_block, undivided
from autopar.pricing.work import work_of
from autopar.tracer import capture
from hardware_profiles.profile import load_cluster
from hardware_profiles.topology import Topology
from tests.models import GptLayer, Stack, hidden_states

HIDDEN, SEQ = 1024, 2048
SBH = SEQ * HIDDEN
CLUSTER = load_cluster("a100x8")
BLOCK = "layers.*"


@pytest.fixture(scope="module")
def graph():
    return capture(
        lambda: Stack(lambda: GptLayer(HIDDEN, HIDDEN // 128, fused=True), HIDDEN, 4),
        hidden_states(HIDDEN),
        seq_len=SEQ,
    )


def price(graph, degree=1, boundary="sequence", micro_batch=1, kernels="eager"):
    division = undivided(BLOCK) if degree == 1 else divide(graph, BLOCK, boundary, degree, SEQ)
    chip = CLUSTER.node_groups[0].chip
    setting = Setting(chip, "bf16", kernels, degree, Topology(CLUSTER).strided(degree, 1), SEQ)
    return price_block(graph, BLOCK, division, setting, [micro_batch])[0]


def test_an_undivided_fused_layer_keeps_34_sbh(graph):
    # Korthikanti et al., arXiv 2205.05198, table 2; the fused kernel's log-sum-exp adds 4 bytes per head and row.
    assert price(graph).recompute["none"].saved_bytes == pytest.approx(34 * SBH, rel=0.005)


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_under_sequence_parallelism_the_two_gathered_inputs_stay_whole(graph, degree):
    # Table 2 has 34 sbh / t; linears that keep their gathered input hold 2 sbh whole instead of divided, twice a layer.
    expected = (34 / degree + 4 * (1 - 1 / degree)) * SBH
    assert price(graph, degree).recompute["none"].saved_bytes == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_without_sequence_parallelism_norms_and_dropout_are_kept_whole(graph, degree):
    # Table 2: sbh (10 + 24/t) once attention is fused.
    expected = (10 + 24 / degree) * SBH
    assert price(graph, degree, "replicated").recompute["none"].saved_bytes == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_matrices_are_divided_and_vectors_are_not(graph, degree):
    matrices, divided_biases, whole = 12 * HIDDEN**2, 3 * HIDDEN + 4 * HIDDEN, 2 * HIDDEN + 4 * HIDDEN
    assert price(graph, degree).parameter_elements == pytest.approx((matrices + divided_biases) / degree + whole)


def test_a_layer_gathers_twice_and_scatters_twice_each_way(graph):
    found = price(graph, 4)
    for collectives in (found.forward_collectives, found.backward_collectives):
        assert {item.kind: item.count for item in collectives} == {"all_gather": 2, "reduce_scatter": 2}
        assert all(item.bytes == 2 * SBH for item in collectives)


def test_without_sequence_parallelism_it_reduces_twice_each_way(graph):
    found = price(graph, 4, "replicated")
    for collectives in (found.forward_collectives, found.backward_collectives):
        assert {item.kind: item.count for item in collectives} == {"all_reduce": 2}


def test_full_recompute_keeps_only_the_layers_input_and_repeats_its_collectives(graph):
    found = price(graph, 4)
    full = found.recompute["full"]
    assert full.saved_bytes == pytest.approx(2 * SBH / 4)
    assert full.collectives == found.forward_collectives
    assert 0.8 * found.forward_seconds < full.seconds <= found.forward_seconds * (1 + 1e-9)


def test_recompute_trades_bytes_for_seconds(graph):
    options = list(price(graph).recompute.values())
    assert [o.saved_bytes for o in options] == sorted((o.saved_bytes for o in options), reverse=True)
    assert [o.seconds for o in options] == sorted(o.seconds for o in options)


def test_no_block_runs_above_the_chips_peak(graph):
    found, sizes = price(graph, micro_batch=8), graph.sizes(8, SEQ)
    block = graph.class_by_name[BLOCK]
    peak = CLUSTER.node_groups[0].chip.peak_flops("bf16")
    assert found.forward_seconds >= block.flops("executed", sizes, "forward") / peak
    assert found.backward_seconds >= block.flops("executed", sizes, "backward") / peak


def test_dividing_never_slows_compute_nor_speeds_it_up_more_than_the_degree(graph):
    seconds = [price(graph, degree, micro_batch=4).forward_seconds for degree in (1, 2, 4, 8)]
    assert seconds == sorted(seconds, reverse=True)
    for degree, value in zip((2, 4, 8), seconds[1:], strict=True):
        assert value >= seconds[0] / degree * (1 - 1e-9)


def test_fused_kernels_move_fewer_bytes_and_keep_the_same(graph):
    eager, compiled = price(graph, micro_batch=4), price(graph, micro_batch=4, kernels="compiled")
    assert compiled.forward_seconds < eager.forward_seconds
    assert compiled.recompute["none"].saved_bytes == eager.recompute["none"].saved_bytes


def test_prices_of_many_micro_batches_are_those_of_each(graph):
    chip = CLUSTER.node_groups[0].chip
    setting = Setting(chip, "bf16", "eager", 1, Topology(CLUSTER).strided(1, 1), SEQ)
    together = price_block(graph, BLOCK, undivided(BLOCK), setting, [1, 2, 8])
    assert [p.forward_seconds for p in together] == [price(graph, micro_batch=b).forward_seconds for b in (1, 2, 8)]


def test_a_small_block_waits_for_the_host():
    small = capture(lambda: Stack(lambda: GptLayer(64, 4, fused=True), 64, 4), hidden_states(64), seq_len=16)
    chip = CLUSTER.node_groups[0].chip
    setting = Setting(chip, "bf16", "eager", 1, Topology(CLUSTER).strided(1, 1), 16)
    found = price_block(small, BLOCK, undivided(BLOCK), setting, [1])[0]
    assert found.forward_overhead_seconds > 0


@pytest.mark.parametrize("experts", [1, 8])
def test_the_shape_of_every_matmul_multiplies_to_its_flops(graph, experts):
    # 2 m n k b FLOPs, whatever the operator: grouped matmuls of a mixture of experts too, whatever their number.
    found = graph if experts == 1 else capture(lambda: Experts(experts), hidden_states(64), seq_len=32)
    sizes = {atom: float(size) for atom, size in found.sizes(2, 32).items()}
    matmuls = 0
    for block_class in found.block_classes:
        for operator in block_class.operators:
            work = work_of(block_class, operator, sizes, 2)
            if work.kind == "matmul":
                matmuls += 1
                (product,) = work.products
                assert 2 * prod(size for _, size, _ in product.dims) == pytest.approx(work.flops)
                assert {"m", "n", "k"} <= {letter for _, _, letter in product.dims}
    assert matmuls >= 2


class Experts(nn.Module):
    """Rows in equal groups, one matrix a group."""

    def __init__(self, experts):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, 64, 64))
        self.experts = experts

    def forward(self, x):
        rows = x.flatten(0, 1)
        ends = torch.arange(1, self.experts + 1, dtype=torch.int32) * (rows.shape[0] // self.experts)
        return torch._grouped_mm(rows, self.weight, ends)
