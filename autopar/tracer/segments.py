"""Parts of dims: what concatenations, splits and slices say of an index.

A dim that joins unlike parts (a fused projection of queries, keys and values) is one atom with parts. Dividing it divides
each part on its own, so all operators must cut it alike; what cuts it otherwise keeps it whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod

from autopar.tracer.atoms import Dim, Node, leaves, unify
from autopar.tracer.recording import Recording
from autopar.tracer.rules import Place, Role, Rule

Spots = list[tuple[int, int, int]]
"""(tensor, dim, number of the atom in the dim)"""


@dataclass
class Analysis:
    """A recording with its indices found."""

    recording: Recording
    dims: dict[int, list[Dim]] = field(default_factory=dict)
    rules: list[Rule] = field(default_factory=list)
    segments: dict[Node, list[Place]] = field(default_factory=dict)
    without_rule: dict[str, str] = field(default_factory=dict)
    """aten name -> module where it was first met."""

    def atoms_of(self, tensor: int) -> list[list[Node]]:
        """Leaves of every dim."""
        return [leaves(dim) for dim in self.dims[tensor]]

    def at(self, place: Place) -> list[Node]:
        """Leaves of one dim."""
        return leaves(self.dims[place[0]][place[1]])

    def lengths(self, places: list[Place]) -> list[int]:
        """Sizes of dims."""
        return [self.recording.tensors[tensor].shape[dim] for tensor, dim in places]


def join(found: Analysis, places: list[Place]) -> None:
    """Say that dims hold one index."""
    first, *others = places or [(-1, -1)]
    for tensor, dim in others:
        unify(found.dims[first[0]][first[1]], found.dims[tensor][dim])


def find_segments(found: Analysis) -> None:
    """Which atoms concatenate parts. One atom has one set of parts: where others have the same lengths, they are the same.

    Where views cut the dim as well, equal parts are its inner atoms.
    """
    joints = [joint for rule in found.rules for joint in rule.segments] + list(_tilings(found))
    for _ in range(2):  # what the first pass joins may be a dim that the second looks at
        found.segments = {}
        for whole, parts in joints:
            nodes = found.at(whole)
            if len(nodes) == 1:
                known = found.segments.setdefault(nodes[0], parts)
                if found.lengths(known) == found.lengths(parts):
                    _join_all(found, known, parts)
            elif nodes and all(length == prod(node.size for node in nodes[1:]) for length in found.lengths(parts)):
                for tensor, dim in parts:
                    unify(found.dims[tensor][dim], nodes[1:])
        for rule in found.rules:
            if rule.cut is not None and (same := _part_of(found, rule.cut)) is not None:
                join(found, [same, rule.cut[1]])
    found.segments = {node: parts for node, parts in found.segments.items() if leaves([node]) == [node]}


def _tilings(found: Analysis) -> Iterator[tuple[Place, list[Place]]]:
    """Ranges of one dim that together make it up, each once: fused projections taken apart by slices."""
    cuts: dict[Place, dict[int, Place]] = {}
    for rule, operator in zip(found.rules, found.recording.operators, strict=True):
        if rule.cut is not None and rule.cut[0][0] in operator.reads:
            whole, part, start = rule.cut
            cuts.setdefault(whole, {}).setdefault(start, part)
    for whole, parts in cuts.items():
        starts = sorted(parts)
        lengths = found.lengths([parts[start] for start in starts])
        if starts == [sum(lengths[:number]) for number in range(len(starts))] and [sum(lengths)] == found.lengths(
            [whole]
        ):
            yield whole, [parts[start] for start in starts]


def _part_of(found: Analysis, cut: tuple[Place, Place, int]) -> Place | None:
    """The part of a concatenated dim that a range is."""
    whole, part, start = cut
    nodes = found.at(whole)
    parts = found.segments.get(nodes[0], []) if len(nodes) == 1 else []
    lengths = found.lengths(parts)
    for number, known in enumerate(parts):
        if sum(lengths[:number]) == start and found.lengths([part]) == [lengths[number]]:
            return known
    return None


def _join_all(found: Analysis, first: list[Place], second: list[Place]) -> None:
    for one, other in zip(first, second, strict=True):
        join(found, [one, other])


def segment_spots(found: Analysis, whole: Place, parts: list[Place]) -> Iterator[tuple[Role, Spots]]:
    """Each part is divided on its own, where the dim is one atom that all operators cut alike.

    Where views cut it too, parts hold its inner atoms. What fits neither stays whole.
    """
    nodes, cut = found.at(whole), [found.at(part) for part in parts]
    if len(nodes) == 1 and all(cut) and cut == [found.at(part) for part in found.segments[nodes[0]]]:
        yield "parallel", [(*whole, 0), *((*part, 0) for part in parts)]
    elif len(nodes) > 1 and all(one == nodes[1:] for one in cut):
        yield "whole", [(*whole, 0)]
        for atom in range(len(nodes) - 1):
            yield "parallel", [(*whole, atom + 1), *((*part, atom) for part in parts)]
    else:
        yield from _whole_spots(found, whole, *parts)


def cut_spots(found: Analysis, cut: tuple[Place, Place, int]) -> Iterator[tuple[Role, Spots]]:
    """A range that is one of the parts of its dim is divided with them; any other is whole."""
    whole, part, _ = cut
    known = _part_of(found, cut)
    parts = found.segments[found.at(whole)[0]] if known is not None else []
    if known is not None and found.at(known) == found.at(part) and all(found.at(one) for one in parts):
        yield "parallel", [(*whole, 0), (*part, 0)]
    else:
        yield from _whole_spots(found, whole, part)


def _whole_spots(found: Analysis, *places: Place) -> Iterator[tuple[Role, Spots]]:
    for place in places:
        for atom in range(len(found.at(place))):
            yield "whole", [(*place, atom)]
