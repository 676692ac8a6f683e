"""What the trace and the picture both ask about the events of a timeline: what they are, and whose they are."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from math import isfinite

from autopiper.cluster.spec import Cluster
from autopiper.errors import PlanError
from autopiper.plan.actions import COMPUTE_STREAM
from autopiper.plan.timeline import Event, Lane, Timeline

COMPUTE, SEND, RECV, COLLECTIVES = "compute", "send", "recv", "collectives"
TRACKS = (COMPUTE, SEND, RECV, COLLECTIVES)
"""The sorts of tracks of a rank, in the order in which they are shown."""
MOST_RUNS = 4
"""Runs of numbers that a label lists before it says only where they end, and how many they are."""

_KIND = re.compile(r"A2A_[FB]|[A-Z]+(?:_[A-Z]+)*")
_PASS = re.compile(r"(?:p\d+:)?\d+(?:\.\d+)?[FIWB](\d+)")


def check(timeline: Timeline) -> None:
    """Raise PlanError where there is nothing to draw, or times that no axis can show."""
    if not any(lane.events for lane in timeline.lanes):
        raise PlanError(
            "the timeline has no events, so there is nothing to draw; it was simulated with events=False, "
            "api.simulate keeps them"
        )
    for lane in timeline.lanes:
        for event in lane.events:
            if not (isfinite(event.start_s) and isfinite(event.end_s) and 0 <= event.start_s <= event.end_s):
                raise PlanError(
                    f"{event.action} of {ranks_text(lane.ranks)} runs from {event.start_s} s to {event.end_s} s; "
                    "the times must be finite, 0 or more, and end after they start"
                )


def kind_of(event: Event) -> str:
    """Return the kind of an event; where it is not said, that of the action's text."""
    if event.kind:
        return event.kind
    found = _KIND.search(event.action)
    return found[0] if found else ""


def micro_batch_of(event: Event) -> int | None:
    """Return the micro-batch of an event; where it is not said, that of the action's text if it is a pass."""
    if event.micro_batch is not None:
        return event.micro_batch
    found = _PASS.fullmatch(event.action)
    return int(found[1]) if found else None


def track_of(event: Event) -> str:
    """Return which of TRACKS shows an event."""
    if event.stream == COMPUTE_STREAM:
        return COMPUTE
    kind = kind_of(event)
    return SEND if kind.startswith("SEND") else RECV if kind.startswith("RECV") else COLLECTIVES


def runs_text(numbers: Iterable[int]) -> str:
    """Write numbers briefly: "0-3, 8"; of many runs "0, 8, 16 … 504 (64)"."""
    runs: list[list[int]] = []
    ordered = sorted(set(numbers))
    for number in ordered:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [f"{first}" if first == last else f"{first}-{last}" for first, last in runs]
    if len(texts) <= MOST_RUNS:
        return ", ".join(texts)
    return f"{', '.join(texts[: MOST_RUNS - 1])} … {texts[-1]} ({len(ordered)})"


def ranks_text(ranks: Sequence[int]) -> str:
    """Name ranks: "rank 3", "ranks 0-3, 8"."""
    return f"rank{'s' * (len(set(ranks)) > 1)} {runs_text(ranks)}"


def devices_text(devices: Sequence[int], cluster: Cluster | None) -> str:
    """Name devices, with their types where a cluster tells them: "device 4 a100-80g"."""
    text = f"device{'s' * (len(set(devices)) > 1)} {runs_text(devices)}"
    return text if cluster is None else f"{text} {types_text(devices, cluster)}"


def types_text(devices: Iterable[int], cluster: Cluster) -> str:
    """Name the types of devices: "a100-80g", or "a100-80g + v100-32g" where they are not alike."""
    return " + ".join(dict.fromkeys(cluster.device(d).type.name for d in devices))


def places_of(lane: Lane) -> list[tuple[int, int]]:
    """Return the (pipeline, stage) pairs that a lane computes for, in order."""
    return sorted(
        {(e.pipeline or 0, e.stage) for e in lane.events if e.stage is not None and e.stream == COMPUTE_STREAM}
    )
