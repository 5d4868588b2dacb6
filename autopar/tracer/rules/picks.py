"""Operators that pick, place or order elements by the values of an index."""

from __future__ import annotations

from typing import Any

from autopar.tracer.recording import Ref
from autopar.tracer.rules.base import Composites, Context, Letter, Place, Role, Rule, along, base, rule, whole
from autopar.tracer.rules.norm import ROWS


@rule("aten.embedding")
def embedding(c: Context) -> Rule:
    """Rows of a table: whole along it, or each shard looks up what it has and the results are summed."""
    table, index = c.tensor(0), c.tensor(1)
    rank = len(c.shape(index))
    found = Rule([Letter("parallel", [(index, dim), (c.out, dim)]) for dim in range(rank)])
    found.letters.append(Letter("parallel", [(table, 1), (c.out, rank)]))
    found.letters.append(Letter("whole", [(table, 0)], _own_rows(c)))
    found.moves = [(c.out, 2.0)]
    return found


def _own_rows(c: Context) -> Composites:
    """Each shard picks from the rows it has, and leaves the others to be summed in."""
    return ((ROWS, (("forward", "all_reduce", c.out),)),)


@rule("aten.embedding_dense_backward")
def embedding_backward(c: Context) -> Rule:
    """Token positions are summed into the table's gradient; each shard of rows needs only its own."""
    grad, index = c.tensor(0), c.tensor(1)
    rank = len(c.shape(index))
    found = Rule([Letter("summed", [(index, dim), (grad, dim)]) for dim in range(rank)])
    found.letters.append(Letter("parallel", [(c.out, 1), (grad, rank)]))
    found.letters.append(Letter("whole", [(c.out, 0)], ((ROWS, ()),)))
    found.moves = [(c.out, 1.0), (grad, 2.0)]
    return found


@rule("aten.nll_loss_forward", "aten.nll_loss2d_forward")
def nll_loss(c: Context) -> Rule:
    """Picks one class a row; rows are summed unless each keeps its loss, a mean is an average of the shards' means.

    Whole along the classes, or one more reduction of a row's size.
    """
    scores, target = c.tensor(0), c.tensor(1)
    kept = c.arg(3, "reduction", 1) == 0
    return _nll(c, scores, target, [c.out] if kept else [], "parallel" if kept else "summed", [scores])


@rule("aten.nll_loss_backward", "aten.nll_loss2d_backward")
def nll_loss_backward(c: Context) -> Rule:
    """One element a row differs from zero."""
    grad, scores, target = (c.tensor(number) for number in range(3))
    rows = [grad] if c.shape(grad) == c.shape(target) else []
    return _nll(c, scores, target, rows, "parallel", [scores, c.out])


def _nll(c: Context, scores: int, target: int, rows: list[int], role: Role, full: list[int]) -> Rule:
    """Classes are dim 1 of scores, or the only one; `rows` are tensors shaped like the target."""
    classes = min(1, len(c.shape(scores)) - 1)
    found = Rule()
    row = 0
    for dim in range(len(c.shape(scores))):
        places: list[Place] = [(tensor, dim) for tensor in full]
        if dim == classes:
            places += [
                (read, 0)
                for read in c.operator.reads
                if c.shape(read) == (c.shape(scores)[dim],) and read not in (target, *rows, *full)
            ]
            collectives = () if c.out in full else (("forward", "all_reduce", -1),)
            found.letters.append(Letter("whole", places, ((ROWS, collectives),)))
        else:
            found.letters.append(Letter(role, places + [(tensor, row) for tensor in (target, *rows)]))
            row += 1
    return found


@rule("aten.gather")
def gather(c: Context) -> Rule:
    """``out[i, j] = source[i, index[i, j]]``: the picked dim of the source is whole, that of the index parallel."""
    source, index = c.tensor(0), c.tensor(2)
    dim = c.dim(source, c.arg(1))
    found = _beside(c, dim, [source, index, c.out])
    found.letters.append(Letter("parallel", [(c.out, dim), (index, dim)]))
    found.letters.append(Letter("whole", [(source, dim)], _own_rows(c)))
    return found


def _beside(c: Context, dim: int, tensors: list[int]) -> Rule:
    """Letters of all dims but one; whole where sizes differ, as elements then meet by their place."""
    found = along(c, [], tensors)
    return Rule([letter for letter in found.letters if letter.places[0][1] != dim])


@rule(
    "aten.scatter_add",
    "aten.scatter_add_",
    "aten.scatter",
    "aten.scatter_",
    "aten.scatter_reduce",
    "aten.scatter_reduce_",
)
def scatter(c: Context) -> Rule:
    """``out[i, index[i, j]] = source[i, j]``: added ones may come from several shards, the first of which adds to `self`."""
    target, index = c.tensor(0), c.tensor(2)
    dim = c.dim(target, c.arg(1))
    source = [read for read in c.operator.reads[2:] if len(c.shape(read)) == len(c.shape(index)) and c.shape(index)]
    found = _beside(c, dim, [c.out, target, index, *source])
    adds = base(c) in ("scatter_add", "scatter_add_") and all(c.shape(read) == c.shape(index) for read in source)
    placed = [(tensor, dim) for tensor in (index, *source)]
    found.letters += [Letter("summed", placed)] if adds else [Letter("whole", [place]) for place in placed]
    found.letters.append(Letter("whole", [(c.out, dim), (target, dim)], ((ROWS, ()),)))
    return found


