"""Cross entropy over a divided vocabulary against torch's; losses with a global denominator."""

from __future__ import annotations

import pytest
import small_models
import torch
import torch.distributed as dist
import torch.nn.functional as F
from parity import TIMEOUT, plan_for

from autopar.runtime.launch import on_ranks
from autopar.runtime.loss import divided_cross_entropy
from autopar.runtime.step import parallelize

CASES = [
    {},
    {"reduction": "sum"},
    {"reduction": "none"},
    {"ignore_index": 3},
    {"label_smoothing": 0.1},
    {"ignore_index": 3, "label_smoothing": 0.2, "reduction": "none"},
]


def test_cross_entropy_of_divided_logits_is_torchs_with_its_gradient():
    torch.manual_seed(0)
    logits, target = torch.randn(6, 8, 5, dtype=torch.float64) * 30, torch.randint(0, 8, (6, 5))
    target[0, 0] = 3

    def work(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        found = []
        for case in CASES:
            part = logits[:, rank * 4 : rank * 4 + 4].clone().requires_grad_()
            value = divided_cross_entropy(dist.group.WORLD, part, target, **case)
            value.square().sum().backward()
            found.append((value.detach(), part.grad))
        return found

    first, second = on_ranks(2, work, TIMEOUT)
    for number, case in enumerate(CASES):
        whole = logits.clone().requires_grad_()
        value = F.cross_entropy(whole, target, **case)
        value.square().sum().backward()
        assert torch.allclose(first[number][0], value, atol=1e-12), case
        assert torch.allclose(torch.cat([first[number][1], second[number][1]], dim=1), whole.grad, atol=1e-12), case


def summed(output, tokens, labels):
    """Only even labels count: their number differs from part to part."""
    counts = labels.flatten() % 2 == 0
    losses = F.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="none")
    return (losses * counts).sum(), counts.sum()


def test_totals_and_counts_make_one_denominator_over_ranks_and_micro_batches():
    batch = next(iter(small_models.batches(24, small_models.SEQ_LEN, 5)))
    model = small_models.build_model()
    total, count = summed(model(*batch), *batch)
    (total / count).backward()
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
    for choices in ({"dp": 2, "zero": 2, "micro_batch": 4}, {"pp": 2, "micro_batch": 6}):
        plan = plan_for("llama", **choices)

        def work(rank: int, plan=plan) -> tuple[float, float]:
            step = parallelize(small_models.build_model(), plan, summed, timeout=TIMEOUT)
            return step(batch), step.grad_norm

        for loss, gradient in on_ranks(2, work, TIMEOUT):
            assert loss == pytest.approx((total / count).item(), abs=1e-12)
            assert gradient == pytest.approx(norm.item(), abs=1e-12)
