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
from autopiper.ir.joint import Joint, join
from autopiper.plan.actions import COMPUTE_KINDS, Program
from autopiper.plan.costs import CostTable

Floats = NDArray[np.float64]


def kernel_kind(kind: str, sharded: bool) -> int:
    """Return the kernel's word for a kind of node; a reduction under ZeRO is a reduce-scatter."""
    if kind in COMPUTE_KINDS:
        word = "compute"
    elif kind == "TRANSFER":
        word = "send_recv"
    elif kind == "REDUCE_GRAD":
        word = "reduce_scatter" if sharded else "all_reduce"
    elif kind.startswith("UNSHARD"):
        word = "all_gather"
    elif kind.startswith("A2A"):
        word = "all_to_all"
    else:
        word = "other"
    return kernel.KINDS.index(word)


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
        """Return start and end of every node, in seconds; `earliest` = before which time some may not start."""
        work = self.work
        if earliest:
            release = np.zeros(len(work.seconds))
            for node, at in earliest.items():
                release[self._entry[node]] = at
            work = replace(work, earliest=release)
        start, end = kernel.walk(work)
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
        kinds: list[int] = []
        owner: list[int] = []
        entry, exit_ = np.zeros(len(joint.nodes), np.int64), np.zeros(len(joint.nodes), np.int64)
        edges: list[tuple[int, int]] = []
        passed: dict[tuple[int, int], int] = {}
        pools: dict[tuple[object, ...], int] = {}
        capacity: list[float] = []
        used: list[tuple[int, int, float]] = []
        for number, node in enumerate(joint.nodes):
            total_s, uses = durations.node(node)
            entry[number] = len(seconds)
            left_s = total_s
            for block in marks.get(number, ()):  # from the last block downwards, as the backward goes
                rest_s = min(left_s, durations.left_s(node, block))
                passed[number, block] = len(seconds)
                seconds.append(left_s - rest_s)
                left_s = rest_s
            seconds.append(left_s)
            exit_[number] = len(seconds) - 1
            edges += [(n, n + 1) for n in range(int(entry[number]), int(exit_[number]))]
            block_ = node.actions[0].gradient_block
            sharded = block_ is not None and durations.graph.gradient_blocks[block_].zero > 0
            pieces = int(exit_[number] - entry[number]) + 1
            kinds += [kernel_kind(node.kind, sharded)] * pieces
            owner += [number] * pieces
            for pool, demand, has in _once(uses):
                if pool not in pools:
                    pools[pool] = len(capacity)
                    capacity.append(has)
                used.append((int(exit_[number]), pools[pool], demand))
        for target in range(len(joint.nodes)):
            for source, at_block in joint.waits[target]:
                ready = int(exit_[source]) if at_block is None else passed[source, at_block]
                edges.append((ready, int(entry[target])))
            edges += [(int(exit_[source]), int(entry[target])) for source in joint.stream_before[target]]
        pairs = np.array(edges, dtype=np.int64).reshape(-1, 2)
        after_start, after, missing = kernel.successors(len(seconds), pairs[:, 0], pairs[:, 1])
        lanes = [(n, p) for n, number in enumerate(owner) for p in joint.nodes[number].programs]
        lane_pairs = np.array(lanes, dtype=np.int64).reshape(-1, 2)
        member_start, member = kernel.ragged(len(seconds), lane_pairs[:, 0], lane_pairs[:, 1])
        at = np.array([n for n, _, _ in used], dtype=np.int64)
        use_start, use = kernel.ragged(len(seconds), at, np.array([r for _, r, _ in used], dtype=np.int64))
        _, demand_ = kernel.ragged(len(seconds), at, np.array([d for _, _, d in used], dtype=np.float64))
        return entry, exit_, kernel.Work(
            seconds=np.array(seconds, dtype=np.float64), kind=np.array(kinds, dtype=np.int64),
            after_start=after_start, after=after, missing=missing, earliest=np.zeros(len(seconds)),
            member_start=member_start, member=member, use_start=use_start, use=use, demand=demand_,
            capacity=np.array(capacity, dtype=np.float64), slowdown=self._slowdown(kinds),
        )  # fmt: skip

    def _slowdown(self, kinds: Sequence[int]) -> Floats:
        """Return the slowdown of each pair of kinds; of pairs that do not occur together, none, to spare the kernel."""
        found = kernel.no_slowdown()
        present = set(kinds)
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


def _once(uses: Sequence[Use]) -> list[Use]:
    """Join what one node asks of the same pool, and leave out pools that cannot run dry."""
    if not uses:
        return []
    asked: dict[tuple[object, ...], float] = {}
    has: dict[tuple[object, ...], float] = {}
    for pool, demand, capacity in uses:
        asked[pool] = max(asked.get(pool, 0.0), demand)
        has[pool] = capacity
    return [(pool, demand, has[pool]) for pool, demand in asked.items() if has[pool] != float("inf")]


def prepare(graph: TrainingGraph, programs: Sequence[Program], costs: CostTable, joint: Joint | None = None) -> Walks:
    """Join the Programs, unless that has been done already, and price them. Raises as `simulate` does."""
    joint = joint or join(programs)
    stuck = joint.topological[1]
    if joint.faults or stuck:
        circle = [f"{len(stuck)} actions wait for each other in a circle"] if stuck else []
        raise PlanError("the Programs cannot be simulated", [*joint.faults, *circle])
    return Walks(joint, Durations(graph, programs, costs))
