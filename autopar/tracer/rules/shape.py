"""Views, parts and joins of tensors."""

from __future__ import annotations

from typing import Any

import torch

from autopar.tracer.recording import Ref
from autopar.tracer.rules.base import Context, Letter, Place, Rule, along, base, places_of, rule, whole


@rule("aten.view", "aten._unsafe_view", "aten.reshape", "aten._reshape_alias", "aten.unsqueeze", "aten.squeeze",
      "aten.flatten", "aten.unflatten", "aten.unsqueeze_", "aten.squeeze_")  # fmt: skip
def view(c: Context) -> Rule:
    """Equal elements in row-major order; another dtype of another width cuts the last dim anew."""
    if isinstance(c.arg(1, "dtype"), torch.dtype):
        found = along(c, [])
        found.moves = []
        return found
    return Rule(views=[(c.operator.reads[0], c.out)], moves=[])


@rule("aten.permute", "aten.t", "aten.transpose", "aten.numpy_T", "aten.movedim", "aten.t_", "aten.transpose_")
def permute(c: Context) -> Rule:
    """Dims in another order."""
    source, rank = c.tensor(0), len(c.shape(c.out))
    if base(c) == "permute":
        order = [dim % rank for dim in c.arg(1)]
    elif base(c) == "transpose":
        order = list(range(rank))
        first, second = c.arg(1) % rank, c.arg(2) % rank
        order[first], order[second] = second, first
    else:
        order = list(range(rank))[::-1]
    return Rule([Letter("parallel", [(c.out, dim), (source, own)]) for dim, own in enumerate(order)], moves=[])


@rule("aten.expand", "aten.broadcast_to")
def expand(c: Context) -> Rule:
    """A dim of size 1 becomes a new one; nothing moves."""
    source, shift = c.tensor(0), len(c.shape(c.out)) - len(c.shape(c.tensor(0)))
    found = Rule(moves=[])
    for dim, size in enumerate(c.shape(c.out)):
        own = dim - shift
        same = own >= 0 and c.shape(source)[own] == size
        found.letters.append(Letter("parallel", [(c.out, dim), (source, own)] if same else [(c.out, dim)]))
    return found


@rule("aten.repeat")
def repeat(c: Context) -> Rule:
    """Dims whose size stays keep their index; others are whole."""
    source = c.tensor(0)
    return _same_or_whole(c, source, c.out, len(c.shape(c.out)) - len(c.shape(source)))


def _same_or_whole(c: Context, source: int, out: int, shift: int = 0) -> Rule:
    found = Rule()
    for dim, size in enumerate(c.shape(out)):
        own = dim - shift
        if own >= 0 and c.shape(source)[own] == size:
            found.letters.append(Letter("parallel", [(out, dim), (source, own)]))
        else:
            found.letters.append(Letter("whole", [(out, dim)]))
            if own >= 0:
                found.letters.append(Letter("whole", [(source, own)]))
    return found


@rule("aten.slice", "aten.narrow")
def slice_(c: Context) -> Rule:
    """One dim is cut, the others stay."""
    return _cut(c, c.tensor(0), c.out, c.arg(1, "dim", 0), c.arg(2, "start"), c.arg(4, "step", 1), moves=[])


@rule("aten.slice_backward")
def slice_backward(c: Context) -> Rule:
    """The gradient of a slice: zeros around it."""
    return _cut(c, c.out, c.tensor(0), c.arg(2), c.arg(3), c.arg(5), moves=None)


def _cut(c: Context, large: int, small: int, dim: int, start: int | None, step: int, moves: Any) -> Rule:
    """A range of one dim: one of the parts that the dim concatenates, or else whole."""
    cut = c.dim(large, dim)
    same = c.shape(large) == c.shape(small)
    rank = range(len(c.shape(large)))
    found = Rule([Letter("parallel", [(large, d), (small, d)]) for d in rank if same or d != cut], moves=moves)
    if not same and step == 1:
        begin = start or 0
        found.cut = ((large, cut), (small, cut), begin if begin >= 0 else begin + c.shape(large)[cut])
    elif not same:
        found.letters += [Letter("whole", [(large, cut)]), Letter("whole", [(small, cut)])]
    return found


@rule("aten.select")
def select(c: Context) -> Rule:
    """One dim disappears."""
    source = c.tensor(0)
    return _without(c, source, c.out, c.dim(source, c.arg(1)), moves=[])


def _without(c: Context, large: int, small: int, gone: int, moves: Any) -> Rule:
    kept = [dim for dim in range(len(c.shape(large))) if dim != gone]
    found = Rule([Letter("parallel", [(small, dim), (large, own)]) for dim, own in enumerate(kept)], moves=moves)
    found.letters.append(Letter("whole", [(large, gone)]))
    return found


@rule("aten.unbind")
def unbind(c: Context) -> Rule:
    """Every write is a select."""
    source = c.tensor(0)
    gone = c.dim(source, c.arg(1, "dim", 0))
    kept = [dim for dim in range(len(c.shape(source))) if dim != gone]
    found = Rule(
        [
            Letter("parallel", [(source, own), *((out, dim) for out in c.operator.writes)])
            for dim, own in enumerate(kept)
        ],
        moves=[],
    )
    found.letters.append(Letter("whole", [(source, gone)]))
    return found


@rule("aten.split", "aten.split_with_sizes", "aten.chunk", "aten.tensor_split", "aten.split_copy", "aten.unsafe_split",
      "aten.unsafe_split_with_sizes", "aten.unsafe_chunk")  # fmt: skip
