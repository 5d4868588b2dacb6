"""Training by a plan on this rank: data, seeds, steps, checkpoints, lines.

The same seed and batches give the same losses whatever the plan: every rank builds the whole model under the seed and keeps its
part, and every rank draws the same global batches and takes its part.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar.documents.plan import Plan
from autopar.errors import RequestError
from autopar.runtime import checkpoint
from autopar.runtime.batch import batch_dims
from autopar.runtime.initial import BySeed, FromFiles, Initialise, Values, build_without_memory, in_parts
from autopar.runtime.loss import UserLoss
from autopar.runtime.metrics import Lines, header, step_line
from autopar.runtime.optimizer import BuildOptimizer
from autopar.runtime.step import TrainStep, parallelize

Report = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Recipe:
    """What a user's model file gives: see the names in it."""

    build_model: Callable[[], nn.Module]
    example_inputs: Callable[[int, int], Any]
    loss: UserLoss | None = None
    build_optimizer: BuildOptimizer | None = None
    batches: Callable[[int, int, int], Iterator[Any]] | None = None


@dataclass(frozen=True)
class RunOptions:
    """How long, from where, and what is written."""

    steps: int = 100
    seed: int = 0
    clip_norm: float | None = None
    checkpoint: Path | None = None
    save_every: int | None = None
    resume: bool = False
    init_from: Path | None = None
    initialise: Initialise = "auto"
    metrics: Path | None = None
    timeout: timedelta = timedelta(minutes=10)


def train(plan: Plan, recipe: Recipe, options: RunOptions, report: Report | None = None) -> list[dict[str, Any]]:
    """Train on this rank of the default process group; returns the run's lines. Rank 0 writes and reports them."""
    _check(options)
    torch.manual_seed(options.seed)
    model, initial = _first_weights(plan, recipe, options)
    dims = batch_dims(recipe.example_inputs, plan.workload.seq_len)
    step = parallelize(
        model,
        plan,
        recipe.loss,
        recipe.build_optimizer,
        options.clip_norm,
        batch_dims=dims,
        initial=initial,
        timeout=options.timeout,
    )
    del model
    batches = _batches(plan, recipe, options.seed)
    first = next(batches)
    if not step.is_built:
        step.build(first)
    saved = _resumes_from(options)
    done = int(checkpoint.load(step, saved)["step"]) if saved is not None else 0
    # What is random from here on (dropout) differs between data-parallel ranks, and only there.
    torch.manual_seed(
        options.seed + 1 + step.ranks["dp_replicate"] * step.ranks.sizes["dp_shard"] + step.ranks["dp_shard"]
    )
    return list(_steps(step, _from(first, batches, done), done, options, report or (lambda line: None)))


def _first_weights(plan: Plan, recipe: Recipe, options: RunOptions) -> tuple[nn.Module, Values | None]:
    """The model, and how its parameters are filled later where they have no memory yet."""
    files = FromFiles(options.init_from) if options.init_from is not None else None
    parts = in_parts(options.initialise, plan.model.parameters)
    model = build_without_memory(recipe.build_model) if parts else recipe.build_model()
    if files is not None:
        files.load(model)
    return model, (files or BySeed(model, options.seed)) if parts else None


def _resumes_from(options: RunOptions) -> Path | None:
    """Where to go on; a run that torchrun started again goes on where it was saved, without being told."""
    if options.checkpoint is None or options.resume:
        return options.checkpoint
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    return options.checkpoint if again and checkpoint.found(options.checkpoint) else None


def _check(options: RunOptions) -> None:
    if (options.resume or options.save_every) and options.checkpoint is None:
        raise RequestError("--resume and --save-every need to know where: --checkpoint DIR")


def _batches(plan: Plan, recipe: Recipe, seed: int) -> Iterator[Any]:
    """Global batches: the user's, or example inputs drawn anew each step."""
    size, seq = plan.workload.global_batch, plan.workload.seq_len
    if recipe.batches is not None:
        made = recipe.batches(size, seq, seed)
        if not isinstance(made, Iterable):
            raise RequestError(
                f"batches(batch, seq, seed) returned {type(made).__name__}, expected an iterator of batches"
            )
        yield from made
        return
    number = 0
    while True:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed * 1_000_003 + number)
            batch = recipe.example_inputs(size, seq)
        yield batch
        number += 1


def _from(first: Any, batches: Iterator[Any], done: int) -> Iterator[Any]:
    """The stream of batches after the first `done`."""
    if done == 0:
        yield first
    for _ in range(done - 1):
        next(batches)
    yield from batches


def _steps(
    step: TrainStep, batches: Iterator[Any], done: int, options: RunOptions, report: Report
) -> Iterator[dict[str, Any]]:
    plan, ranks = step.plan, step.ranks
    lines = Lines(options.metrics if ranks.rank == 0 else None, append=done > 0)
    how = "in parts, by name" if in_parts(options.initialise, plan.model.parameters) else "whole model"
    initialised = f"{how}, from {options.init_from or 'the seed'}"
    opening = header(plan, ranks, seed=options.seed, initialised=initialised, resumed_from=done)
    for number, line in enumerate(_lines(step, batches, done, options, opening)):
        lines.write(line)
        if ranks.rank == 0:
            report(line)
        yield line
        if number and options.save_every and options.checkpoint and (done + number) % options.save_every == 0:
            about = {"plan_hash": plan.hash, "seed": options.seed}
            checkpoint.save(step, options.checkpoint, done + number, about)


def _lines(
    step: TrainStep, batches: Iterator[Any], done: int, options: RunOptions, opening: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    yield opening
    for number in range(done + 1, options.steps + 1):
        try:
            batch = next(batches)
        except StopIteration:
            raise RequestError(f"batches() ended before step {number} of {options.steps}; train fewer steps") from None
        start = time.perf_counter()
        loss = step(batch)
        seconds = time.perf_counter() - start
        yield step_line(number, loss, step.grad_norm, seconds, step.seconds_by_part, step.plan, step.ranks)
