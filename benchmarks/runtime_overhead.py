"""Step time of plans against scripts written by hand for the same strategy, on two pinned ranks of this machine.

    python benchmarks/runtime_overhead.py [--pairs 40]

Both run in one process group, turn by turn, on the same model and batches; a pair's ratio is autopar / by hand. Printed: the
median ratio and its 95 % interval (order statistics of the pairs, which assume nothing of their distribution).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import islice
from math import comb
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import autopar
from autopar.documents import Plan
from autopar.runtime.launch import on_ranks

EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))
import tiny_llama  # noqa: E402

BATCH, SEQ = 16, 64
CLIP = 1.0
TIMEOUT = timedelta(minutes=5)
Step = Callable[[Any], float]
STRATEGIES = {
    "ddp": {"dp": 2, "zero": 0, "micro_batch": 8},
    "fsdp2": {"dp": 2, "zero": 3, "micro_batch": 8},
    "tp": {"tp": 2, "sp": 0, "micro_batch": 16},
    "pipeline": {"pp": 2, "schedule": "1f1b", "micro_batch": 4},
}


def build() -> nn.Module:
    """The same weights for both."""
    torch.manual_seed(0)
    return tiny_llama.build_model()


def whole_step(model: nn.Module, parameters: list[nn.Parameter], part: Callable[[Any], Any]) -> Step:
    """Forward, backward, clip, update of a model that divides itself; the loss is averaged over ranks."""
    optimizer = tiny_llama.build_optimizer(parameters)

    def step(batch: Any) -> float:
        tokens, labels = part(batch)
        optimizer.zero_grad()
        loss = tiny_llama.loss(model(tokens), tokens, labels)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.SUM)
        return float(mean) / dist.get_world_size()

    return step


def own_half(batch: Any) -> Any:
    """A data-parallel rank's sequences."""
    return tuple(tensor.chunk(2)[dist.get_rank()] for tensor in batch)


def by_hand(strategy: str) -> Step:
    """A script such as torch's tutorials show."""
    model = build()
    if strategy == "ddp":
        divided: nn.Module = DistributedDataParallel(model)
        return whole_step(divided, list(divided.parameters()), own_half)
    mesh = init_device_mesh("cpu", (2,))
    if strategy == "fsdp2":
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return whole_step(model, list(model.parameters()), own_half)
    if strategy == "tp":
        for layer in model.layers:
            columns = ("attention.q_proj", "attention.k_proj", "attention.v_proj", "ffn.gate_proj", "ffn.up_proj")
            plan: dict[str, Any] = {name: ColwiseParallel() for name in columns}
            plan |= {name: RowwiseParallel() for name in ("attention.o_proj", "ffn.down_proj")}
            parallelize_module(layer, mesh, plan)
        # Norms, embedding and head are whole; foreach refuses a mix of whole and divided tensors.
        parameters = list(model.parameters())
        divided = torch.tensor([isinstance(parameter, DTensor) for parameter in parameters])
        optimizer = torch.optim.AdamW(parameters, lr=3e-3, foreach=False)

        def step(batch: Any) -> float:
            optimizer.zero_grad()
            loss = tiny_llama.loss(model(batch[0]), *batch)
            loss.backward()
            gradients = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in parameters]
            squares = torch.stack([g.pow(2).sum() for g in gradients])
            parts = squares[divided].sum()
            dist.all_reduce(parts)
            norm = (parts + squares[~divided].sum()).sqrt()
            for gradient in gradients:
                gradient.mul_(torch.clamp(CLIP / (norm + 1e-6), max=1.0))
            optimizer.step()
            return float(loss.detach())

        return step
    return pipeline_by_hand(model)


