"""Contractions of two matrices, or batches of them. Each multiply-add is two FLOPs."""

from __future__ import annotations

from autopar.tracer.rules.base import Context, Letter, Place, Rule, places_of, rule


def einsum(out: list[Place], first: list[Place], second: list[Place], letters: str) -> Rule:
    """``ab,bc->ac`` over the given places; every letter counts in the FLOPs."""
    inputs, output = letters.split("->")
    left, right = inputs.split(",")
    found = Rule(flops=2.0, executed=2.0)
    for name in dict.fromkeys(left + right):
        places = [place for place, letter in zip(first + second, left + right, strict=True) if letter == name]
        written = [place for place, letter in zip(out, output, strict=True) if letter == name]
        found.letters.append(Letter("parallel" if written else "summed", written + places))
        found.flop_places.append(places[0])
    return found


def _product(c: Context, first: int, second: int) -> Rule:
    ranks = len(c.shape(first)), len(c.shape(second)), len(c.shape(c.out))
    letters = {
        (1, 1, 0): "k,k->",
        (2, 1, 1): "mk,k->m",
        (2, 2, 2): "mk,kn->mn",
        (3, 3, 3): "bmk,bkn->bmn",
        (3, 3, 2): "bmk,bkn->mn",
    }[ranks]
    return einsum(places_of(c, c.out), places_of(c, first), places_of(c, second), letters)


@rule("aten.mm", "aten.bmm", "aten.dot", "aten.vdot", "aten.mv", "aten._int_mm")
def matmul(c: Context) -> Rule:
    """``[b] m k, [b] k n -> [b] m n``."""
    return _product(c, c.tensor(0), c.tensor(1))


@rule("aten.addmm", "aten.baddbmm", "aten.addmv", "aten.addbmm", "aten.addmm_", "aten.baddbmm_")
def matmul_with_bias(c: Context) -> Rule:
    """A bias, broadcast against the product, is added; where partial sums are left, to one of them only."""
    found = _product(c, c.tensor(1), c.tensor(2))
    bias = c.tensor(0)
    for letter in found.letters:
        for tensor, dim in list(letter.places):
            own = dim - len(c.shape(c.out)) + len(c.shape(bias))
            if tensor == c.out and own >= 0 and c.shape(bias)[own] != 1:
                letter.places.append((bias, own))
    return found


@rule("aten._grouped_mm")
def grouped_matmul(c: Context) -> Rule:
    """Rows of one tensor in groups, one matrix a group: ``m k, e k n -> m n``; each row meets one expert.

    The groups' ends count all rows: rows divide only together with ends made local.
    """
    first, second = c.tensor(0), c.tensor(1)
    if (len(c.shape(first)), len(c.shape(second))) == (2, 3):
        found = einsum(places_of(c, c.out), places_of(c, first), places_of(c, second)[1:], "mk,kn->mn")
        experts = [(second, 0)]
    else:
        found = einsum(places_of(c, c.out)[1:], places_of(c, first), places_of(c, second), "km,mn->kn")
        experts = [(c.out, 0)]
    rows = found.letters[0 if experts[0][0] == second else 1]
    rows.role, rows.composites = "whole", (("local_ends", ()),)
    ends = [(read, 0) for read in c.operator.reads[2:] if len(c.shape(read)) == 1]
    found.letters.append(
        Letter("whole", experts + [place for place in ends if c.shape(place[0])[0] == c.size(experts[0])])
    )
    return found
