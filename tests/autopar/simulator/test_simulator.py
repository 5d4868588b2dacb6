"""Step times against closed forms and an independent recurrence; parts, determinism, stragglers."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.documents.plan import PARTS, ActionCost, Collective
from autopar.documents.timeline import Timeline
from autopar.errors import RequestError
from autopar.simulator import score, simulate
from tests.plans import make_plan


def collective(axis, seconds, overlap=0.0):
    return Collective(axis=axis, kind="all_reduce", count=1, bytes=1.0, seconds=seconds, overlap=overlap)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("p", "m"), [(1, 4), (2, 2), (4, 8), (8, 8), (16, 64)])
def test_the_bubble_of_equal_stages_is_p_minus_1_over_m_plus_p_minus_1(name, p, m):
    """Narayanan et al. 2021, arXiv 2104.04473, section 2.2: (p - 1) (t_f + t_b) idle beside m (t_f + t_b) of work."""
    line = simulate(make_plan(p, m, schedule=name))
    assert line.seconds_by_part["bubble"] / line.step_seconds == pytest.approx((p - 1) / (m + p - 1))
    assert line.step_seconds == pytest.approx((m + p - 1) * 3.0)


@pytest.mark.parametrize(("p", "m", "v"), [(2, 4, 2), (4, 8, 2), (4, 16, 4), (8, 32, 3)])
def test_interleaving_divides_the_bubble_by_v(p, m, v):
    """The same paper, section 2.2.2: (p - 1) (t_f + t_b) / v."""
    line = simulate(make_plan(p, m, v, "interleaved", forward=1 / v, backward=2 / v))
    assert line.seconds_by_part["bubble"] / line.step_seconds == pytest.approx((p - 1) / (v * m + p - 1))


def gpipe_recurrence(forward, backward, m, send):
    """Start-to-end recurrence of a fill-drain pipeline, stage by stage, written without the engine."""
    p = len(forward)
    done = [[0.0] * m for _ in range(p)]
    for i in range(p):
        for k in range(m):
            before = done[i][k - 1] if k else 0.0
            come = done[i - 1][k] + send if i else 0.0
            done[i][k] = max(before, come) + forward[i]
    back = [[0.0] * m for _ in range(p)]
    for i in reversed(range(p)):
        for k in range(m):
            before = back[i][k - 1] if k else done[i][m - 1]
            come = back[i + 1][k] + send if i < p - 1 else 0.0
            back[i][k] = max(before, come) + backward[i]
    return max(row[-1] for row in back)


def one_f_one_b_recurrence(forward, backward, m, send):
    """1F1B by demand: an action's end is found from those of its inputs and of the action before it on its stage."""
    p = len(forward)
    ends = {}

    def before(i, is_backward, k):
        warm = min(m, p - i)
        if not is_backward:
            return (False, k - 1) if k < warm else (True, k - warm)
        return (False, k + warm - 1) if k + warm - 1 < m else (True, k - 1)

    def end(i, is_backward, k):
        if k < 0:
            return 0.0
        if (i, is_backward, k) not in ends:
            free = end(i, *before(i, is_backward, k))
            source = i + 1 if is_backward else i - 1
            come = end(source, is_backward, k) + send if 0 <= source < p else 0.0
            ends[i, is_backward, k] = max(free, come) + (backward if is_backward else forward)[i]
        return ends[i, is_backward, k]

    return max(end(i, True, m - 1) for i in range(p))


times = st.floats(0.1, 10.0)


@st.composite
def unequal(draw):
    p = draw(st.integers(1, 6))
    stages = st.lists(times, min_size=p, max_size=p)
    # Sends shorter than any action: a send then never waits for the one before it.
    return draw(stages), draw(stages), draw(st.integers(p, 12)), draw(st.floats(0.0, 0.09))


@settings(max_examples=60, deadline=None)
@given(unequal())
def test_unequal_stages_follow_the_recurrence(case):
    forward, backward, m, send = case
    for name, recurrence in (("gpipe", gpipe_recurrence), ("1f1b", one_f_one_b_recurrence)):
        plan = make_plan(len(forward), m, 1, name, forward, backward, send=send)
        assert score(plan) == pytest.approx(recurrence(forward, backward, m, send))


