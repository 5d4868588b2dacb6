"""Operators through which shares of a sum pass: ``f(a + b) = f(a) + f(b)``.

A contraction over a divided index leaves each rank a share. What follows may go on with shares as long as it is linear in them,
so that one reduction at the next site serves for all (weights of experts applied, results put back into the order of tokens).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from autopar.documents.graph import Operator

FIRST_ARGUMENT = frozenset({
    "aten._to_copy", "aten.clone", "aten.contiguous", "aten.neg", "aten.sum", "aten.mean", "aten.div", "aten.div_",
    "aten.index", "aten.index_select", "aten.gather",
})  # fmt: skip
"""Linear in the first read, whatever the others are."""

ANY_ONE_ARGUMENT = frozenset({"aten.mul", "aten.mul_"})
"""Linear in each read on its own: shares of one, the others alike on every rank."""

ALL_ARGUMENTS = frozenset({"aten.add", "aten.add_", "aten.sub", "aten.sub_", "aten.cat", "aten.stack"})
"""Linear in all reads together: shares of every one."""

ACCUMULATING = frozenset({"aten.index_add", "aten.index_add_"})
"""Added to the first read, which holds shares or is zero; linear in the last one."""

ZEROS = frozenset({"aten.zeros", "aten.zeros_like", "aten.new_zeros"})


def shares_of(operator: Operator, writer: Mapping[int, Operator]) -> Iterator[frozenset[int]]:
    """Sets of reads that may hold shares of sums, all others whole: the writes then hold shares too."""
    reads = tuple(dict.fromkeys(operator.reads))
    if not reads or len(operator.writes) != 1:
        return
    if operator.name in FIRST_ARGUMENT:
        yield frozenset(reads[:1])
    elif operator.name in ANY_ONE_ARGUMENT:
        if len(reads) == len(operator.reads):  # a square is not linear
            for read in reads:
                yield frozenset({read})
    elif operator.name in ALL_ARGUMENTS:
        yield frozenset(reads)
    elif operator.name in ACCUMULATING:
        target, source = reads[0], reads[-1]
        yield frozenset({target, source})
        if target in writer and writer[target].name in ZEROS:
            yield frozenset({source})
