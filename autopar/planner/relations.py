"""What each forward operator and each site allows, as tables to be joined: the weighted constraint problem of L0.

    minimise  sum over relations of cost(row chosen)      rows of relations that share a variable agree on it

A variable is a version of a tensor, its values are placements. A relation is an operator (a row per way to run it) or a
site (a row per conversion). Operators that meet in a version between which no site lies are joined first, and of rows that
look the same from outside only the cheapest is kept: elementwise chains collapse and no optimum is lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from autopar.pricing.division import Placement
from autopar.pricing.versions import Version

MOST_ROWS = 400
"""A join that would have more rows is left to the solver."""


class Row(NamedTuple):
    """One way to satisfy a relation: a placement per variable, its cost in seconds, and what was chosen (a nested tuple)."""

    values: tuple[Placement, ...]
    cost: float
    chosen: Any


@dataclass
class Relation:
    """Allowed combinations of placements of some versions."""

    variables: tuple[Version, ...]
    rows: list[Row]
    site: bool = False


def join(left: Relation, right: Relation, keep: frozenset[Version]) -> Relation:
    """Both relations at once, seen through the variables in `keep` alone; the cheapest row for each combination."""
    shared = [v for v in left.variables if v in right.variables]
    extra = [v for v in right.variables if v not in left.variables]
    at_left = [left.variables.index(v) for v in shared]
    at_right = [right.variables.index(v) for v in shared]
    at_extra = [right.variables.index(v) for v in extra]
    every = (*left.variables, *extra)
    seen = [index for index, variable in enumerate(every) if variable in keep]
    by_key: dict[tuple[Placement, ...], list[Row]] = {}
    for row in right.rows:
        by_key.setdefault(tuple(row.values[i] for i in at_right), []).append(row)
    best: dict[tuple[Placement, ...], Row] = {}
    for one in left.rows:
        for other in by_key.get(tuple(one.values[i] for i in at_left), ()):
            values = (*one.values, *(other.values[i] for i in at_extra))
            outside = tuple(values[i] for i in seen)
            cost = one.cost + other.cost
            if outside not in best or cost < best[outside].cost:
                best[outside] = Row(outside, cost, (one.chosen, other.chosen))
    return Relation(tuple(every[i] for i in seen), list(best.values()))


def collapse(relations: Iterable[Relation]) -> list[Relation]:
    """Join operators that meet without a site between them, as long as the tables stay small."""
    pool = dict(enumerate(relations))
    holders: dict[Version, set[int]] = {}
    for key, relation in pool.items():
        for variable in relation.variables:
            holders.setdefault(variable, set()).add(key)
    waiting = sorted(holders)
    while waiting:
        variable = waiting.pop()
        members = [key for key in sorted(holders[variable]) if not pool[key].site]
        for key in members[1:]:
            first = members[0]
            pair = {first, key}
            left, right = pool[first], pool[key]
            keep = frozenset(v for v in (*left.variables, *right.variables) if holders[v] - pair)
            joined = join(left, right, keep)
            if len(joined.rows) > MOST_ROWS:
                break
            del pool[key]
            pool[first] = joined
            for gone in (*left.variables, *right.variables):
                holders[gone].discard(key)
                holders[gone].discard(first)
            for kept in joined.variables:
                holders[kept].add(first)
    return list(pool.values())


def flatten(chosen: Any) -> Iterator[Any]:
    """The leaves of nested choices."""
    if type(chosen) is tuple:
        for item in chosen:
            yield from flatten(item)
    elif chosen is not None:
        yield chosen
