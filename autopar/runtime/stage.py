"""Pipeline stages without tracing: the user's forward stays, what a stage does not hold becomes a stand-in.

    blocks of other stages           hand the hidden state on
    first block, where not stage 0   takes the received hidden state in place of its own argument
    last block, where not the end    ends the forward with its result
    modules before the blocks        return zeros without memory where no later code needs their parameters
    modules after the blocks         are never reached, and dropped

Inputs go to every stage, so what every stage can compute from them (rotary tables, masks) it computes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from autopar.documents.plan import Plan
from autopar.errors import PlanMismatch, RequestError
from autopar.runtime.batch import in_dtype
from autopar.runtime.probe import Inputs, Probe, Result

Loss = Callable[[Any, Inputs, int], torch.Tensor]


@dataclass(frozen=True)
class Cut:
    """Which blocks a virtual stage holds: blocks [first, last] of the chain, of `count`."""

    chain: str
    first: int
    last: int
    count: int

    @property
    def begins(self) -> bool:
        """Whether it holds the first block, and with it what comes before."""
        return self.first == 0

    @property
    def ends(self) -> bool:
        """Whether it holds the last block, and with it what comes after."""
        return self.last == self.count - 1


@dataclass
class Pieces:
    """A stage's model, its blocks by chain and number, and what every parameter is in the whole model."""

    model: nn.Module
    blocks: dict[tuple[str, int], nn.Module] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    """Name of a parameter here -> its first name in the whole model: they differ where tied ones are cut apart."""
    cut: Cut | None = None
    result: Result | None = None
    """What a block returns, where the model was cut."""
    moot: frozenset[str] = frozenset()
    """Modules before the blocks that see stand-ins' zeros: what they make is not used."""

    @property
    def first_block(self) -> nn.Module:
        """The first block it holds."""
        return next(iter(self.blocks.values()))

    @property
    def last_block(self) -> nn.Module:
        """The last block it holds."""
        return list(self.blocks.values())[-1]


def cuts(plan: Plan, model: nn.Module) -> list[list[Cut]]:
    """Per pp rank, per chunk, its cut. Raises RequestError for plans whose stages hold parts of several chains."""
    chains = {chain for stage in plan.stages for chunk in stage.chunks for chain in chunk}
    if len(chains) != 1:
        raise RequestError(
            f"pipelines over {len(chains)} lists of blocks ({', '.join(sorted(chains)) or 'none'}) are not carried out; "
            "plan without pp (--forbid pp)"
        )
    chain = chains.pop()
    try:
        count = len(list(model.get_submodule(chain).named_children()))
    except AttributeError:
        raise PlanMismatch(f"the plan divides the blocks of '{chain}', which the model does not have") from None
    found = [[Cut(chain, *chunk[chain], count) for chunk in stage.chunks] for stage in plan.stages]
    ordered = [found[stage][chunk] for chunk in range(plan.schedule.virtual_stages) for stage in range(plan.mesh.pp)]
    starts = [0, *(cut.last + 1 for cut in ordered[:-1])]
    if [cut.first for cut in ordered] != starts or ordered[-1].last != count - 1:
        held = ", ".join(f"{cut.first}-{cut.last}" for cut in ordered)
        raise PlanMismatch(f"the plan's stages hold blocks {held} of '{chain}', but the model has {count}")
    return found


def whole(model: nn.Module, plan: Plan) -> Pieces:
    """The model itself as the only stage."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    pieces = Pieces(model, names={name: first[id(parameter)] for name, parameter in model.named_parameters()})
    for chain in {chain: None for stage in plan.stages for chunk in stage.chunks for chain in chunk}:
        try:
            blocks = list(model.get_submodule(chain).children())
        except AttributeError:
            raise PlanMismatch(f"the plan names the blocks of '{chain}', which the model does not have") from None
        pieces.blocks |= {(chain, number): block for number, block in enumerate(blocks)}
    return pieces


def split(model: nn.Module, cut: Cut, found: Probe, device: torch.device) -> Pieces:
    """The part of a model that a virtual stage holds. The model is not changed; blocks' parameters are shared with it."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    own = _copies(model, cut.chain)
    shell = copy.deepcopy(model, dict(own))
    container = shell.get_submodule(cut.chain)
    assert found.block is not None, "the probe ran at least one block"
    pieces = Pieces(shell, cut=cut, result=found.block)
    for number, (name, block) in enumerate(list(container.named_children())):
        if cut.first <= number <= cut.last:
            pieces.blocks[cut.chain, number] = block
        else:
            setattr(container, name, Skip(found.block, device))
    for name in list(_replaceable(shell, cut.chain)):
        _replace(shell, name, cut, found, device)
    pieces.moot = _moot(model, shell, found)
    known = {id(copied): first[original] for original, copied in own.items() if original in first}
    pieces.names = {name: known[id(parameter)] for name, parameter in shell.named_parameters()}
    return pieces


