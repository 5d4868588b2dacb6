"""The weights that a training starts from.

whole   build_model() under the seed on every rank, which keeps its part: what fits a rank's host memory
parts   build_model() without memory for parameters; every rank then fills its part, one whole parameter at a time. A value
        depends on the seed and the module's name only, so that it is the same under every plan: the module's own
        reset_parameters(), or the model's _init_weights(module), run under a seed made of the two
files   .safetensors that someone trained before, by the names of the model's state_dict
"""

from __future__ import annotations

import copy
import hashlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from autopar.errors import DocumentError, RequestError
from autopar.runtime.rectangles import rectangles
from autopar.runtime.shard import Layout

Values = Callable[[str], torch.Tensor]
"""A parameter's name in the whole model -> its whole value."""
Initialise = Literal["auto", "whole", "parts"]
SHARE_OF_HOST = 0.5
"""Of the host's memory that all ranks' whole models may take together while they are built."""


def in_parts(choice: Initialise, parameters: int) -> bool:
    """Whether ranks shall fill only their parts: if told so, or where whole fp32 models of this host's ranks are too large."""
    if choice != "auto":
        return choice == "parts"
    world = dist.get_world_size() if dist.is_initialized() else 1
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return 4.0 * parameters * ranks > SHARE_OF_HOST * host


def build_without_memory(build: Callable[[], nn.Module]) -> nn.Module:
    """The model with its parameters on meta, each as soon as a module has it; buffers keep the values they were given."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    with patch.object(nn.Module, "register_parameter", on_meta):
        return build()


class BySeed:
    """First values by the seed and the names of modules."""

    def __init__(self, model: nn.Module, seed: int) -> None:
        self.seed = seed
        self.modules = dict(model.named_modules())
        self.init_weights = getattr(model, "_init_weights", None)
        self.last: tuple[str, dict[str, nn.Parameter | None]] = ("", {})
        self.shapes = {
            name: {key: p.shape if p is not None else None for key, p in module._parameters.items()}
            for name, module in self.modules.items()
        }

    def __call__(self, name: str) -> torch.Tensor:
        """Raises RequestError for a module that cannot be told to initialise itself."""
        path, _, attribute = name.rpartition(".")
        if self.last[0] != path or not self.last[1]:
            self.last = path, self._initialised(path)
        value = self.last[1][attribute]
        assert value is not None, "a name of a parameter"
        return value.detach()

    def _initialised(self, path: str) -> dict[str, nn.Parameter | None]:
        module = copy.copy(self.modules[path])
        module.__dict__.pop("_is_hf_initialized", None)  # transformers' mark of what it has initialised
        module._parameters = {
            key: nn.Parameter(torch.zeros(shape)) if shape is not None else None
            for key, shape in self.shapes[path].items()
        }
        digest = hashlib.sha256(f"{self.seed}/{path}".encode()).digest()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int.from_bytes(digest[:7], "big"))
            if self.init_weights is not None:
                self.init_weights(module)
            elif (reset := getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))) is not None:
                # Bound to the original: called on the copy.
                reset.__func__(module)
            else:
                raise RequestError(
                    f"module '{path}' ({type(module).__name__}) has parameters but no reset_parameters(): a model this large "
                    "is initialised in parts, module by module; give it one, or start from files (--init-from DIR)"
                )
        return module._parameters


class FromFiles:
    """Values by name out of a folder's .safetensors files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
        if not self.files:
            raise DocumentError(
                f"{folder}: holds no .safetensors file; --init-from takes the folder of a model's weights"
            )
        self.file_of = {name: path for path in self.files for name in self._open(path).keys()}  # noqa: SIM118

    @staticmethod
    def _open(path: Path) -> Any:
        try:
            from safetensors import SafetensorError, safe_open
        except ImportError:
            raise RequestError("--init-from needs the safetensors library: pip install safetensors") from None
        try:
            return safe_open(str(path), framework="pt")
        except (OSError, SafetensorError) as error:
            raise DocumentError(f"{path}: cannot be read: {error}") from None

    def __call__(self, name: str) -> torch.Tensor:
        """Raises DocumentError where no file holds it."""
        if name not in self.file_of:
            raise DocumentError(f"{self.folder}: holds no {name}: these are another model's weights")
        value: torch.Tensor = self._open(self.file_of[name]).get_tensor(name)
        return value

    def load(self, model: nn.Module) -> None:
        """Copy what has memory: every buffer that is stored, and every parameter that is not on meta; tied ones count once."""
        wanted = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if not tensor.is_meta}
        held = {id(tensor) for name, tensor in wanted.items() if name in self.file_of}
        with torch.no_grad():
            for name, tensor in wanted.items():
                if name in self.file_of or id(tensor) not in held:
                    tensor.copy_(_of_shape(self(name), tensor.shape, name))


def materialise(module: nn.Module, device: torch.device) -> None:
    """Give memory to what is on meta; tied parameters stay tied."""
    ties: dict[int, list[tuple[nn.Module, str]]] = {}
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None and parameter.is_meta:
                ties.setdefault(id(parameter), []).append((owner, name))
    if not ties:
        return
    module._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
    for (first, name), *others in ties.values():
        for owner, other in others:
            owner._parameters[other] = first._parameters[name]


def fill(parameters: Iterable[tuple[nn.Parameter, Layout]], values: Values, tp: int, place: int) -> None:
    """Put whole values' rectangles into a rank's parts."""
    with torch.no_grad():
        for parameter, layout in parameters:
            whole = _of_shape(values(layout.name), layout.shape, layout.name)
            for offsets, part in rectangles(layout, parameter, parameter.detach(), tp, place):
                slices = tuple(slice(begin, begin + size) for begin, size in zip(offsets, part.shape, strict=True))
                part.copy_(whole[slices])


def _of_shape(value: torch.Tensor, shape: torch.Size, name: str) -> torch.Tensor:
    if value.shape != shape:
        raise DocumentError(f"{name} is stored with shape {tuple(value.shape)}, the model's has {tuple(shape)}")
    return value
