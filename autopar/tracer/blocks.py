"""Repeated blocks: which there are, and how to run two of them and stand in for the rest.

Blocks of a container are equal when class, parameter and buffer shapes, plain attributes and children are equal; an
attribute that merely counts the block's own position is left out. Of four or more equal blocks the first two are run (the
first may make what all share, such as rotary tables) and the second describes the class; the rest hand on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
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


@dataclass
class BlockList:
    """A container of blocks: its name, its blocks' names and digests; blocks of equal digest need not be neighbours."""

    name: str
    modules: tuple[str, ...]
    digests: tuple[str, ...]

    @cached_property
    def repeats(self) -> tuple[Repeats, ...]:
        """Runs of equal neighbours."""
        runs: list[Repeats] = []
        for block, digest in enumerate(self.digests):
            if runs and runs[-1].digest == digest:
                runs[-1].count += 1
            else:
                runs.append(Repeats(block, 1, digest))
        return tuple(runs)

    @cached_property
    def members(self) -> dict[str, list[int]]:
        """The blocks of every digest, in order."""
        found: dict[str, list[int]] = {}
        for block, digest in enumerate(self.digests):
            found.setdefault(digest, []).append(block)
        return found

    def described_by(self, digest: str) -> int:
        """The block whose recording stands for all of a digest: the second, or the only one."""
        return self.members[digest][:2][-1]

    def stands_in(self, digest: str) -> list[int]:
        """The blocks of a digest that are not run: all after the second of four or more."""
        blocks = self.members[digest]
        return blocks[2:] if len(blocks) >= FEWEST_TO_MULTIPLY else []

    def runs(self, block: int) -> bool:
        """Whether a block is run in full when only two of each kind are."""
        return block not in self.stands_in(self.digests[block])


def find_block_lists(model: nn.Module) -> list[BlockList]:
    """Containers of blocks, outermost only, in the order in which the model holds them."""
    found: list[BlockList] = []
    for name, module in model.named_modules():
        inside = any(not known.name or name.startswith(f"{known.name}.") for known in found)
        if not inside and _is_container(module):
            found.append(_block_list(name, module))
    return found


def _is_container(module: nn.Module) -> bool:
    if not isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
        return False
    children = list(module.children())
    if len(children) < 2 or any(next(child.parameters(), None) is None for child in children):
        return False
    if isinstance(module, nn.Sequential):
        return len(children) >= FEWEST_TO_MULTIPLY and len(set(_digests(children))) == 1
    if len({type(child) for child in children}) == 1:
        return True
    # Blocks of several classes that alternate: each kind occurs at least twice on average.
    return len(children) >= FEWEST_TO_MULTIPLY and 2 * len(set(_digests(children))) <= len(children)


def _block_list(name: str, container: nn.Module) -> BlockList:
    names, children = zip(*container.named_children(), strict=True)
    # Blocks of two containers may be equal and yet see inputs of other sizes (a text and an image tower): two classes.
    digests = tuple(f"{name}:{digest}" for digest in _digests(list(children)))
    return BlockList(name, tuple(f"{name}.{child}".removeprefix(".") for child in names), digests)


def _digests(blocks: list[nn.Module]) -> list[str]:
    described = [list(_describe(block)) for block in blocks]
    counters = _counters(described)
    return [
        hashlib.sha256(repr([line for line in lines if line[:2] not in counters]).encode()).hexdigest()[:16]
        for lines in described
    ]


def _counters(described: list[list[tuple[str, str, Any]]]) -> set[tuple[str, str]]:
    """Attributes that hold their block's own position (from 0 or 1) wherever they occur."""
    distances: dict[tuple[str, str], set[int]] = {}
    for block, lines in enumerate(described):
        for path, name, value in lines:
            if type(value) is int:
                distances.setdefault((path, name), set()).add(value - block)
    return {key for key, found in distances.items() if found in ({0}, {1}) and len(described) > 1}


def _describe(block: nn.Module) -> Iterator[tuple[str, str, Any]]:
    """(path of the submodule, what, value) of everything that a block's graph can depend on."""
    for path, module in block.named_modules():
        yield path, "", f"{type(module).__module__}.{type(module).__qualname__}"
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield path, name, (tuple(parameter.shape), str(parameter.dtype), parameter.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                yield path, name, (tuple(buffer.shape), str(buffer.dtype))
        for name, value in sorted(vars(module).items()):
            if isinstance(value, int | float | str | torch.dtype):
                yield path, name, value


def stood_in(lists: list[BlockList]) -> tuple[str, ...]:
    """Names of the blocks that are not run."""
    return tuple(module for blocks in lists for number, module in enumerate(blocks.modules) if not blocks.runs(number))


@contextmanager
def only_two_run(model: nn.Module, lists: list[BlockList]) -> Iterator[None]:
    """Within the block, of each run of equal blocks only two are run; the rest hand their first tensor on.

    A stand-in returns what the second block returned, with the current hidden state in the place of that block's.
    """
    handles = []
    originals: list[tuple[nn.Module, Any]] = []
    for blocks in lists:
        for digest, members in blocks.members.items():
            memory = _Memory()
            for block in blocks.stands_in(digest):
                module = model.get_submodule(blocks.modules[block])
                originals.append((module, module.__dict__.get("forward")))
                module.forward = memory.answer
            if blocks.stands_in(digest):
                second = model.get_submodule(blocks.modules[members[1]])
                handles.append(second.register_forward_hook(memory.remember, with_kwargs=True, prepend=True))
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
