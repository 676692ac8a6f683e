"""The loops of the kernel: compiled by numba where it can be imported, plain Python where it cannot.

A node that can meet no other one, on a resource or a lane, is settled at once: its end is known when its predecessors'
are. Only the others go through the heap. Each of them is in it at most once, first with its start, then with its end;
the end moves when a rate changes, and a rate changes only where a node on a shared resource or lane comes or goes.

Everything is in tables whose rows have named fields. They are numpy's own types on purpose: what numba keeps on disk
names the types of the arguments, and could not be read any more if it named a class of ours that has since changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Table = Any
F = TypeVar("F", bound=Callable[..., Any])

try:
    from numba import njit
except ImportError:  # no numba for this interpreter or this numpy: the same functions, some hundred times slower
    njit = None

NODE = np.dtype(
    [
        ("seconds", "f8"),
        ("ready", "f8"),  # s: the latest of its earliest time and of the ends known so far of its predecessors
        ("missing", "i8"),  # predecessors whose end is not known yet
        ("kind", "i8"),
        ("contends", "i8"),  # 1 where it can slow another node down, or be slowed
        ("after_first", "i8"),  # its successors are after[after_first:after_last]; likewise its lanes and uses
        ("after_last", "i8"),
        ("member_first", "i8"),
        ("member_last", "i8"),
        ("use_first", "i8"),
        ("use_last", "i8"),
        ("place", "i8"),  # where it is in the heap
        ("key", "f8"),  # s: when it will start, or end, while it is in the heap
        ("runs", "i8"),  # 1 from its start on
        ("left", "f8"),  # s: what was left to do at `since`, at factor 1
        ("since", "f8"),  # s: when `factor` was last set
        ("factor", "f8"),  # how many seconds one second of `left` takes now: share * slow
        ("share", "f8"),  # the largest pressure of its resources
        ("slow", "f8"),  # the largest slowdown by what runs on its lanes
    ]
)
USE = np.dtype([("resource", "i8"), ("demand", "f8"), ("node", "i8")])
OWNER = np.dtype(
    [
        ("capacity", "f8"),  # bytes/s, of a resource
        ("pressure", "f8"),  # load / capacity, at least 1
        ("room", "i8"),  # where the list of what runs on it begins
        ("number", "i8"),  # how long that list is
    ]
)
"""A resource, whose list holds uses; or a lane, whose list holds nodes (capacity and pressure mean nothing there)."""


def table(dtype: np.dtype[np.void], rows: int) -> Table:
    """Return a table of zeros whose rows have their fields as attributes, compiled or not."""
    made = np.zeros(rows, dtype=dtype)
    return made.view(np.recarray) if njit is None else made


def compiled(function: F) -> F:
    """Compile a function when it is first called, and keep what came out beside this file where that is writable."""
    if njit is None:
        return function
    try:
        done: F = njit(cache=True)(function)
    except RuntimeError:  # no folder to keep it in: compiled anew by each process
        done = njit(function)
    return done


@compiled
def fill(
    nodes: Table,
    seconds: Floats,
    earliest: Floats,
    missing: Ints,
    kind: Ints,
    after_start: Ints,
    member_start: Ints,
    use_start: Ints,
    slowdown: Floats,
) -> None:
    """Write the rows of nodes that have not begun; row by row, as a table of some size is not in the cache twice."""
    felt = np.zeros(len(slowdown), dtype=np.bool_)
    for a in range(len(slowdown)):
        for b in range(len(slowdown)):
            if slowdown[a, b] > 1.0:  # a kind that neither slows nor is slowed meets nobody on its lanes
                felt[a] = True
                felt[b] = True
    for n in range(len(nodes)):
        node = nodes[n]
        node.seconds = seconds[n]
        node.ready = earliest[n]
        node.missing = missing[n]
        node.kind = kind[n]
        node.after_first = after_start[n]
        node.after_last = after_start[n + 1]
        node.member_first = member_start[n]
        node.member_last = member_start[n + 1]
        node.use_first = use_start[n]
        node.use_last = use_start[n + 1]
        meets = node.use_first < node.use_last or (felt[kind[n]] and node.member_first < node.member_last)
        if meets and seconds[n] > 0.0:
            node.contends = 1
        node.left = seconds[n]
        node.factor = 1.0
        node.share = 1.0
        node.slow = 1.0


@compiled
def run(
    nodes: Table,
    after: Ints,
    member: Ints,
    uses: Table,
    resources: Table,
    lanes: Table,
    slowdown: Floats,
    on_resources: Ints,
    on_lanes: Ints,
    heap: Ints,
    settled: Ints,
    start: Floats,
    end: Floats,
) -> None:
    """Write the `start` and `end` of the nodes that start.

    `on_resources` (U) and `on_lanes` (M) are room for the lists of the owners, `settled` (N) for the nodes whose
    predecessors have known ends, `heap` for N nodes, the next event first, after one entry that counts them.
    """
    waiting = 0
    for n in range(len(nodes) - 1, -1, -1):
        if nodes[n].missing == 0:
            settled[waiting] = n
            waiting += 1
    while True:
        while waiting > 0:
            waiting -= 1
            n = settled[waiting]
            node = nodes[n]
            if node.contends == 1:
                heap[0] += 1
                node.place = heap[0]
                _move(nodes, heap, n, node.ready)
            else:
                start[n] = node.ready
                end[n] = node.ready + node.seconds
                waiting = _release(nodes, after, n, end[n], settled, waiting)
        if heap[0] == 0:
            return
        n = heap[1]
        node = nodes[n]
        now = node.key
        if node.runs == 0:
            node.runs = 1
            start[n] = now
            node.since = now
            _move(nodes, heap, n, now + node.left)
            for at in range(node.use_first, node.use_last):
                _add(resources[uses[at].resource], on_resources, at)
            for at in range(node.member_first, node.member_last):
                _add(lanes[member[at]], on_lanes, n)
            node.slow = _slow(nodes, n, member, lanes, on_lanes, slowdown)
            _pace(nodes, heap, n, now)
        else:
            end[n] = now
            last = heap[heap[0]]
            heap[0] -= 1
            if last != n:
                nodes[last].place = 1
                _move(nodes, heap, last, nodes[last].key)
            for at in range(node.use_first, node.use_last):
                _remove(resources[uses[at].resource], on_resources, at)
            for at in range(node.member_first, node.member_last):
                _remove(lanes[member[at]], on_lanes, n)
            waiting = _release(nodes, after, n, now, settled, waiting)
        _load(nodes, heap, n, uses, resources, on_resources, now)
        _meet(nodes, heap, n, member, lanes, on_lanes, slowdown, now)


@compiled
def _release(nodes: Table, after: Ints, n: int, end_s: float, settled: Ints, waiting: int) -> int:
    """Tell the successors of a node its end; put those that wait for nothing more on the stack; return its height."""
    for at in range(nodes[n].after_first, nodes[n].after_last):
        other = nodes[after[at]]
        other.ready = max(other.ready, end_s)
        other.missing -= 1
        if other.missing == 0:
            settled[waiting] = after[at]
            waiting += 1
    return waiting


@compiled
def _add(owner: Table, items: Ints, item: int) -> None:
    """Append one item to the list of an owner."""
    items[owner.room + owner.number] = item
    owner.number += 1


@compiled
def _remove(owner: Table, items: Ints, item: int) -> None:
    """Take one item out of the list of an owner; the last one takes its place."""
    slot = owner.room
    while items[slot] != item:
        slot += 1
    owner.number -= 1
    items[slot] = items[owner.room + owner.number]


@compiled
def _load(nodes: Table, heap: Ints, n: int, uses: Table, resources: Table, on_resources: Ints, now: float) -> None:
    """Add up what is asked of the resources of a node that came or went; set the pace of all whose share changes.

    Added up anew each time: a running sum would keep rounding errors after its large terms have gone.
    """
    for at in range(nodes[n].use_first, nodes[n].use_last):
        owner = resources[uses[at].resource]
        load = 0.0
        for slot in range(owner.room, owner.room + owner.number):
            load += uses[on_resources[slot]].demand
        pressure = max(1.0, load / owner.capacity)
        changed = pressure != owner.pressure
        owner.pressure = pressure
        for slot in range(owner.room, owner.room + owner.number):
            other = uses[on_resources[slot]].node
            if changed or other == n:
                share = 1.0
                for use in range(nodes[other].use_first, nodes[other].use_last):
                    share = max(share, resources[uses[use].resource].pressure)
                nodes[other].share = share
                _pace(nodes, heap, other, now)


@compiled
def _meet(
    nodes: Table, heap: Ints, n: int, member: Ints, lanes: Table, on_lanes: Ints, slowdown: Floats, now: float
) -> None:
    """Set the pace of those nodes that the kind of a node slows down, after it came to their lanes or went."""
    for at in range(nodes[n].member_first, nodes[n].member_last):
        lane = lanes[member[at]]
        for slot in range(lane.room, lane.room + lane.number):
            other = on_lanes[slot]
            if other != n and slowdown[nodes[other].kind, nodes[n].kind] > 1.0:
                nodes[other].slow = _slow(nodes, other, member, lanes, on_lanes, slowdown)
                _pace(nodes, heap, other, now)


@compiled
def _slow(nodes: Table, n: int, member: Ints, lanes: Table, on_lanes: Ints, slowdown: Floats) -> float:
    """Return how much a node is slowed down by what runs on its lanes now."""
    worst = 1.0
    for at in range(nodes[n].member_first, nodes[n].member_last):
        lane = lanes[member[at]]
        for slot in range(lane.room, lane.room + lane.number):
            if on_lanes[slot] != n:
                worst = max(worst, slowdown[nodes[n].kind, nodes[on_lanes[slot]].kind])
    return worst


@compiled
def _pace(nodes: Table, heap: Ints, n: int, now: float) -> None:
    """Set the factor of a running node; where it changes, account for what was done and move its end."""
    node = nodes[n]
    factor = node.share * node.slow
    if factor != node.factor:
        node.left = max(0.0, node.left - (now - node.since) / node.factor)
        node.since = now
        node.factor = factor
        _move(nodes, heap, n, now + node.left * factor)


@compiled
def _move(nodes: Table, heap: Ints, n: int, key_s: float) -> None:
    """Give a node another key, and put it from its place as far up or down the heap as that says."""
    nodes[n].key = key_s
    at = nodes[n].place
    while at > 1 and _before(nodes, n, heap[at >> 1]):
        heap[at] = heap[at >> 1]
        nodes[heap[at]].place = at
        at >>= 1
    while 2 * at <= heap[0]:
        below = 2 * at
        if below < heap[0] and _before(nodes, heap[below + 1], heap[below]):
            below += 1
        if not _before(nodes, heap[below], n):
            break
        heap[at] = heap[below]
        nodes[heap[at]].place = at
        at = below
    heap[at] = n
    nodes[n].place = at


@compiled
def _before(nodes: Table, a: int, b: int) -> bool:
    """Whether node a comes before node b: by key, then by number."""
    return bool(nodes[a].key < nodes[b].key or (nodes[a].key == nodes[b].key and a < b))
