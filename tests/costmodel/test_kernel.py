"""The kernel against its plain reference, against longest paths, and against sums worked out by hand."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopiper.costmodel import loops
from autopiper.costmodel.kernel import KINDS, Floats, Work, no_slowdown, ragged, successors, walk
from autopiper.costmodel.reference import walk_plainly
from autopiper.errors import CostError

COMPUTE, SEND, ALL_REDUCE, ALL_TO_ALL = (KINDS.index(k) for k in ("compute", "send_recv", "all_reduce", "all_to_all"))


def table(rows: Sequence[Sequence[Any]], dtype: type) -> Any:
    row = np.repeat(np.arange(len(rows)), [len(r) for r in rows])
    return ragged(len(rows), row, np.array([value for r in rows for value in r], dtype=dtype))


def work_of(
    seconds: Sequence[float],
    edges: Sequence[tuple[int, int]] = (),
    *,
    kind: Sequence[int] | None = None,
    earliest: Sequence[float] | None = None,
    lanes: Sequence[Sequence[int]] | None = None,
    uses: Sequence[Sequence[tuple[int, float]]] | None = None,
    capacity: Sequence[float] = (),
    slowdown: Floats | None = None,
) -> Work:
    nodes = len(seconds)
    pairs = np.array(edges, dtype=np.int64).reshape(-1, 2)
    after_start, after, missing = successors(nodes, pairs[:, 0], pairs[:, 1])
    member_start, member = table(lanes or [()] * nodes, np.int64)
    use_start, use = table([[r for r, _ in row] for row in uses or [()] * nodes], np.int64)
    _, demand = table([[d for _, d in row] for row in uses or [()] * nodes], np.float64)
    return Work(
        seconds=np.array(seconds, dtype=np.float64),
        kind=np.array(kind or [COMPUTE] * nodes, dtype=np.int64),
        after_start=after_start,
        after=after,
        missing=missing,
        earliest=np.array(earliest or [0.0] * nodes, dtype=np.float64),
        member_start=member_start,
        member=member,
        use_start=use_start,
        use=use,
        demand=demand,
        capacity=np.array(capacity, dtype=np.float64),
        slowdown=no_slowdown() if slowdown is None else slowdown,
    )


def slower(node: int, beside: int, factor: float) -> Floats:
    matrix = no_slowdown()
    matrix[node, beside] = factor
    return matrix


@st.composite
def works(draw: st.DrawFn, max_nodes: int = 14) -> Work:
    """Nodes on a few lanes and resources; the edges go from a node to one with a higher number, in any order."""
    seconds = st.sampled_from([0.0, 0.5, 1.0, 1.5]) | st.floats(0.01, 3.0)
    nodes = draw(st.integers(1, max_nodes))
    lanes, resources = draw(st.integers(1, 4)), draw(st.integers(0, 4))
    name = draw(st.permutations(range(nodes)))
    pairs = [(a, b) for a in range(nodes) for b in range(a + 1, nodes)]
    edges = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=2 * nodes)) if pairs else []
    use = st.tuples(st.integers(0, resources - 1), st.sampled_from([0.0, 1.0, 2.0]) | st.floats(0.01, 5.0))
    factors = draw(st.lists(st.sampled_from([1.0, 1.0, 1.46, 2.0]), min_size=len(KINDS) ** 2, max_size=len(KINDS) ** 2))

    def each(of: st.SearchStrategy[Any]) -> list[Any]:
        return draw(st.lists(of, min_size=nodes, max_size=nodes))

    return work_of(
        each(seconds),
        [(name[a], name[b]) for a, b in edges],
        kind=each(st.integers(0, len(KINDS) - 1)),
        earliest=each(st.just(0.0) | st.floats(-1.0, 6.0)),
        lanes=each(st.lists(st.integers(0, lanes - 1), unique=True, max_size=3)),
        uses=each(st.lists(use, max_size=3)) if resources else None,
        capacity=draw(st.lists(st.sampled_from([1.0, 2.0, float("inf")]), min_size=resources, max_size=resources)),
        slowdown=np.array(factors).reshape(len(KINDS), len(KINDS)),
    )


def alone(work: Work) -> Work:
    """The same nodes and edges where nothing can contend."""
    return replace(
        work,
        use_start=np.zeros_like(work.use_start),
        use=work.use[:0].copy(),
        demand=work.demand[:0].copy(),
        slowdown=no_slowdown(),
    )


def longest_paths(work: Work) -> tuple[list[float], list[float]]:
    graph: nx.DiGraph[int] = nx.DiGraph()
    graph.add_nodes_from(range(len(work.seconds)))
    graph.add_edges_from(
        (n, int(m)) for n in graph.nodes for m in work.after[work.after_start[n] : work.after_start[n + 1]]
    )
    start, end = [0.0] * len(graph), [0.0] * len(graph)
    for n in nx.topological_sort(graph):
        start[n] = max([float(work.earliest[n]), *(end[m] for m in graph.predecessors(n))])
        end[n] = start[n] + float(work.seconds[n])
    return start, end


@settings(max_examples=400, deadline=None)
@given(works())
def test_the_kernel_does_what_the_reference_does(work: Work) -> None:
    start, end = walk(work)
    plain_start, plain_end = walk_plainly(work)
    np.testing.assert_allclose(start, plain_start, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(end, plain_end, rtol=1e-9, atol=1e-12)


@settings(max_examples=100, deadline=None)
@given(works(30))
def test_where_nothing_contends_each_node_starts_at_its_longest_path(work: Work) -> None:
    start, end = walk(alone(work))
    expected = longest_paths(work)
    assert (start.tolist(), end.tolist()) == expected  # to the last bit


@settings(max_examples=100, deadline=None)
@given(works(30))
def test_events_round_as_the_walk_without_them_does(work: Work) -> None:
    """Resources that are never short send every node through the events, and change no bit."""
    nodes = len(work.seconds)
    roomy = replace(
        alone(work),
        use_start=np.arange(nodes + 1),
        use=np.zeros(nodes, dtype=np.int64),
        demand=np.ones(nodes),
        capacity=np.array([float(nodes)]),
    )
    for got, expected in zip(walk(roomy), walk(alone(work)), strict=True):
        assert got.tolist() == expected.tolist()


@settings(max_examples=200, deadline=None)
@given(works())
def test_the_work_done_between_start_and_end_is_the_seconds_of_the_node(work: Work) -> None:
    """Only starts and ends are taken from the kernel: the rates between them are worked out here from who runs."""
    start, end = walk(work)
    lanes = [work.member[work.member_start[n] : work.member_start[n + 1]].tolist() for n in range(len(start))]
    times = np.unique(np.concatenate([start, end]))
    done = np.zeros(len(start))
    for begin, stop in pairwise(times):
        runs = np.flatnonzero((start <= begin) & (end >= stop))
        load = np.zeros(len(work.capacity))
        for n in runs:
            for u in range(work.use_start[n], work.use_start[n + 1]):
                load[work.use[u]] += work.demand[u]
        for n in runs:
            used = work.use[work.use_start[n] : work.use_start[n + 1]]
            beside = [work.kind[m] for m in runs if m != n and set(lanes[m]) & set(lanes[n])]
            factor = max([1.0, *(load[used] / work.capacity[used])])
            factor *= max([1.0, *(work.slowdown[work.kind[n], k] for k in beside)])
            done[n] += (stop - begin) / factor
    np.testing.assert_allclose(done, work.seconds, rtol=1e-9, atol=1e-9)


@settings(max_examples=100, deadline=None)
@given(works())
def test_every_node_starts_as_soon_as_it_may(work: Work) -> None:
    start, end = walk(work)
    may = work.earliest.copy()
    for n in range(len(start)):
        for m in work.after[work.after_start[n] : work.after_start[n + 1]]:
            may[m] = max(may[m], end[n])
    assert start.tolist() == may.tolist()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.floats(0.01, 3.0), st.floats(0.0, 10.0)), min_size=1, max_size=12))
def test_a_full_link_works_without_pause_and_loses_nothing(flows: list[tuple[float, float]]) -> None:
    """However it is shared, a link that each flow fills alone is over when a queue of them would be."""
    work = work_of(
        [s for s, _ in flows],
        earliest=[at for _, at in flows],
        uses=[[(0, 7.0)]] * len(flows),
        capacity=[7.0],
    )
    over = 0.0
    for seconds, at in sorted(flows, key=lambda f: f[1]):
        over = max(over, at) + seconds
    assert walk(work)[1].max() == pytest.approx(over, rel=1e-9)


def test_two_equal_flows_on_one_link_take_twice_as_long() -> None:
    start, end = walk(work_of([3.0, 3.0], uses=[[(0, 10.0)], [(0, 10.0)]], capacity=[10.0]))
    assert start.tolist() == [0.0, 0.0]
    assert end.tolist() == [6.0, 6.0]


def test_a_link_with_room_for_both_slows_neither() -> None:
    assert walk(work_of([3.0, 3.0], uses=[[(0, 10.0)], [(0, 10.0)]], capacity=[20.0]))[1].tolist() == [3.0, 3.0]


def test_a_flow_that_comes_half_way_shares_only_what_is_left() -> None:
    # Node 0 has done 2 of 4 s when node 1 comes; both then go at half speed: 0 ends after 4 s more, at 6, when node 1
    # has done 2 of its 3 s, and it ends alone 1 s later.
    work = work_of([4.0, 3.0], earliest=[0.0, 2.0], uses=[[(0, 1.0)], [(0, 1.0)]], capacity=[1.0])
    assert [a.tolist() for a in walk(work)] == [[0.0, 2.0], [6.0, 7.0]]


def test_the_worst_resource_sets_the_pace() -> None:
    # Node 0 crosses both links; link 1 is shared with nodes 1 and 2 (factor 3), link 0 with node 3 (factor 2).
    work = work_of(
        [1.0, 9.0, 9.0, 1.0],
        uses=[[(0, 1.0), (1, 1.0)], [(1, 1.0)], [(1, 1.0)], [(0, 1.0)]],
        capacity=[1.0, 1.0],
    )
    # Node 3 is slowed by 2 until it ends, at 2; node 0 by 3, until 3; the others then have 8 s left at factor 2.
    assert walk(work)[1] == pytest.approx([3.0, 19.0, 19.0, 2.0], rel=1e-12)


@pytest.mark.parametrize("beside", [COMPUTE, SEND])
def test_an_all_to_all_is_slower_only_while_an_all_reduce_runs_beside_it(beside: int) -> None:
    matrix = slower(ALL_TO_ALL, ALL_REDUCE, 1.46)
    # The all-reduce (2 s) starts at 1 on one of the two lanes of the all-to-all (4 s): 1 s done before, 2 / 1.46
    # during, the rest after. It is itself not slowed, and the other node neither slows nor is slowed.
    work = work_of(
        [4.0, 2.0, 5.0],
        kind=[ALL_TO_ALL, ALL_REDUCE, beside],
        earliest=[0.0, 1.0, 0.0],
        lanes=[(0, 1), (1,), (0,)],
        slowdown=matrix,
    )
    assert walk(work)[1] == pytest.approx([3.0 + (4.0 - 1.0 - 2.0 / 1.46), 3.0, 5.0], rel=1e-12)
    apart = replace(work, member=np.array([0, 1, 2, 0]))
    assert walk(apart)[1].tolist() == [4.0, 3.0, 5.0]


def test_the_largest_slowdown_counts_not_the_product_and_sharing_comes_on_top() -> None:
    matrix = slower(COMPUTE, ALL_TO_ALL, 1.5)
    matrix[COMPUTE, ALL_REDUCE] = 1.2
    work = work_of(
        [1.0, 9.0, 9.0], kind=[COMPUTE, ALL_TO_ALL, ALL_REDUCE], lanes=[(0,)] * 3, slowdown=matrix,
        uses=[[(0, 1.0)], [(0, 1.0)], []], capacity=[1.0],
    )  # fmt: skip
    assert walk(work)[1][0] == pytest.approx(1.5 * 2, rel=1e-12)


def test_a_kind_slows_others_of_its_kind_but_not_itself() -> None:
    matrix = slower(SEND, SEND, 2.0)
    assert walk(work_of([1.0, 1.0], kind=[SEND] * 2, lanes=[(0,), (0,)], slowdown=matrix))[1].tolist() == [2.0, 2.0]
    assert walk(work_of([1.0], kind=[SEND], lanes=[(0, 0)], slowdown=matrix))[1].tolist() == [1.0]


def test_nodes_in_a_circle_and_after_it_never_start() -> None:
    work = work_of([1.0] * 5, [(0, 1), (1, 2), (2, 1), (2, 3)], uses=[[(0, 1.0)]] * 5, capacity=[1.0])
    for start, end in (walk(work), walk_plainly(work)):
        assert np.isnan(start).tolist() == np.isnan(end).tolist() == [False, True, True, True, False]


def test_nothing_is_walked_in_no_time() -> None:
    start, end = walk(work_of([]))
    assert len(start) == len(end) == 0


def test_what_comes_in_is_not_changed_and_may_be_read_only() -> None:
    work = work_of([1.0, 1.0], [(0, 1)], uses=[[(0, 1.0)]] * 2, capacity=[1.0], earliest=[2.0, 0.0])
    for name in ("seconds", "after", "missing", "earliest", "use", "demand", "member", "slowdown"):
        getattr(work, name).flags.writeable = False
    assert [a.tolist() for a in walk(work)] == [a.tolist() for a in walk(work)] == [[2.0, 3.0], [3.0, 4.0]]


@settings(max_examples=30, deadline=None)
@given(works())
def test_without_numba_the_same_loops_run_as_plain_python(work: Work) -> None:
    plain = _without_numba()
    assert not hasattr(plain.run, "py_func") and hasattr(loops.run, "py_func")  # what numba has made knows its source
    compiled = walk(work)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "autopiper.costmodel.loops", plain)
        patch.setattr("autopiper.costmodel.loops", plain)
        interpreted = walk(work)
    for a, b in zip(compiled, interpreted, strict=True):
        assert a.tolist() == b.tolist()


@cache
def _without_numba() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "numba", None)  # what makes `import numba` raise ImportError
        assert loops.__file__ is not None
        spec = importlib.util.spec_from_file_location("loops_without_numba", Path(loops.__file__))
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: {"seconds": np.array([1.0, -1.0])}, r"seconds holds -1.0 at 1; every entry must be finite"),
        (lambda w: {"seconds": np.array([1, 1])}, r"seconds is int64; it must be an array of float64"),
        (lambda w: {"seconds": [1.0, 1.0]}, r"seconds is list; it must be an array of float64"),
        (lambda w: {"kind": np.array([0, 7])}, r"kind\[1\] is 7; there are 7 kinds, numbered from 0"),
        (lambda w: {"kind": np.array([0])}, r"kind has 1 entries and seconds 2; both must be equally long"),
        (lambda w: {"missing": np.array([1, 1])}, r"missing\[0\] is 1, but 0 entries of after name node 0"),
        (lambda w: {"after": np.array([2])}, r"after\[0\] is 2; there are 2 nodes"),
        (lambda w: {"after_start": np.array([0, 1])}, r"after_start must rise from 0 to 1 .* in 3 entries"),
        (lambda w: {"use": np.array([0, -1])}, r"use\[1\] is -1; there are 1 resources"),
        (lambda w: {"member": np.array([0, -1])}, r"member\[1\] is -1; lanes are numbered from 0"),
        (lambda w: {"capacity": np.array([0.0])}, r"capacity holds 0.0 at 0; every entry must be greater than 0"),
        (lambda w: {"earliest": np.array([0.0, np.nan])}, r"earliest holds nan at 1; every entry must be finite"),
        (lambda w: {"slowdown": np.full((7, 7), 0.5)}, r"slowdown holds 0.5 at 0; every entry must be finite and at"),
        (lambda w: {"slowdown": np.ones((2, 2))}, r"slowdown has shape \(2, 2\); it must be \(7, 7\)"),
        (lambda w: {"demand": np.ones((2, 1))}, r"demand has 2 dimensions; it must have 1"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(change: Callable[[Work], dict[str, Any]], message: str) -> None:
    work = work_of([1.0, 1.0], [(0, 1)], uses=[[(0, 1.0)]] * 2, capacity=[1.0], lanes=[(0,), (0,)])
    with pytest.raises(CostError, match=message):
        replace(work, **change(work))
