"""The indices of whole blocks, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.tracer.indices import Analysis, analyse, local_dims
from tests.models import GptLayer
from tests.operators import leaf
from tests.shards import Run, divide_everything, recorded

BATCH, SEQ, HEADS, GROUPS, HEAD_DIM, FFN, VOCABULARY = 2, 6, 4, 2, 6, 36, 60


@pytest.fixture(autouse=True)
def exact() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


class LlamaLayer(nn.Module):
    """RMSNorm with an upcast, rotary positions, grouped queries, SwiGLU; a fused projection of q, k and v, cut by slices."""

    def __init__(self, rotary: str, attention: str, hidden: int = HEADS * HEAD_DIM) -> None:
        super().__init__()
        self.rotary, self.attention, self.head_dim = rotary, attention, hidden // HEADS
        kv = GROUPS * self.head_dim
        self.cuts = [hidden, hidden + kv, hidden + 2 * kv]
        self.qkv = nn.Linear(hidden, hidden + 2 * kv, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.gate_up, self.down = nn.Linear(hidden, 2 * FFN, bias=False), nn.Linear(FFN, hidden, bias=False)
        self.scale = nn.Parameter(torch.ones(hidden))

    def norm(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return self.scale * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        positions, half = torch.arange(x.shape[2]), self.head_dim // 2
        angles = torch.outer(positions, 100.0 ** (-torch.arange(half) / half))
        if self.rotary == "complex":
            turned = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.polar(torch.ones_like(angles), angles)
            return torch.view_as_real(turned).flatten(3)
        angles = torch.cat((angles, angles), -1)
        return x * angles.cos() + torch.cat((-x[..., half:], x[..., :half]), -1) * angles.sin()

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if self.attention == "enable_gqa":
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        repeat = HEADS // GROUPS
        k, v = (t[:, :, None].expand(-1, -1, repeat, -1, -1).flatten(1, 2) for t in (k, v))
        if self.attention == "expand":
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        future = torch.full((q.shape[2], q.shape[2]), -1e9).triu(1)
        return (q @ k.transpose(2, 3) / self.head_dim**0.5 + future).softmax(-1) @ v

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, end = self.cuts
        fused = self.qkv(self.norm(x))
        parts = fused[..., :first], fused[..., first:second], fused[..., second:end]
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts)
        x = x + self.out(self.attend(self.rotate(q), self.rotate(k), v).transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class TiedModel(nn.Module):
    """Embedding, learned positions, one layer, a head tied to the embedding, a loss of shifted labels."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        hidden = HEADS * HEAD_DIM
        self.reduction = reduction
        self.tokens, self.positions = nn.Embedding(VOCABULARY, hidden), nn.Embedding(SEQ, hidden)
        self.layer, self.norm = GptLayer(hidden, HEADS, True), nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        scores = self.head(self.norm(self.layer(self.tokens(ids) + self.positions(torch.arange(ids.shape[1])))))
        if self.reduction == "gather":
            return -scores.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None]).mean()
        labels = F.pad(ids[:, 1:], (0, 1), value=-100)
        return F.cross_entropy(scores.flatten(0, 1), labels.flatten())


def run_of(model: nn.Module, x: torch.Tensor) -> Run:
    return recorded(lambda: model(x), list(model.parameters()))


BLOCKS: dict[str, Callable[[], Run]] = {
    **{
        f"llama, {rotary} rotation, {attention} attention": lambda r=rotary, a=attention: run_of(
            LlamaLayer(r, a), leaf(BATCH, SEQ, HEADS * HEAD_DIM)
        )
        for rotary, attention in (
            ("half", "enable_gqa"),
            ("complex", "enable_gqa"),
            ("half", "expand"),
            ("half", "explicit"),
        )
    },
    "gpt, explicit attention": lambda: run_of(GptLayer(24, HEADS, False), leaf(BATCH, SEQ, 24)),
    "gpt, fused attention": lambda: run_of(GptLayer(24, HEADS, True), leaf(BATCH, SEQ, 24)),
    "tied model": lambda: run_of(TiedModel("mean"), torch.randint(0, VOCABULARY, (BATCH, SEQ))),
    "tied model, gathered loss": lambda: run_of(TiedModel("gather"), torch.randint(0, VOCABULARY, (BATCH, SEQ))),
}


