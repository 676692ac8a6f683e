"""RowWriter: writes one row phase by phase, counting the micro-batches of each stage and kind."""

from __future__ import annotations

from collections import Counter, deque

from autopiper.plan.passes import Pass, PassGroup

Place = tuple[int, int]
"""(pipeline, stage)."""


class RowWriter:
    """One device group's row under construction."""

    def __init__(self) -> None:
        self.row: list[PassGroup] = []
        self._next: Counter[tuple[Place, str]] = Counter()
        self._split: deque[Pass] = deque()

    def _make(self, kind: str, place: Place) -> Pass:
        key = (place, "F" if kind == "F" else "B")  # B and I count on together
        made = Pass(kind=kind, pipeline=place[0], stage=place[1], micro_batch=self._next[key])
        self._next[key] += 1
        if kind == "I":
            self._split.append(made)
        return made

    def add(self, kind: str, place: Place) -> None:
        """Append F, B or I of the stage's next micro-batch."""
        self.row.append((self._make(kind, place),))

    def overlap(self, forward: Place, backward: Place) -> None:
        """Append a group of two: the next F of one stage and the next B of another."""
        self.row.append((self._make("F", forward), self._make("B", backward)))

    def add_weight(self, place: Place | None = None) -> None:
        """Append the W of the oldest I, of one stage or of any, that has not had it; nothing where there is none."""
        for it in self._split:
            if place is None or (it.pipeline, it.stage) == place:
                self._split.remove(it)
                self.row.append((Pass(kind="W", pipeline=it.pipeline, stage=it.stage, micro_batch=it.micro_batch),))
                return
