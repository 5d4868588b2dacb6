"""One training step on meta tensors, recorded operator by operator.

Backward attribution needs no hooks: autograd numbers its nodes, so a node's number, read while the forward operator ran,
finds that operator again when the node runs. Both readings are private names of torch, guarded by one test per release.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from autopar.errors import CaptureError
from autopar.tracer.recording import ModuleCall, OperatorRecord, Recording, Ref, TensorRecord
from autopar.tracer.routing import device_kernels, no_checkpointing
from autopar.tracer.shadow import NoValue, Shadows

Key = tuple[Any, ...]
_SAME_TENSOR = (torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.lift_fresh.default)
"""Operators whose output is their input: no record of their own."""


_GROUPED = torch.ops.aten._grouped_mm.default

MOST_OPERATORS = 100_000
"""A block is a few hundred operators, so a model that runs more than this unrolls a loop over its sequence."""


class Recorder(TorchDispatchMode):
    """Records every aten call while it is active."""

    def __init__(
        self,
        model: nn.Module,
        skipped: Sequence[str] = (),
        inputs: Any = None,
        real_inputs: Callable[[], Any] = dict,
    ) -> None:
        super().__init__()
        self.recording = Recording()
        self.shadows = Shadows(self.recording, lambda: self._pair(inputs, real_inputs()))
        self._ids: dict[Key, int] = {}
        self._alive: list[Any] = []
        self._operator_of_node: dict[int, int] = {}
        self._modules: list[str] = [""]
        self.names = _modules(model, frozenset(skipped))
        self.running = "none"
        """The operator that runs now, or ran last."""
        self._saved_storages: set[int] = set()
        self._base_of_storage: dict[int, int] = {}
        self._kept_out: set[int] = set()
        for name, parameter in _own(self.names, "_parameters"):
            self._register(parameter).parameter = name
            self._kept_out.add(_storage(parameter))
        for name, buffer in _own(self.names, "_buffers"):
            self._register(buffer).buffer = name
            self._kept_out.add(_storage(buffer))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.running = str(func)
        node = torch._C._current_autograd_node()
        number = node._sequence_nr() if node is not None else torch.autograd._get_sequence_nr() - 1
        seen = (
            [] if str(func).startswith("aten.new_") else tree_leaves((args, kwargs))
        )  # its dtype and device alone are read
        reads = tuple(self.tensor_id(leaf) for leaf in seen if isinstance(leaf, torch.Tensor))
        given = tree_map(self._ref, (args, kwargs))
        if func is torch.ops.aten._local_scalar_dense.default:
            return self._scalar(args[0])
        if func is torch.ops.aten._to_copy.default and _leaves_meta(kwargs):
            return func(self.shadows.value(reads[0]), **kwargs)
        try:
            output = _grouped(*args, **kwargs) if func is _GROUPED else func(*args, **kwargs)
        except NotImplementedError as error:
            output = self._without_kernel(func, given, error)
        if func in _SAME_TENSOR or _is_same_view(func, args, output):
            return output
        self._write(func, node is not None, number, given, reads, output)
        return output

    def _write(self, func: Any, backward: bool, number: int, given: Any, reads: tuple[int, ...], output: Any) -> None:
        forward = self._operator_of_node.get(number) if backward else None
        module = self.recording.operators[forward].module if forward is not None else self._modules[-1]
        identity = len(self.recording.operators)
        if identity >= MOST_OPERATORS:
            raise CaptureError(
                f"in module '{module}': more than {MOST_OPERATORS:,} operators: a loop over the sequence runs step by step; "
                "capture at a shorter sequence (--seq-len 256), or with a kernel that takes the whole sequence"
            )
        outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        writes = tuple(self._register(tensor).id for tensor in outputs)
        phase: Literal["forward", "backward"] = "backward" if backward else "forward"
        args, kwargs = given
        record = OperatorRecord(identity, str(func), phase, module, args, kwargs, reads, writes, forward)
        self.recording.operators.append(record)
        self.shadows.note(record, func)
        if not backward:
            # The first: operators without a gradient that follow see the same number.
            self._operator_of_node.setdefault(number, identity)

    def _scalar(self, tensor: torch.Tensor) -> Any:
        """What ``.item()`` and ``if tensor:`` see."""
        try:
            return self.shadows.value(self.tensor_id(tensor)).item()
        except NoValue:
            if tensor.dtype is not torch.bool and not tensor.is_floating_point():
                raise NoValue("a whole number that depends on weights decides what runs next") from None
            assumed = False if tensor.dtype is torch.bool else 0.0
            message = f"a value that depends on weights decides what runs next; {assumed} was assumed"
            self.recording.assumed.append((self._modules[-1], message))
            return assumed

    def _without_kernel(self, func: Any, given: Any, error: NotImplementedError) -> Any:
        try:
            return self.shadows.shaped(func, *given)
        except NoValue:
            raise error from None

    def tensor_id(self, tensor: torch.Tensor) -> int:
        """The record of a tensor as it is now."""
        found = self._ids.get(_key(tensor))
        return found if found is not None else self._register(tensor).id

    def _register(self, tensor: torch.Tensor) -> TensorRecord:
        record = TensorRecord(
            len(self.recording.tensors),
            tuple(tensor.shape),
            tuple(tensor.stride()),
            str(tensor.dtype).removeprefix("torch."),
            _storage(tensor),
            tensor.storage_offset(),
        )
        previous = self._ids.get(_key(tensor))
        if previous is not None:
            record.parameter = self.recording.tensors[previous].parameter
            record.buffer = self.recording.tensors[previous].buffer
        self.recording.tensors[record.id] = record
        self._base_of_storage.setdefault(record.storage, record.id)
        self._ids[_key(tensor)] = record.id
        # Alive for as long as the recording: the address of a freed storage would be used again.
        self._alive.append(tensor.untyped_storage())
        return record

    def _pair(self, inputs: Any, values: Any) -> dict[int, torch.Tensor]:
        pairs = zip(tree_leaves(inputs), tree_leaves(values), strict=True)
        return {self.tensor_id(meta): real for meta, real in pairs if isinstance(meta, torch.Tensor)}

    def _ref(self, leaf: Any) -> Any:
        return Ref(self.tensor_id(leaf)) if isinstance(leaf, torch.Tensor) else leaf

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Autograd keeps `tensor` for backward: mark the first tensor of its storage, parameters and buffers apart."""
        storage = _storage(tensor)
        if storage not in self._kept_out and storage not in self._saved_storages:
            self._saved_storages.add(storage)
            self.tensor_id(tensor)
            base = self.recording.tensors[self._base_of_storage[storage]]
            base.saved_by = (self._modules[-1], len(self.recording.operators))
        return tensor

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A module's forward begins."""
        name = self.names[module]
        self._modules.append(name)
        inputs = self._tensor_ids((args, kwargs))
        self.recording.calls.append(ModuleCall(name, inputs, (), len(self.recording.operators), -1))

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """A module's forward ends."""
        name = self._modules.pop()
        call = next(call for call in reversed(self.recording.calls) if call.module == name and call.last_operator < 0)
        call.outputs = self._tensor_ids(output)
        call.last_operator = len(self.recording.operators) - 1

    @property
    def current_module(self) -> str:
        """The innermost module whose forward has not ended."""
        return self._modules[-1]

    def note_gradients(self, model: nn.Module) -> None:
        """Which tensor ended as each parameter's gradient."""
        for parameter in model.parameters():
            gradient = self._ids.get(_key(parameter.grad)) if parameter.grad is not None else None
            if gradient is not None:
                self.recording.gradients[self.tensor_id(parameter)] = gradient

    def _tensor_ids(self, values: Any) -> tuple[int, ...]:
        return tuple(self.tensor_id(leaf) for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))


