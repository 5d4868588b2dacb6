"""The weights a training starts from: those of build_model() under the seed, or files that someone trained before."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from autopar.errors import DocumentError, RequestError


def load_weights(model: nn.Module, folder: Path) -> None:
    """Copy every parameter and stored buffer of a whole model from a folder's .safetensors files, by name.

    Raises DocumentError where the folder holds none, or they are another model's.
    """
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    if not files:
        raise DocumentError(f"{folder}: holds no .safetensors file; --init-from takes the folder of a model's weights")
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise RequestError("--init-from needs the safetensors library: pip install safetensors") from None
    wanted = model.state_dict(keep_vars=True)
    left = {id(tensor): name for name, tensor in wanted.items()}  # tied names count as one
    with torch.no_grad():
        for path in files:
            try:
                with safe_open(str(path), framework="pt") as stored:
                    for name in stored.keys():  # noqa: SIM118  (no mapping)
                        if name in wanted:
                            _copy(wanted[name], stored.get_tensor(name), name, path)
                            left.pop(id(wanted[name]), None)
            except (OSError, SafetensorError) as error:
                raise DocumentError(f"{path}: cannot be read: {error}") from None
    if left:
        names = sorted(left.values())
        raise DocumentError(f"{folder}: holds no {names[0]} ({len(names)} missing): these are another model's weights")


def _copy(into: torch.Tensor, value: torch.Tensor, name: str, path: Path) -> None:
    if into.shape != value.shape:
        raise DocumentError(f"{path}: {name} has shape {tuple(value.shape)}, the model's has {tuple(into.shape)}")
    into.copy_(value)
