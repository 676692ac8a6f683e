"""From the joint graph and its prices to the kernel's arrays, and back: when every node starts and ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from autopiper.costmodel import kernel
from autopiper.costmodel.durations import Durations
from autopiper.costmodel.network import Use
from autopiper.errors import PlanError
from autopiper.ir.graph import TrainingGraph
from autopiper.ir.joint import Joint, Node, join
from autopiper.plan.actions import COMPUTE_KINDS, EXCHANGE_KINDS, GATHER_KINDS, Program
from autopiper.plan.costs import CostTable

Floats = NDArray[np.float64]


KIND_WORDS = {
    **dict.fromkeys(COMPUTE_KINDS, "compute"),
    "TRANSFER": "send_recv",
    **dict.fromkeys(GATHER_KINDS, "all_gather"),
    **dict.fromkeys(EXCHANGE_KINDS, "all_to_all"),
}
"""The kernel's word for each kind of node but reductions; else "other"."""


class Walks:
    """A joint graph as arrays, to be walked several times.

    A backward that somebody waits for block by block is several nodes of the kernel in a row, its pieces: one up to
    each block waited for, one for the rest.
    """

    def __init__(self, joint: Joint, durations: Durations) -> None:
        self.joint, self.durations = joint, durations
        self.num_programs = len(durations.programs)
        self._entry, self._exit, self.work = self._arrays()

    def walk(self, earliest: Mapping[int, float]) -> tuple[list[float], list[float]]:
        """Return start and end of every node, in seconds; `earliest` = before which time some may not start.

        Raises PlanError where actions wait for each other in a circle.
        """
        work = self.work
        if earliest:
            release = np.zeros(len(work.seconds))
            for node, at in earliest.items():
                release[self._entry[node]] = at
            work = replace(work, earliest=release)
        start, end = kernel.walk(work)
        stuck = int(np.isnan(end[self._exit]).sum())
        if stuck:
            circle = f"{stuck} actions wait for each other in a circle"
            raise PlanError("the Programs cannot be simulated", [circle])
        return start[self._entry].tolist(), end[self._exit].tolist()

    def shared(self, start: Sequence[float], end: Sequence[float]) -> bool:
        """Whether anything took longer than it does alone, for sharing a link or its rank."""
        ends = np.add.reduceat(self.work.seconds, self._entry) if len(self._entry) else np.zeros(0)
        took = np.asarray(end) - np.asarray(start)
        return bool((took > ends * (1 + 1e-6) + 1e-12 * np.asarray(end)).any())

    def carried_over(self, end: Sequence[float]) -> dict[int, float]:
        """Return when the first node of each stream can start in the step that follows.

        A rank begins a step when it is through with the one before, but for messages that are still leaving; each
        stream keeps its order besides. One node may open several streams.
        """
        through = [0.0] * self.num_programs
        leaving: dict[int, float] = {}
        for (program, _), nodes in self.joint.streams.items():
            if nodes:
                last = self.joint.nodes[nodes[-1]]
                if last.kind == "TRANSFER" and last.programs[0] == program:
                    leaving[nodes[0]] = max(leaving.get(nodes[0], 0.0), end[nodes[-1]])
                else:
                    through[program] = max(through[program], end[nodes[-1]])
        carried = leaving
        for (program, _), nodes in self.joint.streams.items():
            if nodes:
                carried[nodes[0]] = max(carried.get(nodes[0], 0.0), through[program])
        return carried

    def _arrays(self) -> tuple[NDArray[np.int64], NDArray[np.int64], kernel.Work]:
        joint, durations = self.joint, self.durations
        marks = self._marks()
        seconds: list[float] = []
        owner: list[int] = []
        entry: list[int] = []
        passed: dict[tuple[int, int], int] = {}
        pools = _Pools()
        for number, node in enumerate(joint.nodes):
            left_s, uses = durations.node(node)
            entry.append(len(seconds))
            for block in marks.get(number, ()):  # from the last block downwards, as the backward goes
                rest_s = min(left_s, durations.left_s(node, block))
                passed[number, block] = len(seconds)
                seconds.append(left_s - rest_s)
                owner.append(number)
                left_s = rest_s
            if uses:
                pools.ask(len(seconds), uses)
            seconds.append(left_s)
            owner.append(number)
        exit_ = [n - 1 for n in (*entry[1:], len(seconds))]
        sources = [n for n in range(len(seconds) - 1) if owner[n] == owner[n + 1]]
        targets = [n + 1 for n in sources]
        for target, first in enumerate(entry):
            for source in joint.stream_before[target]:
                sources.append(exit_[source])
                targets.append(first)
            for source, block_ in joint.waits[target]:
                sources.append(exit_[source] if block_ is None else passed[source, block_])
                targets.append(first)
        after_start, after, missing = kernel.successors(len(seconds), _ints(sources), _ints(targets))
        kinds_of = [self._kind(node) for node in joint.nodes]
        kinds = _ints([kinds_of[number] for number in owner])
        rows = [n for n, number in enumerate(owner) for _ in joint.nodes[number].programs]
        member_start, member = kernel.ragged(
            len(seconds), _ints(rows), _ints([p for number in owner for p in joint.nodes[number].programs])
        )
        use_start, use = kernel.ragged(len(seconds), _ints(pools.node), _ints(pools.pool))
        return _ints(entry), _ints(exit_), kernel.Work(
            seconds=np.array(seconds, dtype=np.float64), kind=kinds, after_start=after_start, after=after,
            missing=missing, earliest=np.zeros(len(seconds)), member_start=member_start, member=member,
            use_start=use_start, use=use, demand=np.array(pools.demand, dtype=np.float64),
            capacity=np.array(pools.capacity, dtype=np.float64), slowdown=self._slowdown(set(kinds_of)),
        )  # fmt: skip

    def _kind(self, node: Node) -> int:
        """Return the kernel's word for a node; a reduction under ZeRO is a reduce-scatter."""
        word = KIND_WORDS.get(node.kind, "other")
        if node.kind == "REDUCE_GRAD":
            block = self.durations.graph.gradient_blocks[node.actions[0].gradient_block or 0]
            word = "reduce_scatter" if block.zero else "all_reduce"
        return kernel.KINDS.index(word)

    def _slowdown(self, present: set[int]) -> Floats:
        """Return the slowdown of each pair of kinds; of pairs that do not occur together, none, to spare the kernel."""
        found = kernel.no_slowdown()
        for overlap in self.durations.costs.overlaps:
            a, b = kernel.KINDS.index(overlap.kind), kernel.KINDS.index(overlap.under)
            if {a, b} <= present:
                found[a, b] = overlap.slowdown
        return found

    def _marks(self) -> dict[int, list[int]]:
        """Return the blocks at which somebody waits for a backward, highest first."""
        found: dict[int, set[int]] = {}
        for waits in self.joint.waits:
            for source, block in waits:
                if block is not None:
                    found.setdefault(source, set()).add(block)
        return {node: sorted(blocks, reverse=True) for node, blocks in found.items()}