@st.composite
def any_plan(draw):
    name = draw(st.sampled_from(["gpipe", "1f1b", "interleaved"]))
    v = draw(st.integers(1, 3)) if name == "interleaved" else 1
    p = draw(st.integers(1, 4))
    m = p * draw(st.integers(1, 3))

    def action():
        axes = draw(st.lists(st.sampled_from(["tp", "cp", "ep", "etp"]), max_size=2))
        return ActionCost(
            compute_seconds=draw(times),
            recompute_seconds=draw(st.sampled_from([0.0, 0.7])),
            overhead_seconds=draw(st.sampled_from([0.0, 0.01])),
            collectives=tuple(collective(axis, draw(times), draw(st.sampled_from([0.0, 0.5, 1.0]))) for axis in axes),
        )

    return make_plan(
        p, m, v, name, [action() for _ in range(p * v)], [action() for _ in range(p * v)],
        send=draw(st.floats(0, 2)), activation=[draw(times) for _ in range(p * v)],
        gather=draw(st.floats(0, 5)), reduce=draw(st.floats(0, 5)),
        gathers=draw(st.sampled_from(["never", "once", "each_action"])),
        reduces=draw(st.sampled_from(["never", "once", "each_backward"])),
        dp_overlap=draw(st.sampled_from([0.0, 0.6, 1.0])), dp_exposed_seconds=draw(st.floats(0, 20)),
        optimizer_seconds=draw(st.floats(0, 1)), memory={"parameters": 10.0, "context": 3.0}, reserve_fraction=0.1,
    )  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(any_plan())
def test_the_parts_add_up_to_the_step_exactly(plan):
    line = simulate(plan)
    assert set(line.seconds_by_part) == set(PARTS)
    assert math.fsum(line.seconds_by_part.values()) == line.step_seconds
    assert min(line.seconds_by_part.values()) >= -1e-12 * line.step_seconds


@settings(max_examples=40, deadline=None)
@given(any_plan())
def test_idle_parts_are_the_gaps_between_compute_spans(plan):
    """Own work and idleness are accounted apart: what compute spans leave open is what the other parts name."""
    line = simulate(plan)
    spans = line.spans
    busy = sum(s for stream, s in zip(spans.stream, spans.seconds, strict=True) if stream == "compute") / plan.mesh.pp
    on_compute = sum(line.seconds_by_part[part] for part in ("compute", "recompute", "overhead", "optimizer"))
    assert on_compute == pytest.approx(busy)


@settings(max_examples=60, deadline=None)
@given(any_plan())
def test_no_stream_does_two_things_at_once(plan):
    last = {}
    spans = simulate(plan).spans
    for rank, stream, start, seconds in zip(spans.rank, spans.stream, spans.start, spans.seconds, strict=True):
        assert start >= last.get((rank, stream), 0.0) - 1e-9
        last[rank, stream] = start + seconds


