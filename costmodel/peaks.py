"""Memory of one rank over the simulated step: parameters and their states, activations from F to B or W, buffers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from autopiper._data import data
from autopiper.costmodel.durations import Durations
from autopiper.costmodel.memory import boundary_bytes, stage_kept_bytes, stage_static_bytes, stage_workspace_bytes
from autopiper.ir.graph import GraphStage
from autopiper.ir.joint import Joint
from autopiper.ir.regions import RECEIVE_DEPTH
from autopiper.model.spec import Model
from autopiper.plan.actions import COMPUTE_STREAM, Action
from autopiper.plan.costs import PriceIndex
from autopiper.plan.timeline import MemoryPoint

TIE = 1e-10
"""Of two moments that differ by less than this, relative, neither is later: sums of floats differ by as much."""
ACTIVATIONS, GRADIENTS, PARAMETERS, BUFFERS = "activations", "gradients", "parameters", "buffers"


@data
class Memory:
    """What one rank holds over a step, in bytes."""

    static_bytes: float
    """Parameters, gradients, master weights and optimizer states that stay."""
    peak_bytes: float
    peak_live: int
    """Most (stage, micro-batch) pairs between their F and their B or W at any time."""
    points: tuple[MemoryPoint, ...]


def memory(
    number: int,
    joint: Joint,
    durations: Durations,
    start: Sequence[float],
    end: Sequence[float],
    *,
    points: bool = True,
) -> Memory:
    """Return what the ranks of Program `number` hold over the step. `points=False` leaves the course of it out.

    Activations count from the start of F to the end of B or W (what I or W compute again goes block by block); a
    received message from the moment its receive is posted (the one before has arrived, and the one before that is used
    up) until the pass that uses it is over; a sent one from the pass that made it until it has gone; under ZeRO 3 the
    parameters of a bucket from the start of their gather until they are let go, under ZeRO 2 and 3 its gradients from
    the moment when the first backward of a chain comes to its uppermost block until they are reduced. Buffers hold the largest workspace of a pass throughout.
    """
    holds = _Holds(number, joint, durations, start, end)
    changes = [*holds.activations(), *holds.messages(), *holds.exchanges(), *holds.buckets()]
    graph = durations.graph
    stages = [graph.stage(p.pipeline, p.stage) for p in durations.programs[number].places]
    states = [stage_static_bytes(graph, durations.costs, s) for s in stages]
    static = {name: sum(getattr(s, name) for s in states) for name in ("parameters", "gradients", "optimizer")}
    level = {
        ACTIVATIONS: 0.0,
        GRADIENTS: static["gradients"],
        PARAMETERS: static["parameters"],
        BUFFERS: holds.workspace,
    }
    optimizer = static["optimizer"]
    peak = sum(level.values()) + optimizer
    live = most = 0
    course: list[MemoryPoint] = [_point(0.0, level, optimizer)] if points else []
    for when, _, kind, num_bytes, count in sorted(changes, key=lambda c: (c[0], c[1])):
        level[kind] += num_bytes
        live += count
        peak, most = max(peak, sum(level.values()) + optimizer), max(most, live)
        if points:
            point = _point(max(when, course[-1].time_s), level, optimizer)
            course[-1:] = [point] if when <= course[-1].time_s else [course[-1], point]
    return Memory(static_bytes=sum(static.values()), peak_bytes=peak, peak_live=most, points=tuple(course))


def _point(when: float, level: dict[str, float], optimizer: float) -> MemoryPoint:
    # Sums of floats that come and go leave crumbs: less than none is none.
    return MemoryPoint(
        time_s=when, parameters_bytes=level[PARAMETERS], gradients_bytes=max(0.0, level[GRADIENTS]),
        optimizer_bytes=optimizer, activations_bytes=max(0.0, level[ACTIVATIONS]), buffers_bytes=max(0.0, level[BUFFERS]),
    )  # fmt: skip


Change = tuple[float, int, str, float, int]
"""(when, releases first, what, bytes, micro-batches)."""


class _Holds:
    """What is held from when to when on one Program's ranks."""

    def __init__(
        self, number: int, joint: Joint, durations: Durations, start: Sequence[float], end: Sequence[float]
    ) -> None:
        self.number, self.joint, self.durations, self.start, self.end = number, joint, durations, start, end
        self.graph, self.program = durations.graph, durations.programs[number]
        self.member = self.program.member
        self.device_type = durations.devices[self.program.devices[0]].type.name
        self.streams = joint.by_program.get(number, {})
        self.over: dict[tuple[int, int, str, int], float] = {}
        """(pipeline, stage, kind, micro-batch) -> end of the last action of the pass."""
        self.begun: dict[tuple[int, int, str, int], float] = {}
        self.backwards: list[tuple[int, Action]] = []
        """(node, action) of each segment whose end makes gradients."""
        for node, action in self.actions(COMPUTE_STREAM):
            if action.kind in ("B", "W"):
                self.backwards.append((node, action))
            if action.kind in "FBIW":
                key = (action.pipeline, action.stage or 0, action.kind, action.micro_batch or 0)
                self.begun.setdefault(key, start[node])
                self.over[key] = end[node]
        self.workspace = max(
            (
                stage_workspace_bytes(*self._of(stage, stage.recompute, samples))
                for stage in self._stages()
                for samples in {row[self.member] for row in stage.slices}
            ),
            default=0.0,
        )

    def actions(self, stream: str) -> list[tuple[int, Action]]:
        """Return (node, this Program's action of it) of a stream, in order."""
        return [(n, self.joint.nodes[n].action_of(self.number)) for n in self.streams.get(stream, ())]

    def _stages(self) -> list[GraphStage]:
        return [self.graph.stage(p.pipeline, p.stage) for p in self.program.places]

    def _of(
        self, stage: GraphStage, recompute: tuple[str, ...], samples: int
    ) -> tuple[PriceIndex, Model, str, int, int, int, tuple[str, ...], int]:
        """Return the arguments that the formulas of `costmodel.memory` share."""
        return (
            self.durations.prices, self.graph.model, self.device_type, stage.tensor_parallel_size, stage.start,
            stage.stop, recompute, samples,
        )  # fmt: skip

    def _hold(self, begin_s: float, until_s: float, kind: str, num_bytes: float, live: int = 0) -> list[Change]:
        # What is let go at the moment when it comes was never held; let go a tie earlier, it would count as less than none.
        gone_s = until_s * (1 - TIE)
        return [(begin_s, 1, kind, num_bytes, live), (gone_s, 0, kind, -num_bytes, -live)] if begin_s < gone_s else []

    def activations(self) -> list[Change]:
        """What passes keep from F to the end of the backward, and what comes in between for I and W apart."""
        found: list[Change] = []
        kept: dict[tuple[int, int, int], float] = {}
        for stage in self._stages():
            for samples in {row[self.member] for row in stage.slices}:
                kept[stage.pipeline, stage.index, samples] = stage_kept_bytes(
                    *self._of(stage, stage.recompute, samples)
                )
        for (pipeline, index, kind, mb), begin in self.begun.items():
            samples = self.graph.stage(pipeline, index).slices[mb][self.member]
            done = self.over.get((pipeline, index, "B", mb), self.over.get((pipeline, index, "W", mb)))
            if kind == "F" and done is not None:
                found += self._hold(begin, done, ACTIVATIONS, kept[pipeline, index, samples], 1)
        return found

    def messages(self) -> list[Change]:
        found: list[Change] = []
        for stream, nodes in self.streams.items():
            if not nodes or self.joint.nodes[nodes[0]].kind != "TRANSFER":
                continue
            used_up: list[float] = []
            actions = self.actions(stream)
            stage = self.durations.stage_of(actions[0][1])
            cut = stage.start if actions[0][1].kind in ("SEND_B", "RECV_F") else stage.stop
            per_sample = boundary_bytes(self.graph.model, self.graph.training, self.durations.costs, cut)
            for place, (node, action) in enumerate(actions):
                low, high = action.samples or (0, 0)
                passes = ("F",) if action.kind.endswith("F") else ("B", "I")
                keys = [(action.pipeline, action.stage or 0, k, action.micro_batch or 0) for k in passes]
                over = next((self.over[key] for key in keys if key in self.over), self.end[node])
                if action.kind.startswith("SEND"):
                    found += self._hold(over, self.end[node], BUFFERS, per_sample * (high - low))
                    continue
                posted = self.end[nodes[place - 1]] if place else 0.0
                if place >= RECEIVE_DEPTH:
                    posted = max(posted, used_up[-RECEIVE_DEPTH])
                used_up.append(max(over, self.end[node]))
                found += self._hold(min(posted, used_up[-1]), used_up[-1], BUFFERS, per_sample * (high - low))
        return found

    def exchanges(self) -> list[Change]:
        """All-to-alls: what arrives is held beside what leaves while it does."""
        found: list[Change] = []
        for stream, nodes in self.streams.items():
            if nodes and self.joint.nodes[nodes[0]].kind.startswith("A2A"):
                for node, action in self.actions(stream):
                    stage = self.durations.stage_of(action)
                    block = stage.borders[action.segment - 1].exchange or 0
                    elements = self.graph.model.blocks[block].all_to_all_elements / stage.tensor_parallel_size
                    samples = stage.slices[action.micro_batch or 0][self.member]
                    num_bytes = elements * samples * self.graph.training.activation_bytes
                    found += self._hold(self.start[node], self.end[node], BUFFERS, num_bytes)
        return found

    def buckets(self) -> list[Change]:
        """Parameters that are gathered for a chain of slots, gradients of a chain until they are reduced (ZeRO 2, 3)."""
        training, blocks = self.graph.training, self.graph.gradient_blocks
        if not any(block.zero >= 2 for block in blocks):
            return []
        found: list[Change] = []
        gathered: dict[tuple[int, int], list[float]] = {}
        reduced: list[tuple[int, Action]] = []
        for stream in self.streams:
            for node, action in self.actions(stream):
                if action.kind.startswith("UNSHARD_"):
                    gathered.setdefault(_bucket(action), []).append(self.start[node])
                elif action.kind == "REDUCE_GRAD" and action.micro_batch is not None:
                    reduced.append((node, action))
        for node, action in self.actions(COMPUTE_STREAM):
            if action.kind.startswith("RESHARD"):
                key = _bucket(action)
                num_bytes = self._bucket_elements(key) * training.weight_bytes
                found += self._hold(gathered[key].pop(0), self.end[node], PARAMETERS, num_bytes)
        reached: dict[tuple[int, int], list[float]] = {}
        next_: dict[tuple[int, int], int] = {}
        for node, action in reduced:
            key = _bucket(action)
            if key not in reached:
                reached[key] = self._reached(key)
            begins, first = reached[key], next_.get(key, 0)
            # What has begun when the reduction starts is what it sums: the backwards since the one before.
            next_[key] = bisect_left(begins, self.start[node] * (1 + TIE) + TIE)
            if first < next_[key]:
                num_bytes = self._bucket_elements(key) * training.gradient_bytes
                found += self._hold(begins[first], self.end[node], GRADIENTS, num_bytes)
        return found

    def _reached(self, key: tuple[int, int]) -> list[float]:
        """Return when each backward of this rank comes to the uppermost block of a bucket, in order."""
        home = self.graph.gradient_blocks[key[0]].holders[0]
        stage = self.graph.stage(home.pipeline, home.stage)
        top = self.graph.gradient_blocks[key[0]].buckets[key[1]].highest_block
        segment = stage.segment_of(2 * top + (top not in stage.sharded))
        found = []
        for node, action in self.backwards:
            if (action.pipeline, action.stage) != (stage.pipeline, stage.index):
                continue
            if action.kind == "B" and action.segment != segment:
                continue
            high = 2 * stage.stop if action.kind == "W" else stage.segment(segment)[1]
            before = self.start[node]
            if 2 * top + 2 < high:
                before = max(before, self.end[node] - self.durations.left_s(self.joint.nodes[node], top + 1))
            found.append(before)
        return sorted(found)

    def _bucket_elements(self, key: tuple[int, int]) -> float:
        """Elements of a bucket on one tensor-parallel rank."""
        block = self.graph.gradient_blocks[key[0]]
        piece = block.buckets[key[1]]
        home = block.holders[0]
        return (piece.stop - piece.start) / self.graph.stage(home.pipeline, home.stage).tensor_parallel_size


def _bucket(action: Action) -> tuple[int, int]:
    """(gradient block, bucket) of a gather, release or reduction."""
    return action.gradient_block or 0, action.bucket or 0