class _Pools:
    """What nodes ask of pools, as rows of the kernel's table; in order of the nodes."""

    def __init__(self) -> None:
        self.node: list[int] = []
        self.pool: list[int] = []
        self.demand: list[float] = []
        self.capacity: list[float] = []
        self._numbers: dict[tuple[object, ...], int] = {}
        self._known: dict[int, tuple[Sequence[Use], list[tuple[int, float]]]] = {}
        """Equal messages share one list of uses, so it is worked out once. (The list is kept: its id is the key.)"""

    def ask(self, node: int, uses: Sequence[Use]) -> None:
        """Note what a node asks for; of the same pool once, and of one that cannot run dry nothing."""
        found = self._known.get(id(uses))
        if found is None:
            asked: dict[int, float] = {}
            for pool, demand, capacity in uses:
                if capacity == float("inf"):
                    continue
                if pool not in self._numbers:
                    self._numbers[pool] = len(self.capacity)
                    self.capacity.append(capacity)
                number = self._numbers[pool]
                asked[number] = max(asked.get(number, 0.0), demand)
            found = self._known[id(uses)] = (uses, list(asked.items()))
        for number, demand in found[1]:
            self.node.append(node)
            self.pool.append(number)
            self.demand.append(demand)


def _ints(values: Sequence[int]) -> NDArray[np.int64]:
    return np.array(values, dtype=np.int64)


def prepare(graph: TrainingGraph, programs: Sequence[Program], costs: CostTable, joint: Joint | None = None) -> Walks:
    """Join the Programs, unless that has been done already, and price them. Raises as `simulate` does."""
    joint = joint or join(programs)
    if joint.faults:
        raise PlanError("the Programs cannot be simulated", joint.faults)
    return Walks(joint, Durations(graph, programs, costs))
