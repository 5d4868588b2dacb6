"""The orders equal what torch.distributed.pipelining executes."""

from __future__ import annotations

from unittest import mock

import pytest

from autopar.errors import RequestError
from autopar.simulator.schedules import Action, in_flight, orders

SIZES = [(1, 1), (1, 4), (2, 2), (2, 7), (3, 3), (4, 4), (4, 9), (5, 16), (8, 8), (8, 32), (16, 40)]


def executed_by_torch(schedule_class, pp, rank, m):
    """What a torch schedule of one stage per rank calls on its stage, in order."""
    from torch.distributed.pipelining import schedules

    stage = mock.MagicMock(stage_index=rank, num_stages=pp, is_last=rank == pp - 1, has_backward=True)
    for name in ("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops"):
        getattr(stage, name).return_value = []
    called = []
    stage.forward_one_chunk.side_effect = lambda i, *a, **k: called.append(Action(False, 0, i))
    stage.backward_one_chunk.side_effect = lambda i, *a, **k: called.append(Action(True, 0, i))
    schedule = getattr(schedules, schedule_class)(stage, m)
    schedule._initialize_stage = mock.Mock()
    schedule._step_microbatches([()] * m, [{}] * m)
    return tuple(called)


@pytest.mark.parametrize(("pp", "m"), SIZES)
@pytest.mark.parametrize(("name", "schedule_class"), [("gpipe", "ScheduleGPipe"), ("1f1b", "Schedule1F1B")])
def test_one_chunk_schedules_run_what_torch_runs(name, schedule_class, pp, m):
    pytest.importorskip("torch")
    for rank, order in enumerate(orders(name, pp, m)):
        assert order == executed_by_torch(schedule_class, pp, rank, m)


def is_backward(action):
    from torch.distributed.pipelining.schedules import _ComputationType

    return action.computation_type == _ComputationType.FULL_BACKWARD


@pytest.mark.parametrize(
    ("pp", "m", "v"),
    [(1, 4, 2), (2, 2, 2), (2, 4, 3), (4, 3, 2), (4, 8, 2), (4, 10, 3), (4, 16, 4), (3, 9, 5), (8, 32, 2), (8, 8, 6)],
)
def test_interleaved_runs_torchs_pipeline_order(pp, m, v):
    pytest.importorskip("torch")
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    for ours, theirs in zip(
        orders("interleaved", pp, m, v), get_schedule_ops("Interleaved1F1B", pp, m, v), strict=True
    ):
        listed = tuple(Action(is_backward(a), a.stage_index // pp, a.microbatch_index) for a in theirs if a is not None)
        assert ours == listed


@pytest.mark.parametrize(("name", "torchs"), [("gpipe", "GPipe"), ("1f1b", "1F1B")])
@pytest.mark.parametrize(("pp", "m"), [(2, 2), (3, 5), (4, 9), (8, 32)])
def test_one_chunk_schedules_are_torchs_pipeline_order(name, torchs, pp, m):
    """torch 2.13 lists the last 1F1B rank's forwards one too high, yet runs them from 0: kinds only there."""
    pytest.importorskip("torch")
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    for rank, (ours, theirs) in enumerate(zip(orders(name, pp, m), get_schedule_ops(torchs, pp, m), strict=True)):
        listed = [
            (is_backward(a), a.microbatch_index) for a in theirs if a is not None and a.microbatch_index is not None
        ]
        if name == "1f1b" and rank == pp - 1:
            assert [action.backward for action in ours] == [backward for backward, _ in listed]
        else:
            assert [(action.backward, action.micro_batch) for action in ours] == listed


@pytest.mark.parametrize(("pp", "m"), SIZES)
def test_1f1b_keeps_at_most_p_minus_i_micro_batches(pp, m):
    """Narayanan et al. 2021, arXiv 2104.04473, section 2.2.1."""
    assert [in_flight(order)[0] for order in orders("1f1b", pp, m)] == [min(m, pp - i) for i in range(pp)]


@pytest.mark.parametrize(("pp", "m"), SIZES)
def test_gpipe_keeps_every_micro_batch(pp, m):
    assert [in_flight(order)[0] for order in orders("gpipe", pp, m)] == [m] * pp


@pytest.mark.parametrize(("pp", "v"), [(2, 2), (4, 2), (4, 4), (8, 3)])
def test_interleaving_keeps_one_plus_p_minus_1_over_pv_of_1f1bs_first_stage(pp, v):
    """Korthikanti et al. 2022, arXiv 2205.05198: L (1 + (p - 1) / (p v)) layers' activations on the first stage."""
    order = orders("interleaved", pp, 8 * pp, v)[0]
    now, most = 0, 0
    for action in order:
        now += -1 if action.backward else 1
        most = max(most, now)
    assert most / v == pytest.approx(pp * (1 + (pp - 1) / (pp * v)))


@pytest.mark.parametrize(("name", "pp", "m", "v"), [("gpipe", 3, 4, 1), ("1f1b", 4, 6, 1), ("interleaved", 4, 8, 3)])
def test_every_micro_batch_goes_forward_and_back_once_through_every_chunk(name, pp, m, v):
    for order in orders(name, pp, m, v):
        assert sorted(order) == sorted(Action(b, c, i) for b in (False, True) for c in range(v) for i in range(m))


def test_a_schedule_of_one_chunk_refuses_several():
    with pytest.raises(RequestError, match="1f1b runs 1 chunk per rank, but virtual_stages is 2"):
        orders("1f1b", 4, 8, 2)


def test_interleaving_shows_the_division_that_fails():
    with pytest.raises(RequestError, match=r"micro_batches\(11\) // pp\(4\)\) = 2 rounds, but 11"):
        orders("interleaved", 4, 11, 2)
