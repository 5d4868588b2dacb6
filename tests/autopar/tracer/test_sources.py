"""Where models come from, and what a user reads when one cannot be captured."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from autopar.errors import CaptureError
from autopar.tracer import capture

GOOD = """
import torch
from torch import nn
SEQ_LEN = 8
def build_model():
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
def example_inputs(batch, seq):
    return (torch.zeros(batch, seq, 4),)
"""

CALLS = {
    "no build_model, near miss": (GOOD.replace("build_model", "build_modle"), ["build_model", "build_modle"]),
    "no example_inputs": (GOOD.replace("example_inputs", "inputs"), ["example_inputs(batch, seq)"]),
    "syntax": (GOOD + "\ndef broken(:\n", ["model.py:10", "SyntaxError"]),
    "import fails": (GOOD + "\nimport no_such_module\n", ["model.py:10", "no_such_module"]),
    "exits on import": (GOOD + "\nraise SystemExit(3)\n", ["model.py:10", "SystemExit"]),
    "build fails": (GOOD.replace("return nn.S", "return 1 / 0; nn.S"), ["model.py:6", "ZeroDivisionError"]),
    "build returns a class": (GOOD.replace("return nn.S", "return nn.Linear; nn.S"), ["type", "torch.nn.Module"]),
    "no parameters": (GOOD.replace("return nn.S", "return nn.ReLU(); nn.S"), ["no parameters"]),
    "example_inputs takes one argument": (GOOD.replace("(batch, seq)", "(batch)", 1), ["example_inputs", "1 positional"]),
    "too many inputs": (GOOD.replace("seq, 4),)", "seq, 4), 1)"), ["example_inputs do not fit", "3"]),
    "inputs of the wrong width": (GOOD.replace("seq, 4),)", "seq, 5),)"), ["module '0' (Linear)", "aten.addmm"]),
    "inputs of a wrong type": (GOOD.replace("(torch.zeros(batch, seq, 4),)", "7"), ["int", "args tuple"]),
    "SEQ_LEN": (GOOD.replace("SEQ_LEN = 8", "SEQ_LEN = 'long'"), ["SEQ_LEN", "'long'"]),
    "loss fails": (GOOD + "\ndef loss(output, x):\n    return output.nothing\n", ["model.py:11", "nothing"]),
    "loss is no number": (GOOD + "\ndef loss(output, x):\n    return output\n", ["loss()", "(2, 8, 4)"]),
    "value decides": (
        GOOD + "\nclass M(nn.Linear):\n    def forward(self, x):\n        n = int(super().forward(x).argmax())\n"
        "        return x[:n]\n\ndef build_model():\n    return M(4, 4)\n",
        ["model.py:12", "_local_scalar_dense", "M", "whole number"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_mistake_in_model_py_is_told_with_place_and_way_out(name, tmp_path):
    text, expected = CALLS[name]
    (tmp_path / "model.py").write_text(text)
    with pytest.raises(CaptureError) as caught:
        capture(str(tmp_path / "model.py"))
    message = str(caught.value)
    assert message.startswith(str(tmp_path / "model.py"))
    for words in expected:
        assert words in message


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "vocab_size": 100,
    "max_position_embeddings": 32,
}

CONFIGS = {
    "cut off": (json.dumps(LLAMA)[:-20], ["not complete JSON"]),
    "empty": ("", ["not complete JSON"]),
    "a list": ("[1]", ["model_type"]),
    "no model_type": (json.dumps({"hidden_size": 4}), ["model_type"]),
    "unknown model_type": (json.dumps(LLAMA | {"model_type": "lama"}), ["'lama'", "did you mean 'llama'", "model.py"]),
    "no layers": (json.dumps({k: v for k, v in LLAMA.items() if "layers" not in k}), ["num_hidden_layers"]),
    "contradictory": (json.dumps(LLAMA | {"hidden_size": 63}), ["63"]),
    "a wrong type": (json.dumps(LLAMA | {"hidden_size": "wide"}), ["hidden_size"]),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_mistake_in_config_json_is_told(name, tmp_path):
    pytest.importorskip("transformers")
    text, expected = CONFIGS[name]
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CaptureError) as caught:
        capture(str(tmp_path))
    for words in ("config.json", *expected):
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("nowhere/model.py", "no such file"),
        ("nowhere/config.json", "cannot be read"),
        ("no_such_package.module:build", "no module named no_such_package"),
        ("just_a_word", "model.py"),
        ("torch.nn:Linearr", "did you mean 'Linear'"),
        ("hf:nobody/nothing", "local cache"),
        ("hf:a/b/c", "not a name"),
    ],
)
def test_a_spec_that_names_nothing_is_told(spec, expected):
    with pytest.raises(CaptureError, match="^" + spec.split(":")[0].replace(".", r"\.")) as caught:
        capture(spec)
    assert expected in str(caught.value)


def test_a_folder_with_a_config_is_the_model_it_describes(tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    graph = capture(str(tmp_path))
    hidden, ffn = 64, 128
    block = hidden * (hidden + 2 * 32 + hidden) + 3 * hidden * ffn + 2 * hidden
    assert graph.model.parameters == 2 * 100 * hidden + 4 * block + hidden
    assert graph.captured.seq == 32
    assert [chain.count for chain in graph.chains] == [4]
    matmuls = 4 * (block - 2 * hidden) + 100 * hidden
    assert graph.flops("model", 1, 32) == 6 * matmuls * 32 + 4 * 12 * 32**2 * hidden


def test_any_function_of_a_file_or_package_may_build_the_model(tmp_path, monkeypatch):
    (tmp_path / "zoo_of_models.py").write_text(GOOD.replace("build_model", "make"))
    by_file = capture(f"{tmp_path / 'zoo_of_models.py'}:make")
    monkeypatch.syspath_prepend(tmp_path)
    by_package = capture("zoo_of_models:make")
    assert by_file.model.hash == by_package.model.hash
    assert by_file.model.parameters == 40


def test_the_hash_follows_structure_and_not_sizes_of_the_workload_or_the_files_name(tmp_path):
    texts = {
        "a": GOOD,
        "b": GOOD.replace("SEQ_LEN = 8", "SEQ_LEN = 16"),
        "c": GOOD.replace("nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)", "nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 4)"),
    }
    hashes = []
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
        hashes.append(capture(str(tmp_path / f"{name}.py")).model.hash)
    assert hashes[0] == hashes[1] != hashes[2]


def test_files_of_one_folder_import_each_other_and_not_their_namesakes(tmp_path):
    for folder, width in (("one", 4), ("two", 6)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "parts_of_it.py").write_text(f"WIDTH = {width}\n")
        text = "from parts_of_it import WIDTH\n" + GOOD.replace("4", "WIDTH")
        (tmp_path / folder / "model.py").write_text(text)
    sizes = [capture(str(tmp_path / folder / "model.py")).model.parameters for folder in ("one", "two")]
    assert sizes == [2 * (4 * 4 + 4), 2 * (6 * 6 + 6)]


def test_code_that_looks_at_masks_and_positions_is_captured():
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            positions = torch.arange(x.shape[1])
            if bool((positions.diff() == 1).all()) and mask.all():
                return self.linear(x)
            return self.linear(self.linear(x))

    def inputs(batch: int, seq: int):
        return torch.zeros(batch, seq, 4, dtype=torch.get_default_dtype()), torch.ones(batch, seq, dtype=torch.bool)

    graph = capture(Looks(), inputs, seq_len=8)
    # One product; the input needs no gradient, so backward has one more.
    assert graph.flops("model", 1, 8) == 2 * (2 * 8 * 4 * 4)


def test_a_constructor_that_reads_values_is_built_all_the_same():
    class DropPath(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)]
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Dropout(rate)) for rate in rates)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    graph = capture(
        DropPath, lambda batch, seq: (torch.zeros(batch, seq, 4, dtype=torch.get_default_dtype()),), seq_len=8
    )
    assert graph.model.parameters == 3 * 20


@pytest.mark.parametrize(("dtype", "name"), [("bf16", "bfloat16"), ("fp32", "float32"), ("fp64", "float64")])
def test_the_training_dtype_is_called_compute(dtype, name):
    graph = capture("examples/tiny_llama.py", dtype=dtype)
    assert graph.captured.dtype == name
    assert {parameter.dtype for parameter in graph.parameters} == {"compute"}


def test_an_unknown_dtype_is_told():
    with pytest.raises(CaptureError, match=r"bf17.*did you mean 'bf16'"):
        capture("examples/tiny_llama.py", dtype="bf17")


@pytest.mark.parametrize("variable", ["HF_HOME", "HF_HUB_CACHE"])
def test_a_name_is_read_from_the_local_cache(variable, tmp_path, monkeypatch):
    """Laid out as huggingface_hub documents its cache: refs/main names the snapshot."""
    pytest.importorskip("transformers")
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    hub = tmp_path / "hub" if variable == "HF_HOME" else tmp_path
    kept = hub / "models--own--tiny"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text("b" * 40)
    for commit, layers in (("c" * 40, 7), ("b" * 40, 3)):
        (kept / "snapshots" / commit).mkdir(parents=True)
        config = {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "n_layer": layers,
            "n_embd": 32,
            "n_head": 4,
        }
        (kept / "snapshots" / commit / "config.json").write_text(json.dumps(config))
    graph = capture("hf:own/tiny", seq_len=16)
    assert [chain.count for chain in graph.chains] == [3]
