"""The kernel of the simulator: a graph of nodes that take time, share links and slow each other down, walked in time.

`Work` is the graph as arrays; `walk` says when each node starts and ends. It knows no Program and no price: the
simulator turns both into these arrays. `reference.walk_plainly` does the same in the plainest way and is the oracle.

What happens, in full:

* A node starts when all its predecessors are over and its earliest time has come. Nothing queues here: the order of a
  stream is edges.
* A resource that running nodes ask for more than it has serves all of them slower, by load / capacity (never less
  than 1). A node goes at the pace of its worst resource.
* Nodes that run on one lane slow each other down: a node of kind a by the largest `slowdown[a, b]` over the kinds b of
  the *other* nodes that run on any of its lanes. The largest, not the product: pairs are what is measured, and a
  product of pairs would charge the same memory traffic twice.
* Both factors multiply. `seconds` is what a node takes at factor 1; a node of no seconds ends as it starts, and
  neither slows nor is slowed.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from autopiper._data import data
from autopiper.errors import CostError

KINDS = ("compute", "send_recv", "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "other")
"""The kinds that `Work.kind` and both axes of `Work.slowdown` count."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
T = TypeVar("T", bound=np.generic)

_LENGTHS = {  # each array, and the one that it must be as long as
    "kind": "seconds",
    "missing": "seconds",
    "earliest": "seconds",
    "demand": "use",
}
_RAGGED = {"after": "after_start", "member": "member_start", "use": "use_start"}


@data
class Work:
    """N nodes with their edges, lanes and resources, as arrays (C order, float64 and int64).

    A ragged table is two arrays: row i of `after` is `after[after_start[i]:after_start[i + 1]]`; likewise `member`
    and `use`. Raises CostError where the arrays do not fit together or hold what cannot be.
    """

    seconds: Floats
    """[N], s: how long each node runs when nothing slows it down; finite, not negative."""
    kind: Ints
    """[N]: index into KINDS."""
    after_start: Ints
    """[N + 1]: where the successors of each node begin in `after`."""
    after: Ints
    """[E]: the nodes that wait for the end of this one. An edge given twice counts twice, here and in `missing`."""
    missing: Ints
    """[N]: number of predecessors of each node."""
    earliest: Floats
    """[N], s: before this time a node does not start; finite."""
    member_start: Ints
    """[N + 1]: where the lanes of each node begin in `member`."""
    member: Ints
    """[M]: the lanes (Programs) that take part in each node, numbered from 0."""
    use_start: Ints
    """[N + 1]: where the resources of each node begin in `use`."""
    use: Ints
    """[U]: the resources (links, NICs) that each node needs as long as it runs."""
    demand: Floats
    """[U], bytes/s: what the node would take of that resource if it were alone; finite, not negative."""
    capacity: Floats
    """[R], bytes/s: what each resource can give; greater than 0, may be infinite."""
    slowdown: Floats
    """[K, K], K = len(KINDS): factor by which a node of the row's kind slows down while one of the column's runs on
    one of its lanes; at least 1, finite; ones mean no effect (`no_slowdown()`)."""

    def __post_init__(self) -> None:
        nodes = len(self.seconds)
        for name in (field.name for field in fields(self)):
            array, whole = getattr(self, name), name not in ("seconds", "earliest", "demand", "capacity", "slowdown")
            dtype = np.int64 if whole else np.float64
            if not isinstance(array, np.ndarray) or array.dtype != dtype:
                came = getattr(array, "dtype", type(array).__name__)
                raise CostError(f"{name} is {came}; it must be an array of {np.dtype(dtype)}")
            if array.ndim != (2 if name == "slowdown" else 1):
                raise CostError(f"{name} has {array.ndim} dimensions; it must have {2 if name == 'slowdown' else 1}")
        for name, like in _LENGTHS.items():
            if len(getattr(self, name)) != len(getattr(self, like)):
                raise CostError(
                    f"{name} has {len(getattr(self, name))} entries and {like} {len(getattr(self, like))}; "
                    "both must be equally long"
                )
        if self.slowdown.shape != (len(KINDS), len(KINDS)):
            raise CostError(f"slowdown has shape {self.slowdown.shape}; it must be {(len(KINDS), len(KINDS))}")
        for name, starts in _RAGGED.items():
            start, flat = getattr(self, starts), getattr(self, name)
            if len(start) != nodes + 1 or start[0] != 0 or start[-1] != len(flat) or (np.diff(start) < 0).any():
                raise CostError(
                    f"{starts} must rise from 0 to {len(flat)} (the length of {name}) in {nodes + 1} entries"
                )
        _within("kind", self.kind, len(KINDS), "kinds")
        _within("after", self.after, nodes, "nodes")
        _within("use", self.use, len(self.capacity), "resources")
        if (wrong := np.flatnonzero(self.member < 0)).size:
            raise CostError(f"member[{wrong[0]}] is {self.member[wrong[0]]}; lanes are numbered from 0")
        _all("seconds", self.seconds, np.isfinite(self.seconds) & (self.seconds >= 0), "finite and not negative")
        _all("earliest", self.earliest, np.isfinite(self.earliest), "finite")
        _all("demand", self.demand, np.isfinite(self.demand) & (self.demand >= 0), "finite and not negative")
        _all("capacity", self.capacity, self.capacity > 0, "greater than 0")
        _all("slowdown", self.slowdown, np.isfinite(self.slowdown) & (self.slowdown >= 1), "finite and at least 1")
        counted = np.bincount(self.after, minlength=nodes)
        if (wrong := np.flatnonzero(counted != self.missing)).size:
            node = int(wrong[0])
            raise CostError(
                f"missing[{node}] is {self.missing[node]}, but {counted[node]} entries of after name node {node}"
            )


