"""A trace holds to the rules of its viewers, and says what the timeline says."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from report_timelines import compute, gpipe, lane, timeline, with_memory

import autopiper as ap
from autopiper.errors import PlanError
from autopiper.plan import Event, MemoryPoint, Timeline
from autopiper.report.trace import trace_events, write_trace

Events = list[dict[str, Any]]


def assert_well_formed(events: Events) -> None:
    """Hold a trace to the format's rules, reading it from top to bottom as the viewers do."""
    json.dumps(events, allow_nan=False)
    named: dict[str, set[tuple[int, int]]] = defaultdict(set)
    last_ts = -math.inf
    open_until: dict[tuple[int, int], tuple[float, int]] = {}
    latest: dict[tuple[int, int], dict[str, Any]] = {}
    started: dict[int, dict[str, Any]] = {}
    ended: set[int] = set()
    for event in events:
        thread = (event["pid"], event["tid"])
        assert isinstance(event["pid"], int) and event["pid"] > 0 and isinstance(event["tid"], int)
        assert isinstance(event["name"], str) and event["name"]
        if event["ph"] == "M":
            assert last_ts == -math.inf, "names come first"
            named[event["name"]].add(thread)
            assert set(event["args"]) == {"name" if event["name"].endswith("name") else "sort_index"}
            continue
        assert event["ts"] >= last_ts >= -math.inf, "events come in the order of time"
        last_ts = event["ts"]
        assert event["ts"] >= 0 and (event["ts"] * 1024).is_integer(), "whole ticks"
        if event["ph"] == "X":
            assert thread in named["thread_name"] and thread in named["thread_sort_index"]
            assert event["dur"] >= 0 and event["cat"]
            # One viewer computes in microseconds, another cuts both numbers off to nanoseconds first.
            start, end = event["ts"], event["ts"] + event["dur"]
            start_ns, end_ns = int(start * 1000), int(start * 1000) + int(event["dur"] * 1000)
            before, before_ns = open_until.get(thread, (0.0, 0))
            assert start >= before and start_ns >= before_ns, "slices of a thread lie apart"
            open_until[thread], latest[thread] = (end, end_ns), event
        elif event["ph"] in ("s", "f"):
            assert (event["name"], event["cat"]) == ("message", "message")
            assert latest[thread]["ts"] == event["ts"], "an arrow's end follows the slice that it belongs to"
            if event["ph"] == "s":
                assert event["id"] not in started
                assert latest[thread]["cat"] == "send"
                started[event["id"]] = latest[thread]
            else:
                assert event["bp"] == "e"
                assert event["id"] in started and event["id"] not in ended
                ended.add(event["id"])
                assert latest[thread]["args"]["node"] == started[event["id"]]["args"]["node"]
        else:
            assert event["ph"] == "C"
            assert all(isinstance(value, int | float) for value in event["args"].values())
    assert set(started) == ended, "every arrow has both ends"
    assert {pid for pid, _ in named["process_name"]} == {e["pid"] for e in events}
    threads = [tid for _, tid in named["thread_name"]]
    assert len(threads) == len(set(threads))


def test_a_trace_says_what_the_timeline_says() -> None:
    step = with_memory(gpipe(3, 4))
    events = trace_events(step)
    assert_well_formed(events)
    slices = [e for e in events if e["ph"] == "X"]
    assert len(slices) == sum(len(each.events) for each in step.lanes)
    told = {(e["pid"], e["name"]): (e["ts"], e["ts"] + e["dur"]) for e in slices}
    for number, each in enumerate(step.lanes):
        for event in each.events:
            assert told[number + 1, event.action] == pytest.approx((event.start_s * 1e6, event.end_s * 1e6))
    assert Counter(e["ph"] for e in events)["s"] == 2 * 2 * 4  # two borders, two ways, four micro-batches


