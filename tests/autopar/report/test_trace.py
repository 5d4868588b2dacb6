"""The trace is valid: fields that the Trace Event Format requires, threads that never do two things at once."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise

import pytest

from autopar.errors import DocumentError
from autopar.report.trace import chrome_trace, write_trace
from autopar.simulator import simulate
from tests.plans import make_plan

PLAN = make_plan(
    4, 8, 2, "interleaved", 1e-3, 2e-3, send=1e-4, activation=1e9, reduce=5e-4, gather=4e-4, gathers="once",
    dp_overlap=0.5, optimizer_seconds=3e-4, memory={"parameters": 2e9, "context": 5e8},
)  # fmt: skip


@pytest.fixture(scope="module")
def trace():
    return json.loads(json.dumps(chrome_trace(PLAN, simulate(PLAN))))


def of_phase(trace, phase):
    return [event for event in trace["traceEvents"] if event["ph"] == phase]


def test_every_event_has_the_required_fields(trace):
    assert {event["ph"] for event in trace["traceEvents"]} == {"M", "X", "C", "s", "f"}
    for event in trace["traceEvents"]:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["ts"] >= 0
        assert event["ph"] != "X" or event["dur"] >= 0
        assert event["ph"] not in "MC" or event["args"]
        assert event["ph"] not in "sf" or isinstance(event["id"], int)


def test_every_rank_is_a_named_process_with_named_threads(trace):
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in of_phase(trace, "M") if e["name"] == "thread_name"}
    processes = {e["pid"]: e["args"]["name"] for e in of_phase(trace, "M") if e["name"] == "process_name"}
    assert processes == {rank: f"pipeline rank {rank}" for rank in range(4)}
    assert {(event["pid"], event["tid"]) for event in of_phase(trace, "X")} <= names.keys()


def test_no_thread_has_two_spans_at_once(trace):
    threads = defaultdict(list)
    for event in of_phase(trace, "X"):
        threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in threads.values():
        spans.sort()
        assert all(a[1] <= b[0] + 1e-6 for a, b in pairwise(spans))


def test_the_trace_ends_with_the_step(trace):
    last = max(event["ts"] + event["dur"] for event in of_phase(trace, "X"))
    assert last == pytest.approx(simulate(PLAN).step_seconds * 1e6, abs=1e-3)


def test_every_send_points_at_an_action_that_starts_no_earlier(trace):
    starts = {event["id"]: event for event in of_phase(trace, "s")}
    ends = {event["id"]: event for event in of_phase(trace, "f")}
    assert starts.keys() == ends.keys()
    assert len(starts) == 2 * 8 * (4 * 2 - 1)
    assert all(ends[i]["ts"] > starts[i]["ts"] and ends[i]["pid"] != starts[i]["pid"] for i in starts)


def test_counters_add_up_to_the_peak(trace):
    line = simulate(PLAN)
    for rank in range(4):
        totals = [sum(event["args"].values()) for event in of_phase(trace, "C") if event["pid"] == rank]
        assert max(totals) == pytest.approx(line.peak_bytes[rank])


def test_the_trace_is_written_as_json(tmp_path):
    write_trace(PLAN, simulate(PLAN), tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text())["displayTimeUnit"] == "ms"


def test_a_place_that_is_not_there_is_named(tmp_path):
    with pytest.raises(DocumentError, match=r"nowhere/trace\.json: cannot be written"):
        write_trace(PLAN, simulate(PLAN), tmp_path / "nowhere" / "trace.json")