@pytest.fixture(scope="module", params=BLOCKS)
def block(request) -> tuple[Run, Analysis]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    run = BLOCKS[request.param]()
    torch.set_default_dtype(before)
    return run, analyse(run.recording)


def test_every_operator_of_a_block_has_a_rule(block):
    assert not block[1].without_rule


def test_every_dim_of_a_block_can_be_divided_as_its_rule_says(block):
    seen = divide_everything(*block)
    assert seen & {"mm", "addmm"}


def test_every_index_of_backward_is_one_of_forward(block):
    run, found = block
    forward, backward = (
        {
            atom
            for step in run.steps
            if step.record.phase == phase
            for tensor in (*step.record.reads, *step.record.writes)
            for dim in found.atoms_of(tensor)
            for atom in dim
        }
        for phase in ("forward", "backward")
    )
    assert backward <= forward


def structure(run: Run) -> list[list[list[int]]]:
    """Indices of every tensor, numbered in the order they are met."""
    found = analyse(run.recording)
    numbers: dict[object, int] = {}
    return [
        [[numbers.setdefault(atom, len(numbers)) for atom in dim] for dim in found.atoms_of(tensor)]
        for step in run.steps
        for tensor in (*step.record.reads, *step.record.writes)
    ]


def test_sizes_that_coincide_are_told_apart():
    alike, apart = (
        run_of(LlamaLayer("half", "enable_gqa", hidden=24), leaf(batch, seq, 24)) for batch, seq in ((6, 24), (5, 7))
    )
    # Batch equals half a head, the sequence equals the hidden size.
    assert structure(alike) == structure(apart)


def test_query_heads_are_groups_times_repeats():
    run = run_of(LlamaLayer("half", "enable_gqa"), leaf(BATCH, SEQ, HEADS * HEAD_DIM))
    found = analyse(run.recording)
    call = next(step.record for step in run.steps if step.record.name.startswith("autopar.attention."))
    q, k, _ = call.reads[:3]
    assert [node.size for node in found.atoms_of(q)[1]] == [GROUPS, HEADS // GROUPS]
    assert found.atoms_of(k)[1] == found.atoms_of(q)[1][:1]
    composites = [
        composite.name
        for local in local_dims(found, call.id, {tensor: tensor for tensor in run.recording.tensors})
        for composite in local.composites
    ]
    assert set(composites) == {"all_gather_kv", "ulysses", "replicated_kv"}


def test_a_fused_projection_is_divided_part_by_part():
    run = run_of(LlamaLayer("half", "enable_gqa"), leaf(BATCH, SEQ, HEADS * HEAD_DIM))
    found = analyse(run.recording)
    lengths = [found.lengths(parts) for parts in found.segments.values()]
    q, kv = HEADS * HEAD_DIM, GROUPS * HEAD_DIM
    assert [q, kv, kv] in lengths
    assert [FFN, FFN] in lengths


def test_an_operator_without_a_rule_is_whole_and_named():
    run = recorded(lambda: torch.cdist(leaf(4, 6), leaf(4, 6)))
    found = analyse(run.recording)
    assert "aten._cdist_forward" in found.without_rule
    ids = {tensor: tensor for tensor in run.recording.tensors}
    call = next(step.record for step in run.steps if step.record.name.startswith("aten._cdist_forward"))
    assert {local.role for local in local_dims(found, call.id, ids)} == {"whole"}


def test_both_position_dims_of_scores_hold_one_index():
    run = run_of(GptLayer(24, HEADS, False), leaf(BATCH, SEQ, 24))
    found = analyse(run.recording)
    scores = next(step.record for step in run.steps if step.record.name.startswith("aten._softmax.")).writes[0]
    queries, keys = found.atoms_of(scores)[-2:]
    assert queries == keys
    assert queries[0].size == SEQ