class Half(nn.Module):
    """A stage: the first half of the layers behind the embedding, or the other before the head."""

    def __init__(self, model: Any, first: bool) -> None:
        super().__init__()
        half = len(model.layers) // 2
        self.first, self.config = first, model.config
        self.layers = nn.ModuleList(list(model.layers)[:half] if first else list(model.layers)[half:])
        self.ends = nn.ModuleList([model.embedding] if first else [model.norm, model.head])
        self.rotary = type(model).rotary.__get__(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens or a hidden state in, a hidden state or logits out."""
        if self.first:
            x = self.ends[0](x)
        cos, sin = self.rotary(x.shape[1], x)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return x if self.first else self.ends[1](self.ends[0](x))


def pipeline_by_hand(model: Any) -> Step:
    """Two stages, four micro-batches, 1F1B."""
    rank = dist.get_rank()
    part = Half(model, rank == 0)
    stage = PipelineStage(part, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=lambda out, target: tiny_llama.loss(out, None, target))
    parameters = list(part.parameters())
    optimizer = tiny_llama.build_optimizer(parameters)

    def step(batch: Any) -> float:
        tokens, labels = batch
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(tokens)
        else:
            schedule.step(target=labels, losses=losses)
        total = sum(p.grad.pow(2).sum() for p in parameters if p.grad is not None)
        mean = torch.stack(losses).mean().detach() if losses else torch.zeros(())
        sums = torch.stack([torch.as_tensor(total), mean])
        dist.all_reduce(sums)
        factor = torch.clamp(CLIP / (sums[0].sqrt() + 1e-6), max=1.0)
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
        optimizer.step()
        return float(sums[1])

    return step


def pin(rank: int) -> None:
    """Every thread of this process on one core, those of process groups too: they were there before."""
    cores = sorted(os.sched_getaffinity(0))
    for thread in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(thread.name), {cores[rank % len(cores)]})


def pairs(plan: Plan, strategy: str, count: int) -> list[tuple[float, float]]:
    """(autopar's seconds, the script's) turn by turn on this rank; the order within a pair alternates."""
    pin(dist.get_rank())
    ours = autopar.parallelize(build(), plan, tiny_llama.loss, tiny_llama.build_optimizer, CLIP)
    script = by_hand(strategy)
    data = list(islice(tiny_llama.batches(BATCH, SEQ, 0), count + 3))
    for batch in data[:3]:
        first, second = ours(batch), script(batch)
        if abs(first - second) > 1e-3:
            raise AssertionError(f"{strategy}: losses {first} and {second}: not the same training")
    found = []
    for number, batch in enumerate(data[3:]):
        seconds = {}
        for name in ("ours", "script") if number % 2 else ("script", "ours"):
            dist.barrier()
            start = time.perf_counter()
            (ours if name == "ours" else script)(batch)
            seconds[name] = time.perf_counter() - start
        found.append((seconds["ours"], seconds["script"]))
    return found


def interval(values: list[float]) -> tuple[float, float, float]:
    """Median and the order statistics that hold it with at least 95 % (binomial)."""
    ordered, n = sorted(values), len(values)
    outside, low = 0.0, 0
    while outside + comb(n, low) / 2**n <= 0.025:
        outside += comb(n, low) / 2**n
        low += 1
    low = max(low - 1, 0)
    return ordered[n // 2], ordered[low], ordered[n - 1 - low]


def main() -> None:
    """Measure every strategy and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=40)
    options = parser.parse_args()
    graph = autopar.capture(EXAMPLES / "tiny_llama.py", seq_len=SEQ)
    print("| strategy | autopar, ms | by hand, ms | ratio (95 % interval) |\n|---|---:|---:|---:|")
    every = []
    for strategy, choices in STRATEGIES.items():
        fixed = {"pp": 1, "tp": 1, "dp": 1, "recompute": "none"} | choices
        plan = autopar.plan(graph, "local-cpu-x2", global_batch=BATCH, dtype="fp32", fixed=fixed)
        by_rank = on_ranks(2, lambda rank, p=plan, s=strategy: pairs(p, s, options.pairs), TIMEOUT)
        # A step has ended when the slower rank has.
        both = [(max(a[0] for a in turn), max(a[1] for a in turn)) for turn in zip(*by_rank, strict=True)]
        ratios = [ours / script for ours, script in both]
        every += ratios
        middle, low, high = interval(ratios)
        ours, script = (sorted(pair[side] for pair in both)[len(both) // 2] * 1e3 for side in (0, 1))
        print(f"| {strategy} | {ours:.1f} | {script:.1f} | {middle:.3f} ({low:.3f} to {high:.3f}) |")
    middle, low, high = interval(every)
    print(f"| all {len(every)} pairs | | | {middle:.3f} ({low:.3f} to {high:.3f}) |")


if __name__ == "__main__":
    main()
