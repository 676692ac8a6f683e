"""A picture shows each pass where the timeline has it: read back from the SVG, box by box."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from itertools import chain, pairwise
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from report_timelines import compute, gpipe, lane, timeline

import autopiper as ap
from autopiper.errors import PlanError
from autopiper.plan import Event, Timeline
from autopiper.report.boxes import KINDS, MIXED, OTHER
from autopiper.report.palette import LIGHT_INK, contrast, fill, ink
from autopiper.report.picture import picture

NS = "{http://www.w3.org/2000/svg}"
NUMBER = r"-?(?:\d+(?:\.\d)?|\.\d)"


class Shown(NamedTuple):
    tone: str
    left: float
    right: float


class Read:
    """What a reader of the SVG finds in it."""

    def __init__(self, svg: str) -> None:
        self.root = ET.fromstring(svg)
        assert svg.isascii()
        box = [float(v) for v in self.root.attrib["viewBox"].split()]
        assert box[:2] == [0, 0]
        self.width, self.height = box[2], box[3]
        assert [float(self.root.attrib[name]) for name in ("width", "height")] == box[2:]
        self.rows = [g for g in self.root.iter(f"{NS}g") if g.attrib.get("class") == "row"]
        self.left = self.place(self.rows[0])[0]
        axis = next(g for g in self.root.iter(f"{NS}g") if g.attrib.get("class") == "axis")
        (line,) = axis.iter(f"{NS}path")
        found = re.match(rf"M0 0h({NUMBER})", line.attrib["d"])
        assert found is not None
        self.axis_width = float(found[1])
        self.ticks = ["".join(t.itertext()) for t in axis.iter(f"{NS}text")]
        self.texts = ["".join(t.itertext()) for t in self.root.iter(f"{NS}text")]

    @staticmethod
    def place(group: ET.Element) -> tuple[float, float]:
        x, y = group.attrib["transform"].removeprefix("translate(").removesuffix(")").split()
        return float(x), float(y)

    @staticmethod
    def strokes(path: ET.Element) -> list[tuple[float, float]]:
        found, at, data = [], 0.0, path.attrib["d"]
        pieces = re.findall(rf"([Mm])({NUMBER}) (?:10|0)h({NUMBER})", data)
        assert "".join(f"{m}{x} {'10' if m == 'M' else '0'}h{w}" for m, x, w in pieces) == data
        for _, x, width in pieces:
            at += float(x)
            found.append((at, at + float(width)))
            at += float(width)
        return found

    def boxes(self, row: int) -> list[Shown]:
        found = []
        for path in self.rows[row].iter(f"{NS}path"):
            classes = path.attrib["class"].split()
            if "x" in classes:
                found += [Shown(classes[0], left, right) for left, right in self.strokes(path)]
        return sorted(found, key=lambda box: box.left)

    def lines(self, row: int) -> dict[str, list[tuple[float, float]]]:
        paths = [p for p in self.rows[row].iter(f"{NS}path") if "x" not in p.attrib["class"].split()]
        return {p.attrib["class"]: self.strokes(p) for p in paths}

    def numbers(self, row: int) -> list[tuple[float, str]]:
        groups = [g for g in self.rows[row].iter(f"{NS}g") if g.attrib.get("class") in ("d", "w")]
        found = [(float(t.attrib["x"]), "".join(t.itertext())) for g in groups for t in g.iter(f"{NS}text")]
        return sorted(found)

    def labels(self) -> list[tuple[str, ...]]:
        return [tuple("".join(t.itertext()) for t in g.findall(f"{NS}text")) for g in self.rows]


def assert_sound(svg: str, step: Timeline) -> Read:
    """Boxes of a row lie apart, inside the picture, and each inside the time of what it shows."""
    read = Read(svg)
    for number in range(len(read.rows)):
        boxes = read.boxes(number)
        for one, other in pairwise(boxes):
            assert one.right <= other.left + 1e-6
        for box in boxes:
            assert box.left < box.right
            assert box.left >= 0 and box.right <= read.axis_width + 0.11
            assert read.left + box.right <= read.width
        for x, _ in read.numbers(number):
            assert any(box.left < x < box.right for box in boxes)
        assert 0 <= Read.place(read.rows[number])[1] <= read.height - 20
    tops = [Read.place(row)[1] for row in read.rows]
    assert all(later - earlier >= 20 for earlier, later in pairwise(tops))
    assert step.makespan_s > 0
    return read


def test_every_pass_is_a_box_at_its_time() -> None:
    step = gpipe(3, 4)
    read = assert_sound(picture(step), step)
    assert len(read.rows) == 3
    scale = read.axis_width / step.makespan_s
    for number, each in enumerate(step.lanes):
        passes = [e for e in each.events if e.stream == "compute"]
        boxes = read.boxes(number)
        assert [box.tone for box in boxes] == [f"{e.kind}0" for e in passes]
        assert [box.left for box in boxes] == pytest.approx([e.start_s * scale for e in passes], abs=0.06)
        assert [box.right for box in boxes] == pytest.approx([e.end_s * scale for e in passes], abs=0.9)
        assert [text for _, text in read.numbers(number)] == [str(e.micro_batch) for e in passes]
    assert read.labels() == [(f"rank {s}", f"stage {s}") for s in range(3)]


def test_lines_show_when_messages_run() -> None:
    step = gpipe(2, 2)
    read = Read(picture(step))
    scale = read.axis_width / step.makespan_s
    assert set(read.lines(0)) == {"send", "recv"}
    times = [*chain(*read.lines(0)["send"])]
    assert times == pytest.approx([scale, 1.25 * scale, 2 * scale, 2.25 * scale], abs=0.1)
    assert read.lines(0)["send"] == read.lines(1)["recv"]
    assert {"sends", "receives"} <= set(read.texts)
    bare = Read(picture(step, communication=False))
    assert bare.lines(0) == {}
    assert not {"sends", "receives"} & set(bare.texts)
    assert bare.height < read.height


def test_shades_tell_the_stages_of_a_rank_apart() -> None:
    events = [compute("F", 0, 0, 0, 1), compute("F", 2, 0, 1, 2), compute("B", 2, 0, 2, 4), compute("B", 0, 0, 4, 6)]
    other = [compute("F", 1, 0, 0, 1), compute("F", 0, 1, 1, 2, pipeline=1)]
    step = timeline([lane(0, events), lane(1, other)])
    read = assert_sound(picture(step), step)
    assert [box.tone for box in read.boxes(0)] == ["F0", "F1", "B1", "B0"]
    assert [box.tone for box in read.boxes(1)] == ["F0", "F1"]
    assert read.labels() == [("rank 0", "stages 0, 2"), ("rank 1", "p0 stage 1, p1 stage 0")]
    assert {"forward", "backward"} < set(read.texts)
    assert [t for t in read.texts if "2nd" in t] == [
        "forward, 2nd stage of the rank", "backward, 2nd stage of the rank",
    ]  # fmt: skip
    assert fill("F0") != fill("F1")


def test_segments_of_a_pass_are_one_box_and_kinds_have_their_own() -> None:
    segments = [
        Event(action=a, stream="compute", start_s=s, end_s=s + 1, kind=k, pipeline=0, stage=0, micro_batch=m)
        for a, k, m, s in (("0F0", "F", 0, 0.0), ("0.1F0", "F", 0, 1.0), ("0.1I0", "I", 0, 2.0), ("0W0", "W", 0, 4.0))
    ]
    update = [
        Event(action=f"g{g}UPDATE", stream="compute", start_s=5.0 + g, end_s=6.0 + g, kind="UPDATE") for g in (0, 1)
    ]
    gather = Event(action="COPY", stream="compute", start_s=7.0, end_s=8.0, kind="COPY")
    step = timeline([lane(0, [*segments, *update, gather])])
    read = assert_sound(picture(step), step)
    assert [box.tone for box in read.boxes(0)] == ["F0", "I0", "W0", "UPDATE0", "OTHER0"]
    assert [text for _, text in read.numbers(0)] == ["0", "0", "0"]
    assert {"forward", "backward for the input", "backward for the weights", "optimizer", "other"} <= set(read.texts)
    assert "backward" not in read.texts


def test_numbers_are_left_out_where_they_do_not_fit() -> None:
    step = gpipe(2, 200)
    wide = assert_sound(picture(step, width_px=20_000), step)
    assert len(wide.numbers(0)) == 400
    narrow = assert_sound(picture(step, width_px=500), step)
    assert narrow.numbers(0) == []
    assert narrow.axis_width == 500


def test_what_no_eye_tells_apart_becomes_one_box() -> None:
    events = [compute("FB"[n % 2], 0, n // 2, n, n + 1) for n in range(20_000)]
    step = timeline([lane(0, [*events, compute("W", 0, 0, 30_000, 40_000)])])
    read = assert_sound(picture(step, width_px=1000), step)
    boxes = read.boxes(0)
    assert [box.tone for box in boxes] == [MIXED, "W0"]
    assert (boxes[0].left, boxes[0].right) == pytest.approx((0, 500), abs=1)
    assert "too short to tell apart" in read.texts
    alike = timeline([lane(0, [compute("F", 0, n, n, n + 1) for n in range(20_000)])])
    assert [box.tone for box in Read(picture(alike, width_px=1000)).boxes(0)] == ["F0"]


def test_a_large_step_is_a_small_file() -> None:
    step = gpipe(64, 256, kinds="FIW")
    svg = picture(step)
    assert len(svg) < 1_000_000
    read = assert_sound(svg, step)
    assert len(read.rows) == 64
    assert not [t for t in read.texts if t.startswith("Left out") and "rows" in t]
    assert all(sum(box.tone == "F0" for box in read.boxes(row)) == 256 for row in (0, 63))


def test_what_is_left_out_is_said() -> None:
    events = [compute("F", 0, n, n * 1.7, n * 1.7 + 1) for n in range(1500)]
    step = timeline([lane(n, [replace(e, end_s=e.end_s + n * 1e-3) for e in events]) for n in range(100)])
    svg = picture(step)
    assert len(svg) <= 900_000
    read = assert_sound(svg, step)
    (said,) = [t for t in read.texts if t.startswith("Left out")]
    assert f"{100 - len(read.rows)} of 100 rows, which are {100 - len(read.rows)} ranks" in said
    assert "the numbers of the micro-batches" in said
    assert len(picture(gpipe(2, 2))) < 5000 and "Left out" not in picture(gpipe(2, 2))


def test_rows_that_look_alike_become_one_where_there_are_many() -> None:
    one = gpipe(2, 2)
    few = timeline([replace(one.lanes[n % 2], ranks=(n,), devices=(n,)) for n in range(8)])
    assert len(Read(picture(few)).rows) == 8
    many = timeline([replace(one.lanes[n % 2], ranks=(n,), devices=(n,)) for n in range(64)])
    read = assert_sound(picture(many), many)
    assert read.labels() == [("ranks 0, 2, 4 … 62 (32)", "stage 0"), ("ranks 1, 3, 5 … 63 (32)", "stage 1")]


@pytest.mark.parametrize(
    ("scale", "unit", "last"), [(1.0, "s", 4.5), (1e-3, "ms", 4.5), (1e-6, "us", 4.5), (1000.0, "s", 4500.0)]
)
def test_the_axis_has_a_unit_that_fits(scale: float, unit: str, last: float) -> None:
    step = gpipe(2, 1, scale=scale)
    read = Read(picture(step))
    assert read.ticks[0] == f"0 {unit}"
    values = [float(t.replace(",", "")) for t in read.ticks[1:]]
    assert 3 <= len(values) <= 12 and values == sorted(values)
    assert values[-1] <= last * (1 + 1e-9) < values[-1] + values[0] * 1.001
    steps = {round((b - a) / values[0], 6) for a, b in pairwise(values)}
    assert steps <= {1.0}


def test_text_is_escaped_and_nothing_comes_from_elsewhere() -> None:
    step = gpipe(2, 1)
    cluster = ap.Cluster.homogeneous("a100-80g", devices_per_node=2)
    title = "<script>alert('x')</script> & \"quotes\" \x00\ud800 \u00e4\U0001f600"
    svg = picture(step, title=title, cluster=cluster)
    read = Read(svg)
    assert read.texts[0] == "<script>alert('x')</script> & \"quotes\"    \u00e4\U0001f600"
    assert {element.tag.removeprefix(NS) for element in read.root.iter()} == {
        "svg", "title", "style", "rect", "text", "g", "path",
    }  # fmt: skip
    assert not re.search(r"url\(|@import|href|<script", svg)
    assert svg.count("http") == 1  # the name space
    assert "prefers-color-scheme:dark" in svg
    assert read.labels()[0] == ("rank 0", "a100-80g, stage 0")


def test_numbers_are_legible_on_every_tone() -> None:
    for kind in (*KINDS, OTHER):
        for shade in range(4):
            tone = f"{kind}{shade}"
            against = "#ffffff" if ink(tone) == LIGHT_INK else "#16161a"
            assert contrast(fill(tone), against) >= 4.5, tone
    assert contrast("#000000", "#ffffff") == pytest.approx(21)


@settings(max_examples=60, deadline=None)
@given(
    stages=st.integers(1, 5), micro_batches=st.integers(1, 40), message_s=st.sampled_from([0.0, 1e-6, 0.1, 3.0]),
    kinds=st.sampled_from(["FB", "FIW", "F"]), width=st.sampled_from([None, 100.0, 333.3, 5000.0]),
    scale=st.sampled_from([1e-9, 1 / 7, 1e5]),
)  # fmt: skip
def test_every_picture_is_sound(width: float | None, **how: Any) -> None:
    step = gpipe(**how)
    assert_sound(picture(step, width_px=width), step)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("FBIW"), st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=60))
def test_passes_that_overlap_are_still_drawn_apart(times: list[tuple[str, float, float]]) -> None:
    events = [compute(kind, 0, n, start, start + length) for n, (kind, start, length) in enumerate(times)]
    step = timeline([lane(0, events)], makespan_s=2.0)
    assert_sound(picture(step, width_px=300), step)


def test_wrong_input_is_refused() -> None:
    with pytest.raises(PlanError, match="no events, so there is nothing to draw"):
        picture(timeline([lane(0, [])]))
    with pytest.raises(PlanError, match="width_px is 3; it must be 100 to 20000 pixels, or None"):
        picture(gpipe(1, 1), width_px=3)
