"""What a stage splitter must know about a model's forward, learned by running it once, on meta tensors if it can.

A pipeline cut between two blocks of a chain sends one tensor, the hidden state: the first positional argument of every block.
That is enough only if

    blocks run once and in order, and each is given exactly what the one before returned;
    nothing but the hidden state comes of earlier blocks.

Both are read off autograd's graph, in which every block's result is made a leaf: what a tensor depends on is the set of leaves
that its graph reaches.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

from autopar.errors import RequestError

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Result:
    """What a call returned: its structure with shapes in place of tensors; `hidden` is the leaf that the hidden state is."""

    structure: TreeSpec
    leaves: tuple[Any, ...]
    hidden: int | None = None

    def filled(self, device: torch.device, hidden: torch.Tensor | None = None) -> Any:
        """The same structure: zeros without memory, and a hidden state where one is given."""
        leaves = [_zeros(leaf, device) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]
        if self.hidden is not None and hidden is not None:
            leaves[self.hidden] = hidden
        return tree_unflatten(leaves, self.structure)


def _zeros(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.zeros((), dtype=like.dtype, device=device).expand(like.shape)


@dataclass
class Probe:
    """How a model runs around one chain of blocks. Names are those of modules and parameters."""

    hidden: torch.Tensor | None = None
    """The hidden state entering the first block, on meta."""
    order: list[int] = field(default_factory=list)
    block: Result | None = None
    before: dict[str, list[Result]] = field(default_factory=dict)
    """Modules called before the first block -> what each call returned."""
    depends: dict[str, set[str]] = field(default_factory=dict)
    """Modules called before the first block -> parameters that what they returned depends on."""
    after: set[str] = field(default_factory=set)
    """Modules called after the first block began, outside of blocks."""
    needed_by_blocks: set[str] = field(default_factory=set)
    """Parameters outside the blocks that blocks depend on beside the hidden state."""
    needed_by_output: set[str] = field(default_factory=set)
    """Parameters outside the blocks that the model's output depends on beside the last hidden state."""
    problems: list[str] = field(default_factory=list)


def probe(model: nn.Module, chain: str, inputs: Inputs) -> Probe:
    """Run a copy of the model once and watch: on meta, or on the inputs' values where it looks at values.

    Raises RequestError with what stands in a pipeline's way.
    """
    try:
        return watched(meta_twin(model), chain, inputs, torch.device("meta"))
    except RequestError:
        raise
    except Exception as on_meta:
        device = next(model.parameters()).device
        try:
            with torch.random.fork_rng():
                return watched(real_twin(model), chain, inputs, device)
        except RequestError:
            raise
        except Exception as error:
            text = " ".join(str(error).split())[:300]
            raise RequestError(
                f"a pipeline needs to see the model run once first, and it fails: {type(error).__name__}: {text} (on meta "
                f"tensors: {type(on_meta).__name__})"
            ) from error


def watched(twin: nn.Module, chain: str, inputs: Inputs, device: torch.device) -> Probe:
    """Run a twin once and watch. Raises RequestError with what stands in a pipeline's way, and what the model raises."""
    watcher = _Watcher(twin, chain)
    args, kwargs = tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, inputs)
    with device, torch.enable_grad():
        output = twin(*args, **kwargs)
    return watcher.finish(output)


def meta_twin(model: nn.Module) -> nn.Module:
    """A copy of a model on meta whose parameters all take gradients; the model itself is not touched."""
    return _twin(model, lambda tensor: torch.empty_like(tensor, device="meta"))


def real_twin(model: nn.Module) -> nn.Module:
    """A copy of a model that shares the values of its parameters, which all take gradients; buffers are its own."""
    return _twin(model, lambda tensor: tensor.detach() if isinstance(tensor, nn.Parameter) else tensor.clone())


