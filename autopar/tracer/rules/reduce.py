"""Reductions, norms, softmax, embedding and losses."""

from __future__ import annotations

from autopar.tracer.rules.base import Context, Letter, Rule, rule
from autopar.tracer.rules.shape import base

ROWS = "vocab_parallel"


@rule("aten.sum", "aten.mean", "aten.amax", "aten.amin", "aten.max", "aten.min", "aten.prod", "aten.logsumexp",
      "aten.var_mean", "aten.var", "aten.std", "aten.all", "aten.any", "aten.argmax", "aten.norm",
      "aten.linalg_vector_norm")  # fmt: skip
def reduce(c: Context) -> Rule:
    """Reduced dims are summed where the operator is a sum, else whole."""
    source = c.tensor(0)
    rank = len(c.shape(source))
    given = c.arg(1, "dim")
    if base(c) in ("linalg_vector_norm", "norm"):
        given = c.arg(2, "dim")
    along = range(rank) if given is None or given == [] else ([given] if isinstance(given, int) else given)
    gone = {dim % rank for dim in along} if rank else set()
    kept = len(c.shape(c.out)) == rank
    found = Rule()
    position = 0
    for dim in range(rank):
        if dim in gone:
            found.letters.append(Letter("summed" if base(c) in ("sum", "mean") else "whole", [(source, dim)]))
            position += kept
        else:
            found.letters.append(Letter("parallel", [(source, dim), *((out, position) for out in c.operator.writes)]))
            position += 1
    return found


@rule("aten._softmax", "aten._log_softmax", "aten._softmax_backward_data", "aten._log_softmax_backward_data",
      "aten._safe_softmax", "aten.log_softmax", "aten.softmax", "aten.logcumsumexp")  # fmt: skip
def softmax(c: Context) -> Rule:
    """Whole along its dim; two reductions of a row's size (maximum, sum) divide it all the same."""
    tensors = [*c.operator.writes, *(read for read in c.operator.reads if c.shape(read) == c.shape(c.out))]
    along = c.arg(2 if "backward" in c.operator.name else 1)
    rank = len(c.shape(c.out))
    found = Rule()
    for dim in range(rank):
        places = [(tensor, dim) for tensor in tensors]
        if dim == along % rank:
            phase = "backward" if "backward" in c.operator.name else "forward"
            times = 1 if phase == "backward" else 2
            rows = tuple((phase, "all_reduce", -1) for _ in range(times))
            found.letters.append(Letter("whole", places, ((ROWS, rows),)))
        else:
            found.letters.append(Letter("parallel", places))
    return found


@rule("aten.native_layer_norm", "aten._fused_rms_norm", "autopar.rms_norm")
def layer_norm(c: Context) -> Rule:
    """Leading dims are parallel, normalised ones whole."""
    source = c.tensor(0)
    rank, normal = len(c.shape(source)), len(c.arg(1))
    found = Rule()
    for dim in range(rank):
        inside = dim >= rank - normal
        places = [(source, dim), (c.out, dim)]
        if inside:
            places += [(read, dim - rank + normal) for read in c.operator.reads[1:] if len(c.shape(read)) == normal]
        else:
            places += [(out, dim) for out in c.operator.writes[1:] if c.shape(out)[dim] == c.shape(source)[dim]]
        found.letters.append(Letter("whole" if inside else "parallel", places))
    return found


@rule("aten.native_layer_norm_backward", "aten._fused_rms_norm_backward", "autopar.rms_norm_backward")
def layer_norm_backward(c: Context) -> Rule:
    """Rows are parallel in the input's gradient and summed in the weights'."""
    source = c.tensor(1)
    rank, normal = len(c.shape(source)), len(c.arg(2))
    found = Rule()
    full = [tensor for tensor in (*c.operator.reads, *c.operator.writes) if c.shape(tensor) == c.shape(source)]
    rows = [
        tensor
        for tensor in c.operator.reads
        if len(c.shape(tensor)) == rank
        and tensor not in full
        and c.shape(tensor)[: rank - normal] == c.shape(source)[: rank - normal]
    ]
    weights = [t for t in (*c.operator.reads, *c.operator.writes) if len(c.shape(t)) == normal and t not in full]
    for dim in range(rank):
        places = [(tensor, dim) for tensor in full]
        if dim >= rank - normal:
            found.letters.append(Letter("whole", places + [(tensor, dim - rank + normal) for tensor in weights]))
        else:
            found.letters.append(Letter("parallel", places + [(tensor, dim) for tensor in rows]))
    return found


@rule("aten.embedding")
def embedding(c: Context) -> Rule:
    """Rows of a table: whole along it, or each shard looks up what it has and the results are summed."""
    table, index = c.tensor(0), c.tensor(1)
    rank = len(c.shape(index))
    summed = ((ROWS, (("forward", "all_reduce", c.out),)),)
    found = Rule([Letter("parallel", [(index, dim), (c.out, dim)]) for dim in range(rank)])
    found.letters.append(Letter("parallel", [(table, 1), (c.out, rank)]))
    found.letters.append(Letter("whole", [(table, 0)], summed))
    found.moves = [(c.out, 2.0)]
    return found


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


@rule("aten.nll_loss_forward", "aten.nll_loss_backward")
def nll_loss(c: Context) -> Rule:
    """Picks one class a row; rows are summed in a mean or sum. Whole along the classes, or one more reduction of a row's size."""
    backward = base(c) == "nll_loss_backward"
    scores, target = (c.tensor(1), c.tensor(2)) if backward else (c.tensor(0), c.tensor(1))
    rows = [(scores, 0), (target, 0)]
    classes = [(scores, 1)]
    if backward:
        rows.append((c.out, 0))
        classes.append((c.out, 1))
    elif len(c.shape(c.out)) == 1:
        rows.append((c.out, 0))
    composite = ((ROWS, () if backward else (("forward", "all_reduce", -1),)),)
    parallel = backward or len(c.shape(c.out)) == 1
    return Rule([Letter("parallel" if parallel else "summed", rows), Letter("whole", classes, composite)])


@rule("aten.gather", "aten.index_select", "aten.scatter", "aten.scatter_add", "aten.topk", "aten.index", "aten.index_put",
      "aten.index_add", "aten.index_put_", "aten.scatter_", "aten.scatter_add_",
      "aten.index_add_", "aten.histc", "aten.one_hot", "aten.bincount", "aten.nonzero", "aten._unsafe_index")  # fmt: skip
def picks(c: Context) -> Rule:
    """Whole in every dim: which elements meet depends on data."""
    tensors = (*c.operator.reads, *c.operator.writes)
    return Rule([Letter("whole", [(tensor, dim)]) for tensor in tensors for dim in range(len(c.shape(tensor)))])


@rule("aten.arange", "aten.full", "aten.zeros", "aten.ones", "aten.empty", "aten.new_empty", "aten.new_zeros", "aten.new_ones",
      "aten.new_full", "aten.scalar_tensor", "aten.empty_strided", "aten.new_empty_strided", "aten.rand", "aten.randn",
      "aten.eye", "aten.lift")  # fmt: skip
def creation(c: Context) -> Rule:
    """Made from nothing; every shard makes its own part."""
    return Rule([Letter("parallel", [(out, dim)]) for out in c.operator.writes for dim in range(len(c.shape(out)))])
