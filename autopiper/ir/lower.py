"""Lowering: from the training graph to one Program per member, with explicit transfers, reductions and updates.

What each rank does, in order, per stream. Streams of a Program:

    compute            F and B (or I and W) in the order of the schedule, then the updates
    p0:s0.m0>s1.m0:F   one channel: a directed pair of members and one kind of message; one name on both ends
    reduce0, …         gradient reductions, one stream per holder set
    loss, norm         the global loss, the global gradient norm
"""

from __future__ import annotations

from collections.abc import Iterator

from autopiper.ir.graph import GradientBlock, GraphStage, TrainingGraph
from autopiper.plan.actions import COMPUTE_STREAM, Action, Place, Program, Wait, compute_text

RECEIVE_DEPTH = 2
"""Messages that a channel may receive ahead of their use: one in use, one arriving."""


def channel(pipeline: int, source: Place, target: Place, kind: str) -> str:
    """Name of the channel from one member to another; `kind` is F or B."""
    return f"p{pipeline}:s{source.stage}.m{source.member}>s{target.stage}.m{target.member}:{kind}"


def lower(graph: TrainingGraph) -> tuple[Program, ...]:
    """Write the Programs of a complete training graph, in order of pipeline, stage and member."""
    ranks = {device: rank for rank, device in enumerate(graph.devices())}
    reduce_streams: dict[tuple[Place, ...], str] = {}
    for block in graph.gradient_blocks:
        if len(block.holders) > 1:
            reduce_streams.setdefault(block.holders, f"reduce{len(reduce_streams)}")
    held: dict[Place, list[GradientBlock]] = {}
    for block in graph.gradient_blocks:
        for place in block.holders:
            held.setdefault(place, []).append(block)
    programs = []
    for stage in graph.stages():
        for place in stage.places():
            devices = stage.members[place.member]
            streams: dict[str, list[Action]] = {COMPUTE_STREAM: []}
            for action in _member_actions(graph, stage, place, held.get(place, []), reduce_streams):
                streams.setdefault(action.stream, []).append(action)
            programs.append(
                Program(
                    ranks=tuple(ranks[d] for d in devices),
                    devices=devices,
                    places=(place,),
                    streams={name: tuple(actions) for name, actions in streams.items()},
                )
            )
    return tuple(programs)


def _member_actions(
    graph: TrainingGraph,
    stage: GraphStage,
    place: Place,
    held: list[GradientBlock],
    reduce_streams: dict[tuple[Place, ...], str],
) -> Iterator[Action]:
    computes = {
        (p.kind, p.micro_batch): compute_text(stage.index, p.kind, p.micro_batch)
        for p in stage.order
        if stage.slices[p.micro_batch][place.member] > 0
    }
    waits: dict[tuple[str, int], list[Wait]] = {key: [] for key in computes}
    transfers = [t for kind in ("F", "B") for t in _transfers(graph, stage, place, kind, computes, waits)]
    for (kind, mb), received in waits.items():
        yield Action(
            kind=kind, stream=COMPUTE_STREAM, pipeline=stage.pipeline, stage=stage.index, micro_batch=mb,
            waits=tuple(received),
        )  # fmt: skip
    yield from transfers
    last = next((text for (kind, _), text in reversed(computes.items()) if kind in ("B", "W")), None)
    forwards = [text for (kind, _), text in computes.items() if kind == "F"]
    is_last = stage.index == len(graph.pipelines[stage.pipeline].stages) - 1
    yield Action(kind="LOSS", stream="loss", waits=(Wait(action=forwards[-1]),) if is_last and forwards else ())
    reduced: dict[int, str] = {}
    for block in held:
        if len(block.holders) > 1:
            for number, bucket in enumerate(block.buckets):
                lowest = bucket.lowest_block
                if block.kind == "tied":  # final when the lowest use in this stage has passed
                    lowest = min(b for b in block.blocks if stage.start <= b < stage.stop)
                reduce = Action(
                    kind="REDUCE_GRAD",
                    stream=reduce_streams[block.holders],
                    gradient_block=block.index,
                    bucket=number,
                    waits=(Wait(action=last, block=lowest),) if last else (),
                )
                reduced[block.index] = reduce.text
                yield reduce
    ready: tuple[Wait, ...] = (Wait(action="LOSS"),)
    if graph.training.needs_norm:
        before = [Wait(action=text) for text in reduced.values()]
        if last:
            before.append(Wait(action=last))
        yield Action(kind="NORM", stream="norm", waits=tuple(before))
        ready = (*ready, Wait(action="NORM"))
    for block in held:
        # Buckets of one block share a stream, so the last one says that all are over.
        own_reduce = (Wait(action=reduced[block.index]),) if block.index in reduced else ()
        yield Action(kind="UPDATE", stream=COMPUTE_STREAM, gradient_block=block.index, waits=(*own_reduce, *ready))


def _transfers(
    graph: TrainingGraph,
    stage: GraphStage,
    place: Place,
    kind: str,
    computes: dict[tuple[str, int], str],
    waits: dict[tuple[str, int], list[Wait]],
) -> Iterator[Action]:
    """Yield the sends and receives of one member for one direction, and add to `waits` what its computes wait for.

    `computes` = the text of each compute of the member, in its order. Forward messages go to the next stage, backward
    ones to the stage before; the order of a channel is the order in which the *sending* stage works.
    """
    pipe = graph.pipelines[stage.pipeline]
    step = 1 if kind == "F" else -1
    produce = ("F",) if kind == "F" else ("B", "I")
    if 0 <= stage.index + step < len(pipe.stages):
        regions = _Regions(stage, pipe.stages[stage.index + step], place.member)
        streams = regions.streams(stage.pipeline, kind, sending=True)
        for (name, mb), text in computes.items():
            if name in produce:
                ready = (Wait(action=text),)
                for peer, region in regions.of(mb):
                    yield Action(
                        kind=f"SEND_{kind}", stream=streams[peer], pipeline=stage.pipeline, stage=stage.index,
                        micro_batch=mb, peer=peer, samples=region, waits=ready,
                    )  # fmt: skip
    if 0 <= stage.index - step < len(pipe.stages):
        other = pipe.stages[stage.index - step]
        regions = _Regions(stage, other, place.member)
        streams = regions.streams(stage.pipeline, kind, sending=False)
        consumers: dict[int, list[str]] = {}
        for sent in other.order:
            if sent.kind not in produce or stage.slices[sent.micro_batch][place.member] == 0:
                continue
            mb = sent.micro_batch
            use = next((key for key in ((k, mb) for k in produce) if key in computes), None)
            for peer, region in regions.of(mb):
                ahead = consumers.setdefault(peer, [])
                receive = Action(
                    kind=f"RECV_{kind}", stream=streams[peer], pipeline=stage.pipeline, stage=stage.index,
                    micro_batch=mb, peer=peer, samples=region,
                    waits=(Wait(action=ahead[-RECEIVE_DEPTH]),) if len(ahead) >= RECEIVE_DEPTH else (),
                )  # fmt: skip
                yield receive
                if use is not None:
                    waits[use].append(Wait(action=receive.text))
                    ahead.append(computes[use])


class _Regions:
    """Which samples one member of a stage shares with which members of a neighbour; equal slices are worked out once."""

    def __init__(self, stage: GraphStage, other: GraphStage, member: int) -> None:
        self.stage, self.other, self.member = stage, other, member
        self._known: dict[tuple[tuple[int, ...], tuple[int, ...]], list[tuple[int, tuple[int, int]]]] = {}

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
