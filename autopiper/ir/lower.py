"""Lowering: from the training graph to Programs, with explicit transfers, gathers, reductions and updates.

What each rank does, in order, per stream. Streams of a Program:

    compute            F and B (or I and W) in the order of the schedule, then the updates
    p0:s0.m0>s1.m0:F   one channel: a directed pair of members and one kind of message; one name on both ends
    a2a, a2a4, …       all-to-alls of sharded experts, one stream per group of members, named by its first
    gather0, …         gathers of parameters (ZeRO), one stream per holder set
    reduce0, …         gradient reductions, one stream per holder set
    loss, norm         the global loss, the global gradient norm

They stand in a Program in the order in which what is ready is issued (`PRIORITY`), so that what takes long to arrive
leaves first.
"""

from __future__ import annotations

from collections.abc import Iterable

from autopiper._collector import no_collection
from autopiper.ir.graph import GradientBlock, Members, TrainingGraph
from autopiper.ir.member import Member, Sources
from autopiper.ir.replicas import classes
from autopiper.ir.slots import Slot, slots
from autopiper.plan.actions import COMPUTE_STREAM, Action, Copy, Place, Program

PRIORITY = ("SEND", "UNSHARD", "A2A", "REDUCE_GRAD", "LOSS", "NORM", "", "RECV")
"""Kinds by which the streams of a Program are sorted (Piper's dispatch order); "" = computing."""


@no_collection()
def lower(graph: TrainingGraph) -> tuple[Program, ...]:
    """Write one Program per class of equal ranks of a complete training graph, in order of device group and member."""
    writer = _Writer(graph)
    return tuple(writer.write(members, first, others) for members, first, others in classes(graph))


@no_collection()
def lower_all(graph: TrainingGraph) -> tuple[Program, ...]:
    """Write the Program of every member, equal or not."""
    writer = _Writer(graph)
    return tuple(writer.write(members, m) for members in graph.groups() for m in range(len(members)))


def program_of(graph: TrainingGraph, device: int) -> Program:
    """Write the Program of the member that a device belongs to; equal ranks differ in their peers and samples."""
    members, m = next((g, m) for g in graph.groups() for m, devices in enumerate(g) if device in devices)
    return _Writer(graph).write(members, m)


class _Writer:
    """Writes Programs of one graph."""

    def __init__(self, graph: TrainingGraph) -> None:
        self.ranks = {device: rank for rank, device in enumerate(graph.devices())}
        orders = {row.members: slots(graph, row) for row in graph.rows}
        of_stage: dict[tuple[int, int], list[tuple[int, Slot]]] = {}
        for order in orders.values():
            for n, slot in enumerate(order):
                of_stage.setdefault((slot.it.pipeline, slot.it.stage), []).append((n, slot))
        held: dict[tuple[int, ...], list[GradientBlock]] = {}
        for block in graph.gradient_blocks:
            for p in block.holders:
                held.setdefault(graph.stage(p.pipeline, p.stage).members[p.member], []).append(block)
        self.sources = Sources(graph=graph, groups=graph.groups(), slots=orders, of_stage=of_stage, held=held)

    def write(self, members: Members, member: int, copies: Iterable[int] = ()) -> Program:
        """Write the Program of a member of a device group; `copies` = the members that equal it."""
        devices = members[member]
        streams: dict[str, list[Action]] = {}
        for action in Member(self.sources, members, member).actions():
            streams.setdefault(action.stream, []).append(action)
        streams.setdefault(COMPUTE_STREAM, [])
        return Program(
            ranks=tuple(self.ranks[d] for d in devices),
            devices=devices,
            places=tuple(
                Place(pipeline=s.pipeline, stage=s.index, member=member) for s in self.sources.groups[members]
            ),
            streams={name: tuple(streams[name]) for name in sorted(streams, key=lambda n: _priority(n, streams[n]))},
            copies=tuple(
                Copy(ranks=tuple(self.ranks[d] for d in members[m]), devices=members[m], member=m) for m in copies
            ),
        )


def _priority(name: str, actions: list[Action]) -> int:
    if name == COMPUTE_STREAM:
        return PRIORITY.index("")
    return next(i for i, kind in enumerate(PRIORITY) if kind and actions[0].kind.startswith(kind))
