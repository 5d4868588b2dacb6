"""Versions of a tensor: the places along its way where the runtime can change its placement.

A tensor leaves the modules that produced it (output sites, innermost first) and enters those that read it (input
sites, outermost first). Readers that pass the same sites read the same version, so the versions form a tree:

    produced -> leaves norm -> enters attention -> enters q_proj
                                                -> enters k_proj

Consecutive sites that all readers pass alike are one place: the first is kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from autopar.documents.graph import BlockClass, Operator, Site

ATTENTION = ("autopar.attention", "autopar.attention_backward")


class Version(NamedTuple):
    """A tensor (number 0: as produced) after a conversion."""

    tensor: int
    number: int = 0


class Edge(NamedTuple):
    """A site as the step from one version to the next."""

    parent: Version
    child: Version
    site: Site


@dataclass(frozen=True)
class Versions:
    """All versions of a block class's forward tensors."""

    edges: tuple[Edge, ...]
    read: dict[tuple[int, int], Version]
    """(operator, tensor) -> the version it reads."""
    leaving: dict[int, Version]
    """Output tensor of the class -> the version handed on."""


def within(module: str | None, outer: str) -> bool:
    """Whether a module lies inside another (or is it); None is outside of everything."""
    return module is not None and (outer == "" or module == outer or module.startswith(outer + "."))


def versions_of(block_class: BlockClass) -> Versions:
    """The version tree of every forward tensor of a class."""
    forward = [operator for operator in block_class.operators if operator.phase == "forward"]
    producer = {tensor: operator.module for operator in forward for tensor in operator.writes}
    sites: dict[int, list[Site]] = {}
    for site in block_class.sites:
        if site.module or site.where == "attention":
            sites.setdefault(site.tensor, []).append(site)
    readers: dict[int, list[Operator | None]] = {tensor: [None] for tensor in block_class.outputs}
    for operator in forward:
        for tensor in dict.fromkeys(operator.reads):
            readers.setdefault(tensor, []).append(operator)
    edges: list[Edge] = []
    read: dict[tuple[int, int], Version] = {}
    leaving: dict[int, Version] = {}
    for tensor, consumers in readers.items():
        ways = [_way(sites.get(tensor, ()), producer.get(tensor), consumer) for consumer in consumers]
        numbers, steps = _tree(ways)
        edges += [Edge(Version(tensor, above), Version(tensor, below), site) for above, below, site in steps]
        for consumer, number in zip(consumers, numbers, strict=True):
            if consumer is None:
                leaving[tensor] = Version(tensor, number)
            else:
                read[consumer.id, tensor] = Version(tensor, number)
    return Versions(tuple(edges), read, leaving)


def _way(sites: Iterable[Site], source: str | None, reader: Operator | None) -> tuple[Site, ...]:
    """Sites that a tensor passes from the module that produced it to a reader, in order."""
    target = None if reader is None else reader.module
    leaves = [s for s in sites if s.where == "output" and within(source, s.module) and not within(target, s.module)]
    enters = [s for s in sites if s.where == "input" and within(target, s.module) and not within(source, s.module)]
    calls = [s for s in sites if s.where == "attention" and reader is not None and reader.name in ATTENTION]
    leaves.sort(key=lambda site: -len(site.module))
    enters.sort(key=lambda site: len(site.module))
    seen: dict[tuple[str, str], Site] = {}
    for site in leaves + enters + calls[:1]:
        seen.setdefault((site.module, site.where), site)
    return tuple(seen.values())


def _tree(ways: list[tuple[Site, ...]]) -> tuple[list[int], list[tuple[int, int, Site]]]:
    """Version number of every way's end, and the steps (above, below, site) between versions."""
    ends = {_key(way) for way in ways}
    children: dict[tuple[object, ...], set[tuple[object, ...]]] = {}
    for way in ways:
        for length in range(len(way)):
            children.setdefault(_key(way[:length]), set()).add(_key(way[: length + 1]))
    numbers: dict[tuple[object, ...], int] = {(): 0}
    steps: list[tuple[int, int, Site]] = []
    for way in ways:
        above, first = 0, None
        for length in range(1, len(way) + 1):
            key = _key(way[:length])
            first = first or way[length - 1]
            if key not in ends and len(children[key]) == 1:
                continue
            if key not in numbers:
                numbers[key] = len(steps) + 1
                steps.append((above, numbers[key], first))
            above, first = numbers[key], None
    return [numbers[_key(way)] for way in ways], steps


def _key(way: tuple[Site, ...]) -> tuple[object, ...]:
    return tuple((site.module, site.where) for site in way)
