"""Starting ranks: forked here, or joined under torchrun. One cause when any of them fails.

A rank that fails tells why in a file, and the others, who would wait for it in a collective, are ended. Every group has a timeout
all the same: under torchrun, or when a rank stops without failing, it is what ends the wait.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autopar.documents.plan import Plan
from autopar.errors import AutoparError, PlanMismatch, RunFailed
from autopar.runtime.train import Recipe, Report, RunOptions, train

GRACE_SECONDS = 2.0
"""How long ranks may go on telling their own causes after the first failed."""


def run(
    plan: Plan, recipe: Recipe, options: RunOptions, nproc: int | None = None, report: Report | None = None
) -> list[dict[str, Any]]:
    """Train by a plan: under torchrun on this rank, else on ranks forked here. Returns rank 0's lines.

    Raises PlanMismatch for another number of ranks, RunFailed naming the rank and the cause when one fails.
    """
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return _joined(plan, recipe, options, report)
    world = plan.mesh.devices if nproc is None else nproc
    if world != plan.mesh.devices:
        raise PlanMismatch(f"the plan is for {plan.mesh.devices} ranks, not {world}; leave --nproc out or plan again")
    if torch.cuda.is_available() and torch.cuda.device_count() < world:
        raise PlanMismatch(
            f"the plan is for {world} ranks and this machine has {torch.cuda.device_count()} GPUs; start it with torchrun on "
            "all machines"
        )
    answers = on_ranks(world, lambda rank: train(plan, recipe, options, report), options.timeout)
    lines: list[dict[str, Any]] = answers[0]
    return lines


def _joined(plan: Plan, recipe: Recipe, options: RunOptions, report: Report | None) -> list[dict[str, Any]]:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # A restarted attempt must not meet what the one before left in the store.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    is_master = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    address, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "29500"))
    store = dist.TCPStore(address, port, world, is_master, timeout=options.timeout)
    prefixed = dist.PrefixStore(f"attempt{attempt}", store)
    join(rank, world, int(os.environ.get("LOCAL_RANK", "0")), prefixed, options.timeout)
    try:
        return train(plan, recipe, options, report)
    finally:
        dist.destroy_process_group()


def join(rank: int, world: int, local_rank: int, store: dist.Store, timeout: timedelta) -> None:
    """Enter the default process group: NCCL where this rank has a GPU, else gloo."""
    logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)
    backend = "gloo"
    if torch.cuda.is_available() and dist.is_nccl_available():
        backend = "nccl"
        torch.cuda.set_device(local_rank)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)


def on_ranks(world: int, work: Callable[[int], Any], timeout: timedelta) -> list[Any]:
    """What `work(rank)` returns on each of `world` processes forked here, in one process group.

    Raises what a rank raised if it is a user's mistake, else RunFailed with the rank and its cause.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryDirectory(prefix="autopar-") as folder:
        children: dict[int, int] = {}
        try:
            for rank in range(world):
                child = _fork()
                if child == 0:
                    _work(rank, world, work, Path(folder), timeout)
                children[child] = rank
            ended = _wait(dict(children))
        finally:
            _end(children)
        return _answers(world, ended, Path(folder))


def _fork() -> int:
    """As os.fork; Python warns of threads of the parent's, of which a rank uses none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _work(rank: int, world: int, work: Callable[[int], Any], folder: Path, timeout: timedelta) -> None:
    """A forked rank: it never returns."""
    status = 1
    # A fork has none of its parent's OpenMP threads and would wait for them for ever; ranks of torchrun may have more than one.
    torch.set_num_threads(1)
    try:
        store = dist.FileStore(str(folder / "store"), world)
        join(rank, world, rank, store, timeout)
        _tell(folder / f"answer-{rank}", work(rank))
        status = 0
    except BaseException as error:
        _tell(folder / f"failure-{rank}", (time.time(), _portable(error), traceback.format_exc()))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _portable(error: BaseException) -> AutoparError | str:
    """A user's mistake as it is; anything else in words."""
    for cause in (error, error.__cause__):
        if isinstance(cause, AutoparError):
            return cause
    inner = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ is not None else error
    return f"{type(inner).__name__}: {' '.join(str(inner).split())[:500]}"


def _tell(path: Path, what: Any) -> None:
    """Write whole or not at all: the parent may look at any time."""
    temporary = path.with_suffix(".part")
    temporary.write_bytes(pickle.dumps(what))
    temporary.rename(path)


def _wait(children: dict[int, int]) -> dict[int, int]:
    """Rank -> exit status (negative: the signal), until all ended or some failed and the others had their grace."""
    ended: dict[int, int] = {}
    deadline: float | None = None
    while children and (deadline is None or time.monotonic() < deadline):
        for child in list(children):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                code = os.waitstatus_to_exitcode(status)
                ended[children.pop(child)] = code
                if code != 0 and deadline is None:
                    deadline = time.monotonic() + GRACE_SECONDS
        time.sleep(0.01)
    return ended


def _end(children: dict[int, int]) -> None:
    """End the children that still run."""
    for child in children:
        try:
            if os.waitpid(child, os.WNOHANG) == (0, 0):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
        except ChildProcessError:
            continue


def _answers(world: int, ended: dict[int, int], folder: Path) -> list[Any]:
    failures = {
        rank: pickle.loads(path.read_bytes()) for rank in range(world) if (path := folder / f"failure-{rank}").exists()
    }
    killed = sorted(rank for rank, code in ended.items() if code != 0 and rank not in failures)
    if killed:
        code = ended[killed[0]]
        how = f"was ended by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"ended with status {code}"
        why = "; SIGKILL is how the system ends a process when memory runs out" if code == -signal.SIGKILL else ""
        raise RunFailed(f"rank {killed[0]} of {world} {how}{why}; the other ranks were stopped")
    if failures:
        _raise_cause(failures, world)
    return [pickle.loads((folder / f"answer-{rank}").read_bytes()) for rank in range(world)]


def _raise_cause(failures: dict[int, tuple[float, AutoparError | str, str]], world: int) -> None:
    """The first failure that is no consequence of another's."""
    first = min(failures, key=lambda rank: (_is_consequence(failures[rank][1]), failures[rank][0]))
    cause, trace = failures[first][1:]
    if isinstance(cause, AutoparError):
        raise cause
    raise RunFailed(f"rank {first} of {world} failed: {cause}{_line(trace)}; the other ranks were stopped")


def _is_consequence(cause: AutoparError | str) -> bool:
    """Whether it is how a rank learns that another one is gone."""
    signs = ("Connection closed by peer", "Connection reset", "Timed out waiting", "connection refused", "Broken pipe")
    return isinstance(cause, str) and any(sign.lower() in cause.lower() for sign in signs)


def _line(trace: str) -> str:
    """`` at file:line`` of the innermost frame outside torch and this package."""
    frames = [line.strip() for line in trace.splitlines() if line.strip().startswith('File "')]
    machinery = (
        str(Path(torch.__file__).parent),
        str(Path(__file__).parent),
        str(Path(contextlib.__file__).parent),
        "<",
    )
    own = [frame for frame in frames if not frame.removeprefix('File "').startswith(machinery)]
    if not own:
        return ""
    place, number = own[-1].removeprefix('File "').split('", line ')[:2]
    return f" at {place}:{number.split(',')[0]}"
