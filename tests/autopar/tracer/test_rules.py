"""Every operator-local dim that a rule offers, carried out with real tensors, gives the undivided result.

Each case runs forward and backward; every operator recorded is divided over 2 or 3 shards along every dim offered.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from autopar.tracer.indices import Analysis, analyse, local_dims
from tests.shards import Indivisible, Run, Shards, mismatch, recorded

RANDOM = ("native_dropout", "bernoulli", "rand", "randn", "randint", "rand_like", "randn_like", "normal_", "uniform_",
          "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")  # fmt: skip
"""Operators whose result is not the same twice."""


@pytest.fixture(autouse=True)
def exact():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


def whole_numbers(below: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, below, shape)


def divide_everything(run: Run, found: Analysis, counts: tuple[int, ...] = (2, 3)) -> set[str]:
    """Check every dim of every operator at the first count that divides it; the operators that were divided."""
    ids = {tensor: tensor for tensor in run.recording.tensors}
    seen = set()
    for step in run.steps:
        if step.record.name.split(".")[1] in RANDOM:
            continue
        for local in local_dims(found, step.record.id, ids):
            positions = (*local.reads, *local.writes)
            assert positions, step.record.name
            if local.role == "whole":
                continue
            for count in counts:
                try:
                    wrong = mismatch(step, local, Shards(found, count))
                except Indivisible:
                    continue
                assert wrong is None, (step.record, local, count, wrong)
                seen.add(step.record.name.split(".")[1])
                break
    return seen


SHAPES: dict[str, tuple[Callable[..., torch.Tensor], list[tuple[int, ...]]]] = {
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
ARITHMETIC: dict[str, tuple[Callable[..., torch.Tensor], list[tuple[int, ...]]]] = {
    "matmul": (lambda a, b: a @ b, [(2, 4, 6), (6, 8)]),
    "batched matmul": (lambda a, b: a @ b, [(2, 4, 6), (2, 6, 8)]),
    "matrix and vector": (lambda a, b: a @ b, [(4, 6), (6,)]),
    "two vectors": (lambda a, b: a @ b, [(6,), (6,)]),
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
PICKS: dict[str, tuple[Callable[..., torch.Tensor], list[tuple[int, ...]]]] = {
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


@pytest.mark.parametrize("case", [*SHAPES, *ARITHMETIC, *PICKS])
def test_a_divided_operator_gives_the_undivided_result(case: str):
    function, shapes = {**SHAPES, **ARITHMETIC, **PICKS}[case]
    run = recorded(lambda: function(*(leaf(*shape) for shape in shapes)))
    found = analyse(run.recording)
    assert not found.without_rule
    divide_everything(run, found)


IMAGES: dict[str, Callable[[], nn.Module]] = {
    "convolution": lambda: nn.Conv2d(4, 6, 3, padding=1),
    "strided convolution without bias": lambda: nn.Conv2d(4, 6, 2, stride=2, bias=False),
    "depthwise convolution": lambda: nn.Conv2d(4, 4, 3, groups=4),
    "grouped convolution": lambda: nn.Conv2d(4, 8, 3, groups=2),
    "transposed convolution": lambda: nn.ConvTranspose2d(4, 6, 2, stride=2),
    "batch norm": lambda: nn.BatchNorm2d(4),
    "group norm": lambda: nn.GroupNorm(2, 4),
    "pooling": lambda: nn.Sequential(nn.MaxPool2d(2), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(1)),
    "adaptive pooling": lambda: nn.AdaptiveAvgPool2d((2, 3)),
    "resampling": lambda: nn.Sequential(nn.Upsample(scale_factor=2), nn.Upsample(scale_factor=2, mode="bilinear")),
    "patches": lambda: nn.Sequential(nn.Unfold(2, stride=2), nn.Fold((8, 8), 2, stride=2)),
    "shuffled pixels": lambda: nn.Sequential(nn.PixelShuffle(2), nn.PixelUnshuffle(4)),
    "learned slope": lambda: nn.PReLU(4),
}


@pytest.mark.parametrize("case", IMAGES)
def test_a_divided_operator_on_images_gives_the_undivided_result(case: str):
    model = IMAGES[case]()
    run = recorded(lambda: model(leaf(2, 4, 8, 8)), model.parameters())
    found = analyse(run.recording)
    assert not found.without_rule
    divide_everything(run, found)


SIZES = st.sampled_from([2, 3, 4, 6])


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_random_program_can_be_divided_wherever_it_says(data: st.DataObject):
    batch, heads, width, count = (data.draw(SIZES) for _ in range(4))
    steps = data.draw(st.lists(st.sampled_from(sorted(STEPS)), min_size=2, max_size=6))

    def program() -> torch.Tensor:
        x = leaf(batch, 4, heads * width)
        for step in steps:
            x = STEPS[step](x, heads)
        return x

    with torch.random.fork_rng():
        run = recorded(program)
    divide_everything(run, analyse(run.recording), (count,))


def _attend(x: torch.Tensor, heads: int) -> torch.Tensor:
    q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) * scale for scale in (1.0, 0.5, 2.0))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def _cut_and_join(x: torch.Tensor, heads: int) -> torch.Tensor:
    first, second = F.linear(x, leaf(2 * x.shape[-1], x.shape[-1])).chunk(2, -1)
    return first.sigmoid() * second


STEPS: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "linear": lambda x, heads: F.linear(x, leaf(x.shape[-1], x.shape[-1]), leaf(x.shape[-1])),
    "residual": lambda x, heads: x + F.linear(x, leaf(x.shape[-1], x.shape[-1])),
    "norm": lambda x, heads: F.layer_norm(x, x.shape[-1:], leaf(x.shape[-1]), leaf(x.shape[-1])),
    "softmax of heads": lambda x, heads: x.unflatten(-1, (heads, -1)).softmax(2).flatten(2),
    "heads in another order": lambda x, heads: x.unflatten(-1, (heads, -1)).transpose(2, 3).flatten(2),
    "rows flattened": lambda x, heads: x.flatten(0, 1).mul(2).view(x.shape),
    "shift": lambda x, heads: F.pad(x[:, 1:], (0, 0, 0, 1)),
    "attention": _attend,
    "gated": _cut_and_join,
}