@rule("aten.index_select")
def index_select(c: Context) -> Rule:
    """Slices of one dim, in the order of an index."""
    source, index = c.tensor(0), c.tensor(2)
    dim = c.dim(source, c.arg(1))
    found = _beside(c, dim, [source, c.out])
    found.letters.append(Letter("parallel", [(c.out, dim), *((index, d) for d in range(len(c.shape(index))))]))
    found.letters.append(Letter("whole", [(source, dim)], _own_rows(c)))
    return found


@rule("aten.index_add", "aten.index_add_")
def index_add(c: Context) -> Rule:
    """Slices added where an index says; they may come from several shards, the first of which adds to `self`."""
    target, index, source = c.tensor(0), c.tensor(2), c.tensor(3)
    dim = c.dim(target, c.arg(1))
    found = _beside(c, dim, [c.out, target, source])
    found.letters.append(Letter("summed", [(source, dim), *((index, d) for d in range(len(c.shape(index))))]))
    found.letters.append(Letter("whole", [(c.out, dim), (target, dim)], ((ROWS, ()),)))
    return found


class _Indexing:
    """``source[:, i, j]``: which dims are picked, and where the dims of the index stand in the result."""

    def __init__(self, c: Context, source: int, indices: Any) -> None:
        self.c = c
        self.rank = len(c.shape(source))
        self.picked = {dim: item.tensor for dim, item in enumerate(indices) if isinstance(item, Ref)}
        self.index_rank = max((len(c.shape(index)) for index in self.picked.values()), default=0)
        numbers = sorted(self.picked)
        together = numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else True
        self.start = numbers[0] if numbers and together else 0
        self.kept = [dim for dim in range(self.rank) if dim not in self.picked]
        self.by_mask = any(c.recording.tensors[index].dtype == "bool" for index in self.picked.values())

    def result_dim(self, kept: int) -> int:
        """Where a dim that is not picked stands in the result."""
        number = self.kept.index(kept)
        return number if number < self.start else number + self.index_rank

    def index_places(self, number: int) -> list[Place]:
        """Index dim `number` in every index tensor that is not broadcast there."""
        places = []
        for index in self.picked.values():
            own = number - self.index_rank + len(self.c.shape(index))
            if own >= 0 and self.c.shape(index)[own] != 1:
                places.append((index, own))
        return places


@rule("aten.index", "aten._unsafe_index")
def index(c: Context) -> Rule:
    """Picked dims are whole, the index's own dims parallel, all others too."""
    source = c.tensor(0)
    picking = _Indexing(c, source, c.arg(1))
    if picking.by_mask:
        return Rule(whole(c, *c.operator.reads, *c.operator.writes))
    found = Rule([Letter("parallel", [(c.out, picking.result_dim(dim)), (source, dim)]) for dim in picking.kept])
    for number in range(picking.index_rank):
        found.letters.append(Letter("parallel", [(c.out, picking.start + number), *picking.index_places(number)]))
    rows = _own_rows(c) if len(picking.picked) == 1 else ()
    found.letters += [Letter("whole", [(source, dim)], rows) for dim in picking.picked]
    return found


@rule("aten.index_put", "aten.index_put_", "aten._index_put_impl_", "aten._unsafe_index_put")
def index_put(c: Context) -> Rule:
    """The gradient of `index`: added values may come from several shards, the first of which adds to `self`."""
    target, values = c.tensor(0), c.tensor(2)
    picking = _Indexing(c, target, c.arg(1))
    if picking.by_mask:
        return Rule(whole(c, *c.operator.reads, *c.operator.writes))
    result_rank = len(picking.kept) + picking.index_rank

    def value(dim: int) -> list[Place]:
        own = dim - result_rank + len(c.shape(values))
        return [(values, own)] if own >= 0 and c.shape(values)[own] != 1 else []

    found = Rule()
    for dim in picking.kept:
        places = [(c.out, dim), (target, dim), *value(picking.result_dim(dim))]
        found.letters.append(Letter("parallel", places))
    role: Role = "summed" if c.arg(3, "accumulate", False) else "whole"
    for number in range(picking.index_rank):
        found.letters.append(Letter(role, [*picking.index_places(number), *value(picking.start + number)]))
    found.letters += [Letter("whole", [(c.out, dim), (target, dim)], ((ROWS, ()),)) for dim in picking.picked]
    return found


@rule("aten.sort", "aten.topk", "aten.cumsum", "aten.cumprod", "aten.cummax", "aten.cummin", "aten.logcumsumexp",
      "aten.glu", "aten.glu_backward", "aten.flip", "aten.roll", "aten.index_fill", "aten.index_fill_", "aten._fft_r2c",
      "aten._fft_c2c", "aten._fft_c2r", "aten.argsort", "aten.renorm")  # fmt: skip
def along_a_dim(c: Context) -> Rule:
    """Whole in the dims that the operator works along."""
    number = 2 if base(c) in ("topk", "roll", "glu_backward", "renorm") else 1
    dims = c.arg(number, "dims" if base(c) in ("flip", "roll") else "dim", -1)
    if c.operator.name == "aten.sort.stable":
        dims = c.operator.kwargs.get("dim", -1)
    if isinstance(dims, int):
        dims = [dims]
    rank = len(c.shape(c.out))
    return along(c, dims or range(rank))


@rule("aten.one_hot", "aten.repeat_interleave", "aten.histc", "aten.bincount", "aten.nonzero", "aten.masked_select",
      "aten.masked_scatter", "aten.masked_scatter_backward", "aten.unique_dim", "aten._unique2", "aten.searchsorted",
      "aten.bucketize")  # fmt: skip
def depends_on_data(c: Context) -> Rule:
    """Whole in every dim: which elements meet depends on data."""
    return Rule(whole(c, *c.operator.reads, *c.operator.writes))
