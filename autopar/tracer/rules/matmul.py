"""Contractions: matmuls, convolution, routed attention. Each multiply-add is two FLOPs."""

from __future__ import annotations

from autopar.tracer.recording import Ref
from autopar.tracer.rules.base import Context, Letter, Place, Role, Rule, rule


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


def dims(c: Context, tensor: int) -> list[Place]:
    """All places of a tensor."""
    return [(tensor, dim) for dim in range(len(c.shape(tensor)))]


def _product(c: Context, first: int, second: int) -> Rule:
    rank = len(c.shape(c.out))
    letters = {0: "k,k->", 1: "mk,k->m", 2: "mk,kn->mn", 3: "bmk,bkn->bmn"}[rank]
    return einsum(dims(c, c.out), dims(c, first), dims(c, second), letters)


@rule("aten.mm", "aten.bmm", "aten.dot", "aten.mv")
def matmul(c: Context) -> Rule:
    """``[b] m k, [b] k n -> [b] m n``."""
    return _product(c, c.tensor(0), c.tensor(1))


@rule("aten.addmm", "aten.baddbmm", "aten.addmv", "aten.addbmm")
def matmul_with_bias(c: Context) -> Rule:
    """A bias, broadcast against the product, is added."""
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
    """Rows of one tensor in groups, one matrix a group: ``m k, e k n -> m n``; each row meets one expert."""
    first, second = c.tensor(0), c.tensor(1)
    rank = len(c.shape(first)), len(c.shape(second))
    if rank == (2, 3):
        found = einsum(dims(c, c.out), dims(c, first), dims(c, second)[1:], "mk,kn->mn")
        found.letters.append(Letter("whole", [(second, 0)]))
    else:
        found = einsum(dims(c, c.out)[1:], dims(c, first), dims(c, second), "km,mn->kn")
        found.letters.append(Letter("whole", [(c.out, 0)]))
    return found


@rule("aten.convolution")
def convolution(c: Context) -> Rule:
    """Batch and output channels are parallel, input channels summed, positions whole: windows overlap."""
    source, weight = c.tensor(0), c.tensor(1)
    bias = [read for read in c.operator.reads[2:] if len(c.shape(read)) == 1]
    return _convolution(c, c.out, source, [weight], bias, times=1, groups=c.arg(8, "groups", 1))


@rule("aten.convolution_backward")
def convolution_backward(c: Context) -> Rule:
    """As many FLOPs as forward for the gradient of the input, and again for that of the weight."""
    grad, source, weight = c.tensor(0), c.tensor(1), c.tensor(2)
    wanted = c.arg(10, "output_mask")
    made = dict(zip([place for place, want in enumerate(wanted) if want], c.operator.writes, strict=True))
    weights = [weight, *([made[1]] if 1 in made else [])]
    bias = [made[2]] if 2 in made else []
    times = sum(bool(want) for want in wanted[:2])
    found = _convolution(c, grad, source, weights, bias, times=times, groups=c.arg(9, "groups", 1))
    roles: dict[int, Role] = {0: "summed", 1: "parallel"}
    for number, role in roles.items():
        found.letters[number].role = role
    if 0 in made:
        found.letters[0].places.append((made[0], 0))
        found.letters[0].role = "parallel"
        found.letters[2].places.append((made[0], 1))
        found.letters += [Letter("whole", [(made[0], dim)]) for dim in range(2, len(c.shape(made[0])))]
    return found


def _convolution(
    c: Context, out: int, source: int, weights: list[int], bias: list[int], times: int, groups: int
) -> Rule:
    """Letters batch, output channels, input channels, then every position on its own; 2 FLOPs a multiply-add."""
    channels = [(weight, 1) for weight in weights]
    found = Rule(
        [
            Letter("parallel", [(out, 0), (source, 0)]),
            Letter("parallel", [(out, 1), *((tensor, 0) for tensor in (*weights, *bias))]),
            Letter("summed" if groups == 1 else "whole", [(source, 1), *channels] if groups == 1 else channels),
        ]
    )
    if groups != 1:
        found.letters.append(Letter("whole", [(source, 1)]))
    for tensor in (out, source, *weights):
        found.letters += [Letter("whole", [(tensor, dim)]) for dim in range(2, len(c.shape(tensor)))]
    found.flops = found.executed = 2.0 * times
    rank = len(c.shape(out))
    found.flop_places = [(out, dim) for dim in (0, *range(2, rank), 1)]
    found.flop_places += [(weights[0], dim) for dim in range(1, rank)]
    return found


