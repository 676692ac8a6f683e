"""Equal replicas: which members do the very same, so that their Programs are written, walked and stored once.

Members that exchange messages, or divide experts among a part of their stage, belong together: a *strand*, the members
of one replica through all stages. Two strands are equal where they have the same slices on the same types of devices
over the same links, and share their nodes with equally many of the same. Strands meet only in collectives in which all
those of a device group take part and wait for the slowest, so equal strands do everything at the same times. Where
pipelines divide experts otherwise than each other, a part may be held by some strands of a group only: those that hold
it wait for each other, and are made one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from autopiper.ir.graph import Members, TrainingGraph

Seat = tuple[int, int]
"""(number of a device group, member): who runs one Program."""


def classes(graph: TrainingGraph) -> Iterator[tuple[Members, int, tuple[int, ...]]]:
    """Yield (device group, first member, equal members) for each class of equal members, in order."""
    groups = list(graph.groups())
    numbers = {members: n for n, members in enumerate(groups)}
    neighbours = _neighbours(graph, numbers)
    strands = _strands(neighbours)
    while _join_parted(graph, numbers, neighbours, strands):
        strands = _strands(neighbours)
    colour = dict.fromkeys(range(len(strands)), 0)
    while True:  # refined until equal strands also share their nodes with equal ones
        refined = _refine(graph, groups, strands, neighbours, colour)
        if len(set(refined.values())) == len(set(colour.values())):
            break
        colour = refined
    first: dict[int, int] = {}
    copies: dict[Seat, list[int]] = {}
    for number, strand in enumerate(strands):
        lead = strands[first.setdefault(colour[number], number)]
        for seat, other in zip(lead, strand, strict=True):
            copies.setdefault(seat, []).append(other[1])
    for (group, _), found in sorted(copies.items()):
        yield groups[group], found[0], tuple(found[1:])


def _neighbours(graph: TrainingGraph, numbers: dict[Members, int]) -> dict[Seat, dict[Seat, int]]:
    """Return for each seat those that it exchanges messages or tokens with, in the order in which they are met."""
    found: dict[Seat, dict[Seat, int]] = {(n, m): {} for members, n in numbers.items() for m in range(len(members))}

    def join(a: Seat, b: Seat) -> None:
        if a != b:
            found[a].setdefault(b, len(found[a]))
            found[b].setdefault(a, len(found[b]))

    for pipe in graph.pipelines:
        for here, there in zip(pipe.stages, pipe.stages[1:], strict=False):
            for mb in {pair: m for m, pair in enumerate(zip(here.slices, there.slices, strict=True))}.values():
                ends = iter(enumerate(there.ranges(mb)))
                peer, (_, high) = next(ends)
                for member, (start, stop) in enumerate(here.ranges(mb)):
                    while start < stop:  # both rise, so one walk over both meets every overlap
                        if high <= start:
                            peer, (_, high) = next(ends)
                            continue
                        join((numbers[here.members], member), (numbers[there.members], peer))
                        start = min(stop, high)
        for stage in pipe.stages:
            size = stage.expert_parallel_size
            if stage.sharded and size < len(stage.members):
                group = numbers[stage.members]
                for m in range(len(stage.members)):
                    join((group, m // size * size), (group, m))
    return found


def _join_parted(
    graph: TrainingGraph,
    numbers: dict[Members, int],
    neighbours: dict[Seat, dict[Seat, int]],
    strands: list[list[Seat]],
) -> bool:
    """Join the holders of each expert part that is held by several device groups, but not by all strands of each.

    Returns whether there was one.
    """
    of = {seat: n for n, strand in enumerate(strands) for seat in strand}
    inside: dict[int, set[int]] = {}
    for (group, _), strand in of.items():
        inside.setdefault(group, set()).add(strand)
    joined = False
    for block in graph.gradient_blocks:
        if block.kind != "expert":
            continue
        seats = [(numbers[graph.stage(p.pipeline, p.stage).members], p.member) for p in block.holders]
        groups = {group for group, _ in seats}
        if len(groups) == 1:
            continue
        holding = {(group, of[group, member]) for group, member in seats}
        together = len({of[seat] for seat in seats}) == 1
        if not together and any(len({s for g, s in holding if g == group}) < len(inside[group]) for group in groups):
            for other in seats[1:]:
                neighbours[seats[0]].setdefault(other, len(neighbours[seats[0]]))
                neighbours[other].setdefault(seats[0], len(neighbours[other]))
            joined = True
    return joined


def _strands(neighbours: dict[Seat, dict[Seat, int]]) -> list[list[Seat]]:
    """Return the connected sets of seats, each from its first seat on in the order in which a walk meets them."""
    seen: set[Seat] = set()
    strands = []
    for seat in sorted(neighbours):
        if seat not in seen:
            strand = [seat]
            seen.add(seat)
            for each in strand:  # grows while it is walked
                for other in sorted(neighbours[each], key=lambda s: (s[0], s[1])):
                    if other not in seen:
                        seen.add(other)
                        strand.append(other)
            strands.append(strand)
    return strands


def _refine(
    graph: TrainingGraph,
    groups: list[Members],
    strands: list[list[Seat]],
    neighbours: dict[Seat, dict[Seat, int]],
    colour: dict[int, int],
) -> dict[int, int]:
    """Give each strand a colour that says everything that its times depend on, beside the collectives."""
    devices = graph.cluster.devices()
    stages = list(graph.groups().values())
    columns = [{(s.pipeline, s.index): list(zip(*s.slices, strict=True)) for s in held} for held in stages]
    head = {(g, m): groups[g][m][0] for strand in strands for g, m in strand}
    on_node: dict[int, Counter[tuple[int, int, int]]] = {}
    for number, strand in enumerate(strands):
        for place, seat in enumerate(strand):
            on_node.setdefault(devices[head[seat]].node, Counter())[colour[number], place, seat[0]] += 1
    node_colour = {node: tuple(sorted(count.items())) for node, count in on_node.items()}
    known: dict[object, int] = {}
    found = {}
    for number, strand in enumerate(strands):
        position = {seat: n for n, seat in enumerate(strand)}
        nodes: dict[int, int] = {}
        signature: list[object] = [colour[number]]
        for seat in strand:
            g, m = seat
            device = devices[head[seat]]
            slices = tuple(column[m] for column in columns[g].values())
            links = tuple((position[other], graph.cluster.tier(head[seat], head[other])) for other in neighbours[seat])
            node = graph.cluster.nodes[device.node]
            local = nodes.setdefault(device.node, len(nodes))
            signature.append(
                (g, device.type.name, slices, links, local, node.intra, node.nic, node.nics, node_colour[device.node])
            )
        found[number] = known.setdefault(tuple(signature), len(known))
    return found
