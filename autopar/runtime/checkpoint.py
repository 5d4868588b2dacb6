"""Checkpoints that any plan of the same model can go on from, written whole or not at all.

Every tensor is stored by its name in the whole model, as the rectangles of it that ranks hold:

    parameters, masters of 16-bit ones, and each optimizer state of a parameter's shape

so that reading is a matter of which rectangles overlap (torch.distributed.checkpoint). A checkpoint is a folder ``step-N``: it is
written beside under another name and renamed when every rank has finished.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from autopar.errors import DocumentError
from autopar.runtime.gradients import Held
from autopar.runtime.rectangles import Rectangle, rectangles
from autopar.runtime.step import TrainStep
from autopar.runtime.zero import local


class Parts(torch.Tensor):
    """A whole tensor of which only some rectangles are here, as torch's checkpoints read and write it."""

    parts: list[Rectangle]

    @staticmethod
    def __new__(cls: type, shape: torch.Size, like: torch.Tensor, parts: list[Rectangle]) -> Parts:
        """A tensor of `shape` without memory of its own, with the dtype and device of `like`."""
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device)
        made.parts = parts
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"{func}: parts of a tensor are only stored")

    def __create_write_items__(self, name: str, whole: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(name, torch.Size(offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=part.size()),
                    properties=TensorProperties.create_from_tensor(part),
                    size=self.size(),
                ),
            )
            for offsets, part in self.parts
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=part.size()) for offsets, part in self.parts]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return next(part for offsets, part in self.parts if torch.Size(offsets) == index.offset)


@dataclass(frozen=True)
class _Stored:
    """A parameter with what trains it."""

    item: Held
    master: nn.Parameter
    stepped: nn.Parameter


def _by_name(step: TrainStep) -> dict[str, list[_Stored]]:
    """Name in the whole model -> its copies on this rank: several chunks may hold one each, all alike."""
    found: dict[str, list[_Stored]] = {}
    optimizer = step.optimizer
    for entry in map(_Stored, step.gradients.held, optimizer.masters, optimizer.stepped):
        found.setdefault(entry.item.layout.name, []).append(entry)
    return found


def parameters(step: TrainStep) -> dict[str, Parts]:
    """Name in the whole model -> what this rank holds of each trained parameter."""
    first = {name: copies[0].item for name, copies in _by_name(step).items()}
    return {f"model.{name}": _parts(step, item, item.parameter) for name, item in first.items()}


def save(step: TrainStep, folder: str | Path, number: int, about: dict[str, Any] | None = None, keep: int = 2) -> Path:
    """Store a built step after `number` updates under ``folder/step-N``; older ones than the newest `keep` are removed.

    Raises DocumentError on every rank when any of them cannot write; what was there before stays.
    """
    base = Path(folder)
    target, temporary = base / f"step-{number:08d}", base / f".step-{number:08d}.part"

    def begin() -> None:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)

    failed = _on_first(begin)
    if failed is None:
        try:
            dcp.save(_state(step), checkpoint_id=temporary, no_dist=not dist.is_initialized())
        except (Exception, CheckpointException) as error:
            failed = _cause(error)

    def publish() -> None:
        (temporary / "progress.json").write_text(json.dumps({"step": number, **(about or {})}), encoding="utf-8")
        shutil.rmtree(target, ignore_errors=True)
        temporary.rename(target)
        for old in found(base)[:-keep]:
            shutil.rmtree(old, ignore_errors=True)

    failed = failed or _on_first(publish)
    if failed is not None:
        _on_first(lambda: shutil.rmtree(temporary, ignore_errors=True))
        good = found(base)
        left = f"the last good checkpoint is {good[-1]}" if good else "there is no earlier checkpoint"
        raise DocumentError(f"{target}: the checkpoint cannot be written: {failed}; {left}")
    return target


def found(folder: str | Path) -> list[Path]:
    """Complete checkpoints of a folder, oldest first."""
    return sorted(path.parent for path in Path(folder).glob("step-*/progress.json"))


