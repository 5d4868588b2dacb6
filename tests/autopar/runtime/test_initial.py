"""First weights made in parts are those that one process would make, under every plan; files fill what they hold."""

from __future__ import annotations

from functools import cache

import pytest
import small_models
import torch
from parity import FACTORIES, TIMEOUT, alone, assembled, assert_equal, data, held, plan_for
from torch import nn

from autopar.errors import DocumentError, RequestError
from autopar.runtime.initial import BySeed, FromFiles, build_without_memory, in_parts
from autopar.runtime.launch import on_ranks
from autopar.runtime.step import parallelize

SEED = 3


def in_one_process(model: str) -> nn.Module:
    """The model on one process, every module initialised by its own method under its own seed."""
    values = BySeed(build_without_memory(FACTORIES[model]), SEED)
    whole = FACTORIES[model]()
    with torch.no_grad():
        for name, parameter in whole.named_parameters():
            parameter.copy_(values(name))
    return whole


@cache
def reference(model: str):
    return alone(lambda: in_one_process(model))


def in_parts_on_ranks(model: str, plan):
    """Train from parts on this rank: no parameter has memory before the plan says which part is this rank's."""
    built = build_without_memory(FACTORIES[model])
    assert all(parameter.is_meta for parameter in built.parameters())
    step = parallelize(built, plan, small_models.loss, clip_norm=0.5, initial=BySeed(built, SEED), timeout=TIMEOUT)
    losses, norms = [], []
    for batch in data():
        losses.append(step(batch))
        norms.append(step.grad_norm)
    return type(reference(model))(losses, norms, held(step))


@pytest.mark.parametrize(
    ("model", "choices"),
    [
        ("llama", {"tp": 2, "micro_batch": 12}),
        ("gpt", {"tp": 2, "micro_batch": 12}),
        ("gpt", {"dp": 2, "zero": 3, "micro_batch": 6}),
        ("gpt", {"dp": 2, "zero": 0, "micro_batch": 6}),
        ("gpt", {"pp": 2, "micro_batch": 6, "schedule": "1f1b"}),
        ("llama", {"tp": 2, "dp": 2, "zero": 3, "micro_batch": 6}),
    ],
)
def test_parts_are_those_of_one_process(model, choices):
    plan = plan_for(model, **choices)
    ranks = on_ranks(plan.mesh.devices, lambda rank: in_parts_on_ranks(model, plan), TIMEOUT)
    assert_equal(ranks, reference(model), f"{model} {choices}")


def test_weights_follow_the_modules_own_initialisation():
    torch.manual_seed(0)
    values = BySeed(nn.Sequential(nn.Linear(400, 300), nn.LayerNorm(300)), SEED)
    # torch's Linear: uniform within 1 / sqrt(inputs); its variance is a third of the square.
    assert values("0.weight").abs().max() <= 400**-0.5
    assert values("0.weight").var().item() == pytest.approx(1 / (3 * 400), rel=0.02)
    assert torch.equal(values("1.weight"), torch.ones(300))
    assert torch.equal(values("0.weight"), values("0.weight"))


def test_buffers_keep_their_values_where_parameters_have_none():
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("angles", torch.arange(4.0))

    model = build_without_memory(Positions)
    assert model.linear.weight.is_meta
    assert model.angles.tolist() == [0, 1, 2, 3]


def test_a_module_that_cannot_initialise_itself_is_named():
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

    with pytest.raises(RequestError, match=r"module 'inner' \(Bare\).*reset_parameters.*--init-from"):
        BySeed(nn.ModuleDict({"inner": Bare()}), SEED)("inner.scale")


def test_files_fill_parts_as_they_fill_a_whole_model(tmp_path):
    store = pytest.importorskip("safetensors.torch")
    model = in_one_process("llama")
    store.save_file(model.state_dict(), tmp_path / "model.safetensors")
    plan = plan_for("llama", tp=2, dp=2, zero=3, micro_batch=6)

    def work(rank: int):
        built = build_without_memory(small_models.build_model)
        values = FromFiles(tmp_path)
        step = parallelize(built, plan, small_models.loss, initial=values, timeout=TIMEOUT)
        return type(reference("llama"))([], [], held(step))

    whole = assembled(on_ranks(4, work, TIMEOUT))
    assert all(torch.equal(whole[name], parameter) for name, parameter in model.named_parameters())
    other = small_models.build_model()
    FromFiles(tmp_path).load(other)
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), model.parameters(), strict=True))


def test_files_of_another_model_are_refused(tmp_path):
    store = pytest.importorskip("safetensors.torch")
    store.save_file({"weight": torch.zeros(2, 3)}, tmp_path / "model.safetensors")
    with pytest.raises(DocumentError, match=r"shape \(2, 3\), the model's has \(3, 2\)"):
        FromFiles(tmp_path).load(nn.Linear(2, 3, bias=False))
    with pytest.raises(DocumentError, match="holds no 0.weight"):
        FromFiles(tmp_path).load(nn.Sequential(nn.Linear(2, 3)))
    (tmp_path / "model.safetensors").write_bytes(b"cut off")
    with pytest.raises(DocumentError, match="cannot be read"):
        FromFiles(tmp_path)


def test_models_beyond_the_hosts_memory_are_built_in_parts(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert in_parts("auto", 10**13)
    assert not in_parts("auto", 10**6)
    assert in_parts("parts", 10**6)
    assert not in_parts("whole", 10**13)
