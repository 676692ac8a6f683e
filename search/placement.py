"""Placement: concrete device ids for the members of every pipeline, tensor-parallel groups inside one node.

Two habits: `pipeline` keeps the stages of one replica on one node, where activations then stay; `data` keeps the members
of one stage on one node, where their gradients are then summed. Which is better, the simulator says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

from autopiper.cluster.spec import Cluster
from autopiper.search.shapes import Shape

Habit = Literal["pipeline", "data"]
Members: TypeAlias = tuple[tuple[tuple[int, ...], ...], ...]
"""Device ids by stage, member and tensor-parallel rank."""


class _Free:
    """Free device ids by node and type."""

    def __init__(self, cluster: Cluster, devices: Sequence[int]) -> None:
        self.cluster = cluster
        self.ids: dict[tuple[int, str], list[int]] = {}
        for d in sorted(devices):
            device = cluster.device(d)
            self.ids.setdefault((device.node, device.type.name), []).append(d)

    def take(self, name: str, size: int, near: Sequence[int], wanted: int) -> tuple[int, ...] | None:
        """Take `size` devices of a type from one node: from `near` if they have room, else where `wanted` more fit.

        Among nodes with room for all that is wanted the fullest is taken, else the emptiest.
        """
        fits = [node for (node, kind), ids in self.ids.items() if kind == name and len(ids) >= size]
        if not fits:
            return None
        close = [n for n in near if n in fits]

        def rank(node: int) -> tuple[int, int, int]:
            room = len(self.ids[node, name])
            return (0, room, node) if room >= wanted else (1, -room, node)

        node = close[0] if close else min(fits, key=rank)
        ids = self.ids[node, name]
        taken, self.ids[node, name] = tuple(ids[:size]), ids[size:]
        return taken


def place(shapes: Sequence[Shape], cluster: Cluster, devices: Sequence[int], habit: Habit) -> list[Members] | None:
    """Return device ids for each shape, or None where a tensor-parallel group finds no node with room.

    Shapes with the widest tensor-parallel groups are placed first, so that narrow ones fill the gaps.
    """
    free = _Free(cluster, devices)
    out: list[Members | None] = [None] * len(shapes)
    for i in sorted(range(len(shapes)), key=lambda i: -max(shapes[i].tensor_parallel_sizes)):
        placed = _place_one(shapes[i], free, habit)
        if placed is None:
            return None
        out[i] = placed
    return [m for m in out if m is not None]


def _place_one(shape: Shape, free: _Free, habit: Habit) -> Members | None:
    count, replicas = len(shape.types), shape.replicas
    found: list[list[tuple[int, ...]]] = [[()] * replicas for _ in range(count)]
    cells = (
        [(s, r) for r in range(replicas) for s in range(count)]
        if habit == "pipeline"
        else [(s, r) for s in range(count) for r in range(replicas)]
    )
    for s, r in cells:
        name, size = shape.types[s][r], shape.tensor_parallel_sizes[s]
        if habit == "pipeline":
            before = found[s - 1][r] if s else ()
            wanted = size * sum(shape.types[later][r] == name for later in range(s, count))
        else:
            before = found[s][r - 1] if r else ()
            wanted = size * sum(other == name for other in shape.types[s][r:])
        near = [free.cluster.device(before[0]).node] if before else []
        taken = free.take(name, size, near, wanted)
        if taken is None:
            return None
        found[s][r] = taken
    return tuple(tuple(row) for row in found)
