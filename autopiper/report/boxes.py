"""The rows of a picture: which boxes and lines a lane shows, in tenths of a pixel.

Neighbours that no eye tells apart become one: segments of one pass that follow each other, and what is narrower than
half a pixel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from autopiper.plan.timeline import Event, Lane, Timeline
from autopiper.report.events import COLLECTIVES, COMPUTE, RECV, SEND, kind_of, micro_batch_of, places_of, track_of

KINDS = ("F", "B", "I", "W", "UPDATE")
"""Kinds with a colour of their own; all else on a compute stream is OTHER."""
OTHER, MIXED = "OTHER", "MIXED"
SHADES = 4
"""Shades of a kind: one for each stage that a rank holds, and again from the first if it holds more."""
TINY = 5
"""Tenths of a pixel below which neighbours become one box."""
LINES = (SEND, RECV, COLLECTIVES)
"""The lines under a row, from the top."""


class Box(NamedTuple):
    """A stretch of a compute stream, [left, right) in tenths of a pixel from the start of the step."""

    tone: str
    """Kind and shade, as "F1"."""
    left: int
    right: int
    micro_batch: int | None


@dataclass(frozen=True)
class Row:
    """What is drawn of one lane, or of several that look alike."""

    ranks: tuple[int, ...]
    devices: tuple[int, ...]
    places: tuple[tuple[int, int], ...]
    """The (pipeline, stage) pairs computed for."""
    boxes: tuple[Box, ...]
    lines: tuple[tuple[tuple[int, int], ...], ...]
    """For each of LINES the stretches in which one or more transfers or collectives run."""


def rows_of(timeline: Timeline, tenths_per_s: float) -> list[Row]:
    """Return one row per lane."""
    return [_row(lane, lambda seconds: round(seconds * tenths_per_s)) for lane in timeline.lanes]


def folded(rows: Iterable[Row]) -> list[Row]:
    """Make one row of all that show the same."""
    found: dict[tuple[object, ...], Row] = {}
    for row in rows:
        look = (row.boxes, row.lines)
        kept = found.get(look)
        found[look] = row if kept is None else replace(
            kept, ranks=kept.ranks + row.ranks, devices=kept.devices + row.devices,
            places=tuple(sorted({*kept.places, *row.places})),
        )  # fmt: skip
    return list(found.values())


def _row(lane: Lane, at: Callable[[float], int]) -> Row:
    places = places_of(lane)
    shade = {place: index % SHADES for index, place in enumerate(places)}
    compute: list[Event] = []
    stretches: dict[str, list[tuple[int, int]]] = {name: [] for name in LINES}
    for event in lane.events:
        track = track_of(event)
        if track == COMPUTE:
            compute.append(event)
        else:
            stretches[track].append((at(event.start_s), at(event.end_s)))
    compute.sort(key=lambda event: (event.start_s, event.end_s))
    return Row(
        ranks=lane.ranks,
        devices=lane.devices,
        places=tuple(places),
        boxes=tuple(_boxes(compute, shade, at)),
        lines=tuple(tuple(_union(stretches[name])) for name in LINES),
    )


def _boxes(events: list[Event], shade: dict[tuple[int, int], int], at: Callable[[float], int]) -> list[Box]:
    boxes: list[Box] = []
    of_last: tuple[object, ...] = ()
    tiny_last = False  # the last box holds nothing but tiny ones
    for event in events:
        if event.end_s <= event.start_s:
            continue
        kind, micro_batch = kind_of(event), micro_batch_of(event)
        kind = kind if kind in KINDS else OTHER
        of = (kind, event.pipeline, event.stage, micro_batch)
        place = None if event.stage is None else (event.pipeline or 0, event.stage)
        tone = f"{kind}{0 if place is None else shade[place]}"
        left, right = at(event.start_s), at(event.end_s)
        tiny = right - left < TINY
        last = boxes[-1] if boxes else Box("", -TINY, -TINY, None)
        if of == of_last and left <= last.right:  # segments of one pass, updates of several gradient blocks
            boxes[-1] = last._replace(right=max(right, last.right))
        elif tiny and tiny_last and left - last.right < TINY:
            boxes[-1] = Box(tone if tone == last.tone else MIXED, last.left, max(right, last.right), None)
        else:
            left = max(left, last.right)  # what was measured may overlap by a little
            if right <= left and boxes:  # nothing of it is left to see
                continue
            boxes.append(Box(tone, left, max(right, left + 1), micro_batch))
            tiny_last = tiny
        of_last = of
    return boxes


def _union(stretches: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join what overlaps or lies closer than TINY; leave out what takes no time to see."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(stretches):
        if end <= start:
            continue
        if found and start - found[-1][1] < TINY:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found