def _is_same_view(func: Any, args: Any, output: Any) -> bool:
    """Whether it is a view that shows its argument as it was: others still read the argument."""
    one_in, one_out = bool(args) and isinstance(args[0], torch.Tensor), isinstance(output, torch.Tensor)
    return one_in and one_out and not func._schema.is_mutable and _key(args[0]) == _key(output)


def _modules(model: nn.Module, skipped: frozenset[str]) -> dict[nn.Module, str]:
    """Modules by their first names, in torch's order, without those skipped and what is inside them."""
    found: dict[nn.Module, str] = {}
    waiting = [("", model)]
    while waiting:
        name, module = waiting.pop()
        if module not in found and name not in skipped:
            found[module] = name
            children = [
                (f"{name}.{child}" if name else child, inner) for child, inner in module._modules.items() if inner
            ]
            waiting += reversed(children)
    return found


def _own(names: dict[nn.Module, str], kind: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Full names and tensors of the modules themselves; a tied one under its first name."""
    seen: set[torch.Tensor] = set()
    for module, prefix in names.items():
        for name, tensor in getattr(module, kind).items():
            if tensor is not None and tensor not in seen:
                seen.add(tensor)
                yield f"{prefix}.{name}" if prefix else name, tensor


def _grouped(first: torch.Tensor, second: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """A grouped product on meta, whose kernel there takes bfloat16 alone although other devices take more."""
    out = _GROUPED(first.to(torch.bfloat16), second.to(torch.bfloat16), *args, **kwargs)
    return out.to(first.dtype)


def _leaves_meta(kwargs: Any) -> bool:
    device = kwargs.get("device")
    return device is not None and torch.device(device).type != "meta"


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _key(tensor: torch.Tensor) -> Key:
    return (_storage(tensor), tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)


@contextmanager
def recording_of(
    model: nn.Module, skipped: Sequence[str] = (), inputs: Any = None, real_inputs: Callable[[], Any] = dict
) -> Iterator[Recorder]:
    """Record everything that runs inside the block, module calls and saved tensors included.

    `skipped` are blocks that do not run; `real_inputs` gives the values of the meta `inputs`, should the model look at one.
    """
    recorder = Recorder(model, skipped, inputs, real_inputs)
    with ExitStack() as stack:
        stack.enter_context(torch.device("meta"))
        stack.enter_context(device_kernels())
        stack.enter_context(no_checkpointing())
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(recorder.pack, lambda tensor: tensor))
        for module in recorder.names:
            enter = module.register_forward_pre_hook(recorder.enter, with_kwargs=True)
            leave = module.register_forward_hook(recorder.leave)
            stack.callback(enter.remove)
            stack.callback(leave.remove)
        with recorder:
            yield recorder
        recorder.note_gradients(model)
