"""A timeline as a Chrome trace: JSON that ui.perfetto.dev and chrome://tracing open.

One process per lane, one thread per stream of it: compute, then each channel that sends, each that receives, then the
collectives. A message is an arrow from its SEND to its RECV; a collective carries the number of its node, the same
for all members; memory is a counter, stacked by what it is for. The rules that the viewers hold a trace to:

- slices of one thread nest or lie apart. Ours lie apart: times are whole ticks of 1/1024 us, which binary numbers hold
  exactly, so that no viewer's rounding makes an overlap; what does overlap on one stream (a measured step may) gets a
  thread more;
- events come in the order of time, and a flow event right after the slice that it belongs to, or a viewer that reads
  from top to bottom ties it to another slice;
- an arrow's start comes before its end, also where both are at the same tick.

Format: the Trace Event Format of Chromium's trace-viewer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autopiper.cluster.spec import Cluster
from autopiper.plan.file import write_text
from autopiper.plan.timeline import Event, Lane, Timeline
from autopiper.report.events import COMPUTE, RECV, SEND, TRACKS, check, devices_text, kind_of, ranks_text, track_of

MESSAGE = "message"
"""Name and category of the arrows."""
COLORS = {
    "F": "thread_state_runnable", "B": "thread_state_running", "I": "thread_state_iowait", "W": "yellow",
    "UPDATE": "grey", "LOSS": "rail_load", "NORM": "rail_load",
}  # fmt: skip
"""Names from the fixed palette of chrome://tracing; Perfetto colours by the name of the slice and ignores them."""
TICKS = 1024
"""Ticks of a microsecond."""
_FIRST, _THEN = 0, 1  # of one moment: what sends, then all else


def write_trace(timeline: Timeline, path: str | Path, cluster: Cluster | None = None) -> None:
    """Write the trace, whole or not at all. Raises PlanError where there is nothing to draw, OSError as files do."""
    head = json.dumps(
        {
            "step_time_s": timeline.step_time_s, "makespan_s": timeline.makespan_s,
            "bubble_fraction": timeline.bubble_fraction, "relative_error": timeline.relative_error,
        },
        allow_nan=False,
    )  # fmt: skip
    encoder = json.JSONEncoder(separators=(",", ":"), allow_nan=False)
    lines = ",\n".join(encoder.encode(event) for event in trace_events(timeline, cluster))
    write_text(path, f'{{"displayTimeUnit":"ms","otherData":{head},"traceEvents":[\n{lines}\n]}}\n')


def trace_events(timeline: Timeline, cluster: Cluster | None = None) -> list[dict[str, Any]]:
    """Return the trace's events: names first, then all else by time; `ts` and `dur` in microseconds.

    `cluster` names the device types. Raises PlanError where the timeline has no events or impossible times.
    """
    check(timeline)
    names: list[dict[str, Any]] = []
    timed: list[tuple[int, int, int, list[dict[str, Any]]]] = []  # (ticks, _FIRST or _THEN, running number, events)
    arrows = _arrows(timeline)
    thread = 0
    for number, lane in enumerate(timeline.lanes):
        pid = number + 1  # process 0 is the idle process to the viewers
        title = f"{ranks_text(lane.ranks)} · {devices_text(lane.devices, cluster)}"
        names += _name("process", title, number, pid)
        for order, (sort, label, events) in enumerate(_tracks(lane)):
            thread += 1  # numbered through the whole trace: viewers look threads up by this number alone
            names += _name("thread", label, order, pid, thread)
            for at, (start, end, event) in events:
                slice_ = {
                    "ph": "X", "name": event.action, "cat": sort, "pid": pid, "tid": thread,
                    "ts": start / TICKS, "dur": (end - start) / TICKS, "args": _args(event),
                }  # fmt: skip
                color = COLORS.get(kind_of(event))
                group = [slice_ if color is None else {**slice_, "cname": color}]
                arrow = arrows.get((number, at))
                if arrow is not None:
                    group.append(_arrow_end(sort, arrow, slice_))
                timed.append((start, _FIRST if sort == SEND else _THEN, len(timed), group))
        for moment, counter in _memory(lane, pid):
            timed.append((moment, _THEN, len(timed), [counter]))
    timed.sort(key=lambda entry: entry[:3])
    return names + [event for *_, group in timed for event in group]


