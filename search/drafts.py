"""Drafts: from shapes to a whole strategy: places, cuts, shares, and an estimate that is good enough to rank by."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from autopiper._data import data
from autopiper.cluster.spec import Cluster
from autopiper.costmodel.balance import PipelinePace, share_batch
from autopiper.costmodel.collectives import all_reduce_s, transfer_s
from autopiper.plan.space import Space
from autopiper.plan.strategy import Group, Pipeline, Schedule, Stage, Strategy
from autopiper.search import cuts
from autopiper.search.layers import LayerPlan, LayerProblem, StageSlot
from autopiper.search.placement import Habit, Members, place
from autopiper.search.prices import Array, Prices
from autopiper.search.shapes import Shape, neighbours


@data
class Piece:
    """One pipeline of a draft."""

    shape: Shape
    members: Members
    problem: LayerProblem
    layers: LayerPlan
    share: int

    @property
    def micro_batches(self) -> int:
        """Micro-batches, a smaller last one included."""
        return -(-self.share // self.shape.quantum)

    def pace(self, family: str) -> PipelinePace:
        """How the pipeline takes micro-batches under a schedule family."""
        further_s = further_s_of(self.layers, self.problem, family)
        return PipelinePace(fill_s=self.layers.fill_s, bottleneck_s=further_s, quantum=self.shape.quantum)


def further_s_of(layers: LayerPlan, problem: LayerProblem, family: str) -> float:
    """Return what a further micro-batch adds to a step, messages and the order of the schedule included.

    1F1B: of any run of n neighbouring stages the first has n - 1 micro-batches more in flight than the last, so n
    micro-batches take one journey through the run and back: its stages, and twice the messages within (stages of T and
    links of c: T + 2c (n - 1)/n). It exceeds the busiest stage where links are slow. GPipe: the messages of all
    forwards, then those of all backwards (too little where a message lies between F and B of the busiest stage).
    """
    inner = layers.cuts[1:-1]
    forward, backward = (
        [float(t[c]) for t, c in zip(transfers, inner, strict=True)]
        for transfers in (problem.forward_transfer_s, problem.backward_transfer_s)
    )
    longest = layers.bottleneck_s
    if family != "1f1b":
        return max(longest, max(forward, default=0.0) + max(backward, default=0.0))
    moves = [there + back for there, back in zip(forward, backward, strict=True)]
    most = problem.micro_batches
    for first in range(len(moves)):
        journey = layers.stage_s[first]
        for last in range(first + 1, min(len(moves) + 1, first + most)):
            journey += moves[last - 1] + layers.stage_s[last]
            longest = max(longest, journey / (last - first + 1))
    return longest


@data
class Draft:
    """A whole strategy, before it is simulated."""

    pieces: tuple[Piece, ...]
    family: str
    choices: tuple[str, ...]
    habit: Habit
    estimate_s: float

    @property
    def words(self) -> str:
        """ "4 x [2 x a100] 75 % + [4 x v100] 25 %, 1f1b" """
        total = sum(p.share for p in self.pieces)
        parts = [f"{p.shape.words} {100 * p.share / total:.3g} %" for p in self.pieces]
        return f"{' + '.join(parts) if len(parts) > 1 else self.pieces[0].shape.words}, {self.family}"


class Workshop:
    """What every draft of one search shares: prices, devices, the space, and tables made once."""

    def __init__(self, prices: Prices, devices: Sequence[int], batch: int, space: Space) -> None:
        self.prices, self.devices, self.batch, self.space = prices, tuple(devices), batch, space
        self.tables = cuts.TableCache()
        self.counts = dict(Counter(prices.cluster.device(d).type.name for d in devices))

    @property
    def cluster(self) -> Cluster:
        """The cluster planned for."""
        return self.prices.cluster

    def draft(
        self, shapes: Sequence[Shape], family: str, choices: tuple[str, ...], habit: Habit,
        reserve: Mapping[tuple[int, int], float] | None = None,
    ) -> Draft | None:  # fmt: skip
        """Return the draft of these shapes; None where they find no place or no cut fits the memory.

        `reserve` = bytes to leave free, by (pipeline, stage): what an earlier simulation found missing. Shapes that
        are best left idle are dropped.
        """
        placed = place(shapes, self.cluster, self.devices, habit)
        if placed is None:
            return None
        share = self.batch / sum(s.quantum for s in shapes)
        counts = [max(1, round(share))] * len(shapes)
        pieces: list[Piece] = []
        for _ in range(4):  # cuts depend on the share, and the share on the cuts
            pieces = []
            for number, (shape, members, count) in enumerate(zip(shapes, placed, counts, strict=True)):
                kept = {s: b for (p, s), b in (reserve or {}).items() if p == number}
                piece = self._cut(shape, members, count, family, choices, kept)
                if piece is None:
                    return None
                pieces.append(piece)
            shares = share_batch([p.pace(family) for p in pieces], self.batch, ragged=True)
            pieces = [replace(p, share=s) for p, s in zip(pieces, shares, strict=True)]
            before, counts = counts, [max(1, p.micro_batches) for p in pieces]
            if counts == before:
                break
        if not all(p.share for p in pieces):
            least = 1 if self.space.equal_pipelines else self.space.min_pipelines
            if len([p for p in pieces if p.share]) < least:
                return None
            return self.draft([p.shape for p in pieces if p.share], family, choices, habit)
        if family == "gpipe" and any(p.micro_batches > p.problem.micro_batches for p in pieces):
            return None  # the memory was proven for fewer micro-batches
        return self.finish(tuple(pieces), family, choices, habit)

    def finish(self, pieces: tuple[Piece, ...], family: str, choices: tuple[str, ...], habit: Habit) -> Draft:
        """Estimate the step of the pieces as they stand."""
        slowest = max(p.pace(family).time_s(p.micro_batches) for p in pieces)
        estimate = slowest + self.sync_s(pieces) + self._update_s(pieces)
        return Draft(pieces=pieces, family=family, choices=choices, habit=habit, estimate_s=estimate)

    def slots(
        self, shape: Shape, micro_batches: int, family: str, reserve: Mapping[int, float]
    ) -> tuple[StageSlot, ...] | None:
        """Return the stages of a shape as the layer problem sees them; None where a member is not priced."""
        count = len(shape.types)
        slots = []
        for s in range(count):
            classes = shape.classes(self.prices, s)
            if not classes:
                return None
            live = micro_batches if family == "gpipe" else min(micro_batches, count - s)
            slots.append(
                StageSlot(
                    members=classes, in_flight=live, reserve_bytes=reserve.get(s, 0.0), neighbours=neighbours(s, count)
                )
            )  # fmt: skip
        return tuple(slots)

    def _cut(
        self, shape: Shape, members: Members, micro_batches: int, family: str, choices: tuple[str, ...],
        reserve: Mapping[int, float],
    ) -> Piece | None:  # fmt: skip
        slots = self.slots(shape, micro_batches, family, reserve)
        if slots is None:
            return None
        moves = [self._transfer_s(shape, members, s) for s in range(len(shape.types) - 1)]
        problem = LayerProblem(
            stages=slots, forward_transfer_s=tuple(moves), backward_transfer_s=tuple(moves),
            micro_batches=micro_batches, choices=choices, equal_stages=self.space.equal_stages,
        )  # fmt: skip
        layers = cuts.solve(problem, self.tables)
        if layers is None:
            return None
        return Piece(shape=shape, members=members, problem=problem, layers=layers, share=0)

    def _transfer_s(self, shape: Shape, members: Members, s: int) -> Array:
        """Seconds of a micro-batch over boundary s for each cut, as the simulator prices it (slowest member)."""
        node = {d: self.cluster.device(d).node for m in (*members[s], *members[s + 1]) for d in m}
        width = min(shape.tensor_parallel_sizes[s], shape.tensor_parallel_sizes[s + 1])
        on = [Counter(node[m[0]] for m in members[t]) for t in (s, s + 1)]
        per_sample = self.prices.cut_bytes
        worst = np.zeros(len(per_sample))
        seen = set()
        for r, (a, b) in enumerate(zip(members[s], members[s + 1], strict=True)):
            samples = max(shape.slices[s][r], shape.slices[s + 1][r])
            way = (node[a[0]], node[b[0]], samples)
            if way in seen:
                continue
            seen.add(way)
            part = samples / width
            if way[0] != way[1]:
                nics = [self.cluster.nodes[n].nics for n in way[:2]]
                part *= max(1.0, *(c[n] * width / k for c, n, k in zip(on, way[:2], nics, strict=True)))
            values, where = np.unique(per_sample, return_inverse=True)
            seconds = np.array([transfer_s(self.prices.costs, self.cluster, a[0], b[0], v * part) for v in values])
            worst = np.maximum(worst, seconds[where])
        return worst

    def sync_s(self, pieces: Sequence[Piece]) -> float:
        """Estimate the gradient reductions: block-wise between all cuts, the busiest device; overlap left aside."""
        borders = sorted({c for p in pieces for c in p.layers.cuts})
        model, training = self.prices.model, self.prices.training
        spans = []
        for start, stop in pairwise(borders):
            holders: list[int] = []
            width = 0
            for p in pieces:
                s = next(i for i in range(len(p.members)) if p.layers.cuts[i] <= start < p.layers.cuts[i + 1])
                holders += [m[0] for m in p.members[s]]
                tp = p.shape.tensor_parallel_sizes[s]
                width = min(width, tp) if width else tp
            size = model.stage_parameters(start, stop) * training.gradient_bytes / width
            spans.append((tuple(holders), width, size))
        crossing: Counter[int] = Counter()
        for holders_ in {h for h, _, _ in spans if len(h) > 1}:
            nodes = {self.cluster.device(d).node for d in holders_}
            if len(nodes) > 1:
                crossing.update(nodes)
        busy: dict[int, float] = {}
        joined: dict[tuple[tuple[int, ...], int], float] = {}
        for holders_, width, size in spans:
            joined[holders_, width] = joined.get((holders_, width), 0.0) + size
        for (holders_, width), size in joined.items():
            if len(holders_) > 1 and size:
                sharing = max(1, *(crossing[self.cluster.device(d).node] for d in holders_)) * width
                seconds = all_reduce_s(self.prices.costs, self.cluster, holders_, size, sharing=sharing)
                for d in holders_:
                    busy[d] = busy.get(d, 0.0) + seconds
        return max(busy.values(), default=0.0)

    @staticmethod
    def _update_s(pieces: Sequence[Piece]) -> float:
        return max(
            float(m.update_s[p.layers.cuts[s] : p.layers.cuts[s + 1]].sum())
            for p in pieces
            for s, slot in enumerate(p.problem.stages)
            for m in slot.members
        )

    def strategy(self, draft: Draft) -> Strategy:
        """Write the draft as a strategy."""
        pipelines = []
        for piece in draft.pieces:
            shape = piece.shape
            whole, rest = divmod(piece.share, shape.quantum)
            sizes = (shape.quantum,) * whole + ((rest,) if rest else ())
            stages = []
            for s, members in enumerate(piece.members):
                rows = (shape.slices[s],) * whole + ((_scaled(shape.slices[s], rest),) if rest else ())
                stages.append(
                    Stage(
                        start=piece.layers.cuts[s],
                        stop=piece.layers.cuts[s + 1],
                        group=Group(members=members, slices=rows),
                        recompute=piece.layers.recompute[s],
                    )
                )
            pipelines.append(Pipeline(micro_batch_sizes=sizes, stages=tuple(stages)))
        return Strategy(
            training=self.prices.training,
            pipelines=tuple(pipelines),
            schedules=tuple(Schedule(family=draft.family, pipelines=(p,)) for p in range(len(pipelines))),
            bucket_bytes=self.space.bucket_bytes,
        )


def _scaled(slices: Sequence[int], total: int) -> tuple[int, ...]:
    """Share a smaller micro-batch in the proportions of a whole one; nobody gets more than of a whole one."""
    whole = sum(slices)
    out = [s * total // whole for s in slices]
    order = sorted(range(len(slices)), key=lambda i: (out[i] * whole - slices[i] * total, i))
    for i in order[: total - sum(out)]:
        out[i] += 1
    return tuple(out)
