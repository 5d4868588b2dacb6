"""Small differentiable functions, each with the shapes of its inputs, that between them run most operators of training."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

Case = tuple[Callable[..., torch.Tensor], list[tuple[int, ...]]]


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


def whole_numbers(below: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, below, shape)


SHAPES: dict[str, Case] = {
    "stack": (lambda a, b: torch.stack([a, b], 1), [(4, 6), (4, 6)]),
    "cat": (lambda a, b: torch.cat([a, b], 1), [(4, 6), (4, 2)]),
    "cat in front": (lambda a, b: torch.cat([a, b]), [(4, 6), (1, 6)]),
    "split": (lambda a: sum(part.sin().sum() * i for i, part in enumerate(a.split([4, 2], -1))), [(4, 6)]),
    "chunk": (lambda a: sum(part.sin().sum() * i for i, part in enumerate(a.chunk(3, 1))), [(4, 6)]),
    "two unlike cuts": (lambda a: a.chunk(2, 1)[0].sin().sum() + a.chunk(3, 1)[1].cos().sum(), [(4, 12)]),
    "cut, then view": (lambda a: a.chunk(3, 1)[1].sin().sum() + a.view(4, 3, 4).cos().sum(), [(4, 12)]),
    "view, then cut": (lambda a: a.view(4, 3, 4).cos().sum() + a.chunk(3, 1)[1].sin().sum(), [(4, 12)]),
    "view, then another cut": (lambda a: a.view(4, 3, 4).cos().sum() + a.chunk(2, 1)[1].sin().sum(), [(4, 12)]),
    "parts of a part": (lambda a: a.chunk(2, 1)[1].chunk(2, 1)[0].sin().sum(), [(4, 12)]),
    "split unsafely": (lambda a: sum(p.sin().sum() * i for i, p in enumerate(a.unsafe_chunk(3, 1))), [(4, 6)]),
    "dims in place": (lambda a: a.clone().transpose_(0, 1).unsqueeze_(0).squeeze_(0).t_() * 2, [(4, 6)]),
    "unbind": (lambda a: a.unbind(1)[1], [(4, 3, 6)]),
    "select": (lambda a: a[:, 1], [(4, 3, 6)]),
    "slice": (lambda a: a[:, 1:3], [(4, 6)]),
    "slices that tile": (lambda a: a[:, :4].sin().sum() + a[:, 4:6].cos().sum() + a[:, 6:].exp().sum(), [(4, 8)]),
    "every second": (lambda a: torch.stack((-a[..., 1::2], a[..., ::2]), -1).flatten(-2), [(2, 4, 6)]),
    "set items": (lambda a: torch.zeros(4, 6).index_put_((torch.arange(4)[:, None], torch.arange(2)), a), [(4, 2)]),
    "expand": (lambda a: a.expand(4, 6), [(1, 6)]),
    "repeat": (lambda a: a.repeat(2, 1), [(4, 6)]),
    "repeat interleaved": (lambda a: a.repeat_interleave(3, 1), [(4, 6)]),
    "diagonal": (lambda a: a.diagonal(0, 0, 2), [(4, 3, 6)]),
    "unfold": (lambda a: a.unfold(1, 2, 2), [(4, 6)]),
    "own strides": (lambda a: torch.as_strided(a, (4, 6), (6, 1)), [(4, 6)]),
    "other strides": (lambda a: torch.as_strided(a, (6, 6), (1, 6)), [(6, 6)]),
    "other dtype": (lambda a: a.detach().view(torch.int32).sum() + a.sum(), [(4, 6)]),
    "pad": (lambda a: F.pad(a, (1, 2)), [(4, 6)]),
    "flip": (lambda a: a.flip(1), [(4, 6)]),
    "roll": (lambda a: a.roll(1, 0), [(4, 6)]),
    "positions": (lambda a: a + torch.arange(6), [(4, 6)]),
    "identity": (lambda a: a @ torch.eye(6), [(4, 6)]),
}
ARITHMETIC: dict[str, Case] = {
    "matmul": (lambda a, b: a @ b, [(2, 4, 6), (6, 8)]),
    "batched matmul": (lambda a, b: a @ b, [(2, 4, 6), (2, 6, 8)]),
    "matrix and vector": (lambda a, b: a @ b, [(4, 6), (6,)]),
    "two vectors": (lambda a, b: a @ b, [(6,), (6,)]),
    "two vectors, conjugated": (torch.vdot, [(6,), (6,)]),
    "bias": (lambda a, b, c: torch.addmm(c, a, b), [(4, 6), (6, 8), (8,)]),
    "batched bias": (lambda a, b, c: torch.baddbmm(c, a, b), [(2, 4, 6), (2, 6, 8), (2, 4, 8)]),
    "sum of matmuls": (lambda a, b, c: torch.addbmm(c, a, b), [(2, 4, 6), (2, 6, 8), (4, 8)]),
    "einsum": (lambda a, b: torch.einsum("bhsd,bhtd->bhst", a, b), [(2, 4, 6, 3), (2, 4, 6, 3)]),
    "where": (lambda a, b: torch.where(a > 0, a, b), [(4, 6), (6,)]),
    "masked": (lambda a: a.masked_fill(a > 1, 0.0), [(4, 6)]),
    "in place": (lambda a: (a * 2).mul_(3).add_(1).relu_(), [(4, 6)]),
    "activations": (
        lambda a: sum(f(a) for f in (F.gelu, F.silu, F.elu, F.softplus, F.mish, F.hardswish, F.logsigmoid)),
        [(4, 6)],
    ),
    "more activations": (lambda a: F.leaky_relu(F.hardtanh(F.hardsigmoid(a))).tanh().sigmoid(), [(4, 6)]),
    "gated": (lambda a: F.glu(a), [(4, 8)]),
    "triangles": (lambda a: a.tril() + a.triu(1) * 2, [(4, 6, 6)]),
    "sums": (lambda a: a.sum((0, 2)) + a.mean(1, keepdim=True).sum() + a.mean((0, 2)), [(4, 3, 6)]),
    "extremes": (lambda a: a.amax(-1) + a.max(1)[0] + a.min(1)[0] + a.logsumexp(1), [(4, 6)]),
    "products": (lambda a: a.prod(1) + a.cumprod(1).sum(1), [(4, 6)]),
    "deviations": (lambda a: a.var(1) + a.std() + torch.var_mean(a, 1)[0] + a.norm(dim=-1), [(4, 6)]),
    "running": (lambda a: a.cumsum(1) + a.cummax(1)[0] + a.logcumsumexp(1) + a.cumsum(-2), [(4, 6)]),
    "softmax": (lambda a: a.softmax(1) + a.log_softmax(0), [(4, 6, 2)]),
    "weight norm": (lambda v, g: torch._weight_norm(v, g, 0), [(4, 6), (4, 1)]),
    "weight norm of filters": (lambda v, g: torch._weight_norm(v, g, 1), [(4, 6, 3), (1, 6, 1)]),
    "layer norm": (lambda a, w, b: F.layer_norm(a, (6,), w, b), [(4, 2, 6), (6,), (6,)]),
    "layer norm of two dims": (lambda a: F.layer_norm(a, (4, 6)), [(2, 4, 6)]),
    "rms norm": (lambda a, w: F.rms_norm(a, (6,), w), [(4, 2, 6), (6,)]),
    "fourier": (lambda a: torch.fft.rfft(a).abs(), [(4, 6)]),
    "squared error": (lambda a, b: F.mse_loss(a, b), [(4, 6), (4, 6)]),
    "summed error": (lambda a, b: F.mse_loss(a, b, reduction="sum"), [(4, 6), (4, 6)]),
    "each error": (lambda a, b: F.mse_loss(a, b, reduction="none"), [(4, 6), (4, 6)]),
    "robust errors": (lambda a, b: F.smooth_l1_loss(a, b) + F.huber_loss(a, b) + F.l1_loss(a, b), [(4, 6), (4, 6)]),
    "binary": (lambda a, b: F.binary_cross_entropy(a.sigmoid(), b.sigmoid().detach()), [(4, 6), (4, 6)]),
    "binary of logits": (lambda a, b: F.binary_cross_entropy_with_logits(a, b.detach()), [(4, 6), (4, 6)]),
}
PICKS: dict[str, Case] = {
    "sort": (lambda a: a.sort()[0] * 2 + a.sort(dim=0, descending=True, stable=True)[0], [(4, 6)]),
    "topk": (lambda a: a.topk(2, dim=-1)[0], [(4, 6, 8)]),
    "gather": (lambda a: a.gather(-1, whole_numbers(6, 4, 6, 2)), [(4, 6, 6)]),
    "gather from the first rows": (lambda a: a.gather(1, whole_numbers(6, 2, 2)), [(4, 6)]),
    "index": (lambda a: a[whole_numbers(4, 6)], [(4, 6)]),
    "index of a later dim": (lambda a: a[:, whole_numbers(6, 4, 2)], [(4, 6, 2)]),
    "two indices": (lambda a: a[:, whole_numbers(6, 4), whole_numbers(2, 4)], [(4, 6, 2)]),
    "two indices apart": (lambda a: a[whole_numbers(4, 6), :, whole_numbers(2, 6)], [(4, 6, 2)]),
    "mask": (lambda a: a[a.detach() > 0], [(4, 6)]),
    "index select": (lambda a: a.index_select(1, whole_numbers(6, 4)), [(4, 6)]),
    "index add": (lambda a, b: a.index_add(0, whole_numbers(4, 8), b), [(4, 6), (8, 6)]),
    "index put": (lambda a, b: a.index_put((whole_numbers(4, 3),), b), [(4, 6), (3, 6)]),
    "scatter": (lambda a, b: a.scatter(1, torch.rand(4, 6).argsort(1)[:, :2], b), [(4, 6), (4, 2)]),
    "scatter add": (lambda a, b: a.scatter_add(1, whole_numbers(6, 4, 6), b), [(4, 6), (4, 6)]),
    "masked scatter": (lambda a, b: a.masked_scatter(a > 0, b), [(4, 6), (4, 6)]),
    "one hot": (lambda a: F.one_hot(whole_numbers(6, 4), 6).double() @ a, [(6, 4)]),
    "embedding": (lambda w: F.embedding(whole_numbers(8, 4, 6), w, padding_idx=0), [(8, 6)]),
    "cross entropy": (lambda a: F.cross_entropy(a, whole_numbers(6, 4)), [(4, 6)]),
    "summed cross entropy": (lambda a: F.cross_entropy(a, whole_numbers(6, 4), reduction="sum"), [(4, 6)]),
    "each cross entropy": (
        lambda a: F.cross_entropy(a, whole_numbers(6, 4), weight=torch.rand(6), reduction="none"),
        [(4, 6)],
    ),
    "cross entropy of an image": (lambda a: F.cross_entropy(a, whole_numbers(6, 4, 2, 2)), [(4, 6, 2, 2)]),
    "cross entropy of one row": (lambda a: F.cross_entropy(a, whole_numbers(6, 1)[0]), [(6,)]),
}


CASES: dict[str, Case] = {**SHAPES, **ARITHMETIC, **PICKS}