def _moot(model: nn.Module, shell: nn.Module, found: Probe) -> frozenset[str]:
    """Modules before the blocks that are stood in for, and those that see what stand-ins return."""
    stood = [name for name, module in shell.named_modules() if getattr(module, "is_stood_in_for", False)]
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    missing = {first[id(parameter)] for name in stood for parameter in model.get_submodule(name).parameters()}
    return frozenset([*stood, *(name for name, needs in found.depends.items() if name and needs & missing)])


def _copies(model: nn.Module, chain: str) -> dict[int, Any]:
    """What a stage's copy of the module tree holds: blocks' tensors themselves, copies of parameters outside of blocks.

    Several stages may hold the latter, each its own.
    """
    inside = {id(parameter) for parameter in model.get_submodule(chain).parameters()}
    kept: dict[int, Any] = {id(buffer): buffer for buffer in model.buffers()}
    for parameter in model.parameters():
        kept[id(parameter)] = (
            parameter
            if id(parameter) in inside
            else nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
        )
    return kept


def _replaceable(shell: nn.Module, chain: str) -> Iterator[str]:
    """Outermost modules outside the blocks that are not around them and hold parameters."""
    around, outer = {chain}, chain
    while outer:
        outer = outer.rpartition(".")[0]
        around.add(outer)
    for name in sorted(around - {chain}):
        module = shell.get_submodule(name)
        for child, inner in module.named_children():
            full = f"{name}.{child}" if name else child
            if full not in around and not isinstance(inner, Skip) and any(True for _ in inner.parameters()):
                yield full


def _replace(shell: nn.Module, name: str, cut: Cut, found: Probe, device: torch.device) -> None:
    """Put a stand-in for a module where the stage has no use for it; containers are looked into."""
    module = shell.get_submodule(name)
    called = name in found.before or name in found.after
    if not called:
        for child, inner in module.named_children():
            if any(True for _ in inner.parameters()):
                _replace(shell, f"{name}.{child}", cut, found, device)
        return
    own = {f"{name}.{inner}" for inner, _ in module.named_parameters()}
    if name in found.after:
        if not cut.ends and not (cut.begins and name in found.before):
            shell.set_submodule(name, Unreached())
        return
    if cut.begins or own & found.needed_by_blocks:
        return
    stand_in = StandIn(found.before[name], device)
    if cut.ends and own & found.needed_by_output:
        # Later code reads its parameters without calling it.
        module.forward = stand_in.forward
        module.is_stood_in_for = True
    else:
        shell.set_submodule(name, stand_in)


class Skip(nn.Module):
    """Stands for a block of another stage: hands the hidden state on."""

    is_stood_in_for = True

    def __init__(self, result: Result, device: torch.device) -> None:
        super().__init__()
        self.result, self.device = result, device

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """What a block would return, around the given hidden state."""
        return self.result.filled(self.device, hidden)


class StandIn(nn.Module):
    """Stands for a module whose results nothing on this stage depends on: zeros of the same shapes, call by call."""

    is_stood_in_for = True

    def __init__(self, results: list[Result], device: torch.device) -> None:
        super().__init__()
        self.results, self.device, self.calls = results, device, 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The next remembered result."""
        self.calls += 1
        return self.results[(self.calls - 1) % len(self.results)].filled(self.device)


class Unreached(nn.Module):
    """Stands for a module that runs after this stage's last block."""


class _Reached(Exception):
    """Carries the hidden state out of the user's forward."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class StageModule(nn.Module):
    """One virtual stage: (received hidden state or nothing, number of the micro-batch) -> hidden state, or the loss."""

    def __init__(
        self,
        pieces: Pieces,
        loss: Loss,
        context: Callable[[], Any],
        dtype: torch.dtype,
        around_model: bool = False,
    ) -> None:
        """The model takes floats in `dtype`, the loss as they came.

        `context` holds while the loss is computed; `around_model`: while the model runs, which then computes it.
        """
        super().__init__()
        self.model = pieces.model
        self.pieces, self.loss, self.context, self.around_model = pieces, loss, context, around_model
        self.dtype = dtype
        self.micro_batches: Mapping[int, Inputs] = {}
        self._received: torch.Tensor | None = None

    def attach(self) -> None:
        """Register entry and exit; after everything else that hooks into blocks."""
        cut = self.pieces.cut
        if cut is not None and not cut.begins:
            self.pieces.first_block.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True)
        if cut is not None and not cut.ends:
            self.pieces.last_block.register_forward_hook(self._exit, with_kwargs=True)

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return (self._received, *args[1:]), kwargs

    def _exit(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        result = self.pieces.result
        assert result is not None
        assert result.hidden is not None
        raise _Reached(tree_leaves(output)[result.hidden])

    def forward(self, *received: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        """Run the user's forward on a micro-batch as far as this stage goes."""
        inputs = self.micro_batches[int(number)]
        self._received = received[0] if received else None
        try:
            with self.context() if self.around_model else nullcontext():
                args, kwargs = in_dtype(inputs, self.dtype)
                output = self.model(*args, **kwargs)
            with self.context():
                return self.loss(output, inputs, int(number))
        except _Reached as reached:
            return reached.hidden
        finally:
            self._received = None
