"""Reductions."""

from __future__ import annotations

from autopar.tracer.rules.base import Context, Letter, Rule, base, rule

_SUMS = ("sum", "mean")
"""A mean is an average of the shards' means."""


@rule("aten.sum", "aten.mean", "aten.amax", "aten.amin", "aten.max", "aten.min", "aten.prod", "aten.logsumexp",
      "aten.var_mean", "aten.var", "aten.std", "aten.std_mean", "aten.all", "aten.any", "aten.argmax", "aten.argmin",
      "aten.aminmax", "aten.norm", "aten.linalg_vector_norm", "aten.count_nonzero", "aten.median", "aten.mode",
      "aten.kthvalue", "aten._is_all_true", "aten._is_any_true")  # fmt: skip
def reduce(c: Context) -> Rule:
    """Reduced dims are summed where the operator is a sum, else whole."""
    source = c.tensor(0)
    rank = len(c.shape(source))
    gone = _reduced(c, rank)
    kept = len(c.shape(c.out)) == rank
    found = Rule()
    position = 0
    for dim in range(rank):
        if dim in gone:
            found.letters.append(Letter("summed" if base(c) in _SUMS else "whole", [(source, dim)]))
            position += kept
        else:
            found.letters.append(Letter("parallel", [(source, dim), *((out, position) for out in c.operator.writes)]))
            position += 1
    return found


def _reduced(c: Context, rank: int) -> set[int]:
    """Dims that are reduced: all, where none is given."""
    number = 2 if base(c) in ("linalg_vector_norm", "norm", "kthvalue") else 1
    given = c.arg(number, "dim", -1 if base(c) == "kthvalue" else None)
    if base(c) in ("var", "std", "var_mean", "std_mean") and isinstance(given, bool):
        given = None
    if given is None or given == []:
        return set(range(rank))
    return {dim % rank for dim in ([given] if isinstance(given, int) else given)} if rank else set()
