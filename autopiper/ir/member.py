"""What one member of a device group does: its actions, each with what it waits for.

The chains of computing come from the group's slots (`ir.slots`), the messages from the regions that it shares with the
members of neighbouring stages (`ir.regions`), reductions and gathers from the gradient blocks that it holds.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence

from autopiper._data import data
from autopiper.ir.graph import Bucket, GradientBlock, GraphStage, Members, TrainingGraph
from autopiper.ir.regions import RECEIVE_DEPTH, Regions
from autopiper.ir.slots import FINAL_KINDS, Slot, gather_chains, reduce_chains
from autopiper.plan.actions import COMPUTE_STREAM, Action, Wait, compute_text

GATHER_DEPTH = 1
"""Slots of computing during which the parameters of a later one may arrive."""

Turn = tuple[float, int, int, int]
"""When an action of a collective stream can begin: the slot that it follows, then all-to-alls, gathers, reductions."""


@data
class Sources:
    """What all members of a graph are written from, worked out once."""

    graph: TrainingGraph
    groups: Mapping[Members, Sequence[GraphStage]]
    slots: Mapping[Members, Sequence[Slot]]
    of_stage: Mapping[tuple[int, int], Sequence[tuple[int, Slot]]]
    """(pipeline, stage) -> (position, slot) of each of its slots."""
    held: Mapping[tuple[int, ...], Sequence[GradientBlock]]
    """Devices of a member -> the gradient blocks that it holds."""


class Member:
    """Writes the actions of one member of one device group."""

    def __init__(self, sources: Sources, members: Members, member: int) -> None:
        self.sources, self.graph, self.members, self.member = sources, sources.graph, members, member
        self.stages = sources.groups[members]
        self.order = sources.slots[members]
        several = len({s.pipeline for s in self.stages}) > 1
        self.prefix = {s.pipeline: f"p{s.pipeline}:" if several else "" for s in self.stages}
        self.texts: list[str | None] = [
            self.text(slot) if slot.stage.slices[slot.it.micro_batch][member] else None for slot in self.order
        ]
        """Per slot, the compute action; None where this member's slice is empty."""
        self.position = {text: n for n, text in enumerate(self.texts) if text is not None}
        self.waits: list[list[Wait]] = [[] for _ in self.order]
        self.after: list[list[Action]] = [[] for _ in self.order]
        """Local actions that follow a slot on the compute stream."""
        self.finals: dict[str, list[int]] = {}
        """Stage -> positions at which this member ends a backward of it."""

    def slots_of(self, stage: GraphStage) -> Sequence[tuple[int, Slot]]:
        """Return (position, slot) of every slot of a stage."""
        return self.sources.of_stage[stage.pipeline, stage.index]

    def text(self, slot: Slot) -> str:
        """Name the compute action of a slot."""
        it = slot.it
        return compute_text(it.stage, it.kind, it.micro_batch, slot.segment, self.prefix[it.pipeline])

    def pass_text(self, stage: GraphStage, kind: str, micro_batch: int) -> str:
        """Name the last action of a pass: its output is there when that is over."""
        segment = stage.num_segments - 1 if kind == "F" else 0
        return compute_text(stage.index, kind, micro_batch, segment, self.prefix[stage.pipeline])

    def latest(self, position: int) -> tuple[Wait, ...]:
        """Wait for the last compute action of this member at or before a slot."""
        text = next((self.texts[n] for n in range(position, -1, -1) if self.texts[n]), None)
        return (Wait(action=text),) if text else ()

    def actions(self) -> Iterator[Action]:
        """Yield every action; those of one stream in its order."""
        exchanges = list(self.exchanges())
        messages = [t for s in self.stages for kind in "FB" for t in self.transfers(s, kind)]
        gathers, reduces = self.gathers(), self.reductions()
        for slot, text, waits, after in zip(self.order, self.texts, self.waits, self.after, strict=True):
            if text is not None:
                it = slot.it
                yield Action(
                    kind=it.kind, stream=COMPUTE_STREAM, pipeline=it.pipeline, stage=it.stage,
                    micro_batch=it.micro_batch, segment=slot.segment, prefix=self.prefix[it.pipeline], waits=tuple(waits),
                )  # fmt: skip
            yield from after
        yield from messages
        # Streams of one name are one stream: what is on it comes in the order in which it can begin.
        for _, action in sorted([*exchanges, *gathers, *reduces], key=lambda pair: pair[0]):
            yield action
        yield from self.end_of_step([action for _, action in reduces])

    # Messages between stages

    def transfers(self, stage: GraphStage, kind: str) -> Iterator[Action]:
        """Yield the sends and receives of one stage for one direction, and note what its passes wait for.

        Forward messages go to the next stage, backward ones to the stage before; the order of a channel is the order
        in which the *sending* side works. What stays on this member is no message: the pass waits for the pass.
        """
        pipe = self.graph.pipelines[stage.pipeline]
        step = 1 if kind == "F" else -1
        makes = ("F",) if kind == "F" else ("B", "I")
        if 0 <= stage.index + step < len(pipe.stages):
            regions = Regions(stage, pipe.stages[stage.index + step], self.member)
            streams = regions.streams(stage.pipeline, kind, sending=True)
            for n, slot in self.slots_of(stage):
                text = self.texts[n]
                if text is not None and slot.it.kind in makes and slot.last:
                    for peer, region in regions.of(slot.it.micro_batch):
                        if not regions.local(peer):
                            yield self._message(f"SEND_{kind}", slot, peer, region, streams[peer], (Wait(action=text),))
        if 0 <= stage.index - step < len(pipe.stages):
            yield from self._receives(stage, pipe.stages[stage.index - step], kind, makes)

    def _message(
        self, kind: str, slot: Slot, peer: int, region: tuple[int, int], stream: str, waits: tuple[Wait, ...]
    ) -> Action:
        it = slot.it
        return Action(
            kind=kind, stream=stream, pipeline=it.pipeline, stage=slot.stage.index, micro_batch=it.micro_batch,
            peer=peer, samples=region, waits=waits, prefix=self.prefix[it.pipeline],
        )  # fmt: skip

    def _receives(self, stage: GraphStage, other: GraphStage, kind: str, makes: tuple[str, ...]) -> Iterator[Action]:
        regions = Regions(stage, other, self.member)
        streams = regions.streams(stage.pipeline, kind, sending=False)
        users = {
            slot.it.micro_batch: n
            for n, slot in self.slots_of(stage)
            if slot.it.kind in makes and slot.first and self.texts[n] is not None
        }
        arriving: dict[int, list[tuple[int, tuple[int, int]]]] = {}
        for _, slot in self.slots_of(other):
            mb = slot.it.micro_batch
            if slot.it.kind in makes and slot.last and mb in users:
                for peer, region in regions.of(mb):
                    if regions.local(peer):
                        self.waits[users[mb]].append(Wait(action=self.pass_text(other, slot.it.kind, mb)))
                    else:
                        arriving.setdefault(peer, []).append((mb, region))
        for peer, messages in arriving.items():
            uses = [users[mb] for mb, _ in messages]
            soonest = list(uses)  # of this message and all later ones: only what is used before them frees a buffer
            for n in range(len(uses) - 2, -1, -1):
                soonest[n] = min(uses[n], soonest[n + 1])
            for n, (mb, region) in enumerate(messages):
                freed = uses[n - RECEIVE_DEPTH] if n >= RECEIVE_DEPTH else None
                waits = self.latest(freed) if freed is not None and freed < soonest[n] else ()
                action = self._message(f"RECV_{kind}", self.order[users[mb]], peer, region, streams[peer], waits)
                self.waits[users[mb]].append(Wait(action=action.text))
                yield action

    # All-to-alls of sharded experts

    def exchanges(self) -> Iterator[tuple[Turn, Action]]:
        """Yield the all-to-alls in the order of the slots, and note what the segments wait for."""
        for n, slot in enumerate(self.order):
            stage, it = slot.stage, slot.it
            border = slot.segment if it.kind == "F" else slot.segment - 1
            if it.kind == "W" or not 0 <= border < len(stage.borders) or stage.borders[border].exchange is None:
                continue
            size = stage.expert_parallel_size
            group = self.member // size * size
            if not any(stage.slices[it.micro_batch][group : group + size]):
                continue
            action = Action(
                kind="A2A_F" if it.kind == "F" else "A2A_B", stream=f"{stage.exchange_stream or 'a2a'}{group or ''}",
                pipeline=it.pipeline, stage=stage.index, micro_batch=it.micro_batch, segment=border + 1,
                prefix=self.prefix[it.pipeline], waits=self.latest(n),
            )  # fmt: skip
            yield (n, 0, 0, 0), action
            following = next(
                at for at in range(n + 1, len(self.order))
                if self.order[at].it == it and self.order[at].segment == (border + 1 if it.kind == "F" else border)
            )  # fmt: skip
            self.waits[following].append(Wait(action=action.text))

    # Parameters and gradients

    def gathers(self) -> list[tuple[Turn, Action]]:
        """Write the gathers of ZeRO 3, each for a chain of slots, no earlier than `GATHER_DEPTH` slots before it."""
        found: list[tuple[Turn, Action]] = []
        for block in self.sources.held.get(self.members[self.member], ()):
            for bucket in range(len(block.buckets)) if block.zero == 3 else ():
                for chain in gather_chains(self.order, block, bucket):
                    head, tail = self.order[chain.first].it, self.order[chain.last].it
                    gather = Action(
                        kind=f"UNSHARD_{head.kind}", stream=block.gather_stream, micro_batch=head.micro_batch,
                        gradient_block=block.index, bucket=bucket,
                        waits=self.latest(chain.first - 1 - GATHER_DEPTH),
                    )  # fmt: skip
                    found.append(((chain.first - 1 - GATHER_DEPTH, 1, bucket, block.index), gather))
                    user = next((n for n in range(chain.first, chain.last + 1) if self.texts[n]), None)
                    if user is not None:
                        self.waits[user].append(Wait(action=gather.text))
                    self.after[chain.last].append(
                        Action(
                            kind=f"RESHARD_{tail.kind}",
                            stream=COMPUTE_STREAM,
                            micro_batch=tail.micro_batch,
                            gradient_block=block.index,
                            bucket=bucket,
                            waits=(Wait(action=gather.text),),
                        )
                    )
        return sorted(found, key=lambda pair: pair[0])

    def reductions(self) -> list[tuple[Turn, Action]]:
        """Write the reductions, in the order in which they can begin; over several device groups, by gradient block."""
        found: list[tuple[Turn, Action]] = []
        for block in self.sources.held.get(self.members[self.member], ()):
            if len(block.holders) == 1:
                continue
            shared = any(self.graph.stage(p.pipeline, p.stage).members != self.members for p in block.holders)
            if block.zero >= 2:
                ends = [[chain.last] for chain in reduce_chains(self.order, block)]
            else:  # once a step, after the last backward of every stage of this member that uses the block
                ends = [
                    [self.slots_of(s)[-1][0] for s in self.stages if any(s.start <= b < s.stop for b in block.blocks)]
                ]
            for positions in ends:
                last = max(positions)
                each = self.order[last].it.micro_batch if block.zero >= 2 else None
                slots_ = [slot for n in positions if (slot := self._latest_final(n)) is not None]
                for number, bucket in enumerate(block.buckets):
                    reduce = Action(
                        kind="REDUCE_GRAD", stream=block.reduce_stream, gradient_block=block.index, bucket=number,
                        micro_batch=each, waits=tuple(self._passed(block, bucket, slot) for slot in slots_),
                    )  # fmt: skip
                    found.append(((float("inf") if shared else last, 2, block.index, number), reduce))
        return sorted(found, key=lambda pair: pair[0])

    def _latest_final(self, position: int) -> Slot | None:
        """Return the last slot, at or before a position, in which this member ends a backward of the same stage.

        An empty slice has nothing to wait for but what came before.
        """
        stage = self.order[position].stage
        if stage.tag not in self.finals:
            self.finals[stage.tag] = [
                n for n, slot in self.slots_of(stage) if self.texts[n] and slot.it.kind in FINAL_KINDS and slot.last
            ]
        finals = self.finals[stage.tag]
        at = bisect_right(finals, position)
        return self.order[finals[at - 1]] if at else None

    def _passed(self, block: GradientBlock, bucket: Bucket, slot: Slot) -> Wait:
        """Wait until the backward that ends with a slot has passed the lowest block of a bucket."""
        stage, it = slot.stage, slot.it
        lowest = bucket.lowest_block
        if block.kind == "tied":  # final when the lowest use in this stage has passed
            lowest = min(b for b in block.blocks if stage.start <= b < stage.stop)
        if it.kind == "W":
            return Wait(action=self.text(slot), block=lowest)
        segment = stage.segment_of(2 * lowest + block.low_half) if stage.borders else 0
        text = compute_text(it.stage, it.kind, it.micro_batch, segment, self.prefix[it.pipeline])
        return Wait(action=text, block=None if block.low_half else lowest)

    def end_of_step(self, reduces: list[Action]) -> Iterator[Action]:
        """Yield loss, norm, updates, and the gathers of what ZeRO 1 and 2 have updated in parts."""
        losses = []
        for stage in self.stages:
            if stage.index == len(self.graph.pipelines[stage.pipeline].stages) - 1:
                forwards = (self.texts[n] for n, s in reversed(self.slots_of(stage)) if s.it.kind == "F" and s.last)
                losses += [text for text in forwards if text][:1]
        yield Action(kind="LOSS", stream="loss", waits=tuple(Wait(action=text) for text in losses))
        reduced = {a.gradient_block: a.text for a in reduces}
        ready: tuple[Wait, ...] = (Wait(action="LOSS"),)
        if self.graph.training.needs_norm:
            last = next((t for t, s in zip(reversed(self.texts), reversed(self.order), strict=True)
                         if t and s.it.kind in FINAL_KINDS), None)  # fmt: skip
            before = [Wait(action=text) for text in dict.fromkeys(reduced.values())]
            yield Action(kind="NORM", stream="norm", waits=(*before, *((Wait(action=last),) if last else ())))
            ready = (*ready, Wait(action="NORM"))
        for block in self.sources.held.get(self.members[self.member], ()):
            own = (Wait(action=reduced[block.index]),) if block.index in reduced else ()
            update = Action(kind="UPDATE", stream=COMPUTE_STREAM, gradient_block=block.index, waits=(*own, *ready))
            yield update
            for bucket in range(len(block.buckets)) if block.zero in (1, 2) else ():
                yield Action(
                    kind="UNSHARD", stream=block.gather_stream, gradient_block=block.index, bucket=bucket,
                    waits=(Wait(action=update.text),),
                )  # fmt: skip
