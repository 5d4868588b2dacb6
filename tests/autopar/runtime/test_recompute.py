"""Recompute keeps what the plan names, and runs the rest again."""

from __future__ import annotations

from collections import Counter
from typing import Any

import small_models
import torch
from parity import graph_of
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.documents.plan import Recompute
from autopar.runtime.recompute import apply_recompute

MATMULS = ("mm", "addmm", "bmm")


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def step_of(mode: str, name: str) -> tuple[Counter[str], torch.Tensor]:
    """Operators of one training step with one block recomputed, and the gradient of its first weight."""
    model = small_models.build_model()
    option = next(item for item in graph_of("llama").block_classes[_block()].recompute if item.name == name)
    entry = Recompute(stage=0, chain="layers", blocks=(1, 1), mode=mode, option=name, keep=option.keep)
    apply_recompute({("layers", 1): model.layers[1]}, [entry])
    batch = next(iter(small_models.batches(4, small_models.SEQ_LEN, 1)))
    with Counting() as counted:
        small_models.loss(model(*batch), *batch).backward()
    return counted.calls, model.layers[1].attention.q_proj.weight.grad


def _block() -> int:
    names = [item.name for item in graph_of("llama").block_classes]
    return names.index(graph_of("llama").chains[0].runs[0].block_class)


def matmuls(calls: Counter[str]) -> int:
    return sum(calls[name] for name in MATMULS)


def test_full_runs_the_seven_projections_of_a_block_again():
    plain, gradient = step_of("none", "none")
    full, same = step_of("full", "full")
    assert torch.equal(gradient, same)
    # The last of them, whose output nothing in backward needs, is spared: torch stops as soon as it has all it needs.
    assert matmuls(full) - matmuls(plain) in (6, 7)


def test_selective_keeps_projections_and_attention_and_runs_what_lies_between_again():
    plain, gradient = step_of("none", "none")
    selective, same = step_of("selective", "selective")
    assert torch.equal(gradient, same)
    assert matmuls(selective) == matmuls(plain)
    attention = [name for name in plain if "scaled_dot_product" in name and "backward" not in name]
    assert all(selective[name] == plain[name] for name in attention)
    assert selective["silu"] == plain["silu"] + 1
