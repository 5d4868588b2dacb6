"""Windows over positions: convolution, pooling, resampling, patches."""

from __future__ import annotations

import re

from autopar.tracer.rules.base import Context, Letter, Place, Rule, along, base, divided, rule, whole


class _Convolution:
    """Channels of a convolution: ``weight`` is (out, in / groups, ...), transposed (in, out / groups, ...)."""

    def __init__(self, c: Context, out: int, source: int, weights: list[int], transposed: bool, groups: int) -> None:
        self.c, self.out, self.source, self.weights, self.groups = c, out, source, weights, groups
        self.out_dim, self.in_dim = (1, 0) if transposed else (0, 1)
        self.transposed = transposed

    def channels(self, outs: list[Place], sources: list[Place], biases: list[Place]) -> list[Letter]:
        """Output channels, then input channels; both whole where they come in groups."""
        outs = outs + [(weight, self.out_dim) for weight in self.weights]
        sources = sources + [(weight, self.in_dim) for weight in self.weights]
        if self.groups == 1:
            return [divided(self.c, outs + biases), Letter("parallel", sources)]
        own_groups = (("local_groups", ()),)
        sizes = {self.c.size(place) for place in outs + sources if place[0] not in self.weights}
        if sizes == {self.groups}:
            # One channel a group: an index of its own, which divides together with the number of groups.
            own = [place for place in outs + sources if self.c.size(place) == self.groups]
            return [Letter("whole", own + biases, own_groups)]
        return [Letter("whole", [place], own_groups) for place in outs + sources + biases]

    def cost(self, times: int) -> Rule:
        """Two FLOPs for every multiply-add: a position of the output (transposed: of the source) meets one filter."""
        found = Rule(flops=2.0 * times, executed=2.0 * times)
        over = self.source if self.transposed else self.out
        rank = len(self.c.shape(over))
        found.flop_places = [(over, dim) for dim in (0, *range(2, rank), 1)]
        found.flop_places += [(self.weights[0], dim) for dim in range(1, rank)]
        return found

    def positions(self, *more: int) -> list[Letter]:
        """Every position on its own, whole: windows overlap."""
        tensors = (self.out, self.source, *self.weights, *more)
        return [Letter("whole", [(tensor, dim)]) for tensor in tensors for dim in range(2, len(self.c.shape(tensor)))]


@rule("aten.convolution")
def convolution(c: Context) -> Rule:
    """Batch and output channels are parallel, input channels summed, positions whole."""
    source, weight = c.tensor(0), c.tensor(1)
    bias = [(read, 0) for read in c.operator.reads[2:3]]
    shape = _Convolution(c, c.out, source, [weight], bool(c.arg(6)), c.arg(8, "groups", 1))
    found = shape.cost(times=1)
    found.letters = [Letter("parallel", [(c.out, 0), (source, 0)])]
    channels = shape.channels([(c.out, 1)], [(source, 1)], bias)
    if shape.groups == 1:
        channels[1].role = "summed"
    found.letters += channels + shape.positions()
    return found


@rule("aten.convolution_backward")
def convolution_backward(c: Context) -> Rule:
    """As many FLOPs as forward for the gradient of the input, and again for that of the weight."""
    grad, source, weight = c.tensor(0), c.tensor(1), c.tensor(2)
    wanted = c.arg(10, "output_mask")
    made = dict(zip([place for place, want in enumerate(wanted) if want], c.operator.writes, strict=True))
    weights = [weight, *([made[1]] if 1 in made else [])]
    dsource = [made[0]] if 0 in made else []
    shape = _Convolution(c, grad, source, weights, bool(c.arg(7)), c.arg(9, "groups", 1))
    found = shape.cost(times=sum(bool(want) for want in wanted[:2]))
    biases = [(made[2], 0)] if 2 in made else []
    found.letters = [divided(c, [(tensor, 0) for tensor in (grad, source, *dsource)])]
    found.letters += shape.channels([(grad, 1)], [(tensor, 1) for tensor in (source, *dsource)], biases)
    found.letters += shape.positions(*dsource)
    return found


@rule("aten.max_pool2d_with_indices", "aten.max_pool2d_with_indices_backward", "aten.max_pool3d_with_indices",
      "aten.max_pool3d_with_indices_backward", "aten.avg_pool2d", "aten.avg_pool2d_backward", "aten.avg_pool3d",
      "aten.avg_pool3d_backward", "aten._adaptive_avg_pool2d", "aten._adaptive_avg_pool2d_backward",
      "aten._adaptive_avg_pool3d", "aten._adaptive_avg_pool3d_backward", "aten.adaptive_max_pool2d",
      "aten.adaptive_max_pool2d_backward", "aten.reflection_pad1d", "aten.reflection_pad1d_backward",
      "aten.reflection_pad2d", "aten.reflection_pad2d_backward", "aten.replication_pad2d",
      "aten.replication_pad2d_backward", "aten.upsample_nearest1d", "aten.upsample_nearest1d_backward",
      "aten.upsample_nearest2d", "aten.upsample_nearest2d_backward", "aten.upsample_nearest3d",
      "aten.upsample_nearest3d_backward", "aten._upsample_nearest_exact2d", "aten._upsample_nearest_exact2d_backward",
      "aten.upsample_linear1d", "aten.upsample_linear1d_backward", "aten.upsample_bilinear2d",
      "aten.upsample_bilinear2d_backward", "aten.upsample_bicubic2d", "aten.upsample_bicubic2d_backward",
      "aten._upsample_bilinear2d_aa", "aten._upsample_bilinear2d_aa_backward")  # fmt: skip
def windows(c: Context) -> Rule:
    """Batch and channels are parallel; the last one, two or three dims are positions, whole."""
    digits = re.search(r"(\d)d", c.operator.name)
    assert digits is not None
    return along(c, range(-int(digits[1]), 0))


@rule("aten.im2col", "aten.col2im", "aten.pixel_shuffle", "aten.pixel_unshuffle", "aten.channel_shuffle")
def patches(c: Context) -> Rule:
    """Batch is parallel; channels and positions trade places and are whole."""
    source = c.tensor(0)
    lead = len(c.shape(source)) - (2 if base(c) == "col2im" else 3)
    batch = [Letter("parallel", [(c.out, dim), (source, dim)]) for dim in range(lead)]
    rest = [letter for letter in whole(c, source, c.out) if letter.places[0][1] >= lead]
    return Rule(batch + rest)