def split(c: Context) -> Rule:
    """A dim that concatenates its parts: each part is divided on its own."""
    source = c.tensor(0)
    cut = c.dim(source, c.arg(2, "dim", 0))
    found = Rule(moves=[])
    for dim in range(len(c.shape(source))):
        places = [(out, dim) for out in c.operator.writes]
        if dim == cut:
            found.segments.append(((source, dim), places))
        else:
            found.letters.append(Letter("parallel", [(source, dim), *places]))
    return found


@rule("aten.cat", "aten.concat")
def cat(c: Context) -> Rule:
    """The joined dim concatenates its parts; empty ones are none."""
    parts = [item.tensor for item in c.arg(0) if isinstance(item, Ref)]
    joined = c.dim(c.out, c.arg(1, "dim", 0))
    parts = [part for part in parts if len(c.shape(part)) == len(c.shape(c.out))]
    filled = [(part, joined) for part in parts if c.shape(part)[joined]]
    found = Rule()
    for dim in range(len(c.shape(c.out))):
        places: list[Place] = filled if dim == joined else [(part, dim) for part in parts]
        if dim == joined and len(filled) > 1:
            found.segments.append(((c.out, dim), places))
        else:
            found.letters.append(Letter("parallel", [(c.out, dim), *places]))
    return found


@rule("aten.stack")
def stack(c: Context) -> Rule:
    """A new dim in front of `dim`."""
    parts = [item.tensor for item in c.arg(0) if isinstance(item, Ref)]
    new = c.dim(c.out, c.arg(1, "dim", 0))
    kept = [dim for dim in range(len(c.shape(c.out))) if dim != new]
    found = Rule([Letter("parallel", [(c.out, dim), *((part, own) for part in parts)]) for own, dim in enumerate(kept)])
    found.letters.append(Letter("whole", [(c.out, new)]))
    return found


@rule("aten.view_as_real", "aten.view_as_complex")
def view_as_parts(c: Context) -> Rule:
    """Real and imaginary part are a last dim of 2 on one side."""
    source = c.tensor(0)
    rank = min(len(c.shape(source)), len(c.shape(c.out)))
    found = Rule([Letter("parallel", [(source, dim), (c.out, dim)]) for dim in range(rank)], moves=[])
    found.letters += [Letter("whole", [(tensor, rank)]) for tensor in (source, c.out) if len(c.shape(tensor)) > rank]
    return found


@rule("aten.as_strided")
def as_strided(c: Context) -> Rule:
    """The same dims under their own strides, or a window that no index describes."""
    source = c.tensor(0)
    record, size, stride = c.recording.tensors[source], tuple(c.arg(1)), tuple(c.arg(2))
    if size == record.shape and stride == record.stride and c.arg(3, "storage_offset") in (None, record.offset):
        return Rule([Letter("parallel", [(source, d), (c.out, d)]) for d in range(len(size))], moves=[])
    return Rule(whole(c, source, c.out), moves=[])


@rule("aten.diagonal", "aten.diagonal_backward", "aten.trace")
def diagonal(c: Context) -> Rule:
    """Two dims become the last one; which elements meet there depends on their place."""
    if base(c) == "trace":
        return Rule(whole(c, c.tensor(0)))
    backward = base(c) == "diagonal_backward"
    small, large = (c.tensor(0), c.out) if backward else (c.out, c.tensor(0))
    first, second = (c.dim(large, c.arg(number + backward, f"dim{number}", number - 1)) for number in (2, 3))
    pair = [c.dim(large, first), c.dim(large, second)]
    others = [dim for dim in range(len(c.shape(large))) if dim not in pair]
    found = Rule([Letter("parallel", [(small, own), (large, dim)]) for own, dim in enumerate(others)])
    found.letters += [Letter("whole", [place]) for place in ((small, len(others)), *((large, dim) for dim in pair))]
    found.moves = None if backward else []
    return found


@rule("aten.unfold", "aten.unfold_backward")
def unfold(c: Context) -> Rule:
    """Windows of one dim become a last dim."""
    backward = base(c) == "unfold_backward"
    windows, source = (c.tensor(0), c.out) if backward else (c.out, c.tensor(0))
    dim = c.dim(source, c.arg(2 if backward else 1))
    rank = len(c.shape(source))
    found = Rule([Letter("parallel", [(source, d), (windows, d)]) for d in range(rank) if d != dim])
    found.letters += [Letter("whole", [place]) for place in ((source, dim), (windows, dim), (windows, rank))]
    found.moves = None if backward else []
    return found


@rule("aten.select_backward")
def select_backward(c: Context) -> Rule:
    """The gradient of a select."""
    gone = c.dim(c.out, c.arg(2))
    return _without(c, c.out, c.tensor(0), gone, moves=None)


@rule("aten.constant_pad_nd")
def pad(c: Context) -> Rule:
    """Dims whose size stays keep their index."""
    padded = {len(c.shape(c.out)) - 1 - number // 2 for number, size in enumerate(c.arg(1)) if size}
    return along(c, padded, [c.tensor(0), c.out])


@rule("aten.zeros", "aten.ones", "aten.full", "aten.empty", "aten.empty_strided", "aten.new_empty", "aten.new_zeros",
      "aten.new_ones", "aten.new_full", "aten.new_empty_strided", "aten.scalar_tensor", "aten.rand", "aten.randn",
      "aten.randint", "aten.lift")  # fmt: skip
def creation(c: Context) -> Rule:
    """Made from nothing, alike everywhere or at random: every shard makes its own part."""
    return Rule([Letter("parallel", [place]) for place in places_of(c, *c.operator.writes)])


@rule("aten.arange", "aten.linspace", "aten.logspace", "aten.eye", "aten.randperm", "aten.tril_indices",
      "aten.triu_indices")  # fmt: skip
def positions(c: Context) -> Rule:
    """Made from nothing, each element by its place: a part begins at an offset that the operator does not know."""
    return Rule(whole(c, *c.operator.writes))
