"""Which rectangles of a whole tensor a rank's part of it is made of: what checkpoints store and first weights fill."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from autopar.runtime.names import divided_dim, pieces
from autopar.runtime.shard import Layout
from autopar.runtime.zero import local

Rectangle = tuple[tuple[int, ...], torch.Tensor]
"""(offsets in the whole tensor, this rank's memory of it)."""


def rectangles(layout: Layout, parameter: torch.Tensor, tensor: torch.Tensor, tp: int, place: int) -> list[Rectangle]:
    """The rectangles of the whole that a rank's part of it holds, as views of that part.

    `tensor` is the parameter or what is divided as it is (a master, a state); `place` is the rank's on tp.
    """
    own = local(tensor)
    start = 0
    if isinstance(parameter, DTensor):
        _, offsets = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
        start = offsets[0]
    if own.numel() == 0:
        return []
    origin = [start, *(0 for _ in own.shape[1:])] if own.dim() else []
    dim = divided_dim(layout.placement)
    if dim is None:
        return [(tuple(origin), own)]
    found = []
    for piece in pieces(layout.shape[dim], layout.placement, tp, place):
        # Of the piece, at [local, local + size) of the undivided part, the rows from `first` on lie here.
        low, high = piece.local, piece.local + piece.size
        begin = start if dim == 0 else 0
        first, last = max(low, begin), min(high, begin + own.shape[dim])
        if first < last:
            offsets = list(origin)
            offsets[dim] = piece.whole + first - low
            found.append((tuple(offsets), own.narrow(dim, first - begin, last - first)))
    return found