def _twin(model: nn.Module, copied: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    known: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        is_parameter = isinstance(tensor, nn.Parameter)
        values = copied(tensor)
        known[id(tensor)] = nn.Parameter(values, tensor.is_floating_point()) if is_parameter else values
    return copy.deepcopy(model, known)


class _Watcher:
    """Hooks on a twin that fill a Probe."""

    def __init__(self, twin: nn.Module, chain: str) -> None:
        self.found, self.twin = Probe(), twin
        self.chain = chain
        container = twin.get_submodule(chain)
        self.blocks = [block for _, block in container.named_children()]
        inside = {id(module) for block in self.blocks for module in block.modules()}
        self.outputs: list[torch.Tensor] = []
        self.leaf_number: dict[int, int] = {}
        self.names = {id(parameter): name for name, parameter in twin.named_parameters()}
        self.block_of = _only_in_blocks(twin, self.blocks)
        self.made: dict[int, tuple[int, torch.Tensor]] = {}
        """Tensors that blocks return beside their hidden state: id -> (block, the tensor, so that its id stays its own)."""
        for number, block in enumerate(self.blocks):
            block.register_forward_pre_hook(self._enter(number), with_kwargs=True)
            block.register_forward_hook(self._leave, with_kwargs=True)
        for name, module in twin.named_modules():
            if id(module) not in inside:
                module.register_forward_hook(self._outside(name))

    def _enter(self, number: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            found = self.found
            found.order.append(number)
            if not args or not isinstance(args[0], torch.Tensor):
                found.problems.append(
                    f"block {number} of '{self.chain}' does not get its hidden state as first argument"
                )
                return
            if found.hidden is None:
                found.hidden = args[0].detach().to("meta")
            elif self.outputs and args[0] is not self.outputs[-1]:
                found.problems.append(
                    f"block {number} of '{self.chain}' is not given what the block before returned: something happens between"
                )
            for leaf in tree_leaves((args[1:], kwargs)):
                if id(leaf) in self.made:
                    self._problem(f"block {number}", self.made[id(leaf)][0])
                elif isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                    found.needed_by_blocks |= self._reached(leaf, f"block {number}")

        return hook

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        result = _result(output, args[0] if args else None)
        if result.hidden is None:
            self.found.problems.append(f"blocks of '{self.chain}' return nothing of the shape of their hidden state")
            return output
        leaves, structure = tree_flatten(output)
        handed_on = {id(leaf) for leaf in tree_leaves((args, kwargs))}
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and id(leaf) not in handed_on:
                self.made[id(leaf)] = len(self.outputs), leaf
        leaf = leaves[result.hidden].detach().requires_grad_()
        leaves[result.hidden] = leaf
        self.leaf_number[id(leaf)] = len(self.outputs)
        self.outputs.append(leaf)
        self.found.block = self.found.block or result
        return tree_unflatten(leaves, structure)

    def _outside(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if self.found.order:
                self.found.after.add(name)
            else:
                self.found.before.setdefault(name, []).append(_result(output, None))
                reached = self.found.depends.setdefault(name, set())
                for leaf in tree_leaves(output):
                    if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                        reached |= self._reached(leaf, name)

        return hook

    def _reached(self, tensor: torch.Tensor, reader: str, last: bool = False) -> set[str]:
        """Parameters that a tensor depends on; depending on an earlier block is a problem."""
        names = set()
        for leaf in _leaves_of(tensor):
            number = self.leaf_number.get(id(leaf), self.block_of.get(id(leaf)))
            if number is None:
                names |= {self.names[id(leaf)]} if id(leaf) in self.names else set()
            elif not (last and number == len(self.outputs) - 1):
                self._problem(reader, number)
        return names

    def _problem(self, reader: str, block: int) -> None:
        self.found.problems.append(f"{reader} reads what came of block {block} beside the hidden state")

    def _own_parameters(self, module: str) -> Iterator[tuple[str, nn.Parameter]]:
        """(first name, parameter) of what a module holds directly."""
        for _, parameter in self.twin.get_submodule(module).named_parameters(recurse=False):
            yield self.names[id(parameter)], parameter

    def finish(self, output: Any) -> Probe:
        """What was learned; raises RequestError with what stands in a pipeline's way."""
        found = self.found
        for leaf in tree_leaves(dict(output) if isinstance(output, dict) else output):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                found.needed_by_output |= self._reached(leaf, "the model's output", last=True)
        # What a module after the blocks holds itself (a tied head) needs no other module to be there.
        owned = (name for name in found.after for name, _ in self._own_parameters(name))
        found.needed_by_output -= set(owned)
        if found.order != list(range(len(self.blocks))):
            found.problems.insert(
                0, f"the blocks of '{self.chain}' run in the order {found.order[:8]}, not once each and in order"
            )
        if found.problems:
            raise RequestError(f"{found.problems[0]}: a pipeline cannot cut this model; plan without pp (--forbid pp)")
        return found


def _only_in_blocks(model: nn.Module, blocks: list[nn.Module]) -> dict[int, int]:
    """Id of a parameter that one block alone holds -> the block's number."""
    holders: dict[int, set[int]] = {}
    inside = {id(module): number for number, block in enumerate(blocks) for module in block.modules()}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                holders.setdefault(id(parameter), set()).add(inside.get(id(module), -1))
    return {key: min(numbers) for key, numbers in holders.items() if len(numbers) == 1 and -1 not in numbers}


def _result(output: Any, hidden: torch.Tensor | None) -> Result:
    leaves, structure = tree_flatten(output)
    alike = [
        n
        for n, leaf in enumerate(leaves)
        if isinstance(leaf, torch.Tensor) and hidden is not None and leaf.shape == hidden.shape
    ]
    kept = tuple(leaf.detach().to("meta") if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
    return Result(structure, kept, alike[0] if alike else None)


def _leaves_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Leaves of autograd's graph that a tensor's gradient reaches."""
    if tensor.grad_fn is None:
        yield tensor
        return
    waiting, seen = [tensor.grad_fn], {tensor.grad_fn}
    while waiting:
        node = waiting.pop()
        variable = getattr(node, "variable", None)
        if variable is not None:
            yield variable
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
