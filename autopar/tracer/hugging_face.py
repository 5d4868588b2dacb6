"""Models of the transformers library from their config.json alone: no weights, no network."""

from __future__ import annotations

import inspect
import json
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar.errors import CaptureError
from autopar.tracer.sources import LONGEST_DEFAULT, Source, user_code
from hardware_profiles.schema import did_you_mean

LAYER_KEYS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")


def open_cached(spec: str, seq_len: int | None) -> Source:
    """``hf:org/name`` from the local cache only; its place is HF_HUB_CACHE or HF_HOME. Raises CaptureError."""
    name = spec.removeprefix("hf:")
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        raise CaptureError(f"{spec}: needs the transformers library: pip install 'autopar[hf]'") from None
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    cache = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    try:
        found = try_to_load_from_cache(name, "config.json", cache_dir=cache)
    except HFValidationError:
        raise CaptureError(f"{spec}: not a name; give hf:organisation/model") from None
    if not isinstance(found, str):
        raise CaptureError(f"{spec}: not in the local cache {cache}; download its config.json and give that file")
    return open_config(Path(found), seq_len)


def open_config(path: Path, seq_len: int | None) -> Source:
    """The model a config.json describes, by its `architectures`. Raises CaptureError."""
    data = _read(path)
    try:
        import transformers
    except ImportError:
        raise CaptureError(f"{path}: needs the transformers library: pip install 'autopar[hf]'") from None
    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings():
        # Notices about fields of old config files: nobody who reads a plan can act on them.
        warnings.simplefilter("ignore")
        config = _config(transformers, data, path)
        model_class = _model_class(transformers, data, config, path)

    def build() -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return model_class._from_config(config, dtype=torch.get_default_dtype())

    def inputs(batch: int, seq: int) -> dict[str, Any]:
        return _inputs(model_class, config, batch, seq)

    return Source(str(path), build, inputs, None, seq_len or min(_longest(model_class, config), LONGEST_DEFAULT))


_LENGTH_KEYS = ("max_target_positions", "max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len",
                "n_ctx")  # fmt: skip


