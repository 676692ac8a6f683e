"""Who runs what: every rank in one Program, on the devices of the strategy, and copies that are equal indeed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from autopiper.ir.graph import GradientBlock, GraphStage, Members, TrainingGraph
from autopiper.plan.actions import Program

Seat = tuple[Members, int]
"""Device group and member."""


def seats(graph: TrainingGraph, programs: Sequence[Program]) -> list[str]:
    """Check that Programs and their copies are the members of the strategy, each once."""
    groups = graph.groups()
    of = {device: (members, m) for members in groups for m, devices in enumerate(members) for device in devices}
    used = {device: rank for rank, device in enumerate(graph.devices())}
    faults: list[str] = []
    seen: Counter[int] = Counter()
    home: dict[Seat, tuple[int, int]] = {}
    """Seat -> (Program, which of its copies)"""
    for number, program in enumerate(programs):
        seat = of.get(program.devices[0])
        everyone = [(program.ranks, program.devices, program.member)]
        everyone += [(copy.ranks, copy.devices, copy.member) for copy in program.copies]
        for turn, (ranks, devices, member) in enumerate(everyone):
            seen.update(devices)
            where = of.get(devices[0])
            if where is None or where[0][where[1]] != devices:
                faults.append(f"{program.name} runs on devices {devices}, which are no member of the strategy")
                continue
            if ranks != tuple(used[device] for device in devices):
                faults.append(
                    f"{program.name}: ranks {ranks} are not the positions of devices {devices} among those used"
                )
            if where[1] != member or seat is None or where[0] != seat[0]:
                placed = "+".join(p.text for s in groups[where[0]] for p in s.places() if p.member == where[1])
                faults.append(f"{program.name} runs on devices {devices}, but the strategy places {placed} there")
            home[where] = (number, turn)
        if seat is not None:
            held = tuple(p for s in groups[seat[0]] for p in s.places() if p.member == seat[1])
            if set(held) != set(program.places) or len(held) != len(program.places):
                faults.append(
                    f"Program of {program.name}, but devices {program.devices} hold {'+'.join(p.text for p in held)}"
                )
    for members in groups:
        for m, devices in enumerate(members):
            times = {seen[device] for device in devices}
            if times != {1}:
                name = "+".join(p.text for s in groups[members] for p in s.places() if p.member == m)
                faults.append(f"{name} has {max(times)} Programs; it must have one")
    return faults or _copies(graph, programs, home)


def holdings(graph: TrainingGraph) -> dict[tuple[int, ...], list[GradientBlock]]:
    """Return the gradient blocks that each member holds, by its devices."""
    found: dict[tuple[int, ...], list[GradientBlock]] = {}
    for block in graph.gradient_blocks:
        for p in block.holders:
            found.setdefault(graph.stage(p.pipeline, p.stage).members[p.member], []).append(block)
    return found


def _copies(graph: TrainingGraph, programs: Sequence[Program], home: dict[Seat, tuple[int, int]]) -> list[str]:
    """Check that a copy has the samples, messages, partners and devices of the Program that it is a copy of."""
    faults = []
    groups = graph.groups()
    of = {devices: (members, m) for members in groups for m, devices in enumerate(members)}
    held = holdings(graph)
    for program in programs:
        if program.copies:
            members, lead = of[program.devices]
            own = list(_facts(graph, groups[members], lead, home, held))
            for copy in program.copies:
                for (what, mine), (_, other) in zip(
                    own, _facts(graph, groups[members], copy.member, home, held), strict=True
                ):
                    if mine != other:
                        faults.append(f"{program.name}: member {copy.member} is no copy of it: {what} differ")
                        break
    return faults


def _facts(
    graph: TrainingGraph,
    stages: Sequence[GraphStage],
    member: int,
    home: dict[Seat, tuple[int, int]],
    held: Mapping[tuple[int, ...], Sequence[GradientBlock]],
) -> Iterator[tuple[str, object]]:
    """Yield what must be equal for two members of a device group to do the same."""
    devices = stages[0].members[member]
    turn = home[stages[0].members, member][1]
    yield "device types", [graph.cluster.device(device).type.name for device in devices]
    yield (
        "gradient blocks",
        [(b.kind, b.blocks, b.elements, len(b.buckets), len(b.holders), b.zero) for b in held.get(devices, ())],
    )
    for stage in stages:
        yield f"slices of {stage.tag}", [row[member] for row in stage.slices]
        size = stage.expert_parallel_size
        if stage.sharded and size < len(stage.members):
            group = range(member // size * size, member // size * size + size)
            partners = [home[stage.members, m] for m in group]
            yield f"expert groups of {stage.tag}", [(number, copy == turn) for number, copy in partners]
            yield f"places in the expert groups of {stage.tag}", member % size
        for step in (-1, 1):
            at = stage.index + step
            pipe = graph.pipelines[stage.pipeline]
            if not 0 <= at < len(pipe.stages):
                continue
            other = pipe.stages[at]
            known: dict[object, list[object]] = {}
            messages = []
            for mb, rows in enumerate(zip(stage.slices, other.slices, strict=True)):
                if rows not in known:
                    start, stop = stage.ranges(mb)[member]
                    known[rows] = [
                        (home[other.members, p][0], home[other.members, p][1] == turn, min(stop, b) - max(start, a),
                         other.members == stage.members and p == member,
                         graph.cluster.tier(devices[0], other.members[p][0]))
                        for p, (a, b) in enumerate(other.ranges(mb)) if max(start, a) < min(stop, b)
                    ]  # fmt: skip
                messages.append(known[rows])
            yield f"messages between {stage.tag} and {other.tag}", messages