def _attention_letters(c: Context, q: int, k: int, v: int) -> dict[str, list[Place]]:
    """b, query heads, query and key positions, head dims of q and v."""
    return {"b": [(q, 0), (k, 0), (v, 0)], "h": [(q, 1)], "s": [(q, 2)], "t": [(k, 2), (v, 2)],
            "d": [(q, 3), (k, 3)], "e": [(v, 3)]}  # fmt: skip


@rule("autopar.attention")
def attention(c: Context) -> Rule:
    """Scores and their product with v: ``2 b h s t (d + e)`` FLOPs, half where causal."""
    q, k, v = (c.tensor(number) for number in range(3))
    o, lse = c.operator.writes
    places = _attention_letters(c, q, k, v)
    for name, more in {
        "b": [(o, 0), (lse, 0)],
        "h": [(o, 1), (lse, 1)],
        "s": [(o, 2), (lse, 2)],
        "e": [(o, 3)],
    }.items():
        places[name] += more
    _mask_places(c, places, c.arg(3))
    return _attention_rule(c, places, (q, k, v), (k, v), backward=False)


@rule("autopar.attention_backward")
def attention_backward(c: Context) -> Rule:
    """Five matmuls where forward has two: 2.5 times its executed FLOPs (Dao, arXiv 2307.08691); model FLOPs twice."""
    grad, q, k, v, o, lse = (c.tensor(number) for number in range(6))
    dq, dk, dv, *dmask = c.operator.writes
    places = _attention_letters(c, q, k, v)
    more = {
        "b": [(grad, 0), (o, 0), (lse, 0), (dq, 0), (dk, 0), (dv, 0)],
        "h": [(grad, 1), (o, 1), (lse, 1), (dq, 1)],
        "s": [(grad, 2), (o, 2), (lse, 2), (dq, 2)],
        "t": [(dk, 2), (dv, 2)],
        "d": [(dq, 3), (dk, 3)],
        "e": [(grad, 3), (o, 3), (dv, 3)],
    }
    for name, extra in more.items():
        places[name] += extra
    _mask_places(c, places, c.arg(6), *dmask)
    return _attention_rule(c, places, (q, k, v), (k, v, dk, dv), backward=True)


def _mask_places(c: Context, places: dict[str, list[Place]], mask: object, *gradient: int) -> None:
    """A mask or bias is broadcast from the right against batch, heads, query and key positions."""
    if not isinstance(mask, Ref):
        return
    for tensor in (mask.tensor, *gradient):
        shape = c.shape(tensor)
        for name, dim in zip("tshb", range(len(shape) - 1, -1, -1), strict=False):
            if shape[dim] != 1:
                places[name].append((tensor, dim))


def _attention_rule(
    c: Context, places: dict[str, list[Place]], qkv: tuple[int, int, int], grouped: tuple[int, ...], backward: bool
) -> Rule:
    q, k, v = qkv
    keys = tuple(("forward", "all_gather", tensor) for tensor in (k, v))
    exchange = tuple(("forward", "all_to_all", tensor) for tensor in qkv)
    found = Rule(segments=[])
    heads, groups = c.shape(q)[1], c.shape(k)[1]
    found.letters = [
        Letter("parallel", places["b"]),
        Letter("whole", places["s"], (("all_gather_kv", keys), ("ulysses", exchange))),
        Letter("whole", places["t"]),
        Letter("whole", places["d"]),
        Letter("whole", places["e"]),
    ]
    found.heads = (places["h"], [(tensor, 1) for tensor in grouped], heads // groups)
    causal = bool(c.operator.args[-1])
    # d and e: q k^T costs 2 b h s t d, the product with v 2 b h s t e; equal head dims make one term of 4.
    same = c.shape(q)[3] / c.shape(v)[3]
    found.flops = 2.0 * (1 + same) * (2 if backward else 1)
    found.executed = 2.0 * (1 + same) * (2.5 if backward else 1) * (0.5 if causal else 1)
    found.flop_places = [(q, 0), (q, 1), (q, 2), (k, 2), (v, 3)]
    return found