def _longest(model_class: Any, config: Any) -> int:
    """The longest sequence a configuration allows; of an image model its patches."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    image, patch = getattr(config, "image_size", None), getattr(config, "patch_size", None)
    if (
        getattr(model_class, "main_input_name", "") == "pixel_values"
        and isinstance(image, int)
        and isinstance(patch, int)
    ):
        return (image // patch) ** 2
    return next((n for key in _LENGTH_KEYS if isinstance(n := getattr(text, key, None), int)), LONGEST_DEFAULT)


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CaptureError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise CaptureError(f"{path}: not complete JSON ({error}); download the config.json again") from None
    if not isinstance(data, dict) or "model_type" not in data:
        raise CaptureError(f"{path}: no 'model_type': neither a Hugging Face config.json nor a graph.json of autopar")
    if not isinstance(data["model_type"], str):
        raise CaptureError(f"{path}: model_type is {data['model_type']!r}, expected a name such as 'llama'")
    named = data.get("architectures")
    if named is not None and not (isinstance(named, list) and all(isinstance(name, str) for name in named)):
        raise CaptureError(f"{path}: architectures is {named!r}, expected a list such as ['LlamaForCausalLM']")
    for key in LAYER_KEYS:
        count = data.get(key)
        if count is not None and not (
            isinstance(count, int | list) and count and (isinstance(count, list) or count > 0)
        ):
            raise CaptureError(f"{path}: {key} is {count!r}, expected a whole number above 0")
    return data


def _config(transformers: Any, data: dict[str, Any], path: Path) -> Any:
    known = transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES
    name = data["model_type"]
    if name not in known:
        raise CaptureError(
            f"{path}: model_type '{name}' is not one that transformers {transformers.__version__} builds"
            f"{did_you_mean(name, known)}; write a model.py with build_model() instead"
        )
    missing = [key for key in LAYER_KEYS if key in data]
    config_class = transformers.models.auto.configuration_auto.CONFIG_MAPPING[name]
    if not missing and _takes_layers(config_class):
        raise CaptureError(f"{path}: the number of layers is missing (num_hidden_layers): the file is incomplete")
    values = {key: value for key, value in data.items() if key not in ("model_type", "torch_dtype", "dtype")}
    with user_code(str(path), "reading the configuration"):
        config = config_class(**values)
    for part in (config, getattr(config, "text_config", None), getattr(config, "decoder", None)):
        if part is not None and hasattr(part, "use_cache"):
            part.use_cache = False
    return config


def _takes_layers(config_class: Any) -> bool:
    """Whether the configuration itself, not one of its parts, counts layers."""
    return (
        not getattr(config_class, "sub_configs", {})
        and "num_hidden_layers" in inspect.signature(config_class).parameters
    )


def _model_class(transformers: Any, data: dict[str, Any], config: Any, path: Path) -> Any:
    for name in data.get("architectures") or []:
        found = getattr(transformers, name, None)
        if hasattr(found, "_from_config"):
            return found
    autos = transformers.models.auto.modeling_auto
    for mapping in ("FOR_CAUSAL_LM_", "FOR_SEQ_TO_SEQ_CAUSAL_LM_", "FOR_MASKED_LM_", "FOR_IMAGE_CLASSIFICATION_", ""):
        classes = getattr(autos, f"MODEL_{mapping}MAPPING")
        if type(config) in classes:
            return classes[type(config)]
    raise CaptureError(
        f"{path}: architectures {data.get('architectures')} are not in transformers {transformers.__version__}; write a "
        "model.py with build_model() instead"
    )


def _inputs(model_class: Any, config: Any, batch: int, seq: int) -> dict[str, Any]:
    """A batch by the forward's own signature and `main_input_name`."""
    names = inspect.signature(model_class.forward).parameters
    main = getattr(model_class, "main_input_name", "input_ids")
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    made: dict[str, Any] = {}
    vision = getattr(config, "vision_config", None)
    if main == "pixel_values" or (vision is not None and "pixel_values" in names):
        made["pixel_values"] = _images(vision or config, batch)
    elif main == "input_features":
        made[main] = torch.randn(
            batch, config.num_mel_bins, 2 * config.max_source_positions, dtype=torch.get_default_dtype()
        )
    if "input_ids" in names:
        made["input_ids"] = _tokens(config, text, batch, seq)
    if "decoder_input_ids" in names and getattr(config, "is_encoder_decoder", False):
        made["decoder_input_ids"] = torch.randint(0, text.vocab_size, (batch, seq))
    if "labels" in names:
        made["labels"] = (
            torch.randint(0, config.num_labels, (batch,))
            if "Classification" in model_class.__name__
            else torch.randint(0, text.vocab_size, (batch, seq))
        )
    if "return_loss" in names:
        made["return_loss"] = True
    return made


def _images(vision: Any, batch: int) -> torch.Tensor:
    """One image a sequence, at the size that the configuration of the tower states."""
    size = getattr(vision, "image_size", 224)
    height, width = (size, size) if isinstance(size, int) else size
    return torch.randn(batch, getattr(vision, "num_channels", 3), height, width, dtype=torch.get_default_dtype())


def _tokens(config: Any, text: Any, batch: int, seq: int) -> torch.Tensor:
    """Token ids; where a token stands for a patch of the image, as many of them come first as the image has patches."""
    stands_in = getattr(config, "image_token_id", getattr(config, "image_token_index", None))
    tokens = torch.randint(0, text.vocab_size, (batch, seq))
    vision = getattr(config, "vision_config", None)
    if not isinstance(stands_in, int) or vision is None:
        return tokens
    patches = getattr(config, "image_seq_length", 0) or (vision.image_size // vision.patch_size) ** 2
    patches = min(patches, (vision.image_size // vision.patch_size) ** 2)
    if patches >= seq:
        raise CaptureError(f"an image takes {patches} tokens, so sequences of {seq} are too short: give --seq-len")
    words = torch.where(tokens == stands_in, 0, tokens)
    return torch.cat([torch.full((batch, patches), stands_in), words[:, patches:]], dim=1)
