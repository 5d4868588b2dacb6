"""Convolutions as matrix products over patches: against their FLOPs, the chip's peak, and published training speed."""

from math import prod
from pathlib import Path

import pytest
import torch
from torch import nn

import autopar
from autopar.pricing import Setting, price_block, undivided
from autopar.pricing.work import work_of
from autopar.tracer import capture
from hardware_profiles.profile import load_cluster
from hardware_profiles.topology import Topology

RESNET = Path(__file__).parents[3] / "examples" / "resnet.py"
CONVOLUTIONS = {
    "1d": (lambda: nn.Conv1d(8, 24, 5, stride=2), 1),
    "2d": (lambda: nn.Conv2d(8, 24, 3, padding=1), 2),
    "strided": (lambda: nn.Conv2d(8, 24, 3, stride=2, dilation=2), 2),
    "3d": (lambda: nn.Conv3d(8, 24, 3), 3),
    "pointwise": (lambda: nn.Conv2d(8, 24, 1), 2),
    "grouped": (lambda: nn.Conv2d(8, 24, 3, groups=4), 2),
    "depthwise": (lambda: nn.Conv2d(8, 8, 7, padding=3, groups=8), 2),
    "multiplied": (lambda: nn.Conv2d(8, 24, 3, groups=8), 2),
    "transposed": (lambda: nn.ConvTranspose2d(8, 24, 4, stride=2), 2),
    "transposed 1d": (lambda: nn.ConvTranspose1d(8, 24, 3), 1),
}


class Convolved(nn.Module):
    """One convolution between two pointwise ones, so that its source has a gradient."""

    def __init__(self, convolution, rank):
        super().__init__()
        plain = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[rank - 1]
        self.enter, self.convolution = plain(3, convolution.in_channels, 1), convolution

    def forward(self, x):
        return self.convolution(self.enter(x)).square()


def captured(name):
    build, rank = CONVOLUTIONS[name]
    return capture(
        lambda: Convolved(build(), rank), lambda batch, seq: (torch.zeros(batch, 3, *(16,) * rank),), seq_len=16
    )


def convolutions(graph, sizes):
    for block_class in graph.block_classes:
        for operator in block_class.operators:
            if operator.executed_flops:
                yield block_class, work_of(block_class, operator, sizes, 2)


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_the_products_of_a_convolution_multiply_to_its_flops(name):
    graph = captured(name)
    sizes = {atom: float(size) for atom, size in graph.sizes(2, 16).items()}
    layouts = []
    for _, work in convolutions(graph, sizes):
        layouts.append([product.layout for product in work.products])
        assert sum(2 * prod(size for _, size, _ in product.dims) for product in work.products) == pytest.approx(
            work.flops
        )
    # The first convolution's source is data: no gradient flows to it.
    assert layouts == [["forward"], ["forward"], ["dgrad", "wgrad"], ["wgrad"]]


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_no_convolution_runs_above_the_chips_peak(name):
    graph, cluster = captured(name), load_cluster("a100x8")
    chip = cluster.node_groups[0].chip
    setting = Setting(chip, "bf16", "eager", 1, Topology(cluster).strided(1, 1), 16)
    sizes = graph.sizes(1024, 16)
    for block_class in graph.block_classes:
        found = price_block(graph, block_class.name, undivided(block_class.name), setting, [1024])[0]
        for phase, seconds in (("forward", found.forward_seconds), ("backward", found.backward_seconds)):
            assert seconds >= block_class.flops("executed", sizes, phase) / chip.peak_flops("bf16")


@pytest.mark.parametrize(
    ("cluster", "dtype", "batch", "one_device", "eight_devices"),
    [("a100x8", "bf16", 256, 2470, 16621 / 8), ("v100x8", "fp16", 128, 1156, 8056 / 8)],
)
def test_resnet_50_trains_as_fast_as_published(cluster, dtype, batch, one_device, eight_devices):
    # Mixed precision images/s of NVIDIA's DeepLearningExamples, PyTorch/Classification/ConvNets/resnet50v1.5, README
    # (DGX A100 80 GB; DGX-1 V100 32 GB). Nothing was fitted to them.
    request = {"dp": 8, "zero": 0, "micro_batch": batch}
    plan = autopar.plan(
        str(RESNET), cluster, global_batch=8 * batch, dtype=dtype, optimizer="sgd", fixed=request, forbid=["recompute"]
    )
    images = batch / plan.predicted.step_seconds
    assert 0.8 * eight_devices < images < 1.2 * one_device
