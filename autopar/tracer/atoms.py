"""Atoms under union: which pieces of which dims are the same index.

A dim is a list of nodes, outer to inner. `unify` says that two lists are the same index in row-major order: it walks both
from the outside, joins nodes of equal size and splits the larger of two unequal ones where the smaller divides it,
so 96 against 6x16 against 2x48 ends as [2][3][16]. Size-1 dims are empty lists.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class Node:
    """A piece of a dim: a leaf, or split into `parts`, or joined to another node."""

    __slots__ = ("joined", "number", "parts", "size")
    _count = 0

    def __init__(self, size: int) -> None:
        self.size = size
        self.joined: Node | None = None
        self.parts: tuple[Node, ...] | None = None
        Node._count += 1
        self.number = Node._count

    def root(self) -> Node:
        """The node that stands for all joined to it."""
        node = self
        while node.joined is not None:
            node = node.joined
        step = self
        while step.joined is not None:
            step.joined, step = node, step.joined
        return node


Dim = tuple[Node, ...]


def fresh(size: int) -> Dim:
    """A dim of its own."""
    return () if size == 1 else (Node(size),)


def leaves(dim: Iterable[Node]) -> list[Node]:
    """The unsplit roots of a dim, outer to inner."""
    found: list[Node] = []
    for node in dim:
        root = node.root()
        if root.parts is None:
            found.append(root)
        else:
            found.extend(leaves(root.parts))
    return found


def unify(first: Iterable[Node], second: Iterable[Node]) -> bool:
    """Join two lists in row-major order; False, with what fitted joined, where sizes have no common refinement."""
    left, right = leaves(first)[::-1], leaves(second)[::-1]
    while left and right:
        a, b = left.pop(), right.pop()
        # An earlier step of this walk may have split or joined what still stands on the stacks.
        if a.joined is not None or a.parts is not None:
            left.extend(leaves([a])[::-1])
            right.append(b)
            continue
        if b.joined is not None or b.parts is not None:
            right.extend(leaves([b])[::-1])
            left.append(a)
            continue
        if a is b:
            continue
        if a.size == b.size:
            a.joined = b
        elif a.size > b.size:
            if not _split_outer(a, b, left):
                return False
        elif not _split_outer(b, a, right):
            return False
    return not left and not right


def _split_outer(large: Node, small: Node, rest: list[Node]) -> bool:
    if large.size % small.size:
        return False
    inner = Node(large.size // small.size)
    large.parts = (small, inner)
    rest.append(inner)
    return True


def split_sizes(dim: Sequence[Node]) -> list[int]:
    """Sizes of the leaves."""
    return [node.size for node in leaves(dim)]
