"""Regions: which samples of a micro-batch go from which member to which, and over what channel."""

from __future__ import annotations

from autopiper.ir.graph import GraphStage
from autopiper.plan.actions import Place

RECEIVE_DEPTH = 2
"""Messages that a channel may receive ahead of their use: one in use, one arriving."""


def channel(pipeline: int, source: Place, target: Place, kind: str) -> str:
    """Name of the channel from one member to another; `kind` is F or B."""
    return f"p{pipeline}:s{source.stage}.m{source.member}>s{target.stage}.m{target.member}:{kind}"


class Regions:
    """Which samples one member of a stage shares with which members of a neighbour; equal slices are worked out once."""

    def __init__(self, stage: GraphStage, other: GraphStage, member: int) -> None:
        self.stage, self.other, self.member = stage, other, member
        self._known: dict[tuple[tuple[int, ...], tuple[int, ...]], list[tuple[int, tuple[int, int]]]] = {}

    def local(self, peer: int) -> bool:
        """Whether a member of the neighbour is this very member: both stages are on one device group."""
        return self.stage.members == self.other.members and peer == self.member

    def of(self, micro_batch: int) -> list[tuple[int, tuple[int, int]]]:
        """Return (peer, samples [start, stop)) for every member of the neighbour that shares samples."""
        key = (self.stage.slices[micro_batch], self.other.slices[micro_batch])
        found = self._known.get(key)
        if found is None:
            start, stop = self.stage.ranges(micro_batch)[self.member]
            pairs = ((p, (max(start, a), min(stop, b))) for p, (a, b) in enumerate(self.other.ranges(micro_batch)))
            found = self._known[key] = [(peer, region) for peer, region in pairs if region[0] < region[1]]
        return found

    def streams(self, pipeline: int, kind: str, *, sending: bool) -> list[str]:
        """Return the channel to (or from) each member of the neighbour."""
        here = Place(pipeline=pipeline, stage=self.stage.index, member=self.member)
        there = [Place(pipeline=pipeline, stage=self.other.index, member=m) for m in range(len(self.other.members))]
        return [channel(pipeline, here, p, kind) if sending else channel(pipeline, p, here, kind) for p in there]
