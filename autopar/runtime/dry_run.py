"""Whether a model's own code accepts the local shapes of a plan: one training step on meta tensors, no process group.

Parameters shrink to a rank's part of their placements, hooks at the plan's sites change shapes as its collectives would, and
the step runs forward and backward. Code that holds the undivided number of heads in an attribute fails in a view: then
attributes of the failing module that the degree divides are tried at their local value, and those that help are named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from autopar.documents.plan import Conversion, Plan, SegmentPlacement
from autopar.errors import CaptureError

MOST_PATCHES = 8

Patch = tuple[str, str]
"""(module with ``*`` for the block's number, attribute)."""


@dataclass(frozen=True)
class DryRun:
    """What came of it; `patches` are ``module.attribute`` names (``*`` for the block) that need their local value.

    `in_loss`: it failed outside every module, after the last one ended.
    """

    passed: bool
    reason: str = ""
    in_loss: bool = False
    patches: tuple[str, ...] = field(default=())


@dataclass(frozen=True)
class _Attempt:
    """One run: how many modules it entered and left before it failed, and in which it failed."""

    reason: str = ""
    progress: int = 0
    module: str = ""
    in_loss: bool = False

    @property
    def passed(self) -> bool:
        return not self.reason


def dry_run(model: nn.Module, step: Callable[[int, int], None], plan: Plan) -> DryRun:
    """Run ``step(micro_batch, seq_len)`` of a meta model under the plan's local shapes. The model is restored.

    `step` raises CaptureError where the model's code does not run.
    """
    patches: tuple[Patch, ...] = ()
    result = _attempt(model, step, plan, patches)
    while not result.passed and plan.mesh.tp > 1 and len(patches) < MOST_PATCHES:
        better = _one_more_patch(model, step, plan, patches, result)
        if better is None:
            break
        patches, result = better
    names = tuple(f"{module}.{attribute}" for module, attribute in patches)
    return DryRun(result.passed, result.reason, not result.passed and result.in_loss, names)


def _attempt(model: nn.Module, step: Callable[[int, int], None], plan: Plan, patches: tuple[Patch, ...]) -> _Attempt:
    with _local(model, plan), _patched(model, patches, plan.mesh.tp), _followed(model) as trail:
        try:
            step(plan.schedule.micro_batch, plan.workload.seq_len)
        except CaptureError as error:
            module = trail.inside[-1] if trail.inside else ""
            return _Attempt(str(error), trail.progress, module, module == "" and trail.progress > 1)
    return _Attempt()


def _one_more_patch(
    model: nn.Module, step: Callable[[int, int], None], plan: Plan, patches: tuple[Patch, ...], before: _Attempt
) -> tuple[tuple[Patch, ...], _Attempt] | None:
    """The first attribute near the failure whose local value lets the step pass, or at least get further."""
    for candidate in _candidates(model, before.module, plan.mesh.tp, patches):
        result = _attempt(model, step, plan, (*patches, candidate))
        if result.passed or result.progress > before.progress:
            return (*patches, candidate), result
    return None


def _candidates(model: nn.Module, failed: str, degree: int, taken: tuple[Patch, ...]) -> Iterator[Patch]:
    """Whole-number attributes that the degree divides, of the module that failed and then of those around it."""
    name = failed
    while name:
        pattern = _pattern(name)
        for attribute, value in vars(model.get_submodule(name)).items():
            whole = isinstance(value, int) and not isinstance(value, bool)
            if whole and value > 1 and value % degree == 0 and (pattern, attribute) not in taken:
                yield pattern, attribute
        name = name.rpartition(".")[0]


def _pattern(name: str) -> str:
    """A module's name with ``*`` for its block's number."""
    parts = name.split(".")
    number = next((place for place, part in enumerate(parts) if part.isdecimal()), None)
    return name if number is None else ".".join([*parts[:number], "*", *parts[number + 1 :]])


@dataclass
class _Trail:
    """How many modules were entered and left so far, and those not yet left."""

    progress: int = 0
    inside: list[str] = field(default_factory=list)


@contextmanager
def _followed(model: nn.Module) -> Iterator[_Trail]:
    """Follow which modules run."""
    trail = _Trail()
    names = {module: name for name, module in model.named_modules()}

    def enter(module: nn.Module, args: Any) -> None:
        trail.progress += 1
        trail.inside.append(names[module])

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        trail.progress += 1
        trail.inside.pop()

    with ExitStack() as stack:
        for module in names:
            stack.callback(module.register_forward_pre_hook(enter).remove)
            stack.callback(module.register_forward_hook(leave).remove)
        yield trail


def modules_of(model: nn.Module, pattern: str) -> list[nn.Module]:
    """Modules that a name with ``*`` for the block's number stands for."""
    return [module for _, module in named_modules_of(model, pattern)]


def named_modules_of(model: nn.Module, pattern: str) -> list[tuple[str, nn.Module]]:
    """The same with their names; a pattern without ``*`` names one module."""
    head, star, tail = pattern.partition("*")
    if not star:
        return [(pattern, model.get_submodule(pattern))]
    container = model.get_submodule(head.rstrip("."))
    names = [f"{head}{child}{tail}" for child, _ in container.named_children()]
    return [(name, model.get_submodule(name)) for name in names]


@contextmanager
def _patched(model: nn.Module, patches: tuple[Patch, ...], degree: int) -> Iterator[None]:
    with ExitStack() as stack:
        for pattern, attribute in patches:
            for module in modules_of(model, pattern):
                value = getattr(module, attribute)
                stack.callback(setattr, module, attribute, value)
                setattr(module, attribute, value // degree)
        yield


@contextmanager
def _local(model: nn.Module, plan: Plan) -> Iterator[None]:
    """Parameters at their local shapes, hooks that change shapes at the sites."""
    with ExitStack() as stack:
        _shrink_parameters(model, plan, stack)
        for conversion in plan.conversions:
            for module in modules_of(model, conversion.site.module):
                stack.callback(_hook(module, conversion, plan.mesh.tp).remove)
        yield


def _shrink_parameters(model: nn.Module, plan: Plan, stack: ExitStack) -> None:
    """Parameters at their local shapes, under all their names: tied ones stay one."""
    local: dict[int, nn.Parameter] = {}
    for pattern, axes in plan.placements.items():
        owner, _, attribute = pattern.rpartition(".")
        for module in modules_of(model, owner):
            whole = getattr(module, attribute)
            shape = local_shape(tuple(whole.shape), axes.get("tp", "Replicate"), plan.mesh.tp)
            if shape != tuple(whole.shape):
                local[id(whole)] = nn.Parameter(whole.new_empty(shape), requires_grad=whole.requires_grad)
    for module in model.modules():
        for attribute, whole in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(whole) in local:
                stack.callback(setattr, module, attribute, whole)
                setattr(module, attribute, local[id(whole)])


def local_shape(shape: tuple[int, ...], placement: str | SegmentPlacement, degree: int) -> tuple[int, ...]:
    """A rank's part of a shape. Raises CaptureError where the degree does not divide it."""
    if placement == "Replicate":
        return shape
    dim = placement.dim if isinstance(placement, SegmentPlacement) else int(placement[6:-1])
    pieces = placement.segments if isinstance(placement, SegmentPlacement) else (shape[dim],)
    if any(piece % degree for piece in pieces):
        raise CaptureError(f"tp({degree}) does not divide {pieces} of dim {dim} of a parameter of shape {shape}")
    return (*shape[:dim], sum(pieces) // degree, *shape[dim + 1 :])


def _hook(module: nn.Module, conversion: Conversion, degree: int) -> Any:
    """A hook that gives the tensor of a site its shape after the conversion."""
    number = conversion.site.argument

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return _with_tensor(number, (args, kwargs), conversion, degree)

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        return _with_tensor(number, output, conversion, degree)

    if conversion.site.where == "input":
        return module.register_forward_pre_hook(before, with_kwargs=True)
    return module.register_forward_hook(after)


def _with_tensor(number: int, values: Any, conversion: Conversion, degree: int) -> Any:
    leaves, structure = tree_flatten(values)
    tensors = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    place = tensors[number]
    leaves[place] = _converted(leaves[place], conversion, degree)
    return tree_unflatten(leaves, structure)


def _converted(tensor: torch.Tensor, conversion: Conversion, degree: int) -> torch.Tensor:
    if conversion.dim is None or conversion.forward in ("identity", "all_reduce"):
        return tensor
    if conversion.forward == "all_gather":
        return torch.cat([tensor] * degree, dim=conversion.dim)
    size = tensor.shape[conversion.dim]
    if size % degree:
        raise CaptureError(
            f"tp({degree}) does not divide dim {conversion.dim} of an activation of shape {tuple(tensor.shape)}"
        )
    return tensor.narrow(conversion.dim, 0, size // degree)
