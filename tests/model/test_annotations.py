"""Regions as data: what is legal, what is refused, and that they are no part of what a plan depends on."""

from __future__ import annotations

import threading
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

import autopiper as ap
from autopiper.errors import ModelError
from autopiper.model import Annotation, Model
from autopiper.model.annotations import listening


def test_annotate_appends_the_next_numbers() -> None:
    model = Model.chain(7).annotate("PP", (0, 3)).annotate("PP", (3, 5), (6, 7)).annotate("EP", (4, 5))
    assert model.annotations == (
        Annotation(name="PP", index=0, start=0, stop=3),
        Annotation(name="PP", index=1, start=3, stop=5),
        Annotation(name="PP", index=2, start=6, stop=7),
        Annotation(name="EP", index=0, start=4, stop=5),
    )
    assert model.fingerprint() == Model.chain(7).fingerprint()
    assert model != Model.chain(7)


@given(st.lists(st.integers(0, 12), max_size=8))
def test_regions_are_legal_exactly_if_they_follow_each_other(numbers: list[int]) -> None:
    ranges = list(zip(numbers[::2], numbers[1::2], strict=False))
    legal = bool(ranges) and all(0 <= a < b <= 10 for a, b in ranges) and all(p[1] <= q[0] for p, q in pairwise(ranges))
    try:
        model = Model.chain(10).annotate("any name", *ranges)
    except ModelError:
        assert not legal
    else:
        assert legal
        assert [(a.index, a.start, a.stop) for a in model.annotations] == [(i, *r) for i, r in enumerate(ranges)]


@pytest.mark.parametrize(
    ("name", "ranges", "words"),
    [
        ("PP", ((0, 3), (2, 4)), r"PP 1 .*blocks \[2, 4\), overlaps PP 0, blocks \[0, 3\).*begin at 3 or later"),
        ("PP", ((2, 4), (0, 2)), r"annotation PP 1 .* begins before PP 0"),
        ("PP", ((0, 6),), r"annotation PP 0 of model 'chain' covers blocks \[0, 6\); .* within \[0, 5\)"),
        ("PP", ((2, 2),), r"covers blocks \[2, 2\); a region is one block or more"),
        ("PP", ((-1, 2),), r"covers blocks \[-1, 2\)"),
        ("MB", ((0, 1),), "an annotation cannot be named 'MB': filters use PIPE, MB, PASS"),
        ("", ((0, 1),), "the name of an annotation is empty"),
        (3, ((0, 1),), r"the name of an annotation is 3 \(int\); it must be text"),
        ("PP", (), r"annotate\('PP'\) names no blocks; give one range or more"),
        ("PP", (3,), r"annotate\('PP'\): 3 is no range of blocks; give pairs"),
        ("PP", ((0, 1.5),), r"\(0, 1.5\) is no range of blocks"),
    ],
)
def test_what_is_no_region_is_refused(name: str, ranges: tuple[tuple[int, int], ...], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        Model.chain(5).annotate(name, *ranges)


def test_numbers_have_no_gap() -> None:
    blocks = Model.chain(3).blocks
    with pytest.raises(ModelError, match=r"annotations PP of model 'm' are numbered \[1\]; .* 0\.\.0, without a gap"):
        Model(name="m", blocks=blocks, edges=(), annotations=(Annotation(name="PP", index=1, start=0, stop=1),))


def test_without_a_listener_a_scope_is_nothing() -> None:
    with ap.annotate("PP"), ap.annotate("MB"), ap.annotate(""):
        pass


def test_only_its_own_thread_is_heard() -> None:
    class Ear:
        def __init__(self) -> None:
            self.heard: list[str] = []

        def enter(self, name: str) -> None:
            self.heard.append(name)

        def exit(self, name: str) -> None:
            self.heard.append(f"/{name}")

    def speak(name: str) -> None:
        with ap.annotate(name):
            pass

    ear, inner = Ear(), Ear()
    with listening(ear):
        speak("a")
        other = threading.Thread(target=speak, args=("b",))
        other.start()
        other.join()
        with listening(inner):
            speak("c")
        with pytest.raises(ZeroDivisionError), ap.annotate("d"):
            _ = 1 / 0
    speak("e")
    assert (ear.heard, inner.heard) == (["a", "/a", "d", "/d"], ["c", "/c"])
