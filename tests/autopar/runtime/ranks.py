"""Real ranks for tests: forked after torch is imported, on gloo, with short timeouts."""

from __future__ import annotations

import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

TIMEOUT = timedelta(seconds=60)


def on_ranks(world: int, work: Callable[[int], Any]) -> list[Any]:
    """What `work(rank)` returns on each of `world` forked ranks; raises the first failure with its traceback."""
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(world):
            child = os.fork()
            if child == 0:
                _run(rank, world, work, folder)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)
        answers = []
        for rank in range(world):
            answers.append(pickle.loads(Path(folder, str(rank)).read_bytes()))
    failures = [answer[1] for answer in answers if answer[0] == "failed"]
    if failures:
        raise AssertionError("\n".join(failures))
    return [answer[1] for answer in answers]


def _run(rank: int, world: int, work: Callable[[int], Any], folder: str) -> None:
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=TIMEOUT
        )
        answer = ("done", work(rank))
    except BaseException:
        answer = ("failed", f"rank {rank}:\n{traceback.format_exc()}")
    try:
        Path(folder, str(rank)).write_bytes(pickle.dumps(answer))
    finally:
        os._exit(0)
