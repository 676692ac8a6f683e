"""Keeping the garbage collector away from work that makes many small objects, none of them in a cycle."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """Pause the collector, also as a decorator: it would walk tens of thousands of new actions again and again.

    It takes half of the time of a simulation otherwise.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
