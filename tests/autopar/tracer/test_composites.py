"""Composites: what the named collectives add to a shard's own work gives the undivided result.

Vocabulary-parallel loss and embedding as in Megatron-LM (Shoeybi et al., arXiv 1909.08053, section 3); keys and values
gathered as in Llama 3 (arXiv 2407.21783, section 3.3.2); heads exchanged for positions as in Ulysses (arXiv 2309.14509).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from autopar.documents.graph import Composite
from autopar.tracer.indices import analyse, local_dims
from tests.shards import attention, attention_backward, recorded, scores_of

SHARDS = 2


@pytest.fixture(autouse=True)
def exact():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)


def composites(step: Callable[[], torch.Tensor], operator: str) -> dict[str, Composite]:
    """Composites that the first operator of that name offers."""
    run = recorded(step)
    found = analyse(run.recording)
    number = next(step.record.id for step in run.steps if step.record.name.startswith(operator))
    ids = {tensor: tensor for tensor in run.recording.tensors}
    return {one.name: one for local in local_dims(found, number, ids) for one in local.composites}


def kinds(composite: Composite) -> list[tuple[str, str]]:
    return [(phase, kind) for phase, kind, _ in composite.collectives]


def test_rows_of_an_embedding_are_looked_up_where_they_are_and_summed():
    table, index = torch.randn(12, 4), torch.randint(0, 12, (5, 3))
    rows = len(table) // SHARDS
    total = torch.zeros(5, 3, 4)
    for shard in range(SHARDS):
        own = (index >= shard * rows) & (index < (shard + 1) * rows)
        looked_up = F.embedding((index - shard * rows) * own, table[shard * rows : (shard + 1) * rows])
        total += looked_up * own[..., None]
    assert torch.equal(total, F.embedding(index, table))
    offered = composites(lambda: F.embedding(index, table), "aten.embedding")
    assert kinds(offered["vocab_parallel"]) == [("forward", "all_reduce")]


def test_a_loss_over_divided_classes_needs_three_reductions_of_a_rows_size():
    scores, target = torch.randn(5, 12), torch.randint(0, 12, (5,))
    parts = scores.chunk(SHARDS, 1)
    largest = torch.stack([part.amax(1) for part in parts]).amax(0)
    normaliser = sum((part - largest[:, None]).exp().sum(1) for part in parts)
    picked = torch.zeros(5)
    for shard, part in enumerate(parts):
        own = (target >= shard * 6) & (target < (shard + 1) * 6)
        picked += part.gather(1, ((target - shard * 6) * own)[:, None])[:, 0] * own
    loss = (largest + normaliser.log() - picked).mean()
    assert torch.allclose(loss, F.cross_entropy(scores, target))
    softmax = composites(lambda: F.cross_entropy(scores, target), "aten._log_softmax")["vocab_parallel"]
    pick = composites(lambda: F.cross_entropy(scores, target), "aten.nll_loss_forward")["vocab_parallel"]
    # Maximum, sum of exponentials, and the target's score.
    assert kinds(softmax) + kinds(pick) == [("forward", "all_reduce")] * 3


def test_backward_of_a_divided_softmax_needs_one_reduction():
    grad, output = torch.randn(5, 12), torch.randn(5, 12).softmax(1)
    pairs = list(zip(grad.chunk(SHARDS, 1), output.chunk(SHARDS, 1), strict=True))
    row = sum((g * o).sum(1, keepdim=True) for g, o in pairs)
    whole = torch.ops.aten._softmax_backward_data(grad, output, 1, torch.float64)
    assert torch.allclose(torch.cat([o * (g - row) for g, o in pairs], 1), whole)
    offered = composites(lambda: torch.ops.aten._softmax_backward_data(grad, output, 1, torch.float64), "aten._softmax")
    assert kinds(offered["vocab_parallel"]) == [("backward", "all_reduce")]


def test_divided_queries_need_all_keys_and_values():
    q, k, v = (torch.randn(2, 4, 6, 3) for _ in range(3))
    whole, _ = attention(q, k, v, None, True)
    future = torch.ones(6, 6, dtype=torch.bool).triu(1)
    parts = [
        scores_of(part, k, ~mask, False).softmax(-1) @ v
        for part, mask in zip(q.chunk(SHARDS, 2), future.chunk(SHARDS, 0), strict=True)
    ]
    assert torch.allclose(torch.cat(parts, 2), whole)
    offered = composites(lambda: attend(q, k, v), "autopar.attention.")
    assert kinds(offered["all_gather_kv"]) == [("forward", "all_gather")] * 2


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    inputs = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
    return F.scaled_dot_product_attention(*inputs, is_causal=True)


def test_divided_queries_leave_each_key_a_share_of_its_gradient():
    q, k, v, grad = (torch.randn(2, 4, 6, 3) for _ in range(4))
    o, lse = attention(q, k, v, None, True)
    _, dk, dv = attention_backward(grad, q, k, v, o, lse, None, False, True)
    future = torch.ones(6, 6, dtype=torch.bool).triu(1)
    pieces = zip(*(t.chunk(SHARDS, 2) for t in (grad, q, o, lse)), future.chunk(SHARDS, 0), strict=True)
    shares = [attention_backward(g, part, k, v, out, sums, ~mask, False, False) for g, part, out, sums, mask in pieces]
    assert torch.allclose(sum(share[1] for share in shares), dk)
    assert torch.allclose(sum(share[2] for share in shares), dv)
    offered = composites(lambda: attend(q, k, v), "autopar.attention_backward")["all_gather_kv"]
    assert kinds(offered) == [("backward", "all_gather")] * 2 + [("backward", "reduce_scatter")] * 2


def test_heads_exchanged_for_positions_move_queries_keys_values_and_the_result():
    q, k, v = (torch.randn(2, 4, 6, 3) for _ in range(3))
    by_heads = [
        attention(*parts, None, True)[0] for parts in zip(*(t.chunk(SHARDS, 1) for t in (q, k, v)), strict=True)
    ]
    assert torch.allclose(torch.cat(by_heads, 1), attention(q, k, v, None, True)[0])
    for operator, phase in (("autopar.attention.", "forward"), ("autopar.attention_backward", "backward")):
        assert kinds(composites(lambda: attend(q, k, v), operator)["ulysses"]) == [(phase, "all_to_all")] * 4