def test_tracks_are_named_and_in_order() -> None:
    step = gpipe(2, 1)
    cluster = ap.Cluster.homogeneous("a100-80g", devices_per_node=2)
    events = trace_events(step, cluster)
    names = [(e["pid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"]
    assert names == [
        (1, "compute"), (1, "send · p0:s0>s1:F"), (1, "recv · p0:s1>s0:B"),
        (2, "compute"), (2, "send · p0:s1>s0:B"), (2, "recv · p0:s0>s1:F"),
    ]  # fmt: skip
    processes = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert processes == ["rank 0 · device 0 a100-80g", "rank 1 · device 1 a100-80g"]
    wide = timeline([replace(step.lanes[0], ranks=(0, 1, 2, 3, 8), devices=(4, 5, 6, 7, 12))])
    assert trace_events(wide)[0]["args"]["name"] == "ranks 0-3, 8 · devices 4-7, 12"


def test_members_of_a_collective_carry_its_number() -> None:
    def reduce_(stream: str, start_s: float) -> Event:
        return Event(
            action="g0.0REDUCE_GRAD", stream=stream, start_s=start_s, end_s=3.0, kind="REDUCE_GRAD", node=7,
        )  # fmt: skip

    events = trace_events(timeline([lane(0, [reduce_("reduce0", 2.0)]), lane(1, [reduce_("reduce0", 2.0)])]))
    assert_well_formed(events)
    slices = [e for e in events if e["ph"] == "X"]
    assert [(e["cat"], e["args"]["node"], e["args"]["kind"]) for e in slices] == [("collectives", 7, "REDUCE_GRAD")] * 2
    assert "stage" not in slices[0]["args"]


def test_messages_that_take_no_time_keep_their_arrows() -> None:
    events = trace_events(gpipe(3, 3, message_s=0.0))
    assert_well_formed(events)
    assert sum(e["ph"] == "f" for e in events) == 2 * 2 * 3


def test_memory_is_stacked_by_category() -> None:
    def point(time_s: float, activations: float) -> MemoryPoint:
        return MemoryPoint(
            time_s=time_s, parameters_bytes=8.0, gradients_bytes=4.0, optimizer_bytes=16.0,
            activations_bytes=activations, buffers_bytes=0.5,
        )  # fmt: skip

    assert point(0.0, 2.0).total_bytes == 30.5
    one = timeline([lane(0, [compute("F", 0, 0, 0.0, 2.0)], memory=(point(0, 0), point(1, 1), point(1, 2)))])
    events = trace_events(one)
    assert_well_formed(events)
    counters = [e for e in events if e["ph"] == "C"]
    assert [(e["ts"], e["args"]["activations"]) for e in counters] == [(0, 0), (1e6, 2)]  # the last of one moment
    assert all(
        e["args"] | {"activations": 0}
        == {"parameters": 8, "gradients": 4, "optimizer": 16, "activations": 0, "buffers": 0.5}
        for e in counters
    )


def test_a_measured_step_may_say_less_and_overlap() -> None:
    def bare(action: str, start_s: float, end_s: float, stream: str = "compute") -> Event:
        return Event(action=action, stream=stream, start_s=start_s, end_s=end_s)

    step = timeline(
        [
            lane(
                0,
                [
                    bare("0F0", 0.0, 2.0), bare("0F1", 1.0, 3.0), bare("0F2", 2.0, 4.0),
                    bare("0SEND_F0>0[0:1]", 2.0, 3.0, "x"), bare("2.1A2A_F5", 3.0, 4.0, "a2a"),
                ],
            )
        ]
    )  # fmt: skip
    events = trace_events(step)
    assert_well_formed(events)
    slices = {e["name"]: e for e in events if e["ph"] == "X"}
    assert slices["0F0"]["tid"] == slices["0F2"]["tid"] != slices["0F1"]["tid"]
    assert [slices[n]["args"]["kind"] for n in ("0F1", "0SEND_F0>0[0:1]", "2.1A2A_F5")] == ["F", "SEND_F", "A2A_F"]
    assert slices["0SEND_F0>0[0:1]"]["cat"] == "send"
    assert not [e for e in events if e["ph"] in ("s", "f")]  # nobody knows which ends belong together


@settings(max_examples=60, deadline=None)
@given(
    stages=st.integers(1, 5), micro_batches=st.integers(1, 6), message_s=st.sampled_from([0.0, 1e-9, 0.1, 1 / 3]),
    scale=st.sampled_from([1e-7, 1e-3, 1 / 7, 1.0, 12345.678]), kinds=st.sampled_from(["FB", "FIW", "F"]),
)  # fmt: skip
def test_every_step_is_well_formed(stages: int, micro_batches: int, message_s: float, scale: float, kinds: str) -> None:
    step = with_memory(gpipe(stages, micro_batches, message_s=message_s, scale=scale, kinds=kinds))
    events = trace_events(step)
    assert_well_formed(events)
    messages = {e.node for each in step.lanes for e in each.events if e.kind.startswith("SEND")}
    assert sum(e["ph"] == "s" for e in events) == len(messages)


def test_the_file_is_whole_json(tmp_path: Path) -> None:
    step = gpipe(2, 3)
    write_trace(step, tmp_path / "step.trace.json")
    content = json.loads((tmp_path / "step.trace.json").read_text())
    assert content["traceEvents"] == trace_events(step)
    assert content["displayTimeUnit"] == "ms"
    assert content["otherData"]["makespan_s"] == step.makespan_s
    assert [p.name for p in tmp_path.iterdir()] == ["step.trace.json"]  # no temporary file stays


def test_what_cannot_be_drawn_is_refused() -> None:
    def at(start_s: float, end_s: float) -> Timeline:
        return timeline([lane(3, [compute("F", 0, 0, start_s, end_s)])], makespan_s=1.0)

    with pytest.raises(PlanError, match="no events, so there is nothing to draw"):
        trace_events(timeline([lane(0, [])]))
    for start_s, end_s in ((2.0, 1.0), (-1.0, 1.0), (0.0, math.inf), (math.nan, 1.0)):
        with pytest.raises(PlanError, match=f"0F0 of rank 3 runs from {start_s} s to {end_s} s; the times must be"):
            trace_events(at(start_s, end_s))
