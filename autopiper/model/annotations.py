"""Annotations: named, numbered regions of a model, which directives pick out by tag.

`with autopiper.annotate("PP"):` inside a module's forward tags what runs within, as Piper's `annotate` does
(arXiv 2606.11169). `Model.from_module` listens while it runs the forward and turns the scopes into regions of blocks;
nobody else listens, and then a scope does nothing, so the same model trains as it is, under torch.compile too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from threading import get_ident
from typing import Protocol

from autopiper._data import data, require
from autopiper.errors import ModelError

RESERVED = ("PIPE", "MB", "PASS")
"""Tags that filters use for pipelines, micro-batches and passes; no region may be called so."""

EXPERTS = "EP"
"""The conventional name of regions of routed experts. (That of stages is "PP"; any other name is legal.)"""


@data
class Annotation:
    """Region number `index` called `name` covers the blocks [start, stop)."""

    name: str
    index: int
    start: int
    stop: int


def check_name(name: str) -> None:
    """Raise ModelError where a region cannot be called so."""
    require(ModelError, "the name of an annotation", name, str)
    if not name:
        raise ModelError(
            "the name of an annotation is empty; give it one, 'PP' for stages, 'EP' for experts, or any other"
        )
    if name in RESERVED:
        raise ModelError(
            f"an annotation cannot be named '{name}': filters use {', '.join(RESERVED)} for pipelines, micro-batches and "
            "passes; take another name, 'PP' for stages or 'EP' for experts"
        )


def check(annotations: Sequence[Annotation], num_blocks: int, model: str) -> None:
    """Check the regions of a model: names, ranges, and per name numbers 0, 1, … in the order of the blocks.

    Raises ModelError naming the region, what came and what is allowed.
    """
    by_name: dict[str, list[Annotation]] = {}
    for region in annotations:
        check_name(region.name)
        if not 0 <= region.start < region.stop <= num_blocks:
            raise ModelError(
                f"annotation {region.name} {region.index} of model '{model}' covers blocks [{region.start}, {region.stop}); "
                f"a region is one block or more within [0, {num_blocks})"
            )
        by_name.setdefault(region.name, []).append(region)
    for name, regions in by_name.items():
        numbers = [r.index for r in regions]
        if numbers != list(range(len(numbers))):
            raise ModelError(
                f"annotations {name} of model '{model}' are numbered {numbers}; regions of one name are listed by their "
                f"numbers 0..{len(numbers) - 1}, without a gap"
            )
        for before, after in pairwise(regions):
            if after.start < before.stop:
                wrong = "begins before" if after.start < before.start else "overlaps"
                raise ModelError(
                    f"annotation {name} {after.index} of model '{model}', blocks [{after.start}, {after.stop}), {wrong} "
                    f"{name} {before.index}, blocks [{before.start}, {before.stop}); regions of one name follow each other "
                    f"in the order of the blocks: begin at {before.stop} or later"
                )


def appended(annotations: Sequence[Annotation], name: str, ranges: Sequence[tuple[int, int]]) -> tuple[Annotation, ...]:
    """Return the annotations with regions of these block ranges added under the next numbers of `name`.

    Raises ModelError where a range is no pair of whole numbers; what the numbers may be is `check`'s business.
    """
    check_name(name)
    if not ranges:
        raise ModelError(
            f"annotate('{name}') names no blocks; give one range or more, e.g. annotate('{name}', (0, 3), (3, 7))"
        )
    for each in ranges:
        pair = isinstance(each, tuple | list) and len(each) == 2
        if not pair or not all(isinstance(n, int) and not isinstance(n, bool) for n in each):
            raise ModelError(
                f"annotate('{name}'): {each!r} is no range of blocks; give pairs (start, stop) of whole numbers, e.g. (0, 3)"
            )
    first = sum(a.name == name for a in annotations)
    new = (Annotation(name=name, index=first + i, start=a, stop=b) for i, (a, b) in enumerate(ranges))
    return (*annotations, *new)


class Listener(Protocol):
    """Who wants to know of scopes: `Model.from_module`, while it runs a forward."""

    def enter(self, name: str) -> None:
        """A scope of this name begins."""

    def exit(self, name: str) -> None:
        """The innermost scope, of this name, ends."""


_listeners: dict[int, Listener] = {}
"""By thread. A plain mapping, empty while nobody listens: torch.compile sees through it, and not through a ContextVar."""


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Within, `listener` hears of the scopes that this thread enters; one that listened before hears nothing."""
    thread = get_ident()
    before = _listeners.get(thread)
    _listeners[thread] = listener
    try:
        yield
    finally:
        if before is None:
            del _listeners[thread]
        else:
            _listeners[thread] = before


def tell(name: str, begins: bool) -> None:
    """Tell who listens in this thread that a scope begins or ends."""
    listener = _listeners.get(get_ident())
    if listener is not None:
        (listener.enter if begins else listener.exit)(name)


class annotate:
    """Tag what runs within as the next region called `name`; scopes nest, and the whole stack counts.

        with autopiper.annotate("PP"):
            for layer in self.layers[:4]:
                x = layer(x)

    "PP" is the conventional name of stages, "EP" that of routed experts: a scope around the experts inside a layer
    makes them a segment of their own. Free of cost and of effect while training.
    """

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        if _listeners:
            tell(self.name, True)

    def __exit__(self, *_: object) -> None:
        if _listeners:
            tell(self.name, False)
