"""The joint graph of all Programs: one node per compute, per matched transfer, per collective.

This is what verification proves things about and what the simulator walks: a send and its receive are one node, a
collective is one node over all its members, the order of every stream and channel is edges.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from autopiper.plan.actions import COLLECTIVE_KINDS, EXCHANGE_KINDS, TRANSFER_KINDS, Action, Program


@dataclass(slots=True)
class Node:
    """One event of the step. Mutable while `join` gathers its members; nobody changes it afterwards."""

    kind: str
    """F, B, I, W, RESHARD_…, UPDATE; TRANSFER; A2A_F, A2A_B, UNSHARD…, REDUCE_GRAD, LOSS, NORM."""
    text: str
    programs: list[int] = field(default_factory=list)
    """Programs that take part; of a transfer the sender first."""
    actions: list[Action] = field(default_factory=list)

    def action_of(self, program: int) -> Action:
        """Return what this event is to one of the Programs that take part."""
        return self.actions[self.programs.index(program)]


@dataclass(frozen=True)
class Joint:
    """Nodes with their predecessors, both by waits and by stream order."""

    nodes: list[Node]
    waits: list[list[tuple[int, int | None]]]
    """For each node (predecessor, block or None): None = its end, else when it has passed that block."""
    stream_before: list[list[int]]
    """For each node the node before it on each stream that it lies on."""
    streams: dict[tuple[int, str], list[int]]
    """(program, stream) -> its nodes in order."""
    faults: list[str]

    @cached_property
    def by_program(self) -> dict[int, dict[str, list[int]]]:
        """Program -> stream -> its nodes in order."""
        found: dict[int, dict[str, list[int]]] = {}
        for (program, stream), nodes in self.streams.items():
            found.setdefault(program, {})[stream] = nodes
        return found

    @cached_property
    def topological(self) -> tuple[list[int], list[int]]:
        """The nodes in a topological order, and those left over on a cycle."""
        after: list[list[int]] = [[] for _ in self.nodes]
        missing = [0] * len(self.nodes)
        for target in range(len(self.nodes)):
            sources = {s for s, _ in self.waits[target]} | set(self.stream_before[target])
            missing[target] = len(sources)
            for source in sources:
                after[source].append(target)
        order = [n for n, count in enumerate(missing) if count == 0]
        for node in order:  # grows while it is walked
            for target in after[node]:
                missing[target] -= 1
                if missing[target] == 0:
                    order.append(target)
        return order, [n for n, count in enumerate(missing) if count > 0]


def _transfer_key(action: Action, held: Mapping[tuple[int, int], int]) -> tuple[object, ...] | None:
    """Both ends of a message make the same key: who sends what to whom.

    `held` = the member that the Program is of each (pipeline, stage). None where it holds no such stage.
    """
    kind, sending = action.kind[-1], action.kind.startswith("SEND")
    step = 1 if kind == "F" else -1
    stage = action.stage or 0
    member = held.get((action.pipeline, stage))
    if member is None:
        return None
    there = stage + (step if sending else -step)
    if sending:
        return (action.pipeline, kind, action.micro_batch, stage, member, there, action.peer, action.samples)
    return (action.pipeline, kind, action.micro_batch, there, action.peer, stage, member, action.samples)


def join(programs: Sequence[Program]) -> Joint:
    """Join Programs into one graph; what does not fit together is listed in `faults`, not raised."""
    nodes: list[Node] = []
    faults: list[str] = []
    at: list[dict[str, int]] = [{} for _ in programs]
    shared: dict[tuple[object, ...], int] = {}
    streams: dict[tuple[int, str], list[int]] = {}
    joined: list[tuple[int, int, Action]] = []
    """(program, node, action) of every action that has a node"""
    sides: dict[int, set[str]] = {}
    names = [p.name for p in programs]
    for number, program in enumerate(programs):
        mine, held = at[number], {(p.pipeline, p.stage): p.member for p in program.places}
        for stream, actions in program.streams.items():
            row = streams[number, stream] = []
            for action in actions:
                text, kind = action.text, action.kind
                if text in mine:
                    faults.append(f"{names[number]}: action {text} occurs twice in one Program")
                    continue
                transfer = kind in TRANSFER_KINDS
                key: tuple[object, ...] | None = None
                if transfer:
                    key = _transfer_key(action, held)
                    if key is None:
                        faults.append(f"{names[number]}: {text} is of a stage that this Program does not hold")
                        continue
                elif kind in EXCHANGE_KINDS:  # each group of members that divides the experts has a stream of its own
                    key = (action.pipeline, action.stage, action.segment, kind, action.micro_batch, stream)
                elif kind in COLLECTIVE_KINDS:
                    key = (text,)
                node = shared.get(key) if key is not None else None
                if node is None:
                    node = len(nodes)
                    nodes.append(
                        Node(kind="TRANSFER", text=f"{names[number]} {text}")
                        if transfer
                        else Node(kind=kind, text=text)
                    )
                    if key is not None:
                        shared[key] = node
                entry = nodes[node]
                if transfer:
                    side = kind[:4]
                    seen = sides.setdefault(node, set())
                    if side in seen:
                        faults.append(f"{names[number]}: {text} is matched twice")
                    seen.add(side)
                if transfer and side == "SEND":
                    entry.programs.insert(0, number)
                    entry.actions.insert(0, action)
                else:
                    entry.programs.append(number)
                    entry.actions.append(action)
                mine[text] = node
                row.append(node)
                joined.append((number, node, action))
    for node, seen in sides.items():
        if len(seen) != 2:
            entry = nodes[node]
            lacking = "receives" if "SEND" in seen else "sends"
            faults.append(f"{names[entry.programs[0]]}: {entry.actions[0].text} has no other end: nobody {lacking} it")
        elif len({a.stream for a in nodes[node].actions}) != 1:
            faults.append(f"{nodes[node].text}: its ends lie on different channels")
    waits: list[list[tuple[int, int | None]]] = [[] for _ in nodes]
    before: list[list[int]] = [[] for _ in nodes]
    for row in streams.values():
        for earlier, later in pairwise(row):
            before[later].append(earlier)
    for number, node, action in joined:
        for wait in action.waits:
            source = at[number].get(wait.action)
            if source is None:
                faults.append(f"{names[number]}: {action.text} waits for {wait.action}, which is not in its Program")
            else:
                waits[node].append((source, wait.block))
    return Joint(nodes=nodes, waits=waits, stream_before=before, streams=streams, faults=faults)
