"""The joint graph of all Programs: one node per compute, per matched transfer, per collective.

This is what verification proves things about and what the simulator walks: a send and its receive are one node, a
collective is one node over all its members, the order of every stream and channel is edges.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from autopiper.plan.actions import COLLECTIVE_KINDS, TRANSFER_KINDS, Action, Program


@dataclass(slots=True)
class Node:
    """One event of the step. Mutable while `join` gathers its members; nobody changes it afterwards."""

    kind: str
    """F, B, I, W, UPDATE; TRANSFER; REDUCE_GRAD, LOSS, NORM."""
    text: str
    programs: list[int] = field(default_factory=list)
    """Programs that take part; of a transfer the sender first."""
    actions: list[Action] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
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

    def topological(self) -> tuple[list[int], list[int]]:
        """Return the nodes in a topological order, and those left over on a cycle."""
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


def _transfer_key(action: Action, program: Program) -> tuple[object, ...]:
    """Both ends of a message make the same key: who sends what to whom."""
    kind, sending = action.kind[-1], action.kind.startswith("SEND")
    step = 1 if kind == "F" else -1
    stage = action.stage or 0
    member = next(p.member for p in program.places if p.pipeline == action.pipeline and p.stage == stage)
    here, there = (stage, member), (stage + (step if sending else -step), action.peer)
    ends = (here, there) if sending else (there, here)
    return (action.pipeline, kind, action.micro_batch, ends, action.samples)


def join(programs: Sequence[Program]) -> Joint:
    """Join Programs into one graph; what does not fit together is listed in `faults`, not raised."""
    nodes: list[Node] = []
    faults: list[str] = []
    at: dict[tuple[int, str], int] = {}
    shared: dict[tuple[object, ...], int] = {}
    streams: dict[tuple[int, str], list[int]] = {}
    sides: dict[int, set[str]] = {}
    names = [p.places[0].text for p in programs]
    for number, program in enumerate(programs):
        for stream, actions in program.streams.items():
            row = streams[number, stream] = []
            for action in actions:
                text = action.text
                if (number, text) in at:
                    faults.append(f"{names[number]}: action {text} occurs twice in one Program")
                    continue
                key: tuple[object, ...] | None = None
                if action.kind in TRANSFER_KINDS:
                    try:
                        key = _transfer_key(action, program)
                    except StopIteration:
                        faults.append(f"{names[number]}: {text} is of a stage that this Program does not hold")
                        continue
                elif action.kind in COLLECTIVE_KINDS:
                    key = (text,)
                node = shared.get(key) if key is not None else None
                if node is None:
                    node = len(nodes)
                    kind = "TRANSFER" if action.kind in TRANSFER_KINDS else action.kind
                    nodes.append(Node(kind=kind, text=text if kind != "TRANSFER" else f"{names[number]} {text}"))
                    if key is not None:
                        shared[key] = node
                entry = nodes[node]
                if action.kind in TRANSFER_KINDS:
                    side = action.kind[:4]
                    if side in sides.setdefault(node, set()):
                        faults.append(f"{names[number]}: {text} is matched twice")
                    sides[node].add(side)
                    if side == "SEND":
                        entry.programs.insert(0, number)
                        entry.actions.insert(0, action)
                    else:
                        entry.programs.append(number)
                        entry.actions.append(action)
                else:
                    entry.programs.append(number)
                    entry.actions.append(action)
                at[number, text] = node
                row.append(node)
    for node, seen in sides.items():
        if len(seen) != 2:
            entry = nodes[node]
            lacking = "receives" if "SEND" in seen else "sends"
            faults.append(f"{names[entry.programs[0]]}: {entry.actions[0].text} has no other end: nobody {lacking} it")
        elif len({a.stream for a in nodes[node].actions}) != 1:
            faults.append(f"{nodes[node].text}: its ends lie on different channels")
    waits: list[list[tuple[int, int | None]]] = [[] for _ in nodes]
    before: list[list[int]] = [[] for _ in nodes]
    for (number, _), node_list in streams.items():
        for earlier, later in pairwise(node_list):
            before[later].append(earlier)
        for node in node_list:
            entry = nodes[node]
            for action in (a for p, a in zip(entry.programs, entry.actions, strict=True) if p == number):
                for wait in action.waits:
                    source = at.get((number, wait.action))
                    if source is None:
                        faults.append(
                            f"{names[number]}: {action.text} waits for {wait.action}, which is not in its Program"
                        )
                    else:
                        waits[node].append((source, wait.block))
    return Joint(nodes=nodes, waits=waits, stream_before=before, streams=streams, faults=faults)
