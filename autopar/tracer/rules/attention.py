"""Routed attention calls: flash attention as one operator."""

from __future__ import annotations

from autopar.tracer.recording import Ref
from autopar.tracer.rules.base import Composites, Context, Letter, Place, Rule, base, divided, rule

Places = dict[str, list[Place]]
"""b, h: batch and query heads; s, t: query and key positions; d, e: head dims of q and k, and of v."""


def _letters(q: int, k: int, v: int) -> Places:
    return {"b": [(q, 0), (k, 0), (v, 0)], "h": [(q, 1)], "s": [(q, 2)], "t": [(k, 2), (v, 2)],
            "d": [(q, 3), (k, 3)], "e": [(v, 3)]}  # fmt: skip


@rule("autopar.attention")
def attention(c: Context) -> Rule:
    """Scores and their product with v: ``2 b h s t (d + e)`` FLOPs, half where causal."""
    q, k, v = (c.tensor(number) for number in range(3))
    o, lse = c.operator.writes
    places = _letters(q, k, v)
    _add(places, {"b": [(o, 0), (lse, 0)], "h": [(o, 1), (lse, 1)], "s": [(o, 2), (lse, 2)], "e": [(o, 3)]})
    _mask_places(c, places, c.arg(3))
    keys = _collectives("forward", all_gather=(k, v))
    exchange = _collectives("forward", all_to_all=(q, k, v, o))
    return _attention_rule(c, places, (q, k, v), (k, v), (("all_gather_kv", keys), ("ulysses", exchange)))


@rule("autopar.attention_backward")
def attention_backward(c: Context) -> Rule:
    """Five matmuls where forward has two: 2.5 times its executed FLOPs (Dao, arXiv 2307.08691); model FLOPs twice."""
    grad, q, k, v, o, lse = (c.tensor(number) for number in range(6))
    dq, dk, dv, *dmask = c.operator.writes
    places = _letters(q, k, v)
    more = {
        "b": [(grad, 0), (o, 0), (lse, 0), (dq, 0), (dk, 0), (dv, 0)],
        "h": [(grad, 1), (o, 1), (lse, 1), (dq, 1)],
        "s": [(grad, 2), (o, 2), (lse, 2), (dq, 2)],
        "t": [(dk, 2), (dv, 2)],
        "d": [(dq, 3), (dk, 3)],
        "e": [(grad, 3), (o, 3), (dv, 3)],
    }
    _add(places, more)
    _mask_places(c, places, c.arg(6), *dmask)
    keys = _collectives("backward", all_gather=(k, v), reduce_scatter=(dk, dv))
    exchange = _collectives("backward", all_to_all=(grad, dq, dk, dv))
    divisions = (("all_gather_kv", keys), ("ulysses", exchange))
    return _attention_rule(c, places, (q, k, v), (k, v, dk, dv), divisions)


def _collectives(phase: str, **tensors: tuple[int, ...]) -> tuple[tuple[str, str, int], ...]:
    return tuple((phase, kind, tensor) for kind, several in tensors.items() for tensor in several)


def _add(places: Places, more: Places) -> None:
    for name, extra in more.items():
        places[name] += extra


def _mask_places(c: Context, places: Places, mask: object, *gradient: int) -> None:
    """A mask or bias is broadcast from the right against batch, heads, query and key positions."""
    if not isinstance(mask, Ref):
        return
    for tensor in (mask.tensor, *gradient):
        shape = c.shape(tensor)
        for name, dim in zip("tshb", range(len(shape) - 1, -1, -1), strict=False):
            if shape[dim] != 1:
                places[name].append((tensor, dim))


def _attention_rule(
    c: Context, places: Places, qkv: tuple[int, int, int], grouped: tuple[int, ...], divisions: Composites
) -> Rule:
    """Heads and batch are divided; positions by a composite: keys and values gathered, or heads exchanged for positions."""
    q, k, v = qkv
    backward = base(c) == "attention_backward"
    heads, groups = c.shape(q)[1], c.shape(k)[1]
    found = Rule(
        [
            divided(c, places["b"]),
            Letter("whole", places["s"], divisions),
            Letter("whole", places["t"]),
            Letter("whole", places["d"]),
            Letter("whole", places["e"]),
        ]
    )
    found.heads = (places["h"], [(tensor, 1) for tensor in grouped], heads // groups)
    causal = bool(c.operator.args[-1])
    # d and e: q k^T costs 2 b h s t d, the product with v 2 b h s t e; equal head dims make one term of 4.
    same = c.shape(q)[3] / c.shape(v)[3]
    found.flops = 2.0 * (1 + same) * (2 if backward else 1)
    found.executed = 2.0 * (1 + same) * (2.5 if backward else 1) * (0.5 if causal else 1)
    found.flop_places = [(q, 0), (q, 1), (q, 2), (k, 2), (v, 3)]
    return found
