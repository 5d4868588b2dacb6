"""Softmax and norms: whole along what they normalise."""

from __future__ import annotations

from autopar.tracer.rules.base import Context, Letter, Role, Rule, along, divided, rule

ROWS = "vocab_parallel"


@rule("aten._softmax", "aten._log_softmax", "aten._softmax_backward_data", "aten._log_softmax_backward_data",
      "aten._safe_softmax", "aten.log_softmax", "aten.softmax")  # fmt: skip
def softmax(c: Context) -> Rule:
    """Whole along its dim; reductions of a row's size divide it all the same: maximum and sum, backward a sum."""
    backward = "backward" in c.operator.name
    tensors = [*c.operator.writes, *(read for read in c.operator.reads if c.shape(read) == c.shape(c.out))]
    dim = c.arg(2 if backward else 1, "dim")
    found = along(c, [dim], tensors)
    rows = (("backward", "all_reduce", -1),) if backward else (("forward", "all_reduce", -1),) * 2
    for letter in found.letters:
        if letter.role == "whole":
            letter.composites = ((ROWS, rows),)
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
    leading = c.shape(source)[: rank - normal]
    everything = dict.fromkeys((*c.operator.reads, *c.operator.writes))
    full = [tensor for tensor in everything if c.shape(tensor) == c.shape(source)]
    others = [tensor for tensor in everything if tensor not in full]
    rows = [t for t in others if len(c.shape(t)) == rank and c.shape(t)[: rank - normal] == leading]
    weights = [t for t in others if len(c.shape(t)) == normal and t not in rows]
    found = Rule()
    for dim in range(rank):
        places = [(tensor, dim) for tensor in full]
        if dim >= rank - normal:
            found.letters.append(Letter("whole", places + [(tensor, dim - rank + normal) for tensor in weights]))
        else:
            found.letters.append(divided(c, places + [(tensor, dim) for tensor in rows]))
    return found


@rule("aten.native_batch_norm", "aten._native_batch_norm_legit", "aten._native_batch_norm_legit_functional",
      "aten._batch_norm_with_update", "aten.cudnn_batch_norm", "aten.native_batch_norm_backward",
      "aten.cudnn_batch_norm_backward", "aten.batch_norm_backward")  # fmt: skip
def batch_norm(c: Context) -> Rule:
    """Channels are parallel; statistics run over all other dims."""
    return _channels(c, "parallel")


def _channels(c: Context, role: Role, skip: tuple[int, ...] = ()) -> Rule:
    source = c.tensor(1 if "backward" in c.operator.name else 0)
    rank, channels = len(c.shape(source)), c.shape(source)[1]
    tensors = dict.fromkeys(t for t in (*c.operator.writes, *c.operator.reads) if t not in skip)
    full = [tensor for tensor in tensors if c.shape(tensor) == c.shape(source)]
    vectors = [(tensor, 0) for tensor in tensors if c.shape(tensor) == (channels,)]
    found = Rule([Letter("whole", [(tensor, dim) for tensor in full]) for dim in range(rank)])
    found.letters[1] = Letter(role, found.letters[1].places + vectors)
    return found


@rule("aten.native_group_norm", "aten.native_group_norm_backward")
def group_norm(c: Context) -> Rule:
    """Samples are parallel, and summed in the weights' gradients; groups of channels and positions are whole."""
    backward = "backward" in c.operator.name
    factors = (c.tensor(2), c.tensor(3)) if backward else c.operator.writes[1:]
    found = _channels(c, "whole", skip=tuple(factors))
    found.letters[0] = divided(c, found.letters[0].places + [(tensor, 0) for tensor in factors])
    found.letters.append(Letter("whole", [(tensor, 1) for tensor in factors]))
    return found


@rule("aten._weight_norm_interface", "aten._weight_norm_interface_backward")
def weight_norm(c: Context) -> Rule:
    """Each slice along one dim is scaled by a number of its own over its norm: parallel along it, whole within a slice."""
    weight = c.out
    kept = c.dim(weight, c.arg(4 if "backward" in c.operator.name else 2, "dim", 0))
    tensors = tuple(dict.fromkeys((*c.operator.reads, *c.operator.writes)))
    found = [Letter("parallel", [(tensor, kept) for tensor in tensors])]
    full = [tensor for tensor in tensors if c.shape(tensor) == c.shape(weight)]
    others = [dim for dim in range(len(c.shape(weight))) if dim != kept]
    found += [Letter("whole", [(tensor, dim) for tensor in full]) for dim in others]
    return Rule(found)
