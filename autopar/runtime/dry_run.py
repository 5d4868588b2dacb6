"""Whether a model's own code accepts the local shapes of a plan: one training step on meta tensors, no process group.

Parameters shrink to a rank's part of their placements, hooks at the plan's sites change shapes as its collectives would, and
the step runs forward and backward. Code that holds the undivided number of heads in an attribute fails in a view: then
attributes of the failing module that the degree divides are tried at their local value, one and two at a time, and those that
help are named. Shapes that fit do not prove that heads were divided and not what is inside or beside them: every softmax and
attention call is held against that of the undivided model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from math import prod
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.documents.plan import Conversion, Plan
from autopar.errors import CaptureError, RequestError
from autopar.runtime.attributes import counts, make_local, names_read
from autopar.runtime.names import local_shape, modules_of, parameters_of, pattern_of
from autopar.runtime.probe import Inputs, meta_twin, watched
from autopar.runtime.sites import install
from autopar.runtime.stage import cuts

MOST_PATCHES, MOST_PAIRED = 8, 8
SHORT = 4

Patch = tuple[str, str]
"""(module with ``*`` for the block's number, path of a count in it)."""

Call = tuple[str, tuple[int, ...]]
"""Of a softmax or an attention call: its module, and the shape of the scores or queries."""


@dataclass(frozen=True)
class DryRun:
    """What came of it; `patches` are ``module.attribute`` names (``*`` for the block) that need their local value.

    `in_loss`: it failed outside every module, after the last one ended. `module`: whose code failed; torch's own modules only
    take what they are given, so that theirs is the caller's fault.
    """

    passed: bool
    reason: str = ""
    in_loss: bool = False
    patches: tuple[str, ...] = field(default=())
    in_pipeline: bool = False
    """Shapes are accepted, but a pipeline cannot be cut out of the model."""
    module: str = ""


@dataclass(frozen=True)
class _Attempt:
    """One run: how many modules it entered and left before it failed, and in which it failed."""

    reason: str = ""
    progress: int = 0
    module: str = ""
    in_loss: bool = False
    calls: tuple[Call, ...] = ()

    @property
    def passed(self) -> bool:
        return not self.reason


def dry_run(model: nn.Module, step: Callable[[int, int], None], plan: Plan) -> DryRun:
    """Run ``step(micro_batch, seq_len)`` of a meta model under the plan's local shapes. The model is restored.

    `step` raises CaptureError where the model's code does not run.
    """
    tried = _Tries(model, step, plan)
    patches: tuple[Patch, ...] = ()
    result = tried.attempt(patches)
    while not result.passed and plan.mesh.tp > 1 and len(patches) < MOST_PATCHES:
        better = tried.further(patches, result)
        if better is None:
            break
        patches, result = better
    if result.passed:
        return DryRun(True, patches=tuple(f"{module}.{path}" for module, path in patches))
    return DryRun(False, result.reason, result.in_loss, module=_blamed(model, result.module))


def _blamed(model: nn.Module, failed: str) -> str:
    while failed and type(model.get_submodule(failed)).__module__.startswith("torch.nn."):
        failed = failed.rpartition(".")[0]
    return failed


def cannot_cut(model: nn.Module, plan: Plan, inputs: Inputs) -> str:
    """Why a pipeline cannot be cut out of a model on meta; empty where it can, or where only a run can tell."""
    try:
        chain = cuts(plan, model)[0][0].chain
        with _shortened(model, chain):
            twin = meta_twin(model)
        watched(twin, chain, inputs, torch.device("meta"))
    except RequestError as error:
        return str(error)
    except Exception:  # code that looks at values: a run has them
        return ""
    return ""


@contextmanager
def _shortened(model: nn.Module, chain: str) -> Iterator[None]:
    """Only the first blocks of a long list: how one is called shows how all are."""
    container = model.get_submodule(chain)
    if type(container) is not nn.ModuleList or len(container) <= SHORT:
        yield
        return
    model.set_submodule(chain, nn.ModuleList(list(container)[:SHORT]))
    try:
        yield
    finally:
        model.set_submodule(chain, container)


class _Tries:
    """Runs of one plan under sets of patches."""

    def __init__(self, model: nn.Module, step: Callable[[int, int], None], plan: Plan) -> None:
        self.model, self.step, self.plan, self.degree = model, step, plan, plan.mesh.tp

    def attempt(self, patches: tuple[Patch, ...]) -> _Attempt:
        """The step under the plan's local shapes."""
        # Patches that divide something else than heads are found out at the first call: the rest need not run.
        expected = self.whole.calls if patches else ()
        with _local(self.model, self.plan), _patched(self.model, patches, self.degree):
            result = self._run(
                lambda number, call: number >= len(expected) or self._fits(call, expected[number], patches)
            )
        return self._compared(result, patches) if self.degree > 1 and (result.passed or patches) else result

    @cached_property
    def whole(self) -> _Attempt:
        """The step of the undivided model."""
        return self._run()

    def _run(self, goes_on: Callable[[int, Call], bool] = lambda number, call: True) -> _Attempt:
        with _followed(self.model) as trail, _Scores(trail, goes_on) as scores:
            try:
                self.step(self.plan.schedule.micro_batch, self.plan.workload.seq_len)
            except CaptureError as error:
                module = trail.inside[-1] if trail.inside else ""
                reason = str(error).partition(". If it runs on real tensors")[0]
                if "view" in reason or "reshape" in reason:
                    reason += "; let it take its number of heads from the tensor: view(batch, seq, -1, head_dim)"
                in_loss = module == "" and trail.progress > 1
                return _Attempt(reason, trail.progress, module, in_loss, tuple(scores.calls))
        return _Attempt(progress=trail.progress, calls=tuple(scores.calls))

    def further(self, patches: tuple[Patch, ...], before: _Attempt) -> tuple[tuple[Patch, ...], _Attempt] | None:
        """The first count near the failure, or pair of them, whose local value lets the step pass or get further.

        A count that no run reads changes nothing; of a pair at least one changes the failure by itself.
        """
        around = list(_around(self.model, before.module))
        left = list(_candidates(self.model, around, self.degree, patches))
        tried: dict[Patch, _Attempt] = {}
        with ExitStack() as stack:
            read = {
                pattern_of(name): stack.enter_context(names_read(self.model.get_submodule(name))) for name in around
            }
            self.attempt(patches)
            while (
                one := next((item for item in left if item[1].partition(".")[0] in read[item[0]]), None)
            ) is not None:
                left.remove(one)
                tried[one] = self.attempt((*patches, one))
                if _is_better(tried[one], before):
                    return (*patches, one), tried[one]
        for pair in combinations(list(tried)[:MOST_PAIRED], 2):
            if any(tried[one] != before for one in pair):
                result = self.attempt((*patches, *pair))
                if _is_better(result, before):
                    return (*patches, *pair), result
        return None

    def _compared(self, result: _Attempt, patches: tuple[Patch, ...]) -> _Attempt:
        """A run whose softmax and attention calls are not divided by heads failed at the first of them."""
        if result.passed and len(result.calls) != len(self.whole.calls):
            return _Attempt("divided, it makes other softmax and attention calls")
        for call, expected in zip(result.calls, self.whole.calls, strict=False):
            if not self._fits(call, expected, patches):
                (name, local), (_, whole) = call, expected
                shapes = f"{local} in place of {whole}"
                return _Attempt(f"in module {name!r} attention works on shapes {shapes} at tp({self.degree})", 0, name)
        return result

    def _fits(self, call: Call, expected: Call, patches: tuple[Patch, ...]) -> bool:
        (name, local), (_, whole) = call, expected
        patched = any(_inside(pattern_of(name), module) for module, _ in patches)
        return _divides_heads(local, whole, self.degree, patched)


def _divides_heads(local: tuple[int, ...], whole: tuple[int, ...], degree: int, must: bool) -> bool:
    """Whether scores or queries are divided before their last two dims (rows of a router in any but the last), or whole."""
    kept = 2 if len(whole) > 2 else 1
    shares = (degree,) if must else (1, degree)
    return local[-kept:] == whole[-kept:] and any(prod(local) * share == prod(whole) for share in shares)


def _inside(name: str, outer: str) -> bool:
    return name == outer or name.startswith(outer + ".")


def _is_better(result: _Attempt, before: _Attempt) -> bool:
    return result.passed or 0 < before.progress < result.progress


def _around(model: nn.Module, failed: str) -> Iterator[str]:
    """The module that failed and then those around it."""
    while failed:
        yield failed
        failed = failed.rpartition(".")[0]


def _candidates(model: nn.Module, around: list[str], degree: int, taken: tuple[Patch, ...]) -> Iterator[Patch]:
    """Counts of modules that the degree divides."""
    for name in around:
        for path in counts(model.get_submodule(name), degree):
            if (pattern_of(name), path) not in taken:
                yield pattern_of(name), path


class _Scores(TorchDispatchMode):
    """Notes what softmax and attention calls work on, and ends the step at one after which it shall not go on."""

    def __init__(self, trail: _Trail, goes_on: Callable[[int, Call], bool]) -> None:
        super().__init__()
        self.trail, self.goes_on = trail, goes_on
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() in ("aten::_softmax", "aten::_safe_softmax", "autopar::attention"):
            call = (self.trail.inside[-1] if self.trail.inside else "", tuple(args[0].shape))
            self.calls.append(call)
            if not self.goes_on(len(self.calls) - 1, call):
                raise CaptureError("this call is not divided by heads")
        return func(*args, **(kwargs or {}))


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


@contextmanager
def _patched(model: nn.Module, patches: tuple[Patch, ...], degree: int) -> Iterator[None]:
    with ExitStack() as stack:
        for pattern, path in patches:
            for module in modules_of(model, pattern):
                undo = make_local(module, path, degree)
                if undo is not None:
                    stack.callback(undo)
        yield


@contextmanager
def _local(model: nn.Module, plan: Plan) -> Iterator[None]:
    """Parameters at their local shapes, hooks that change shapes at the sites."""
    with ExitStack() as stack:
        _shrink_parameters(model, plan, stack)
        for undo in install(
            model, plan.conversions, lambda tensor, conversion: _converted(tensor, conversion, plan.mesh.tp)
        ):
            stack.callback(undo)
        yield


def _shrink_parameters(model: nn.Module, plan: Plan, stack: ExitStack) -> None:
    """Parameters at their local shapes, under all their names: tied ones stay one."""
    local: dict[int, nn.Parameter] = {}
    for pattern, axes in plan.placements.items():
        for _, module, attribute in parameters_of(model, pattern):
            whole = module._parameters[attribute]
            shape = local_shape(tuple(whole.shape), axes.get("tp", "Replicate"), plan.mesh.tp)
            if shape != tuple(whole.shape):
                local[id(whole)] = nn.Parameter(whole.new_empty(shape), requires_grad=whole.requires_grad)
    for module in model.modules():
        for attribute, whole in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(whole) in local:
                stack.callback(setattr, module, attribute, whole)
                setattr(module, attribute, local[id(whole)])


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
