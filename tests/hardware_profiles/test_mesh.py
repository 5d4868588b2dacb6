"""Rings packed over links, against what bounds them and what is known."""

from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hardware_profiles.mesh import rings
from hardware_profiles.profile import load_cluster


def full(devices: int, links: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(0 if a == b else links for b in range(devices)) for a in range(devices))


@pytest.mark.parametrize("devices", range(2, 10))
@pytest.mark.parametrize("links", [1, 4])
def test_a_full_mesh_keeps_every_port_busy(devices, links):
    assert rings(full(devices, links), tuple(range(devices))) == links * (devices - 1)


def test_the_cube_mesh_holds_six_rings_of_eight_and_four_of_four():
    links = load_cluster("v100x8").node_groups[0].intra.links
    assert rings(links, tuple(range(8))) == 6
    assert rings(links, (0, 1, 2, 3)) == 4


def test_a_chain_closes_no_ring():
    chain = ((0, 1, 0), (1, 0, 1), (0, 1, 0))
    assert rings(chain, (0, 1, 2)) == 0
    assert rings(chain, (0, 1)) == 1


def test_two_islands_close_no_ring():
    islands = tuple(tuple(int(a != b and a // 5 == b // 5) for b in range(10)) for a in range(10))
    assert rings(islands, tuple(range(10))) == 0


@st.composite
def meshes(draw):
    devices = draw(st.integers(2, 6))
    counts = {(a, b): draw(st.integers(0, 3)) for a in range(devices) for b in range(a)}
    return tuple(tuple(counts.get((max(a, b), min(a, b)), 0) for b in range(devices)) for a in range(devices))


@settings(max_examples=80, deadline=None)
@given(meshes())
def test_rings_exist_where_some_order_of_the_devices_is_linked_and_no_port_carries_more_than_it_has(links):
    devices = tuple(range(len(links)))
    orders = [(0, *order) for order in permutations(devices[1:])]
    closed = any(all(links[a][b] for a, b in zip(o, o[1:] + o[:1], strict=True)) for o in orders)
    found = rings(links, devices)
    assert (found > 0) == closed
    assert found <= min(sum(row) for row in links)
