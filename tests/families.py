"""Small models of every family for tests: captured, and really run on the CPU."""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from autopar.documents import Graph
from autopar.tracer import capture, open_source
from benchmarks.family_configs import SEQ, SMALL

BATCH = 3


@cache
def captured(family: str, seq: int = SEQ, **changes: Any) -> Graph:
    """A family's small configuration, with some values changed, captured in fp32."""
    with TemporaryDirectory() as folder:
        return capture(_written(folder, family, **changes), seq_len=seq, dtype="fp32")


def _written(folder: str, family: str, **changes: Any) -> str:
    (Path(folder) / "config.json").write_text(json.dumps(SMALL[family] | changes))
    return folder


def really_run(family: str) -> tuple[Counter[int], int]:
    """Bytes of every storage that autograd keeps in one real step on the CPU, parameters and buffers apart; parameters."""
    torch.manual_seed(0)
    with TemporaryDirectory() as folder:
        source = open_source(_written(folder, family), None, SEQ)
        model = source.build().train()
        args, kwargs = source.batch(BATCH, SEQ)
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        source.loss_of(model(*args, **kwargs), args, kwargs)
    return Counter(storage.nbytes() for storage in kept.values()), sum(p.numel() for p in model.parameters())


def saved_storages(graph: Graph, batch: int, seq: int) -> Counter[int]:
    """Bytes of every storage that a graph says is kept."""
    sizes = graph.sizes(batch, seq)
    found: Counter[int] = Counter()
    for name, count in graph.class_counts.items():
        for tensor in graph.class_by_name[name].tensors:
            if tensor.saved:
                found[int(tensor.bytes(sizes, 4))] += count
    return found
