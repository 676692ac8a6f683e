"""Transfers and all-reduces against closed forms and against a ring that is played step by step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopiper.cluster import Cluster, Link, Node, catalogue
from autopiper.costmodel.collectives import all_reduce_s, ring_all_reduce_s, transfer_s
from autopiper.errors import CostError
from autopiper.plan import CostTable, LinkCost

NO_COSTS = CostTable(blocks=())
EIGHTS = Cluster.homogeneous(
    "a100-80g", num_nodes=4, devices_per_node=8, intra_node_GBps=300, inter_node_GBps=100, nics=4,
    intra_node_latency_us=3, inter_node_latency_us=10,
)  # fmt: skip


def test_a_transfer_is_latency_and_bytes_over_bandwidth() -> None:
    assert transfer_s(NO_COSTS, EIGHTS, 0, 7, 3e9) == pytest.approx(3e-6 + 0.01)
    # One message uses one of the node's four interfaces.
    assert transfer_s(NO_COSTS, EIGHTS, 0, 8, 25e6) == pytest.approx(10e-6 + 1e-3)
    assert transfer_s(NO_COSTS, EIGHTS, 5, 5, 1e9) == 0
    assert transfer_s(NO_COSTS, EIGHTS, 0, 8, 0) == 0


def test_a_measured_tier_wins() -> None:
    measured = CostTable(
        blocks=(),
        links=(LinkCost(tier="network", latency_s=1.0, bytes_per_s=1e6), LinkCost(tier="node", latency_s=2.0, bytes_per_s=4e6)),
    )  # fmt: skip
    assert transfer_s(measured, EIGHTS, 0, 8, 1e6) == pytest.approx(2.0)
    assert transfer_s(measured, EIGHTS, 0, 1, 1e6) == pytest.approx(2.25)
    assert all_reduce_s(measured, EIGHTS, [0, 1], 1e6) == pytest.approx(2 * 2.0 + 0.25)
    assert all_reduce_s(measured, EIGHTS, [0, 8], 1e6) == pytest.approx(2 * 1.0 + 1.0)
    assert all_reduce_s(measured, EIGHTS, [0, 8], 1e6, sharing=2) == pytest.approx(2 * 1.0 + 2.0)


def test_free_links_cost_nothing() -> None:
    ideal = Cluster.local(4, ideal=True)
    assert transfer_s(NO_COSTS, ideal, 0, 3, 1e12) == 0
    assert all_reduce_s(NO_COSTS, ideal, range(4), 1e12) == 0


def test_all_reduce_inside_a_node() -> None:
    assert all_reduce_s(NO_COSTS, EIGHTS, range(8), 1e9) == pytest.approx(14 * 3e-6 + 14 / 8 * 1e9 / 300e9)
    assert all_reduce_s(NO_COSTS, EIGHTS, [3], 1e9) == 0
    assert all_reduce_s(NO_COSTS, EIGHTS, [3, 4], 0) == 0


def test_all_reduce_between_nodes() -> None:
    # Whole nodes use all four interfaces, single devices one, and groups that start together share them.
    assert all_reduce_s(NO_COSTS, EIGHTS, range(32), 1e9) == pytest.approx(
        2 * 28 * 3e-6 + 2 * 3 * 10e-6 + 2 * 31 / 32 * 1e9 / 100e9
    )
    assert all_reduce_s(NO_COSTS, EIGHTS, [0, 8], 1e9) == pytest.approx(2 * 10e-6 + 1e9 / 25e9)
    assert all_reduce_s(NO_COSTS, EIGHTS, [0, 8], 1e9, sharing=4) == pytest.approx(2 * 10e-6 + 1e9 / 25e9)
    assert all_reduce_s(NO_COSTS, EIGHTS, [0, 8], 1e9, sharing=8) == pytest.approx(2 * 10e-6 + 1e9 / 12.5e9)
    assert all_reduce_s(NO_COSTS, EIGHTS, [8, 0], 1e9) == all_reduce_s(NO_COSTS, EIGHTS, [0, 8], 1e9)


def _uneven(rates: Sequence[float], counts: Sequence[int]) -> Cluster:
    nodes = tuple(
        Node(
            name=f"n{i}", devices=("l4",) * count, intra=Link(bytes_per_s=1e10, latency_s=1e-5),
            nic=Link(bytes_per_s=rate, latency_s=1e-4),
        )
        for i, (rate, count) in enumerate(zip(rates, counts, strict=True))
    )  # fmt: skip
    return Cluster(name="uneven", device_types=(catalogue.get("l4"),), nodes=nodes)


def _played_ring_s(cluster: Cluster, num_bytes: float) -> float:
    """Play a ring all-reduce: in each of 2(n-1) steps a device passes on what it got in the step before.

    A link is busy for the time of the bytes; the latency comes on top and does not occupy it.
    """
    n = cluster.num_devices
    links = [cluster.link(i, (i + 1) % n) for i in range(n)]
    has, free = [0.0] * n, [0.0] * n
    for _ in range(2 * (n - 1)):
        gets = [0.0] * n
        for i, link in enumerate(links):
            free[i] = max(has[i], free[i]) + num_bytes / n / link.bytes_per_s
            gets[(i + 1) % n] = free[i] + link.latency_s
        has = gets
    return max(has)


@given(
    st.lists(st.sampled_from([1e8, 1e9, 3e9]), min_size=2, max_size=4),
    st.lists(st.integers(1, 4), min_size=4, max_size=4),
    st.floats(min_value=1, max_value=1e9),
)
def test_the_closed_form_is_the_played_ring(rates: list[float], counts: list[int], num_bytes: float) -> None:
    cluster = _uneven(rates, counts[: len(rates)])
    n, nodes = cluster.num_devices, len(rates)
    formula = all_reduce_s(NO_COSTS, cluster, range(n), num_bytes)
    played = _played_ring_s(cluster, num_bytes)
    waits = 2 * (n - nodes) * 1e-5 + 2 * (nodes - 1) * 1e-4
    # The ring may cross up to two more of the slow hops; it may hide latencies behind the bytes of its slowest link.
    assert played <= formula + 2 * 1e-4 + 1e-12
    assert played >= formula - waits - 1e-12


@given(st.integers(2, 16), st.floats(min_value=1, max_value=1e10))
def test_equal_links_are_exact(size: int, num_bytes: float) -> None:
    cluster = Cluster.homogeneous("l4", devices_per_node=size, intra_node_GBps=10, intra_node_latency_us=7)
    played = _played_ring_s(cluster, num_bytes)
    assert all_reduce_s(NO_COSTS, cluster, range(size), num_bytes) == pytest.approx(played)
    assert ring_all_reduce_s(cluster.nodes[0].intra, size, num_bytes) == pytest.approx(played)


@given(st.sets(st.integers(0, 31), min_size=2, max_size=32), st.floats(0, 1e12), st.floats(0, 1e12), st.integers(1, 8))
def test_more_bytes_and_more_sharing_never_take_less(devices: set[int], a: float, b: float, sharing: int) -> None:
    low, high = sorted((a, b))
    some = sorted(devices)
    assert all_reduce_s(NO_COSTS, EIGHTS, some, low) <= all_reduce_s(NO_COSTS, EIGHTS, some, high)
    assert all_reduce_s(NO_COSTS, EIGHTS, some, high) <= all_reduce_s(NO_COSTS, EIGHTS, some, high, sharing=sharing)
    assert transfer_s(NO_COSTS, EIGHTS, some[0], some[1], low) <= transfer_s(NO_COSTS, EIGHTS, some[0], some[1], high)


def test_impossible_messages_are_refused() -> None:
    for wrong in (-1.0, math.inf, math.nan):
        with pytest.raises(CostError, match="num_bytes is"):
            transfer_s(NO_COSTS, EIGHTS, 0, 1, wrong)
        with pytest.raises(CostError, match="num_bytes is"):
            all_reduce_s(NO_COSTS, EIGHTS, [0, 1], wrong)
    with pytest.raises(CostError, match="sharing is 0; at least one group"):
        all_reduce_s(NO_COSTS, EIGHTS, [0, 1], 1, sharing=0)
    with pytest.raises(CostError, match=r"all-reduce over devices \[2, 2\]: give at least one, each once"):
        all_reduce_s(NO_COSTS, EIGHTS, [2, 2], 1)
    with pytest.raises(CostError, match="give at least one"):
        all_reduce_s(NO_COSTS, EIGHTS, [], 1)
