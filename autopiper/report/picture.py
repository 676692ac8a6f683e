"""A timeline as a picture like those in the papers: a row per rank, a box per pass, bubbles left blank.

SVG that needs nothing beside itself: no font, script or style from elsewhere, readable on light and on dark pages.
What is too small to show, or too much for one picture, is said in words under it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import floor, log10
from statistics import median

from autopiper.cluster.spec import Cluster
from autopiper.errors import PlanError
from autopiper.plan.timeline import Timeline
from autopiper.report.boxes import LINES, Row, folded, rows_of
from autopiper.report.events import check, kind_of, ranks_text, runs_text, types_text
from autopiper.report.palette import LEGEND, LINE_COLORS, LINE_WORDS, fill, ink, style

MOST_CHARACTERS = 900_000
MOST_ROWS = 24
"""Rows above which those that look alike become one."""
NARROWEST, WIDEST = 640, 3600
"""Pixels of the time axis."""
FORWARD = 17.0
"""Pixels that a typical forward gets if the width allows: two digits fit."""
BOX, LINE, GAP, MARGIN = 20.0, 3.0, 8.0, 12.0
"""Heights of a box and of a line under it, the space between rows, and that around the picture; pixels."""
DIGIT, LETTER = 6.0, 6.3
"""Widths of a digit in a box and of a letter in a label, roughly; pixels."""
LONGEST_LABEL = 44
FURTHER = ("", "2nd", "3rd", "4th")


@dataclass(frozen=True)
class _Content:
    """What goes into the picture, given that not everything may fit."""

    rows: Sequence[Row]
    numbers: bool
    lines: bool
    left_out: tuple[str, ...] = ()


def picture(
    timeline: Timeline,
    *,
    title: str | None = None,
    cluster: Cluster | None = None,
    width_px: float | None = None,
    communication: bool = True,
) -> str:
    """Draw one step as SVG text (ASCII, so that any encoding carries it).

    `cluster` names the device types. `width_px` is that of the time axis; None: wide enough for the numbers of the
    micro-batches, within limits. `communication=False` leaves the lines of transfers and collectives out.
    Raises PlanError where there is nothing to draw.
    """
    check(timeline)
    if width_px is not None and not 100 <= width_px <= 20_000:
        raise PlanError(f"width_px is {width_px}; it must be 100 to 20000 pixels, or None")
    end_s = max(timeline.makespan_s, *(e.end_s for lane in timeline.lanes for e in lane.events)) or 1.0
    width = _width(timeline, end_s) if width_px is None else float(width_px)
    rows = rows_of(timeline, width * 10 / end_s)
    if len(rows) > MOST_ROWS:
        rows = folded(rows)
    words = title if title is not None else f"One training step, bubble {timeline.bubble_fraction:.1%}"
    text = ""
    for content in _tries(rows, communication):
        text = _draw(content, words, end_s, width, cluster)
        if len(text) <= MOST_CHARACTERS:
            return text
    count = len(rows)
    while count > 1 and len(text) > MOST_CHARACTERS:
        count = max(1, min(count - 1, int(count * 0.95 * MOST_CHARACTERS / len(text))))
        text = _draw(_first_rows(content, rows, count), words, end_s, width, cluster)
    return text


def _width(timeline: Timeline, end_s: float) -> float:
    forwards = [e.end_s - e.start_s for lane in timeline.lanes for e in lane.events if kind_of(e) == "F"]
    typical_s = median(forwards) if forwards else 0.0
    return min(max(FORWARD * end_s / typical_s, NARROWEST), WIDEST) if typical_s else NARROWEST


def _tries(rows: Sequence[Row], communication: bool) -> list[_Content]:
    """All rows with everything first, then with less and less."""
    no_lines = ("transfers and collectives",) if communication else ()
    return [
        *([_Content(rows, True, True)] if communication else []),
        _Content(rows, True, False, no_lines),
        _Content(rows, False, False, (*no_lines, "the numbers of the micro-batches")),
    ]


def _first_rows(content: _Content, rows: Sequence[Row], count: int) -> _Content:
    ranks = sum(len(row.ranks) for row in rows[count:])
    lacking = f"{len(rows) - count} of {len(rows)} rows, which are {ranks} ranks"
    return _Content(rows[:count], content.numbers, content.lines, (*content.left_out, lacking))


def _draw(content: _Content, title: str, end_s: float, width: float, cluster: Cluster | None) -> str:
    labels = [_label(row, cluster) for row in content.rows]
    left = MARGIN + 8 + LETTER * max(max(len(first), len(second)) for first, second in labels)
    pitch = BOX + GAP + (LINE * len(LINES) + 2 if content.lines else 0)
    whole_width = left + width + 2 * MARGIN
    tones = sorted({box.tone for row in content.rows for box in row.boxes})
    legend, legend_height = _legend(tones, content, MARGIN, MARGIN + 22, whole_width - MARGIN)
    top = MARGIN + 22 + legend_height + 4
    parts = [
        _row(row, label, left, top + number * pitch, content)
        for number, (row, label) in enumerate(zip(content.rows, labels, strict=True))
    ]
    bottom = top + pitch * len(content.rows)
    parts.append(_axis(left, bottom, width, end_s))
    height = bottom + 40
    if content.left_out:
        height += 16
        parts.append(f'<text class="s" x="{_n(MARGIN)}" y="{_n(height - MARGIN)}">{_left_out(content)}</text>')
    height = round(height + 2)
    shown = _safe(title)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_n(whole_width)}" height="{_n(height)}" '
        f'viewBox="0 0 {_n(whole_width)} {_n(height)}" role="img">\n<title>{shown}</title>\n'
        f"<style>{style(tones, content.lines)}</style>\n"
        f'<rect class="bg" width="{_n(whole_width)}" height="{_n(height)}"/>\n'
        f'<text class="h" x="{_n(MARGIN)}" y="{_n(MARGIN + 10)}">{shown}</text>\n'
    )
    text = head + legend + "\n".join(parts) + "\n</svg>\n"
    return text.encode("ascii", "xmlcharrefreplace").decode()


def _row(row: Row, label: tuple[str, str], left: float, top: float, content: _Content) -> str:
    first, second = (_safe(line) for line in label)
    out = [
        f'<g class="row" transform="translate({_n(left)} {_n(top)})">',
        f'<text class="l" x="-8" y="9">{first}</text><text class="s l" x="-8" y="20">{second}</text>',
    ]
    by_tone: dict[str, list[tuple[int, int]]] = {}
    numbers: dict[str, list[str]] = {}
    for box in row.boxes:
        # A hair of the ground stays visible between neighbours.
        shown = (box.left, box.right - min(8, (box.right - box.left) // 6))
        by_tone.setdefault(box.tone, []).append(shown)
        if content.numbers and box.micro_batch is not None:
            text = str(box.micro_batch)
            if shown[1] - shown[0] >= 10 * (DIGIT * len(text) + 2):
                numbers.setdefault(ink(box.tone), []).append(f'<text x="{_n(sum(shown) / 20)}">{text}</text>')
    out += [f'<path class="{tone} x" d="{_strokes(by_tone[tone])}"/>' for tone in by_tone]
    out += [f'<g class="{color}" transform="translate(0 14)">{"".join(texts)}</g>' for color, texts in numbers.items()]
    if content.lines:
        for number, (name, stretches) in enumerate(zip(LINES, row.lines, strict=True)):
            if stretches:
                y = BOX + 2 + LINE * number + LINE / 2 - 10
                out.append(f'<path class="{name}" transform="translate(0 {_n(y)})" d="{_strokes(stretches)}"/>')
    return "\n".join([*out, "</g>"])


def _strokes(stretches: Sequence[tuple[int, int]]) -> str:
    """Path data of boxes as strokes half their height under the origin: the shortest that SVG has for a rectangle."""
    out, at = [], 0
    for number, (start, end) in enumerate(stretches):
        out.append(
            f"{'m' if number else 'M'}{_n((start - at) / 10)} {'0' if number else '10'}h{_n((end - start) / 10)}"
        )
        at = end
    return "".join(out)


def _label(row: Row, cluster: Cluster | None) -> tuple[str, str]:
    """Two lines: who, and with what they compute which stages."""
    parts = [types_text(row.devices, cluster)] if cluster is not None else []
    pipelines = sorted({pipeline for pipeline, _ in row.places})
    for pipeline in pipelines:
        stages = [stage for owner, stage in row.places if owner == pipeline]
        name = f"stage{'s' * (len(stages) > 1)} {runs_text(stages)}"
        parts.append(name if pipelines == [0] else f"p{pipeline} {name}")
    text = ", ".join(parts)
    return ranks_text(row.ranks), text if len(text) <= LONGEST_LABEL else text[: LONGEST_LABEL - 1] + "…"


def _legend(tones: Sequence[str], content: _Content, x: float, y: float, limit: float) -> tuple[str, float]:
    """Return the legend, in as many lines as it needs, and its height."""
    entries = [(f'<rect class="k" width="14" height="10" fill="{fill(t)}"/>', words) for t, words in _kinds(tones)]
    if content.lines:
        entries += [
            (f'<rect class="k" y="4" width="14" height="3" fill="{LINE_COLORS[name]}"/>', LINE_WORDS[name])
            for name, lines in zip(LINES, zip(*(row.lines for row in content.rows), strict=True), strict=True)
            if any(lines)
        ]
    out, at, line = [], x, 0
    for mark, words in entries:
        wide = 20 + LETTER * len(words) + 16
        if at + wide > limit and at > x:
            at, line = x, line + 1
        out.append(
            f'<g transform="translate({_n(at)} {_n(y + 16 * line)})">{mark}<text class="s" x="19" y="9">{words}</text></g>\n'
        )
        at += wide
    return "".join(out), 16.0 * (line + 1)


def _kinds(tones: Sequence[str]) -> list[tuple[str, str]]:
    """(tone, words) of each kind drawn; the shades beyond the first are the further stages that a rank holds."""
    found = []
    for kind, words in LEGEND.items():
        for tone in tones:
            if tone.rstrip("0123456789") == kind:
                further = FURTHER[int(tone.removeprefix(kind) or 0)]
                found.append((tone, f"{words}, {further} stage of the rank" if further else words))
    return found


def _axis(left: float, top: float, width: float, end_s: float) -> str:
    unit, scale = next((u, s) for u, s in (("s", 1.0), ("ms", 1e3), ("us", 1e6)) if end_s * s >= 1 or u == "us")
    end = end_s * scale
    rough = end * 110 / width
    base = 10.0 ** floor(log10(rough))
    step = next(base * factor for factor in (1, 2, 5, 10) if base * factor >= rough * 0.999)
    ticks = [number * step for number in range(floor(end / step * (1 + 1e-9)) + 1)]
    marks = "".join(f"M{_n(tick / end * width)} 0v5" for tick in ticks)
    texts = "".join(
        f'<text class="s m" x="{_n(tick / end * width)}" y="17">{tick:,.10g}{f" {unit}" * (number == 0)}</text>'
        for number, tick in enumerate(ticks)
    )
    return (
        f'<g class="axis" transform="translate({_n(left)} {_n(top)})">'
        f'<path class="a" d="M0 0h{_n(width)}{marks}"/>{texts}</g>'
    )


def _left_out(content: _Content) -> str:
    return "Left out, to keep the file small: " + "; ".join(content.left_out) + ". The trace has everything."


def _n(value: float) -> str:
    """Write a number as short as SVG reads it, to a tenth."""
    text = f"{value:.1f}".removesuffix(".0")
    return "0" if text in ("-0", "0") else text.replace("0.", ".", 1) if text.startswith(("0.", "-0.")) else text


def _safe(text: str) -> str:
    """Escape text; what XML cannot hold at all becomes a blank."""
    return escape(re.sub(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", " ", text))