@settings(max_examples=60, deadline=None)
@given(any_plan())
def test_the_step_is_no_shorter_than_any_lower_bound(plan):
    line = simulate(plan)
    p, m, v = plan.mesh.pp, plan.schedule.micro_batches, plan.schedule.virtual_stages
    for cost in plan.costs:
        busy = m * sum(chunk.forward.seconds + chunk.backward.seconds for chunk in cost.chunks)
        assert line.step_seconds >= (busy + cost.optimizer_seconds) * (1 - 1e-12)
    chunks = [plan.costs[stage % p].chunks[stage // p] for stage in range(p * v)]
    one = sum(chunk.forward.seconds + chunk.backward.seconds for chunk in chunks)
    sends = 2 * sum(chunk.send_seconds for chunk in chunks) if p > 1 else 0.0
    assert line.step_seconds >= (one + sends) * (1 - 1e-12)


def test_the_same_plan_gives_the_same_timeline_bit_for_bit():
    plan = make_plan(4, 8, 2, "interleaved", 0.1, 0.2, send=0.03, gather=0.7, gathers="once", dp_overlap=0.5)
    again = type(plan).from_json(plan.to_json())
    assert simulate(plan).to_json() == simulate(again).to_json()


def test_a_timeline_survives_its_file():
    line = simulate(make_plan(2, 3, send=0.1, activation=5.0, optimizer_seconds=0.5))
    assert Timeline.from_json(line.to_json()) == line


def test_the_plans_hash_is_not_changed_by_its_prediction():
    plan = make_plan()
    line = simulate(plan)
    predicted = plan.predicted.model_copy(update={"step_seconds": line.step_seconds})
    assert plan.model_copy(update={"predicted": predicted}).hash == plan.hash == line.plan_hash
    assert make_plan(forward=1.5).hash != plan.hash


def test_sends_hide_behind_compute_in_the_steady_state():
    """Two stages: each way through the pipeline shows its send once; the others fly while the ranks compute."""
    m, send = 8, 0.25
    line = simulate(make_plan(2, m, schedule="gpipe", send=send))
    assert line.step_seconds == pytest.approx((m + 1) * 3.0 + 2 * send)
    assert line.seconds_by_part["pp"] == pytest.approx(2 * send / 2)


def test_sends_of_one_rank_leave_one_after_the_other():
    """Where a send takes longer than an action the sends set the pace."""
    m, send = 6, 4.0
    line = simulate(make_plan(2, m, schedule="gpipe", forward=1.0, backward=1.0, send=send))
    assert line.step_seconds == pytest.approx(2 * (1 + m * send + 1))


def test_collectives_show_what_does_not_hide():
    cost = ActionCost(compute_seconds=1.0, collectives=(collective("tp", 0.5, 0.6), collective("ep", 0.2)))
    line = simulate(make_plan(1, 3, forward=cost, backward=cost))
    assert line.seconds_by_part["tp"] == pytest.approx(6 * 0.2)
    assert line.seconds_by_part["ep"] == pytest.approx(6 * 0.2)
    assert line.step_seconds == pytest.approx(6 * cost.seconds)


def test_no_more_hides_than_there_is_compute():
    cost = ActionCost(compute_seconds=1.0, collectives=(collective("tp", 5.0, 1.0),))
    assert score(make_plan(1, 1, forward=cost, backward=0.0)) == pytest.approx(5.0)


def test_dp_without_overlap_is_paid_in_full():
    plan = make_plan(1, 4, gather=0.5, reduce=0.7, gathers="once", reduces="once", dp_overlap=0.0)
    line = simulate(plan)
    assert line.step_seconds == pytest.approx(4 * 3.0 + 1.2)
    assert line.seconds_by_part["dp"] == pytest.approx(1.2)


def test_dp_hides_by_its_fraction_but_for_its_ends():
    """Of 1.2 s, 0.3 lie bare and half of the rest hides."""
    line = simulate(
        make_plan(
            1, 4, gather=0.5, reduce=0.7, gathers="once", reduces="once", dp_overlap=0.5, dp_exposed_seconds=0.3
        )
    )  # fmt: skip
    assert line.seconds_by_part["dp"] == pytest.approx(0.3 + 0.5 * (1.2 - 0.3))


def test_each_action_gathers_and_each_backward_reduces_under_zero_3_alone():
    plan = make_plan(1, 4, gather=0.5, reduce=0.7, gathers="each_action", reduces="each_backward", dp_overlap=0.0)
    assert score(plan) == pytest.approx(4 * 3.0 + 8 * 0.5 + 4 * 0.7)


def test_dp_longer_than_compute_sets_the_pace():
    """However much may hide: 8 gathers and 4 reductions of 10 s need 120 s of the dp stream."""
    plan = make_plan(1, 4, gather=10.0, reduce=10.0, gathers="each_action", reduces="each_backward", dp_overlap=1.0)
    assert score(plan) >= 120.0


def test_a_gather_hides_in_the_warm_up_of_later_stages():
    """All ranks gather from the start: only the first, which has nothing to wait for, shows it."""
    gathered = make_plan(4, 8, gather=0.5, gathers="once", dp_overlap=0.0)
    line = simulate(gathered)
    assert line.step_seconds == pytest.approx(score(make_plan(4, 8)) + 0.5)
    assert line.seconds_by_part["dp"] == pytest.approx(0.5 / 4)


def test_a_reduction_does_not_hold_up_the_gradient_that_is_sent_on():
    """Four ranks reduce behind their last backward, side by side: the step grows by one reduction, not by four."""
    assert score(make_plan(4, 8, reduce=0.5, dp_overlap=0.0)) == pytest.approx(score(make_plan(4, 8)) + 0.5)


def test_a_reduction_hides_in_the_last_stages_bubble():
    """The last stage ends its backwards first: its reduction runs while the first stage still drains."""
    costs = {"reduces": "once", "dp_overlap": 1.0, "dp_exposed_seconds": 0.5}
    plain, reduced = make_plan(4, 8), make_plan(4, 8, reduce=0.5, **costs)
    assert score(reduced) == pytest.approx(score(plain) + 0.5)


@pytest.mark.parametrize("rank", range(4))
def test_a_straggler_stage_sets_the_pace(rank):
    """Fill-drain: m actions of the slow stage in a row, plus every other stage once, each way. 1F1B is no slower."""
    p, m, factor = 4, 16, 1.25
    fill_drain = (m * factor + p - 1) * 3.0
    assert simulate(make_plan(p, m, schedule="gpipe"), slow={rank: factor}).step_seconds == pytest.approx(fill_drain)
    assert m * factor * 3.0 <= simulate(make_plan(p, m), slow={rank: factor}).step_seconds <= fill_drain


def test_a_straggler_slows_compute_but_not_collectives():
    cost = ActionCost(compute_seconds=1.0, overhead_seconds=0.1, collectives=(collective("tp", 0.5),))
    assert simulate(make_plan(1, 1, forward=cost, backward=0.0), slow={0: 2.0}).step_seconds == pytest.approx(2.6)


@pytest.mark.parametrize(
    ("slow", "message"), [({4: 1.2}, "pp = 4: 0 to 3"), ({0: 0.0}, "slow=0.0"), ({1: math.nan}, "slow=nan")]
)
def test_a_straggler_that_cannot_be_is_refused(slow, message):
    with pytest.raises(RequestError, match=message):
        simulate(make_plan(4), slow=slow)
