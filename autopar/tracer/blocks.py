"""Repeated blocks: which there are, and how to run two of them and stand in for the rest.

Blocks of a container are equal when class, parameter and buffer shapes, plain attributes and children are equal; an
attribute that merely counts the block's own position is left out. Of a run of four or more equal blocks the first two are run
(the first may make what all share, such as rotary tables) and the second describes the class; the rest hand on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

FEWEST_TO_MULTIPLY = 4


@dataclass
class Repeats:
    """Consecutive equal blocks of one container."""

    first: int
    count: int
    digest: str

    @property
    def described_by(self) -> int:
        """The block whose recording stands for all: the second, or the only one."""
        return self.first + (1 if self.count > 1 else 0)

    def is_run(self, block: int) -> bool:
        """Whether this block is run in full."""
        return self.count < FEWEST_TO_MULTIPLY or block < self.first + 2


@dataclass
class BlockList:
    """A container of blocks: its name, its blocks' names, and its runs of equal blocks."""

    name: str
    modules: tuple[str, ...]
    repeats: tuple[Repeats, ...]

    def runs(self, block: int) -> bool:
        """Whether a block is run in full when only two of each run of equal blocks are."""
        return any(run.first <= block < run.first + run.count and run.is_run(block) for run in self.repeats)


def find_block_lists(model: nn.Module) -> list[BlockList]:
    """Containers of blocks, outermost only, in the order in which the model holds them."""
    found: list[BlockList] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{known.name}.") for known in found)
        if not inside and _is_container(module):
            found.append(_block_list(name, module))
    return found


def _is_container(module: nn.Module) -> bool:
    if not isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
        return False
    children = list(module.children())
    if len(children) < 2 or not any(child.parameters() for child in children):
        return False
    classes = {type(child) for child in children}
    if isinstance(module, nn.Sequential):
        return len(classes) == 1 and len(children) >= FEWEST_TO_MULTIPLY and len(set(_digests(children))) == 1
    return len(classes) == 1 and next(children[0].parameters(), None) is not None


def _block_list(name: str, container: nn.Module) -> BlockList:
    names, children = zip(*container.named_children(), strict=True)
    runs: list[Repeats] = []
    for block, digest in enumerate(_digests(list(children))):
        if runs and runs[-1].digest == digest:
            runs[-1].count += 1
        else:
            runs.append(Repeats(block, 1, digest))
    return BlockList(name, tuple(f"{name}.{child}" for child in names), tuple(runs))


def _digests(blocks: list[nn.Module]) -> list[str]:
    counters = {
        (path, attribute)
        for path, module in blocks[0].named_modules()
        for attribute, value in vars(module).items()
        if isinstance(value, int) and not isinstance(value, bool) and _counts(blocks, path, attribute)
    }
    return [hashlib.sha256("\n".join(_describe(block, counters)).encode()).hexdigest()[:16] for block in blocks]


def _counts(blocks: list[nn.Module], path: str, attribute: str) -> bool:
    """Whether an attribute holds each block's own position (from 0 or 1)."""
    try:
        values = [getattr(block.get_submodule(path), attribute) for block in blocks]
    except AttributeError:
        return False
    return len(blocks) > 1 and values in (list(range(len(blocks))), list(range(1, len(blocks) + 1)))


def _describe(block: nn.Module, counters: set[tuple[str, str]]) -> Iterator[str]:
    for path, module in block.named_modules():
        yield f"{path}:{type(module).__module__}.{type(module).__qualname__}"
        for name, parameter in module.named_parameters(recurse=False):
            yield f" {name} {tuple(parameter.shape)} {parameter.dtype} {parameter.requires_grad}"
        for name, buffer in module.named_buffers(recurse=False):
            yield f" {name} {tuple(buffer.shape)} {buffer.dtype}"
        for name, value in sorted(vars(module).items()):
            if isinstance(value, int | float | str | bool | torch.dtype) and (path, name) not in counters:
                yield f" {name}={value}"


def stood_in(lists: list[BlockList]) -> tuple[str, ...]:
    """Names of the blocks that are not run."""
    return tuple(
        module for blocks in lists for number, module in enumerate(blocks.modules) if not blocks.runs(number)
    )


@contextmanager
def only_two_run(model: nn.Module, lists: list[BlockList]) -> Iterator[None]:
    """Within the block, of each run of equal blocks only two are run; the rest hand their first tensor on.

    A stand-in returns what the second block returned, with the current hidden state in the place of that block's.
    """
    handles = []
    originals: list[tuple[nn.Module, Any]] = []
    for blocks in lists:
        for run in blocks.repeats:
            if run.count < FEWEST_TO_MULTIPLY:
                continue
            memory = _Memory()
            handles.append(
                model.get_submodule(blocks.modules[run.first + 1]).register_forward_hook(
                    memory.remember, with_kwargs=True
                )
            )
            for block in range(run.first + 2, run.first + run.count):
                module = model.get_submodule(blocks.modules[block])
                originals.append((module, module.__dict__.get("forward")))
                module.forward = memory.answer  # type: ignore[method-assign]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for module, forward in originals:
            if forward is None:
                del module.__dict__["forward"]
            else:
                module.forward = forward


class _Memory:
    """What the second of a run of equal blocks returned."""

    def __init__(self) -> None:
        self.leaves: list[Any] = []
        self.structure: Any = None
        self.hidden: int | None = None

    def remember(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Keep the output's structure and which of its tensors is the hidden state."""
        self.leaves, self.structure = tree_flatten(output)
        entering = _first_tensor(args, kwargs)
        tensors = [number for number, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor)]
        alike = [number for number in tensors if entering is not None and self.leaves[number].shape == entering.shape]
        self.hidden = alike[0] if alike else None
        self.leaves = [
            leaf.detach() if isinstance(leaf, torch.Tensor) and number != self.hidden else leaf
            for number, leaf in enumerate(self.leaves)
        ]

    def answer(self, *args: Any, **kwargs: Any) -> Any:
        """The remembered output, with the current hidden state handed on."""
        leaves = list(self.leaves)
        if self.hidden is not None:
            leaves[self.hidden] = _first_tensor(args, kwargs)
        return tree_unflatten(leaves, self.structure)


def _first_tensor(args: Any, kwargs: Any) -> torch.Tensor | None:
    return next((leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)), None)
