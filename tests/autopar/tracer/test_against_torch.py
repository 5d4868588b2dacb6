"""Captured FLOPs and saved bytes against what torch itself does on the CPU, at small sizes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from autopar.documents import Graph
from autopar.tracer import blocks, capture
from tests.models import GptLayer, Stack, hidden_states

SEQ, BATCH = 16, 3


def small_encoder() -> nn.Module:
    """The hand-written attention of the examples, at small sizes."""
    path = Path("examples/custom_attention.py")
    spec = importlib.util.spec_from_file_location("small_custom_attention", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.HIDDEN, module.HEADS, module.VOCABULARY, module.LAYERS = 32, 4, 50, 5
    return module.Encoder()


def tokens(batch: int, seq: int):
    return (torch.randint(0, 50, (batch, seq)),)


@pytest.fixture(scope="module")
def encoder() -> Graph:
    return capture(small_encoder(), tokens, seq_len=SEQ, dtype="fp32")


def run_on_cpu(model: nn.Module) -> tuple[int, int]:
    """FLOPs that torch counts and bytes that autograd keeps, parameters and buffers apart, of one real step."""
    kept: dict[int, torch.UntypedStorage] = {}
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    with FlopCounterMode(display=False) as counter:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = model(*tokens(BATCH, SEQ)).float().mean()
        loss.backward()
    return counter.get_total_flops(), sum(storage.nbytes() for storage in kept.values())


def saved_bytes(graph: Graph, batch: int, seq: int) -> float:
    sizes = graph.sizes(batch, seq)
    return sum(n * graph.class_by_name[name].saved_bytes(sizes, 4) for name, n in graph.class_counts.items())


def test_flops_equal_those_that_torch_counts(encoder):
    assert encoder.flops("model", BATCH, SEQ) == run_on_cpu(small_encoder())[0]


def test_saved_bytes_equal_those_that_autograd_keeps(encoder):
    # Captured at batch 2 and priced at batch 3; five blocks, of which two were run.
    assert saved_bytes(encoder, BATCH, SEQ) == run_on_cpu(small_encoder())[1]


def test_blocks_multiplied_equal_blocks_captured_one_by_one(encoder, monkeypatch):
    monkeypatch.setattr(blocks, "FEWEST_TO_MULTIPLY", 100)
    full = capture(small_encoder(), tokens, seq_len=SEQ, dtype="fp32")
    for which in ("model", "executed"):
        assert full.flops(which, BATCH, SEQ) == encoder.flops(which, BATCH, SEQ)
    assert full.model == encoder.model
    assert saved_bytes(full, BATCH, SEQ) == saved_bytes(encoder, BATCH, SEQ)


def test_figures_at_another_length_equal_a_capture_at_that_length(encoder):
    longer = capture(small_encoder(), tokens, seq_len=4 * SEQ, dtype="fp32")
    assert longer.flops("model", BATCH, 4 * SEQ) == encoder.flops("model", BATCH, 4 * SEQ)
    assert saved_bytes(longer, BATCH, 4 * SEQ) == saved_bytes(encoder, BATCH, 4 * SEQ)


def test_multi_head_attention_of_torch_itself_keeps_no_scores():
    def layer() -> nn.Module:
        return nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)

    graph = capture(Stack(layer, 64, 4), hidden_states(64), seq_len=32)
    block = graph.class_by_name["layers.*"]
    assert any(operator.name == "autopar.attention" for operator in block.operators)
    assert all(len(set(tensor.atoms)) == len(tensor.atoms) for tensor in block.tensors if tensor.saved)


def test_the_models_own_checkpointing_is_left_out():
    class Checkpointed(nn.Module):
        def __init__(self, reentrant: bool) -> None:
            super().__init__()
            self.layer, self.reentrant = GptLayer(64, 4, True), reentrant

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            from torch.utils.checkpoint import checkpoint

            return checkpoint(self.layer, x, use_reentrant=self.reentrant)

    plain = capture(Stack(lambda: GptLayer(64, 4, True), 64, 4), hidden_states(64), seq_len=32)
    for reentrant in (False, True):
        graph = capture(Stack(lambda r=reentrant: Checkpointed(r), 64, 4), hidden_states(64), seq_len=32)
        assert graph.flops("model", 2, 32) == plain.flops("model", 2, 32)
        assert saved_bytes(graph, 2, 32) == saved_bytes(plain, 2, 32)


def test_inputs_given_as_tensors_stand_for_any_batch_and_length(encoder):
    graph = capture(small_encoder(), (torch.zeros(2, SEQ, dtype=torch.int64),), dtype="fp32")
    assert graph.captured.seq == SEQ
    assert graph.flops("model", 5, 2 * SEQ) == encoder.flops("model", 5, 2 * SEQ)


def test_a_module_given_to_capture_is_left_as_it_was():
    model = Stack(lambda: GptLayer(64, 4, True), 64, 4)
    before = [parameter.clone() for parameter in model.parameters()]
    capture(model, hidden_states(64), seq_len=32)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.get_default_dtype() is torch.float32


def test_every_backward_operator_knows_its_forward_operator(encoder):
    # Attribution rests on private names of torch (sequence numbers of autograd nodes): this fails when they change.
    for name in encoder.class_counts:
        block = encoder.class_by_name[name]
        for operator in block.operators:
            if operator.phase == "backward" and operator.name in ("aten.mm", "aten.bmm"):
                forward = block.operator_by_id[operator.forward]
                assert forward.module == operator.module
                assert forward.name in ("aten.mm", "aten.addmm", "aten.bmm")
