import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models.collectives import bus_factor, collective_seconds
from hardware_profiles.cluster import Curve, Group
from hardware_profiles.profile import load_chip
from tests.cost_models.machines import chip, node_group, spread_group

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
sizes = st.floats(1, 1e11)


@st.composite
def groups(draw):
    nodes = draw(st.sampled_from([1, 2, 3, 4, 8, 64, 512]))
    each = draw(st.sampled_from([1, 2, 3, 4, 5, 8]))
    if nodes * each == 1:
        each = 2
    bandwidth = draw(st.sampled_from([25e9, 300e9, 450e9]))
    kind = draw(st.sampled_from(["nvswitch", "pcie", "xgmi", "nvlink_mesh"]))
    changes = {
        "intra_kind": kind,
        "peer_to_peer": draw(st.booleans()),
    }
    if nodes == 1:
        return node_group(each, bandwidth, **changes)
    return spread_group(nodes, each, draw(st.sampled_from([3e9, 25e9, 50e9])), bandwidth, **changes)


@given(st.sampled_from(KINDS), groups(), sizes, sizes)
def test_time_grows_with_bytes(kind, group, some, more):
    assert collective_seconds(kind, some + more, group, chip()) >= collective_seconds(kind, some, group, chip())


@given(st.sampled_from(KINDS), groups(), sizes)
def test_time_falls_with_bandwidth(kind, group, size):
    faster = group.model_copy(
        update={
            "intra_bytes_per_second": 2 * group.intra_bytes_per_second,
            "inter_bytes_per_second": 2 * group.inter_bytes_per_second,
        }
    )
    assert collective_seconds(kind, size, faster, chip()) <= collective_seconds(kind, size, group, chip())


@given(groups(), sizes)
def test_all_reduce_lies_between_reduce_scatter_and_the_pair_that_makes_it(group, size):
    whole, scatter, gather = (
        collective_seconds(kind, size, group, chip()) for kind in ("all_reduce", "reduce_scatter", "all_gather")
    )
    assert scatter <= whole * (1 + 1e-12)
    assert whole <= (gather + collective_seconds("all_reduce", size, group, chip())) * (1 + 1e-12)
    if group.nodes <= 8:
        assert whole <= (scatter + gather) * (1 + 1e-12)


@given(st.sampled_from(KINDS), st.sampled_from([2, 4, 64]), st.sampled_from([1, 4, 8]), st.floats(1e6, 1e11))
def test_a_group_across_nodes_is_never_priced_at_nvlink_speed(kind, nodes, each, size):
    group = spread_group(nodes, each)
    seconds = collective_seconds(kind, size, group, chip())
    if kind == "send":
        assert seconds >= size / group.inter_bytes_per_second
    else:
        # at the least what must leave a node: its ranks' part of the buffer, through all its ports at once
        assert seconds >= size * (nodes - 1) / nodes / nodes / (each * group.inter_bytes_per_second)
        if kind != "all_to_all":
            assert seconds >= size * (nodes - 1) / nodes / (each * group.inter_bytes_per_second)


def test_ranks_per_node_count():
    dense, sparse = spread_group(2, 8), spread_group(16, 1)
    assert dense.size == sparse.size
    assert collective_seconds("all_reduce", 1e9, dense, chip()) < collective_seconds("all_reduce", 1e9, sparse, chip())


def test_all_to_all_is_not_all_gather_across_nodes():
    group = spread_group(4, 8)
    everyone = collective_seconds("all_to_all", 1e9, group, chip())
    # 3/4 of every rank's buffer leaves its node by its own port: NIC-bound, where a ring leaves by all ports in turn
    assert everyone == pytest.approx(1e9 * 0.75 / 25e9, rel=0.15)
    assert everyone > 3 * collective_seconds("all_gather", 1e9, group, chip())


def test_a_lost_peer_to_peer_path_costs():
    fast, slow = (node_group(2, 25e9, intra_kind="pcie", peer_to_peer=flag) for flag in (True, False))
    assert collective_seconds("all_reduce", 1e8, slow, chip()) > collective_seconds("all_reduce", 1e8, fast, chip())


