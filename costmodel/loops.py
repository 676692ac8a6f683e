"""The loops of the kernel: compiled by numba where it can be imported, plain Python where it cannot.

A node that can meet no other one, on a resource or a lane, is settled at once: its end is known when its predecessors'
are. Only the others go through the heap. Each of them is in it at most once, first with its start, then with its end;
the end moves when a rate changes, and a rate changes only where a node on a shared resource or lane comes or goes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
F = TypeVar("F", bound=Callable[..., Any])

try:
    from numba import njit
except ImportError:  # no numba for this interpreter or this numpy: the same functions, some hundred times slower
    njit = None


def compiled(function: F) -> F:
    """Compile a function when it is first called, and keep what came out beside this file where that is writable."""
    if njit is None:
        return function
    try:
        done: F = njit(cache=True)(function)
    except RuntimeError:  # no folder to keep it in: compiled anew by each process
        done = njit(function)
    return done


class Graph(NamedTuple):
    """What does not change: the arrays of `kernel.Work`, and what follows from them."""

    seconds: Floats
    kind: Ints
    after_start: Ints
    after: Ints
    member_start: Ints
    member: Ints
    use_start: Ints
    use: Ints
    demand: Floats
    capacity: Floats
    slowdown: Floats
    owner: Ints
    """[U]: the node that an entry of `use` belongs to."""
    room: Ints
    """[R + 1]: where the running uses of each resource begin in `State.running`."""
    lane_room: Ints
    """[L + 1]: where the running nodes of each lane begin in `State.lane_running`."""
    contends: NDArray[np.bool_]
    """[N]: whether the node can slow another one down, or be slowed."""


class State(NamedTuple):
    """What changes while the walk goes on."""

    heap: Ints
    """[N]: nodes that will start or end, the next one first; by key, then by number."""
    size: Ints
    """[1]: how many of them there are."""
    place: Ints
    """[N]: where a node is in the heap."""
    key: Floats
    """[N], s: when it will start, or end."""
    runs: NDArray[np.bool_]
    """[N]: whether it runs, so that its key is its end."""
    left: Floats
    """[N], s: what was left to do at `since`, at factor 1."""
    since: Floats
    """[N], s: when `factor` was last set."""
    factor: Floats
    """[N]: how many seconds one second of `left` takes now: share * slow."""
    share: Floats
    """[N]: the largest pressure of its resources."""
    slow: Floats
    """[N]: the largest slowdown by what runs on its lanes."""
    pressure: Floats
    """[R]: load / capacity, at least 1."""
    running: Ints
    """[U]: entries of `use` that are in use now, by resource."""
    in_use: Ints
    """[R]: how many those are."""
    lane_running: Ints
    """[M]: the nodes that run now, by lane."""
    on_lane: Ints
    """[L]: how many those are."""


def fresh(graph: Graph) -> State:
    """Return the state in which nothing runs."""
    nodes, resources, lanes = len(graph.seconds), len(graph.capacity), len(graph.lane_room) - 1
    return State(
        heap=np.zeros(nodes, np.int64),
        size=np.zeros(1, np.int64),
        place=np.zeros(nodes, np.int64),
        key=np.zeros(nodes),
        runs=np.zeros(nodes, np.bool_),
        left=graph.seconds.copy(),
        since=np.zeros(nodes),
        factor=np.ones(nodes),
        share=np.ones(nodes),
        slow=np.ones(nodes),
        pressure=np.ones(resources),
        running=np.zeros(len(graph.use), np.int64),
        in_use=np.zeros(resources, np.int64),
        lane_running=np.zeros(len(graph.member), np.int64),
        on_lane=np.zeros(lanes, np.int64),
    )


@compiled
def run(graph: Graph, state: State, missing: Ints, ready: Floats, start: Floats, end: Floats) -> None:
    """Fill `start` and `end`; `ready` comes in as the earliest times. `missing` and `ready` are used up."""
    settled = np.empty(len(missing), np.int64)  # nodes whose predecessors have known ends
    waiting = 0
    for node in range(len(missing) - 1, -1, -1):
        if missing[node] == 0:
            settled[waiting] = node
            waiting += 1
    while True:
        while waiting > 0:
            waiting -= 1
            node = settled[waiting]
            if graph.contends[node]:
                _push(state, node, ready[node])
                continue
            start[node] = ready[node]
            end[node] = ready[node] + graph.seconds[node]
            waiting = _release(graph, node, end[node], missing, ready, settled, waiting)
        if state.size[0] == 0:
            return
        node = state.heap[0]
        now = state.key[node]
        if state.runs[node]:
            end[node] = now
            _pop(state)
            _leave(graph, state, node, now)
            waiting = _release(graph, node, now, missing, ready, settled, waiting)
        else:
            start[node] = now
            _enter(graph, state, node, now)


@compiled
def _release(graph: Graph, node: int, end_s: float, missing: Ints, ready: Floats, settled: Ints, waiting: int) -> int:
    """Tell the successors of a node its end; put those that wait for nothing more on the stack; return its height."""
    for at in range(graph.after_start[node], graph.after_start[node + 1]):
        other = graph.after[at]
        ready[other] = max(ready[other], end_s)
        missing[other] -= 1
        if missing[other] == 0:
            settled[waiting] = other
            waiting += 1
    return waiting


@compiled
def _enter(graph: Graph, state: State, node: int, now: float) -> None:
    """Let a node run from now on, and slow down what it meets."""
    state.runs[node] = True
    state.since[node] = now
    _move(state, node, now + state.left[node])
    for at in range(graph.use_start[node], graph.use_start[node + 1]):
        resource = graph.use[at]
        state.running[graph.room[resource] + state.in_use[resource]] = at
        state.in_use[resource] += 1
    for at in range(graph.use_start[node], graph.use_start[node + 1]):
        _load(graph, state, graph.use[at], now)
    state.share[node] = _share(graph, state, node)
    for at in range(graph.member_start[node], graph.member_start[node + 1]):
        lane = graph.member[at]
        first = graph.lane_room[lane]
        for slot in range(first, first + state.on_lane[lane]):
            other = state.lane_running[slot]
            if other != node:
                by_node = graph.slowdown[graph.kind[other], graph.kind[node]]
                if by_node > state.slow[other]:
                    state.slow[other] = by_node
                    _pace(state, other, now)
                by_other = graph.slowdown[graph.kind[node], graph.kind[other]]
                state.slow[node] = max(state.slow[node], by_other)
        state.lane_running[first + state.on_lane[lane]] = node
        state.on_lane[lane] += 1
    _pace(state, node, now)


@compiled
def _leave(graph: Graph, state: State, node: int, now: float) -> None:
    """Take a node that is over from its resources and lanes, and let what it met go faster."""
    for at in range(graph.use_start[node], graph.use_start[node + 1]):
        resource = graph.use[at]
        _remove(state.running, graph.room[resource], state.in_use, resource, at)
    for at in range(graph.use_start[node], graph.use_start[node + 1]):
        _load(graph, state, graph.use[at], now)
    for at in range(graph.member_start[node], graph.member_start[node + 1]):
        lane = graph.member[at]
        _remove(state.lane_running, graph.lane_room[lane], state.on_lane, lane, node)
    for at in range(graph.member_start[node], graph.member_start[node + 1]):
        lane = graph.member[at]
        first = graph.lane_room[lane]
        for slot in range(first, first + state.on_lane[lane]):
            other = state.lane_running[slot]
            by_node = graph.slowdown[graph.kind[other], graph.kind[node]]
            if by_node > 1.0 and by_node == state.slow[other]:  # it may have been the worst
                state.slow[other] = _slow(graph, state, other)
                _pace(state, other, now)


@compiled
def _remove(items: Ints, first: int, count: Ints, owner: int, item: int) -> None:
    """Take one item out of the list of an owner; the last one takes its place."""
    slot = first
    while items[slot] != item:
        slot += 1
    count[owner] -= 1
    items[slot] = items[first + count[owner]]


@compiled
def _load(graph: Graph, state: State, resource: int, now: float) -> None:
    """Add up what is asked of a resource; where that changes its pressure, set the pace of all that use it.

    Added up anew each time: a running sum would keep rounding errors after its large terms have gone.
    """
    first = graph.room[resource]
    last = first + state.in_use[resource]
    load = 0.0
    for slot in range(first, last):
        load += graph.demand[state.running[slot]]
    pressure = max(1.0, load / graph.capacity[resource])
    if pressure == state.pressure[resource]:
        return
    state.pressure[resource] = pressure
    for slot in range(first, last):
        node = graph.owner[state.running[slot]]
        state.share[node] = _share(graph, state, node)
        _pace(state, node, now)


@compiled
def _share(graph: Graph, state: State, node: int) -> float:
    worst = 1.0
    for at in range(graph.use_start[node], graph.use_start[node + 1]):
        worst = max(worst, state.pressure[graph.use[at]])
    return worst


@compiled
def _slow(graph: Graph, state: State, node: int) -> float:
    worst = 1.0
    for at in range(graph.member_start[node], graph.member_start[node + 1]):
        first = graph.lane_room[graph.member[at]]
        for slot in range(first, first + state.on_lane[graph.member[at]]):
            other = state.lane_running[slot]
            if other != node:
                worst = max(worst, graph.slowdown[graph.kind[node], graph.kind[other]])
    return worst


@compiled
def _pace(state: State, node: int, now: float) -> None:
    """Set the factor of a running node; where it changes, account for what was done and move its end."""
    factor = state.share[node] * state.slow[node]
    if factor == state.factor[node]:
        return
    done = (now - state.since[node]) / state.factor[node]
    state.left[node] = max(0.0, state.left[node] - done)
    state.since[node] = now
    state.factor[node] = factor
    _move(state, node, now + state.left[node] * factor)


@compiled
def _push(state: State, node: int, key_s: float) -> None:
    state.key[node] = key_s
    state.heap[state.size[0]] = node
    state.size[0] += 1
    _rise(state, node, state.size[0] - 1)


@compiled
def _pop(state: State) -> None:
    state.size[0] -= 1
    if state.size[0] > 0:
        _sink(state, state.heap[state.size[0]], 0)


@compiled
def _move(state: State, node: int, key_s: float) -> None:
    later = key_s > state.key[node]
    state.key[node] = key_s
    if later:
        _sink(state, node, state.place[node])
    else:
        _rise(state, node, state.place[node])


@compiled
def _rise(state: State, node: int, at: int) -> None:
    """Put a node at `at`, or as far above as its key allows."""
    while at > 0 and _first(state, node, state.heap[(at - 1) >> 1]):
        other = state.heap[(at - 1) >> 1]
        state.heap[at] = other
        state.place[other] = at
        at = (at - 1) >> 1
    state.heap[at] = node
    state.place[node] = at


@compiled
def _sink(state: State, node: int, at: int) -> None:
    """Put a node at `at`, or as far below as its key demands."""
    while True:
        below = 2 * at + 1
        if below >= state.size[0]:
            break
        if below + 1 < state.size[0] and _first(state, state.heap[below + 1], state.heap[below]):
            below += 1
        other = state.heap[below]
        if not _first(state, other, node):
            break
        state.heap[at] = other
        state.place[other] = at
        at = below
    state.heap[at] = node
    state.place[node] = at


@compiled
def _first(state: State, node: int, other: int) -> bool:
    """Whether a node comes before another one: by key, then by number."""
    return bool(state.key[node] < state.key[other] or (state.key[node] == state.key[other] and node < other))