def load(step: TrainStep, folder: str | Path) -> dict[str, Any]:
    """Put a built step where its newest checkpoint left off, whatever plan wrote it; returns what was said about it.

    Raises DocumentError where there is none, or it is another model's.
    """
    complete = found(folder)
    if not complete:
        raise DocumentError(f"{folder}: no checkpoint to resume from (a folder step-N with progress.json)")
    source = complete[-1]
    reader = dcp.FileSystemReader(source)
    try:
        stored = reader.read_metadata().state_dict_metadata
    except Exception as error:
        raise _unreadable(source, error, complete) from None
    state = _state(step, {name: entry for name, entry in stored.items() if isinstance(entry, TensorStorageMetadata)})
    missing = sorted(set(state) - set(stored))
    if missing:
        raise DocumentError(
            f"{source}: holds no {missing[0]} ({len(missing)} missing): it is another model's or optimizer's"
        )
    try:
        dcp.load(state, storage_reader=reader, no_dist=not dist.is_initialized())
    except (Exception, CheckpointException) as error:
        raise _unreadable(source, error, complete) from None
    _copy_to_other_chunks(step)
    if not any(name.startswith("master.") for name in state):
        step.optimizer.refresh_masters()
    about: dict[str, Any] = json.loads((source / "progress.json").read_text(encoding="utf-8"))
    return about


def _unreadable(source: Path, error: BaseException, complete: list[Path]) -> DocumentError:
    way = f"remove it to go on from {complete[-2]}" if len(complete) > 1 else "remove it to start anew"
    return DocumentError(f"{source}: the checkpoint cannot be read: {_cause(error)}; {way}")


def _copy_to_other_chunks(step: TrainStep) -> None:
    """What was read into one copy of a parameter, with its master and optimizer states, for its other copies on this rank."""
    states = step.optimizer.inner.state
    with torch.no_grad():
        for first, *others in _by_name(step).values():
            for other in others:
                local(other.item.parameter).copy_(local(first.item.parameter))
                local(other.master).copy_(local(first.master))
                states[other.stepped] = {
                    key: value.clone() if isinstance(value, torch.Tensor) else value
                    for key, value in states[first.stepped].items()
                }


def _state(step: TrainStep, stored: dict[str, TensorStorageMetadata] | None = None) -> dict[str, torch.Tensor]:
    """What is stored; given what a checkpoint holds, optimizer states are made to receive it."""
    state: dict[str, torch.Tensor] = dict(parameters(step))
    for name, (entry, *_) in _by_name(step).items():
        item, master = entry.item, entry.master
        if master is not item.parameter and (stored is None or f"master.{name}" in stored):
            state[f"master.{name}"] = _parts(step, item, master)
        known = step.optimizer.inner.state[entry.stepped]
        for key, shape in _expected(name, stored or {}):
            if key not in known:
                known[key] = torch.zeros_like(entry.stepped) if shape == item.layout.shape else torch.zeros(shape)
        for key, value in known.items():
            if isinstance(value, torch.Tensor):
                is_whole = value.dim() > 0 or item.layout.shape == value.shape
                state[f"optimizer.{name}.{key}"] = _parts(step, item, value) if is_whole else value
    return state


def _expected(name: str, stored: dict[str, TensorStorageMetadata]) -> Iterator[tuple[str, torch.Size]]:
    prefix = f"optimizer.{name}."
    for full, entry in stored.items():
        if full.startswith(prefix) and "." not in full[len(prefix) :]:
            yield full[len(prefix) :], entry.size


def _parts(step: TrainStep, item: Held, tensor: torch.Tensor) -> Parts:
    tp, place = step.ranks.sizes["tp"], step.ranks["tp"]
    held = rectangles(item.layout, item.parameter, tensor.detach(), tp, place)
    return Parts(item.layout.shape, tensor, held)


def _on_first(work: Any) -> str | None:
    """Do something on rank 0 only; every rank learns why it failed."""
    failed: list[str | None] = [None]
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            work()
        except OSError as error:
            failed = [_cause(error)]
    if dist.is_initialized():
        dist.broadcast_object_list(failed, src=0)
    return failed[0]


def _cause(error: BaseException) -> str:
    """The innermost reason in words."""
    inner = next(iter(getattr(error, "failures", {}).values()), error)
    reason = inner[0] if isinstance(inner, tuple) else inner
    return f"{type(reason).__name__}: {' '.join(str(reason).split())[:300]}"