def test_a_group_of_one_is_free():
    for kind in KINDS:
        assert collective_seconds(kind, 1e9, Group(size=1), chip()) == 0


def test_nothing_sent_takes_no_time():
    assert collective_seconds("all_gather", 0, node_group(), chip()) == 0


def test_arrays_go_through_whole():
    found = collective_seconds("all_gather", np.array([1e3, 1e6, 1e9]), node_group(), chip())
    assert found.shape == (3,)
    assert found[1] == collective_seconds("all_gather", 1e6, node_group(), chip())


def test_bus_factors_are_those_of_nccl_tests():
    assert bus_factor("all_reduce", 8) == 1.75
    assert [bus_factor(kind, 8) for kind in ("all_gather", "reduce_scatter", "all_to_all")] == [0.875] * 3


def test_gloos_reduce_scatter_is_an_all_reduce_of_the_whole_buffer():
    group = node_group(4, 2e9, intra_kind="shared_memory")
    scatter, whole, gather = (
        collective_seconds(kind, 1e8, group, chip()) for kind in ("reduce_scatter", "all_reduce", "all_gather")
    )
    assert scatter == whole == pytest.approx(2 * gather)


def test_a_measured_curve_of_the_cluster_answers_first():
    curve = Curve(kind="all_reduce", ranks=8, bytes=(1e6, 1e8), seconds=(1.0, 100.0))
    group = node_group(8, curves=(curve,))
    assert collective_seconds("all_reduce", 1e7, group, chip()) == pytest.approx(10)
    assert collective_seconds("all_reduce", 1e9, group, chip()) == pytest.approx(1000)
    assert collective_seconds("all_gather", 1e7, group, chip()) < 1


def busbw(machine, group, size):
    return bus_factor("all_reduce", group.size) * size / collective_seconds("all_reduce", size, group, machine) / 1e9


@pytest.mark.parametrize(("size", "measured"), [(2**24, 109.22), (2**26, 166.63), (2**28, 213.87)])
def test_all_reduce_on_eight_a100_is_within_25_percent_of_azures_nccl_tests(size, measured):
    # Azure AI-benchmarking-guide, ND A100 v4, ring: another machine and NCCL than the curves come from
    found = busbw(load_chip("a100-80gb-sxm"), node_group(8, 300e9), size)
    assert found == pytest.approx(measured, rel=0.25)


@pytest.mark.parametrize(("size", "measured"), [(2**23, 172.13), (2**25, 295.53), (2**27, 400.61)])
def test_all_reduce_on_eight_h100_is_within_20_percent_of_azures_nccl_tests(size, measured):
    found = busbw(load_chip("h100-80gb-sxm"), node_group(8, 450e9), size)
    assert found == pytest.approx(measured, rel=0.2)


@pytest.mark.parametrize("ranks", [5, 6, 7])
def test_ranks_that_were_not_measured_lie_near_the_published_rate(ranks):
    # stas00/ml-engineering network/README.md, H200, NVLS, 8 GB: 414.2, 435.6, 460.0 GB/s on 5, 6, 7 ranks
    measured = {5: 414.2, 6: 435.6, 7: 460.0}[ranks]
    found = busbw(load_chip("h200"), node_group(ranks, 450e9), 2**33)
    assert found == pytest.approx(measured, rel=0.15)


def test_large_all_reduces_over_dgx_h100_nodes_reach_the_published_380_gb_a_second():
    # NVIDIA GTC24 S62129: DGX H100, NVLink 4 and 8 x 400 Gb/s, without SHARP
    group = spread_group(4, 8, nic=50e9, bandwidth=450e9)
    assert busbw(chip(), group, 2**34) == pytest.approx(380, rel=0.1)


def test_in_network_reduction_makes_large_all_reduces_faster():
    plain = spread_group(16, 8, nic=50e9, bandwidth=450e9)
    sharp = plain.model_copy(update={"in_network_reduction": True})
    assert busbw(chip(), sharp, 2**34) > 1.1 * busbw(chip(), plain, 2**34)