def no_slowdown() -> Floats:
    """Return the matrix of a machine on which nothing slows anything else down."""
    return np.ones((len(KINDS), len(KINDS)))


def ragged(num_rows: int, rows: Ints, values: NDArray[T]) -> tuple[Ints, NDArray[T]]:
    """Return (start, flat) of the ragged table with `values[i]` in row `rows[i]`; the order inside a row is kept."""
    order = np.argsort(rows, kind="stable")
    start = np.zeros(num_rows + 1, dtype=np.int64)
    np.cumsum(np.bincount(rows, minlength=num_rows), out=start[1:])
    return start, values[order]


def successors(num_nodes: int, sources: Ints, targets: Ints) -> tuple[Ints, Ints, Ints]:
    """Return `after_start`, `after` and `missing` of the edges from `sources[i]` to `targets[i]`."""
    start, after = ragged(num_nodes, sources, targets)
    return start, after.astype(np.int64), np.bincount(targets, minlength=num_nodes).astype(np.int64)


def walk(work: Work) -> tuple[Floats, Floats]:
    """Return the start and the end of every node, in seconds.

    Nodes that never start, as they wait for each other in a circle or for a node of one, have nan in both: their number
    is `np.isnan(end).sum()`. Costs O(N + E) where nothing can contend, and O(log N) more per node that can.
    Same input, same output to the last bit: equal times are taken by node number.
    """
    from autopiper.costmodel import loops  # numba comes with it: half a second that only a simulation should pay

    nodes = loops.table(loops.NODE, len(work.seconds))
    loops.fill(
        nodes,
        _own(work.seconds),
        _own(work.earliest),
        _own(work.missing),
        _own(work.kind),
        _own(work.after_start),
        _own(work.member_start),
        _own(work.use_start),
        _own(work.slowdown),
    )
    uses = loops.table(loops.USE, len(work.use))
    uses["resource"], uses["demand"] = work.use, work.demand
    uses["node"] = np.repeat(np.arange(len(nodes)), np.diff(work.use_start))
    resources = _owners(len(work.capacity), work.use)
    resources["capacity"], resources["pressure"] = work.capacity, 1.0
    start, end = np.full(len(nodes), np.nan), np.full(len(nodes), np.nan)
    loops.run(
        nodes,
        _own(work.after),
        _own(work.member),
        uses,
        resources,
        _owners(int(work.member.max(initial=-1)) + 1, work.member),
        _own(work.slowdown),
        on_resources=np.zeros(len(work.use), dtype=np.int64),
        on_lanes=np.zeros(len(work.member), dtype=np.int64),
        heap=np.zeros(len(nodes) + 1, dtype=np.int64),
        settled=np.zeros(len(nodes), dtype=np.int64),
        start=start,
        end=end,
    )
    return start, end


def _owners(number: int, items: Ints) -> Any:
    """Return a table of resources or lanes, each with room for all that name it."""
    from autopiper.costmodel import loops

    owners = loops.table(loops.OWNER, number)
    owners["room"][1:] = np.cumsum(np.bincount(items, minlength=number))[:-1]
    return owners


def _own(array: NDArray[T]) -> NDArray[T]:
    """Return the array as the one layout that is compiled: contiguous and writable, copied only where it is not."""
    return np.require(array, requirements=["C", "W"])


def _within(name: str, array: Ints, limit: int, of: str) -> None:
    if (wrong := np.flatnonzero((array < 0) | (array >= limit))).size:
        at = int(wrong[0])
        raise CostError(f"{name}[{at}] is {array[at]}; there are {limit} {of}, numbered from 0")


def _all(name: str, array: Floats, good: NDArray[np.bool_], must: str) -> None:
    if not good.all():
        at = int(np.flatnonzero(~good.ravel())[0])
        raise CostError(f"{name} holds {array.ravel()[at]} at {at}; every entry must be {must}")
