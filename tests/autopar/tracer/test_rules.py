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

from autopar.tracer.indices import analyse
from tests.operators import CASES, leaf
from tests.shards import divide_everything, recorded


@pytest.fixture(autouse=True)
def exact():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize("case", CASES)
def test_a_divided_operator_gives_the_undivided_result(case: str):
    function, shapes = CASES[case]
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


def divide_program(batch: int, heads: int, width: int, count: int, steps: list[str]) -> None:
    def program() -> torch.Tensor:
        x = leaf(batch, 4, heads * width)
        for step in steps:
            x = STEPS[step](x, heads)
        return x

    with torch.random.fork_rng():
        run = recorded(program)
    divide_everything(run, analyse(run.recording), (count,))


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_a_random_program_can_be_divided_wherever_it_says(data: st.DataObject):
    sizes = [data.draw(SIZES) for _ in range(4)]
    divide_program(*sizes, data.draw(st.lists(st.sampled_from(sorted(STEPS)), min_size=2, max_size=6)))


def test_a_dim_that_its_readers_split_otherwise_stays_whole():
    # 2 heads of 3 in another order are 3 of 2: the residual adds dims whose factors have no common refinement.
    divide_program(2, 2, 3, 2, ["heads in another order", "residual", "attention"])


def _attend(x: torch.Tensor, heads: int) -> torch.Tensor:
    q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) * scale for scale in (1.0, 0.5, 2.0))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def _cut_and_join(x: torch.Tensor, heads: int) -> torch.Tensor:
    first, second = F.linear(x, leaf(2 * x.shape[-1], x.shape[-1])).chunk(2, -1)
    return first.sigmoid() * second


def _attend_fused(x: torch.Tensor, heads: int) -> torch.Tensor:
    width = x.shape[-1]
    parts = F.linear(x, leaf(3 * width, width), leaf(3 * width)).split(width, -1)
    q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in parts)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def _attend_grouped(x: torch.Tensor, heads: int) -> torch.Tensor:
    width = x.shape[-1] // heads
    q = x.unflatten(-1, (heads, width)).transpose(1, 2)
    groups = max(size for size in range(1, heads) if heads % size == 0)
    k, v = (F.linear(x, leaf(groups * width, x.shape[-1])).unflatten(-1, (groups, width)).transpose(1, 2) for _ in "kv")
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2)


def _join(x: torch.Tensor, heads: int) -> torch.Tensor:
    joined = torch.cat((x, F.linear(x, leaf(2 * x.shape[-1], x.shape[-1]))), -1)
    return F.linear(joined.sigmoid(), leaf(x.shape[-1], joined.shape[-1]))


def _tied(x: torch.Tensor, heads: int) -> torch.Tensor:
    weight = leaf(2 * x.shape[-1], x.shape[-1])
    return (x @ weight.T).softmax(-1) @ weight


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
    "fused attention": _attend_fused,
    "grouped heads": _attend_grouped,
    "joined halves": _join,
    "tied twice": _tied,
    "mean taken off": lambda x, heads: x - x.mean(-1, keepdim=True),
    "positions added": lambda x, heads: x + leaf(*x.shape[1:]),
    "heads mixed": lambda x, heads: torch.einsum(
        "bshd,hk->bskd", x.unflatten(-1, (heads, -1)), leaf(heads, heads)
    ).flatten(2),
    "rotated": lambda x, heads: torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1),
    "running sum": lambda x, heads: x.cumsum(1),
    "sequence first": lambda x, heads: F.linear(x.transpose(0, 1), leaf(x.shape[-1], x.shape[-1])).transpose(0, 1),
}
