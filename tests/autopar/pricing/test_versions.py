"""Versions of tensors at sites, on a block small enough to read."""

from autopar.documents.graph import BlockClass, Operator, Site, Tensor
from autopar.pricing.versions import Version, versions_of


def _block(sites):
    operators = (
        Operator(id=0, phase="forward", name="aten.rms_norm", module="norm", reads=(0,), writes=(1,)),
        Operator(id=1, phase="forward", name="aten.mm", module="attention.q", reads=(1,), writes=(2,)),
        Operator(id=2, phase="forward", name="aten.mm", module="attention.k", reads=(1,), writes=(3,)),
        Operator(id=3, phase="forward", name="aten.add", module="", reads=(0, 2, 3), writes=(4,)),
    )
    tensors = tuple(Tensor(id=number, dims=((0,), (1,))) for number in range(5))
    return BlockClass(name="b", tensors=tensors, operators=operators, inputs=(0,), outputs=(4,), sites=sites)


def _site(module, where, tensor):
    return Site(module=module, where=where, tensor=tensor)


def test_readers_that_pass_the_same_sites_read_one_version():
    found = versions_of(_block((_site("norm", "output", 1), _site("attention", "input", 1))))
    assert found.read[1, 1] == found.read[2, 1] == Version(1, 1)
    assert [edge.site.module for edge in found.edges] == ["norm"]


def test_sites_of_single_readers_branch_off():
    found = versions_of(_block((_site("attention", "input", 1), _site("attention.q", "input", 1))))
    assert found.read[2, 1] == Version(1, 1)
    assert found.read[1, 1] == Version(1, 2)
    assert [(edge.parent.number, edge.child.number) for edge in found.edges] == [(0, 1), (1, 2)]


def test_a_tensor_is_unchanged_for_readers_outside_the_module_it_enters():
    found = versions_of(_block((_site("norm", "input", 0),)))
    assert found.read[0, 0] == Version(0, 1)
    assert found.read[3, 0] == Version(0, 0)


def test_the_block_itself_is_no_site():
    found = versions_of(_block((_site("", "input", 0), _site("", "output", 4))))
    assert found.edges == ()
    assert found.leaving == {4: Version(4, 0)}
