"""What kernels reach here: products, fused attention and memory-bound operators.

rate of a product       2 n^3 / (t - bare)           cubes, so that the smallest dim is n
rate of attention       2 b h s^2 d / (t - bare)     causal: half of the full 4; its backward counts 2.5 times
bandwidth of a class    bytes read and written / (t - bare)
bare                    one operator on a few numbers, outside of autograd
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from autopar.calibrator.timing import seconds_of

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
CUBES = {"cpu": (16, 32, 64, 128, 256, 512), "cuda": (128, 256, 512, 1024, 2048, 4096, 8192)}
SEQUENCES = {"cpu": (64, 256, 1024), "cuda": (512, 2048, 8192)}
HEADS, HEAD_DIM = 4, 64
ELEMENTS = {"cpu": 2**20, "cuda": 2**26}
"""Of tensors that memory-bound operators run on: larger than a core's own cache."""


@dataclass
class KernelRates:
    """FLOP/s and bytes/s of one rank."""

    gemm: dict[str, dict[int, float]] = field(default_factory=dict)
    """dtype -> dim -> FLOP/s."""
    attention: dict[str, dict[int, float]] = field(default_factory=dict)
    """phase -> sequence -> FLOP/s, in the first dtype."""
    pointwise: dict[str, float] = field(default_factory=dict)
    """class -> bytes/s."""


def measure_kernels(device: torch.device, window: float, align: Callable[[], None]) -> KernelRates:
    """Everything on one rank; `align` brings the ranks together before each measurement, so that all load the machine alike."""
    found = KernelRates()
    few = torch.zeros(8, device=device)
    align()
    bare = seconds_of(lambda: few.add_(1.0), device, window)

    def seconds(call: Callable[[], Any]) -> float:
        align()
        took = seconds_of(call, device, window)
        return max(took - bare, 0.1 * took)

    for name, dtype in DTYPES.items():
        found.gemm[name] = {n: 2.0 * n**3 / seconds(_product(n, dtype, device)) for n in CUBES[device.type]}
    for phase in ("forward", "backward"):
        found.attention[phase] = {}
        for seq in SEQUENCES[device.type]:
            flops = 2.0 * HEADS * seq**2 * HEAD_DIM * (2.5 if phase == "backward" else 1.0)
            found.attention[phase][seq] = flops / seconds(_attention(seq, phase, device))
    for name, (call, bytes_) in _memory_bound(ELEMENTS[device.type], device).items():
        found.pointwise[name] = bytes_ / seconds(call)
    return found


def median_of(passes: Sequence[KernelRates]) -> KernelRates:
    """Each figure's median over passes, so that what else ran during one of them does not count."""
    first = passes[0]
    return KernelRates(
        gemm={
            name: {n: median(one.gemm[name][n] for one in passes) for n in table} for name, table in first.gemm.items()
        },
        attention={
            phase: {seq: median(one.attention[phase][seq] for one in passes) for seq in table}
            for phase, table in first.attention.items()
        },
        pointwise={name: median(one.pointwise[name] for one in passes) for name in first.pointwise},
    )


def _product(n: int, dtype: torch.dtype, device: torch.device) -> Callable[[], Any]:
    """Other matrices every time: in training they were last touched a layer ago, and no longer lie in a core's own cache."""
    count = max(1, ELEMENTS[device.type] // n**2)
    many = [torch.randn(count, n, n, device=device).to(dtype) for _ in range(2)]
    pairs = cycle(list(zip(*many, strict=True)))
    return lambda: torch.mm(*next(pairs))


def _attention(seq: int, phase: str, device: torch.device) -> Callable[[], Any]:
    q, k, v = (torch.randn(1, HEADS, seq, HEAD_DIM, device=device, requires_grad=True) for _ in range(3))
    if phase == "forward":
        with torch.no_grad():
            q, k, v = q.detach(), k.detach(), v.detach()
        return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    gradient = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True)


def _memory_bound(elements: int, device: torch.device) -> dict[str, tuple[Callable[[], Any], float]]:
    """Class -> (a call, the bytes it reads and writes), in fp32; results are new tensors, as they are in training."""
    width, columns = 4.0, 1024
    x, row = torch.randn(elements // columns, columns, device=device), torch.randn(columns, device=device)
    # Rotary positions and the like meet heads as attention wants them: not in the order of memory.
    heads = x.view(-1, HEADS, columns // HEADS).transpose(0, 1)
    table, rows = torch.randn(columns, columns, device=device), torch.randint(0, columns, (len(x),), device=device)
    labels = torch.randint(0, columns, (len(x),), device=device)
    weight = nn.Parameter(torch.randn(elements, device=device))
    weight.grad = torch.randn_like(weight)
    update = torch.optim.AdamW([weight])
    calls: dict[str, tuple[Callable[[], Any], float]] = {
        "copy": (lambda: x.clone(), 2),
        "add": (lambda: (x * row, heads * heads), 5),
        "norm": (lambda: F.rms_norm(x, (columns,)), 2),
        "softmax": (lambda: torch.softmax(x, -1), 2),
        "activation": (lambda: F.silu(x), 2),
        "dropout": (lambda: F.dropout(x, 0.1), 3),
        "embedding": (lambda: F.embedding(rows, table), 2),
        "loss": (lambda: F.cross_entropy(x, labels), 2),
        "optimizer": (update.step, 7),
    }
    return {name: (call, width * passes * elements) for name, (call, passes) in calls.items()}
