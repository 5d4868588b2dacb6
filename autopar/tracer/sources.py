"""Where a model comes from: model.py, model.py:factory, package.module:factory, a Hugging Face config.json or its folder.

Every source gives a `Source`: how to build the model, how to make a batch, and the loss of its output. Only the user's
own file is executed.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from autopar.errors import CaptureError
from hardware_profiles.schema import did_you_mean

LONGEST_DEFAULT = 8192

NOT_A_MODEL = (
    "not a model; give model.py, model.py:factory, package.module:factory, a Hugging Face config.json or its folder, or "
    "a saved graph.json"
)

LossFunction = Callable[..., Any]


@dataclass(frozen=True)
class Source:
    """A model's parts as a user gave them."""

    spec: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int, int], Any]
    """(batch, seq) -> args tuple, kwargs dict, or (args, kwargs)."""
    loss: LossFunction | None
    seq_len: int
    assumed_seq_len: bool = False
    """Nothing said how long sequences are."""
    build_optimizer: Callable[..., Any] | None = None
    """Parameters -> torch optimizer; training alone asks for it, and for `batches`."""
    batches: Callable[[int, int, int], Iterator[Any]] | None = None
    """(batch, seq, seed) -> global batches, each what `inputs` returns."""

    def batch(self, batch: int, seq: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments of one forward; raises CaptureError when the function does not take (batch, seq)."""
        with user_code(self.spec, "example_inputs(batch, seq)"):
            made = self.inputs(batch, seq)
        return as_arguments(made, self.spec)

    def loss_of(self, output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """The scalar that is differentiated: the user's loss, the output's own, or the mean of its float tensors."""
        if self.loss is not None:
            with user_code(self.spec, "loss(output, *inputs)"):
                value = self.loss(output, *args, **kwargs)
            value = value[0] if isinstance(value, tuple) and value else value
            return self._number(value, "loss() returned")
        own = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
        if own is not None:
            return self._number(own, "output.loss is")
        floats = [
            leaf for leaf in tree_leaves(_plain(output)) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
        ]
        if not floats:
            raise CaptureError(
                f"{self.spec}: forward returned {_kind(output)} without a float tensor: define loss(output, *inputs)"
            )
        return self._number(torch.stack([leaf.float().mean() for leaf in floats]).sum(), "forward returned")

    def _number(self, value: Any, said: str) -> torch.Tensor:
        """The loss, if it is one number that training can lower."""
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            raise CaptureError(f"{self.spec}: {said} {_kind(value)}, expected one number as a tensor")
        if not value.requires_grad:
            raise CaptureError(
                f"{self.spec}: {said} a {value.dtype} that no trainable parameter has a gradient for: parameters may be "
                "frozen, or detach(), no_grad(), .item() or argmax() cuts the loss off"
            )
        return value.reshape(()) if value.dim() else value


def open_source(spec: Any, example_inputs: Any = None, seq_len: int | None = None) -> Source:
    """The source a spec names; a module or factory comes with `example_inputs`. Raises CaptureError."""
    if isinstance(spec, nn.Module):
        module = spec
        return _with_inputs(type(spec).__name__, lambda: meta_copy(module), example_inputs, seq_len)
    if callable(spec):
        return _with_inputs(getattr(spec, "__name__", "factory"), spec, example_inputs, seq_len)
    text = str(spec)
    path = Path(text)
    if not text or not _may_be_path(path):
        raise CaptureError(f"{text[:60]!r}: {NOT_A_MODEL}")
    if path.is_dir() and not (path / "config.json").is_file():
        raise CaptureError(f"{path}: a folder without a config.json: {NOT_A_MODEL}")
    if path.is_dir() or path.suffix == ".json":
        from autopar.tracer.hugging_face import open_config

        return open_config(path / "config.json" if path.is_dir() else path, seq_len)
    if text.startswith("hf:"):
        from autopar.tracer.hugging_face import open_cached

        return open_cached(text, seq_len)
    return _from_module(text, seq_len)


def _may_be_path(path: Path) -> bool:
    """Whether the system can look for it at all: a name may be too long or hold a zero byte."""
    try:
        path.exists()
    except (OSError, ValueError):
        return False
    return True


def meta_copy(model: nn.Module) -> nn.Module:
    """A copy of a model on meta, the model itself untouched; fp32 tensors take the default dtype of the moment."""
    known: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        dtype = torch.get_default_dtype() if tensor.dtype is torch.float32 else tensor.dtype
        empty = torch.empty_like(tensor, device="meta", dtype=dtype)
        known[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    return copy.deepcopy(model, known)


def _with_inputs(name: str, build: Callable[[], nn.Module], example: Any, seq_len: int | None) -> Source:
    if example is None:
        raise CaptureError(f"{name}: a module needs example_inputs too: a function (batch, seq) -> inputs")
    if callable(example):
        return Source(name, build, example, None, seq_len or LONGEST_DEFAULT)
    tensors = [leaf for leaf in tree_leaves(example) if isinstance(leaf, torch.Tensor) and leaf.dim()]
    if not tensors:
        raise CaptureError(
            f"{name}: example_inputs hold no tensor with a batch dim; give a function (batch, seq) -> inputs"
        )
    batch, *rest = tensors[0].shape
    seq = rest[0] if rest else 1
    return Source(name, build, lambda b, s: _resized(example, (batch, b), (seq, s)), None, seq_len or seq)


def _resized(example: Any, batch: tuple[int, int], seq: tuple[int, int]) -> Any:
    """The example's tensors at another batch (first dim) and sequence (second dim), each (as given, wanted)."""

    def resize(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.dim():
            return leaf
        shape = list(leaf.shape)
        for dim, (given, wanted) in enumerate((batch, seq)[: len(shape)]):
            shape[dim] = wanted if shape[dim] == given else shape[dim]
        return torch.zeros(shape, dtype=leaf.dtype)

    return tree_map(resize, example)


def _from_module(spec: str, seq_len: int | None) -> Source:
    place, _, factory = spec.partition(":")
    module = _load_file(Path(place)) if place.endswith(".py") else _import(place, spec)
    name = factory or "build_model"
    build = getattr(module, name, None)
    if build is None:
        defined = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise CaptureError(
            f"{place} defines no {name}(){did_you_mean(name, defined)}; it needs `def build_model() -> torch.nn.Module` "
            "and `def example_inputs(batch, seq)`"
        )
    inputs = getattr(module, "example_inputs", None)
    if inputs is None:
        raise CaptureError(
            f"{place} defines no example_inputs(batch, seq): capture needs to know what a batch looks like"
        )
    own = getattr(module, "SEQ_LEN", LONGEST_DEFAULT)
    if not isinstance(own, int) or isinstance(own, bool) or own < 1:
        raise CaptureError(f"{place}: SEQ_LEN is {own!r}, expected a whole number of tokens above 0")
    assumed = seq_len is None and not hasattr(module, "SEQ_LEN")
    optional = {name: getattr(module, name, None) for name in ("loss", "build_optimizer", "batches")}
    return Source(spec, build, inputs, seq_len=seq_len or own, assumed_seq_len=assumed, **optional)


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        near = did_you_mean(
            path.name, [other.name for other in path.parent.glob("*.py")] if path.parent.is_dir() else []
        )
        raise CaptureError(f"{path}: no such file{near}")
    name = f"autopar_model_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise CaptureError(f"{path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    folder = str(path.resolve().parent)
    _forget_namesakes(path.resolve().parent)
    sys.path.insert(0, folder)
    sys.modules[name] = module
    try:
        with user_code(str(path), "the file"):
            spec.loader.exec_module(module)
    finally:
        sys.path.remove(folder)
    return module


_FOLDERS: set[Path] = set()
"""Folders that model files were loaded from."""


def _forget_namesakes(folder: Path) -> None:
    """A sibling of an earlier model file must not answer for one of the same name beside this file."""
    for sibling in folder.glob("*.py"):
        origin = getattr(sys.modules.get(sibling.stem), "__file__", None)
        if origin is not None and Path(origin).parent in _FOLDERS - {folder}:
            del sys.modules[sibling.stem]
    _FOLDERS.add(folder)


def _import(name: str, spec: str) -> ModuleType:
    if ":" not in spec:
        raise CaptureError(f"{spec}: {NOT_A_MODEL}")
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        found = None
    if found is None:
        raise CaptureError(f"{spec}: no module named {name} can be imported from here")
    with user_code(spec, f"importing {name}"):
        return importlib.import_module(name)


class user_code:  # noqa: N801  (reads as a statement)
    """Turns whatever the user's code raises into a CaptureError that names the line and what was being done."""

    def __init__(self, spec: str, doing: str, way_out: str = "") -> None:
        self.spec, self.doing, self.way_out = spec, doing, way_out

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None or isinstance(error, CaptureError) or not isinstance(error, Exception | SystemExit):
            return
        line = source_line(error)
        text = " ".join(str(error).split())[:300]
        raise CaptureError(
            f"{self.spec}: {self.doing} failed{line}: {type(error).__name__}: {text}{self.way_out}"
        ) from None


def source_line(error: BaseException) -> str:
    """`` at file:line`` of the innermost frame outside torch and this package."""
    if isinstance(error, SyntaxError):
        return f" at {error.filename}:{error.lineno}" if error.filename else ""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not _is_machinery(frame.filename)]
    return f" at {own[-1].filename}:{own[-1].lineno} (`{own[-1].line}`)" if own else ""


def _is_machinery(filename: str) -> bool:
    return any(
        part in filename
        for part in ("/torch/", "autopar/tracer/", "autopar/runtime/", "autopar/api.py", "autopar/cli/", "<frozen")
    )


def as_arguments(made: Any, spec: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """example_inputs' three forms as (args, kwargs)."""
    if isinstance(made, dict):
        return (), made
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], tuple | list) and isinstance(made[1], dict):
        return tuple(made[0]), made[1]
    if isinstance(made, tuple | list):
        return tuple(made), {}
    if isinstance(made, torch.Tensor):
        return (made,), {}
    raise CaptureError(
        f"{spec}: example_inputs returned {_kind(made)}, expected an args tuple, a kwargs dict, or (args, kwargs)"
    )


def _plain(output: Any) -> Any:
    return dict(output) if isinstance(output, dict) else output


def _kind(value: Any) -> str:
    return (
        f"{type(value).__name__} of shape {tuple(value.shape)}"
        if isinstance(value, torch.Tensor)
        else type(value).__name__
    )
