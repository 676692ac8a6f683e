"""An executor of Programs, written apart from `ir.verify`, that judges it: it runs a step in symbols, at random speeds.

What a runtime would do is done to symbols. An activation is a token that says which sample it is of and how far that
has come; a gradient is a multiset of the (block, pipeline, micro-batch, sample) that were added to it; weights have a
version. Messages and collectives carry no names: the n-th send of a channel meets its n-th receive, the n-th call on a
communicator (stream and rank set) the n-th of the other ranks. Receive buffers are overwritten when their turn comes.
What is read while a thing lasts must be the same when it begins and when it ends.

`run` raises Wrong where a step under one random timing does not end with the right loss, gradients and weights on every
rank, or does not end.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

from autopiper.ir.graph import GradientBlock, GraphStage, TrainingGraph
from autopiper.ir.regions import RECEIVE_DEPTH
from autopiper.plan.actions import Action, Program

Key = tuple[int, int]
"""(gradient block, bucket)"""
NEVER = float("inf")


class Wrong(Exception):
    """The step went wrong, or may."""


def check(condition: object, *why: object) -> None:
    if not condition:
        raise Wrong(" ".join(map(str, why)))


def key_of(action: Action) -> Key:
    return action.gradient_block or 0, action.bucket or 0


class Rank:
    """One Program at work."""

    def __init__(self, graph: TrainingGraph, number: int, program: Program) -> None:
        self.graph, self.number, self.program, self.member = graph, number, program, program.member
        self.stages = {(p.pipeline, p.stage): graph.stage(p.pipeline, p.stage) for p in program.places}
        self.blocks = [
            b for b in graph.gradient_blocks
            if any(graph.stage(h.pipeline, h.stage).members[h.member] == program.devices for h in b.holders)
        ]  # fmt: skip
        self.row = next(r for r in graph.rows if program.devices in r.members)
        self.slot = {(p.pipeline, p.stage, p.kind, p.micro_batch): n for n, p in enumerate(self.row.passes())}
        self.over: set[str] = set()
        self.passed: set[tuple[str, int]] = set()
        self.done: set[tuple[Hashable, ...]] = set()
        """(pipeline, stage, kind, micro-batch, segment) of what was computed."""
        self.exchanged: set[tuple[Hashable, ...]] = set()
        self.arrived: dict[str, Any] = {}
        """Buffer -> the tokens in it; `buffer` names that of each receive."""
        self.buffer: dict[str, str] = {}
        self.receives: defaultdict[tuple[Hashable, ...], list[str]] = defaultdict(list)
        self.gradients: defaultdict[tuple[Hashable, ...], Counter[Any]] = defaultdict(Counter)
        self.reduced: defaultdict[Key, Counter[Any]] = defaultdict(Counter)
        self.version: Counter[int] = Counter()
        self.gathered: defaultdict[Key, set[int]] = defaultdict(set)
        self.gathers: Counter[Key] = Counter()
        self.released: Counter[Key] = Counter()
        self.whole: set[Key] = set()
        self.losses: set[Any] = set()
        self.covers: defaultdict[Key, list[tuple[int, int]]] = defaultdict(list)
        for action in program.actions():
            if action.kind == "REDUCE_GRAD" and action.micro_batch is not None:
                ends = [
                    self.slot.get((p, s, kind, action.micro_batch), -1) for p, s in self._homes(action) for kind in "BW"
                ]
                self.covers[key_of(action)].append((max(ends, default=-1), action.micro_batch))
        for found in self.covers.values():
            found.sort()
        self._name_buffers()

    def _homes(self, action: Action) -> list[Key]:
        number = action.gradient_block or 0
        top = self.graph.gradient_blocks[number].blocks[0] if number < len(self.graph.gradient_blocks) else -1
        return [key for key, stage in self.stages.items() if stage.start <= top < stage.stop]

    def _name_buffers(self) -> None:
        """Give every receive its buffer: that of the message `RECEIVE_DEPTH` before it, where that is read by then."""
        first: dict[Any, int] = {}
        for n, a in enumerate(self.program.streams.get("compute", ())):
            first.setdefault((a.pipeline, a.stage, a.kind, a.micro_batch), n)
        rows: defaultdict[str, list[tuple[str, float]]] = defaultdict(list)
        for a in self.program.actions():
            if a.kind.startswith("RECV"):
                kinds = "F" if a.kind == "RECV_F" else "BI"
                uses = [first.get((a.pipeline, a.stage, kind, a.micro_batch), NEVER) for kind in kinds]
                rows[f"{a.stream}|{a.kind}|{a.peer}"].append((a.text, min(uses)))
                self.receives[a.kind, a.pipeline, a.stage, a.micro_batch].append(a.text)
        for channel, row in rows.items():
            for n, (text, _) in enumerate(row):
                before = row[n - RECEIVE_DEPTH] if n >= RECEIVE_DEPTH else ("", NEVER)
                free = before[1] < min(use for _, use in row[n:])
                self.buffer[text] = self.buffer[before[0]] if free else f"{channel}#{n}"

    # What samples mean

    def own(self, stage: GraphStage, mb: int) -> range:
        return range(*stage.ranges(mb)[self.member])

    def contribution(self, stage: GraphStage, block: GradientBlock, b: int, mb: int) -> Counter[Any]:
        """What a backward through block b adds: for experts that are divided, of the samples of the whole group."""
        samples = self.own(stage, mb)
        if block.kind == "expert" and b in stage.sharded:
            low, ranges = self.member // stage.expert_parallel_size * stage.expert_parallel_size, stage.ranges(mb)
            samples = range(ranges[low][0], ranges[low + stage.expert_parallel_size - 1][1])
        return Counter((b, stage.pipeline, mb, s) for s in samples)

    def halves(self, action: Action) -> tuple[int, int]:
        stage = self.stages[action.pipeline, action.stage or 0]
        return (2 * stage.start, 2 * stage.stop) if action.kind == "W" else stage.segment(action.segment)

    def parts(self, action: Action) -> list[tuple[GradientBlock, int, int]]:
        """(gradient block, bucket, model block) of the parameters that a compute action uses."""
        low, high = self.halves(action)
        found = []
        for block in self.blocks:
            half = 1 if block.kind == "expert" else 0
            for number, bucket in enumerate(block.buckets):
                for b in block.blocks:
                    if bucket.lowest_block <= b <= bucket.highest_block and low <= 2 * b + half < high:
                        found.append((block, number, b))
        return found

    # Computing

    def inputs(self, action: Action, stage: GraphStage, kind: str) -> None:
        """Check that what the first segment of a pass reads is the output of the neighbour, sample by sample."""
        mb = action.micro_batch or 0
        other = self.graph.stage(stage.pipeline, stage.index - (1 if kind == "F" else -1))
        tokens: Counter[Any] = Counter()
        for text in self.receives[f"RECV_{kind}", stage.pipeline, stage.index, mb]:
            content = self.arrived.get(self.buffer[text])
            check(content is not None, action.text, "reads", text, "that is not there")
            tokens.update(content)
        if other.members == stage.members:
            shared = set(self.own(other, mb)) & set(self.own(stage, mb))
            check(not shared or self.pass_over(other, kind, mb), action.text, "reads what", other.tag, "has not made")
            tokens.update((kind, stage.pipeline, other.index, mb, s) for s in shared)
        wanted = Counter((kind, stage.pipeline, other.index, mb, s) for s in self.own(stage, mb))
        check(tokens == wanted, action.text, "reads", sorted(tokens), "and needs", sorted(wanted))

    def pass_over(self, stage: GraphStage, kind: str, mb: int) -> bool:
        here = (stage.pipeline, stage.index)
        return any(
            all((*here, k, mb, n) in self.done for n in range(stage.num_segments))
            for k in ("F" if kind == "F" else "BI")
        )

    def ready(self, action: Action) -> None:
        """Check all that a compute action reads; called when it begins and when it ends."""
        here = (action.pipeline, action.stage or 0)
        check(here in self.stages, action.text, "is of another rank")
        stage, mb, kind, k = self.stages[here], action.micro_batch or 0, action.kind, action.segment
        check(mb < len(stage.slices) and 0 <= k < stage.num_segments, action.text, "does not exist")
        check(len(self.own(stage, mb)), action.text, "has no samples")
        if kind == "F":
            if k == 0 and stage.index:
                self.inputs(action, stage, "F")
            if k:
                check((*here, "F", mb, k - 1) in self.done, action.text, "before the segment below")
                if stage.borders[k - 1].exchange is not None:
                    check((*here, "A2A_F", mb, k) in self.exchanged, action.text, "before its all-to-all")
        elif kind == "W":
            check(all((*here, "I", mb, n) in self.done for n in range(stage.num_segments)), action.text, "before I")
        else:
            check(self.pass_over(stage, "F", mb), action.text, "before F")
            if k < stage.num_segments - 1:
                check((*here, kind, mb, k + 1) in self.done, action.text, "before the segment above")
                if stage.borders[k].exchange is not None:
                    check((*here, "A2A_B", mb, k + 1) in self.exchanged, action.text, "before its all-to-all")
            elif stage.index < len(self.graph.pipelines[stage.pipeline].stages) - 1:
                self.inputs(action, stage, "B")
        for block, bucket, _ in self.parts(action):
            check(self.version[block.index] == 0, action.text, "after the update of", block.index)
            if block.zero == 3:
                key = (block.index, bucket)
                check(self.released[key] in self.gathered[key], action.text, "without the parameters of", key)

    def compute_over(self, action: Action) -> None:
        self.ready(action)
        stage, mb = self.stages[action.pipeline, action.stage or 0], action.micro_batch or 0
        for kind in {"B": "BI", "I": "BI"}.get(action.kind, action.kind):
            check(
                (stage.pipeline, stage.index, kind, mb, action.segment) not in self.done, action.text, "computed twice"
            )
        self.done.add((stage.pipeline, stage.index, action.kind, mb, action.segment))
        top = stage.index == len(self.graph.pipelines[stage.pipeline].stages) - 1
        if action.kind == "F" and action.segment == stage.num_segments - 1 and top:
            self.losses |= {(stage.pipeline, mb, s) for s in self.own(stage, mb)}

    def pass_block(self, action: Action, b: int) -> None:
        """The backward passes a model block: what it adds to gradients is added now."""
        stage, mb = self.stages[action.pipeline, action.stage or 0], action.micro_batch or 0
        for block, bucket, at in self.parts(action):
            if at == b:
                key: tuple[Hashable, ...] = (block.index, bucket)
                if block.zero >= 2:
                    place = self.slot.get((stage.pipeline, stage.index, action.kind, mb), 0)
                    key = (*key, next((m for end, m in self.covers[block.index, bucket] if end >= place), "never"))
                self.gradients[key].update(self.contribution(stage, block, b, mb))
        self.passed.add((action.text, b))

    # Gradients, parameters

    def final(self, block: GradientBlock, bucket: int) -> Counter[Any]:
        return self.reduced[block.index, bucket] if block.zero >= 2 else self.gradients[block.index, bucket]

    def held(self, action: Action) -> GradientBlock:
        blocks = self.graph.gradient_blocks
        check((action.gradient_block or 0) < len(blocks), action.text, "does not exist")
        block = blocks[action.gradient_block or 0]
        check(block in self.blocks, action.text, "of what is not held")
        check((action.bucket or 0) < len(block.buckets), action.text, "does not exist")
        return block

    def release(self, action: Action) -> None:
        self.held(action)
        key = key_of(action)
        check(self.released[key] in self.gathered[key], action.text, "lets go what was not gathered")
        self.gathered[key].discard(self.released[key])
        self.released[key] += 1

    def finish(self) -> None:
        check("LOSS" in self.over, self.program.name, "has no loss")
        for block in self.blocks:
            check(self.version[block.index] == 1, self.program.name, "never updates", block.index)
            for bucket in range(len(block.buckets)):
                check(not self.gathered[block.index, bucket], self.program.name, "keeps parameters", block.index)
                check(block.zero not in (1, 2) or (block.index, bucket) in self.whole, "half of", block.index)


class Step:
    """All Programs of a step, under one random timing."""

    def __init__(self, graph: TrainingGraph, programs: Sequence[Program], rng: random.Random) -> None:
        self.graph, self.rng = graph, rng
        self.ranks = [Rank(graph, n, p) for n, p in enumerate(programs)]
        self.seat = {(p.pipeline, p.stage, p.member): n for n, each in enumerate(programs) for p in each.places}
        self.calls: defaultdict[Hashable, list[dict[int, tuple[Action, Any]]]] = defaultdict(list)
        """Communicator or channel -> its calls; each call: who is there with which action, and what it gives."""
        self.turns: Counter[Hashable] = Counter()
        self.events: list[tuple[float, float, int, Callable[[], None]]] = []
        self.now, self.count = 0.0, 0
        self.known: dict[Key, Counter[Any]] = {}
        self.todo = [{name: deque(actions) for name, actions in p.streams.items()} for p in programs]
        self.left = sum(len(row) for streams in self.todo for row in streams.values())
        self.busy: set[tuple[int, str]] = set()
        self.speed = {(n, name): self._draw() for n, p in enumerate(programs) for name in p.streams}
        self.losses = {
            (p, mb, s) for rank in self.ranks for (p, index), stage in rank.stages.items()
            if index == len(graph.pipelines[p].stages) - 1
            for mb in range(len(stage.slices)) for s in rank.own(stage, mb)
        }  # fmt: skip

    def _draw(self) -> float:
        return self.rng.choice((0.0, 0.01, 1.0, 1.0, 3.0, 30.0)) * self.rng.random()

    def wanted(self, block: GradientBlock, bucket: int) -> Counter[Any]:
        """The whole gradient of a bucket: every sample of every holder that is here, through every block that uses it."""
        key = (block.index, bucket)
        if key not in self.known:
            total, piece = Counter[Any](), block.buckets[bucket]
            for rank in (r for r in self.ranks if block in r.blocks):
                for stage in rank.stages.values():
                    for b in block.blocks:
                        if piece.lowest_block <= b <= piece.highest_block and stage.start <= b < stage.stop:
                            for mb in range(len(stage.slices)):
                                total.update(rank.contribution(stage, block, b, mb))
            self.known[key] = total
        return self.known[key]

    def finals_are_right(self, rank: Rank, block: GradientBlock, why: str) -> None:
        for bucket in range(len(block.buckets)):
            right = rank.final(block, bucket) == self.wanted(block, bucket)
            check(right, f"{rank.program.name}: {why} of g{block.index}.{bucket} with a wrong gradient")

    # Time

    def after(self, delay: float, then: Callable[[], None]) -> None:
        self.count += 1
        heapq.heappush(self.events, (self.now + delay, self.rng.random(), self.count, then))

    def run(self) -> None:
        total = self.left
        for n in range(len(self.ranks)):
            self.wake(n)
        while self.events:
            self.now, _, _, then = heapq.heappop(self.events)
            then()
        check(self.left == 0, f"stuck: {self.left} of {total} actions never run")
        for rank in self.ranks:
            rank.finish()

    def wake(self, number: int) -> None:
        """Start what can start on a rank."""
        rank = self.ranks[number]
        for name, row in self.todo[number].items():
            if row and (number, name) not in self.busy and all(
                w.action in rank.over or (w.block is not None and (w.action, w.block) in rank.passed) for w in row[0].waits
            ):  # fmt: skip
                self.busy.add((number, name))
                self.after(self._draw() * 0.2, partial(self.begin, number, name, row.popleft()))

    def over(self, number: int, stream: str, action: Action) -> None:
        rank = self.ranks[number]
        check(action.text not in rank.over, action.text, "twice")
        rank.over.add(action.text)
        self.busy.discard((number, stream))
        self.left -= 1
        self.wake(number)

    def begin(self, number: int, stream: str, action: Action) -> None:
        rank, kind = self.ranks[number], action.kind
        lasts = 1e-6 + self._draw() + self.speed[number, stream]
        if kind in ("F", "B", "I", "W"):
            rank.ready(action)
            if kind in ("B", "W"):
                blocks = sorted({half // 2 for half in range(*rank.halves(action))}, reverse=True)
                for b, at in zip(blocks, sorted(self.rng.random() for _ in blocks), strict=True):
                    self.after(lasts * at, partial(self.pass_block, rank, action, b))
        elif kind == "UPDATE":
            rank.version[rank.held(action).index] += 1
            self.may_update(rank, action)
        elif kind.startswith("RESHARD"):
            rank.release(action)
        else:
            self.meet(rank, stream, action, lasts)
            return
        self.after(lasts * 1.001 + 1e-9, partial(self.end, number, stream, action))

    def pass_block(self, rank: Rank, action: Action, b: int) -> None:
        rank.pass_block(action, b)
        self.wake(rank.number)

    def end(self, number: int, stream: str, action: Action) -> None:
        rank = self.ranks[number]
        if action.kind in ("F", "B", "I", "W"):
            rank.compute_over(action)
        elif action.kind == "UPDATE":
            self.may_update(rank, action)
        self.over(number, stream, action)

    def may_update(self, rank: Rank, action: Action) -> None:
        block = rank.held(action)
        check("LOSS" in rank.over, action.text, "without the global weight")
        check("NORM" in rank.over or not self.graph.training.needs_norm, action.text, "without the norm")
        check(rank.version[block.index] == 1, action.text, "twice")
        self.finals_are_right(rank, block, "update")
        for bucket in range(len(block.buckets)):
            check(not rank.gathered[block.index, bucket], action.text, "of gathered parameters")

    # Messages and collectives

    def meet(self, rank: Rank, stream: str, action: Action, lasts: float) -> None:
        """Join the next call of the channel or communicator; it goes on when all its ends are there."""
        ends = self._ends(rank, action)
        place = (stream, ends)
        turn = self.turns[rank.number, place]
        self.turns[rank.number, place] += 1
        while len(self.calls[place]) <= turn:
            self.calls[place].append({})
        call = self.calls[place][turn]
        if action.kind.startswith("RECV"):
            rank.arrived[rank.buffer[action.text]] = None  # from now on the buffer may be written
        call[rank.number] = (action, self.read(rank, action))
        if len(call) == len(set(ends)):
            self.after(lasts, partial(self._met, call, stream))

    def _ends(self, rank: Rank, action: Action) -> tuple[int, ...]:
        """Who takes part: of a message the sender, then the receiver; of a collective all, rising."""
        kind = action.kind
        if kind.startswith(("SEND", "RECV")):
            step = (1 if kind.endswith("F") else -1) * (1 if kind.startswith("SEND") else -1)
            peer = self.seat.get((action.pipeline, (action.stage or 0) + step, action.peer or 0), rank.number)
            check(peer != rank.number, action.text, "has no peer")
            return (rank.number, peer) if kind.startswith("SEND") else (peer, rank.number)
        if kind in ("LOSS", "NORM"):
            return tuple(range(len(self.ranks)))
        if kind in ("A2A_F", "A2A_B"):
            check((action.pipeline, action.stage) in rank.stages, action.text, "is of another rank")
            size = rank.stages[action.pipeline, action.stage or 0].expert_parallel_size
            group = rank.member // size
            return tuple(r.number for r in self.ranks if r.row == rank.row and r.member // size == group)
        block = rank.held(action)
        return tuple(r.number for r in self.ranks if block in r.blocks)

    def _met(self, call: dict[int, tuple[Action, Any]], stream: str) -> None:
        first = next(iter(call.values()))[0]
        for number, (action, given) in call.items():
            check(self.read(self.ranks[number], action) == given, action.text, "is changed while it is sent")
            if not first.kind.startswith(("SEND", "RECV")):
                check(action.text.split(":")[-1] == first.text.split(":")[-1], action.text, "meets", first.text)
        for number, (action, _) in call.items():
            self.write(self.ranks[number], action, [given for _, given in call.values()])
        for number, (action, _) in call.items():
            self.over(number, stream, action)

    def read(self, rank: Rank, action: Action) -> Any:
        """Return what a rank gives to a message or collective; read when it arrives and again when it is over."""
        kind, mb = action.kind, action.micro_batch or 0
        if kind.startswith("RECV"):
            return None
        if kind == "LOSS":
            return frozenset(rank.losses)
        if kind == "NORM":
            for block in rank.blocks:
                self.finals_are_right(rank, block, "NORM")
            return None
        if kind.startswith("SEND") or kind in ("A2A_F", "A2A_B"):
            check((action.pipeline, action.stage) in rank.stages, action.text, "is of another rank")
            stage = rank.stages[action.pipeline, action.stage or 0]
            check(mb < len(stage.slices), action.text, "does not exist")
            here = (stage.pipeline, stage.index)
            if kind.startswith("SEND"):
                check(rank.pass_over(stage, kind[-1], mb), action.text, "sends what is not made")
                samples = range(*(action.samples or (0, 0)))
                check(set(samples) <= set(rank.own(stage, mb)), action.text, "sends samples of others")
                return [(kind[-1], *here, mb, s) for s in samples]
            k = action.segment
            check(0 < k < stage.num_segments and stage.borders[k - 1].exchange is not None, action.text, "of no border")
            made = [(*here, "F", mb, k - 1)] if kind == "A2A_F" else [(*here, "B", mb, k), (*here, "I", mb, k)]
            check(
                not rank.own(stage, mb) or any(m in rank.done for m in made), action.text, "exchanges what is not made"
            )
            return None
        block = rank.held(action)
        if kind == "REDUCE_GRAD":
            key: tuple[Hashable, ...] = key_of(action)
            return Counter(rank.gradients[(*key, action.micro_batch) if block.zero >= 2 else key])
        check(rank.version[block.index] == (1 if kind == "UNSHARD" else 0), action.text, "of weights of another step")
        return None

    def write(self, rank: Rank, action: Action, given: list[Any]) -> None:
        """Take what a message or collective brought."""
        kind, key = action.kind, key_of(action)
        if kind.startswith("RECV"):
            tokens = next(each for each in given if each is not None)
            start, stop = action.samples or (0, 0)
            check(len(tokens) == stop - start, action.text, "gets", len(tokens), "samples")
            rank.arrived[rank.buffer[action.text]] = tokens
        elif kind in ("A2A_F", "A2A_B"):
            rank.exchanged.add((action.pipeline, action.stage, kind, action.micro_batch, action.segment))
        elif kind == "LOSS":
            check(set().union(*given) == self.losses, "the loss is of", sorted(set().union(*given)))
        elif kind == "REDUCE_GRAD":
            total = Counter[Any]()
            for each in given:
                total.update(each)
            if rank.held(action).zero >= 2:
                rank.reduced[key].update(total)
                rank.gradients[(*key, action.micro_batch)].clear()
            else:
                rank.gradients[key] = total
        elif kind == "UNSHARD":
            rank.whole.add(key)
        elif kind.startswith("UNSHARD"):
            rank.gathered[key].add(rank.gathers[key])
            rank.gathers[key] += 1


def run(graph: TrainingGraph, programs: Sequence[Program], seed: int) -> None:
    """Run one step at random speeds. Raises Wrong where it does not end, or ends with anything wrong."""
    Step(graph, programs, random.Random(seed)).run()