def _name(what: str, name: str, order: int, pid: int, thread: int = 0) -> list[dict[str, Any]]:
    owner = {"ph": "M", "pid": pid, "tid": thread}
    return [
        {"name": f"{what}_name", **owner, "args": {"name": name}},
        {"name": f"{what}_sort_index", **owner, "args": {"sort_index": order}},
    ]


def _args(event: Event) -> dict[str, Any]:
    known = {
        "kind": kind_of(event), "pipeline": event.pipeline, "stage": event.stage, "micro_batch": event.micro_batch,
        "node": event.node if event.node >= 0 else None,
    }  # fmt: skip
    return {name: value for name, value in known.items() if value is not None}


def _arrow_end(sort: str, arrow: int, slice_: dict[str, Any]) -> dict[str, Any]:
    end = {"name": MESSAGE, "cat": MESSAGE, "id": arrow} | {key: slice_[key] for key in ("pid", "tid", "ts")}
    # "bp": "e" ties the end to the slice that is open now; without it a viewer takes the next one.
    return {"ph": "s", **end} if sort == SEND else {"ph": "f", "bp": "e", **end}


def _arrows(timeline: Timeline) -> dict[tuple[int, int], int]:
    """(lane, position of the event in it) -> number of its arrow, for every message of which both ends are known."""
    ends: dict[int, tuple[list[tuple[int, int]], list[tuple[int, int]]]] = {}
    for number, lane in enumerate(timeline.lanes):
        for at, event in enumerate(lane.events):
            sort = track_of(event)
            if event.node >= 0 and sort in (SEND, RECV):
                ends.setdefault(event.node, ([], []))[sort == RECV].append((number, at))
    found: dict[tuple[int, int], int] = {}
    pairs = [pair for sends, receives in ends.values() for pair in zip(sends, receives, strict=False)]
    for arrow, (send, receive) in enumerate(pairs, 1):
        if _start(timeline, send) <= _start(timeline, receive):  # an arrow back in time would be none to the viewers
            found[send] = found[receive] = arrow
    return found


def _start(timeline: Timeline, where: tuple[int, int]) -> int:
    return _ticks(timeline.lanes[where[0]].events[where[1]].start_s)


def _ticks(seconds: float) -> int:
    return round(seconds * 1e6 * TICKS)


Timed = tuple[int, tuple[int, int, Event]]
"""(position in the lane, (start in ticks, end in ticks, event))"""


def _tracks(lane: Lane) -> Iterator[tuple[str, str, list[Timed]]]:
    """Yield (sort, label, events) of each thread of a lane; within one, events lie apart and in order."""
    streams: dict[tuple[int, str], list[Timed]] = {}
    for at, event in enumerate(lane.events):
        timed = (at, (_ticks(event.start_s), _ticks(event.end_s), event))
        streams.setdefault((TRACKS.index(track_of(event)), event.stream), []).append(timed)
    for sort, stream in sorted(streams, key=lambda key: key[0]):  # stable: streams of one sort as they first appear
        label = TRACKS[sort] if TRACKS[sort] == COMPUTE else f"{TRACKS[sort]} · {stream}"
        threads: list[list[Timed]] = []
        for timed in sorted(streams[sort, stream], key=lambda entry: entry[1][:2]):
            free = next((t for t in threads if t[-1][1][1] <= timed[1][0]), None)
            if free is None:
                threads.append([timed])
            else:
                free.append(timed)
        for number, events in enumerate(threads):
            yield TRACKS[sort], label if number == 0 else f"{label} ({number + 1})", events


def _memory(lane: Lane, pid: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (tick, counter) for each moment at which the memory changes; of points at one moment the last counts."""
    points = {_ticks(point.time_s): point for point in lane.memory}
    for moment, point in sorted(points.items()):
        yield (
            moment,
            {
                "ph": "C", "name": "memory in bytes", "pid": pid, "tid": 0, "ts": moment / TICKS,
                "args": {
                    "parameters": point.parameters_bytes, "gradients": point.gradients_bytes,
                    "optimizer": point.optimizer_bytes, "activations": point.activations_bytes,
                    "buffers": point.buffers_bytes,
                },
            },
        )  # fmt: skip
