"""Slots: the order in which a device group computes, segment by segment, and the chains of slots that ZeRO asks for.

All members of a group share its slots; a member whose slice of a micro-batch is empty leaves that slot out, but still
takes part in the collectives of the chain, with nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from autopiper._data import data
from autopiper.ir.graph import GradientBlock, GraphStage, Row, TrainingGraph
from autopiper.plan.passes import Pass, PassGroup

FINAL_KINDS = ("B", "W")
"""After these passes the gradients of a micro-batch are final."""


@data
class Slot:
    """One segment of one pass."""

    stage: GraphStage
    it: Pass
    segment: int

    @property
    def first(self) -> bool:
        """Whether the pass begins with this slot."""
        return self.it.kind == "W" or self.segment == (0 if self.it.kind == "F" else self.stage.num_segments - 1)

    @property
    def last(self) -> bool:
        """Whether the pass ends with this slot."""
        return self.it.kind == "W" or self.segment == (self.stage.num_segments - 1 if self.it.kind == "F" else 0)

    @property
    def half_blocks(self) -> tuple[int, int]:
        """Half blocks [low, high) that are computed; W takes the whole stage at once."""
        if self.it.kind == "W":
            return 2 * self.stage.start, 2 * self.stage.stop
        return self.stage.segment(self.segment)


def slots(graph: TrainingGraph, row: Row) -> list[Slot]:
    """Write out a row segment by segment; passes of one group take turns, forwards first, at each all-to-all."""
    found: list[Slot] = []
    for group in row.groups:
        found += _interleaved(graph, group)
    return found


def _interleaved(graph: TrainingGraph, group: PassGroup) -> Iterable[Slot]:
    runs = [_runs(graph.stage(it.pipeline, it.stage), it) for it in sorted(group, key=lambda it: it.kind != "F")]
    for turn in range(max(map(len, runs))):
        for run in runs:
            if turn < len(run):
                yield from run[turn]


def _runs(stage: GraphStage, it: Pass) -> list[list[Slot]]:
    """Cut a pass where it exchanges tokens."""
    if it.kind == "W":
        return [[Slot(stage=stage, it=it, segment=0)]]
    numbers = range(stage.num_segments)
    runs: list[list[Slot]] = [[]]
    for k in numbers if it.kind == "F" else reversed(numbers):
        border = k - 1 if it.kind == "F" else k
        if runs[0] and stage.borders[border].exchange is not None:
            runs.append([])
        runs[-1].append(Slot(stage=stage, it=it, segment=k))
    return runs


@data
class Chain:
    """Slots in a row, from `first` to `last` (positions), that use one bucket: gathered once, let go once."""

    first: int
    last: int


def gather_chains(order: Sequence[Slot], block: GradientBlock, bucket: int) -> list[Chain]:
    """Return the chains of slots that need the parameters of a bucket: passes that follow each other share one."""
    piece = block.buckets[bucket]
    low, high = 2 * piece.lowest_block, 2 * piece.highest_block + 1
    return _chains(order, block, lambda slot: slot.half_blocks[0] < high and slot.half_blocks[1] > low)


def reduce_chains(order: Sequence[Slot], block: GradientBlock) -> list[Chain]:
    """Return the chains of backward slots whose gradients are summed at once: passes that follow each other."""
    return _chains(order, block, lambda slot: slot.it.kind in FINAL_KINDS)


def _chains(order: Sequence[Slot], block: GradientBlock, uses: Callable[[Slot], bool]) -> list[Chain]:
    home = block.holders[0]
    spans: dict[Pass, list[int]] = {}
    for position, slot in enumerate(order):
        if (slot.it.pipeline, slot.it.stage) == (home.pipeline, home.stage) and uses(slot):
            spans.setdefault(slot.it, [position, position])[1] = position
    chains: list[Chain] = []
    for first, last in sorted(spans.values()):
        if chains and first <= chains[-1].last + 1:
            chains[-1] = Chain(first=chains[-1].first, last=max(last, chains[-1].last))
        else:
            chains.append(Chain(first=first, last=last))
    return chains
