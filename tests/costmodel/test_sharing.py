"""Interfaces that several messages use at once, and equal replicas of which one is walked for all."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopiper import ir
from autopiper.cluster import Cluster
from autopiper.cluster.spec import Link, Node
from autopiper.costmodel import price, simulate
from autopiper.errors import PlanError
from autopiper.model.spec import Model
from autopiper.plan import CostTable, Strategy, Timeline, Training
from autopiper.plan import directives as d

BYTES = 1e9
SECOND = Cluster.homogeneous(
    "a100-80g", num_nodes=2, devices_per_node=3, inter_node_GBps=1, inter_node_latency_us=0, nics=1
)
"""A message takes one second."""


def sends(cluster: Cluster, pairs: list[tuple[int, int]], stages_s: list[float]) -> Timeline:
    """One pipeline of two stages on each pair of devices, one micro-batch each; its first forward takes so long."""
    written: list[d.Directive] = []
    for p, pair in enumerate(pairs):
        written.append(d.pipeline(p, [1]))
        for s, device in enumerate(pair):
            written += [d.cut(p, s, blocks=(s, s + 1)), d.place({"PIPE": p, "PP": s}, [device])]
        written.append(d.order(schedule="1f1b", pipelines=(p,)))
    costs = CostTable.from_layers(forward_s=stages_s, backward_s=[4, 4], output_bytes=[BYTES, 0])
    strategy = Strategy.from_directives(written, Training(global_batch_size=len(pairs), precision="bf16"))
    graph = ir.build(strategy, Model.chain(2), cluster)
    return simulate(graph, ir.lower(graph), costs)


def message_s(timeline: Timeline, lane: int) -> float:
    (event,) = (e for e in timeline.lanes[lane].events if e.kind == "SEND_F")
    return event.end_s - event.start_s


def test_messages_that_leave_one_node_at_once_share_its_interface() -> None:
    alone = sends(SECOND, [(0, 3)], [1, 1])
    assert message_s(alone, 0) == pytest.approx(1)
    two = sends(SECOND, [(0, 3), (1, 4)], [1, 1])
    assert [message_s(two, 0), message_s(two, 2)] == pytest.approx([2, 2])
    three = sends(SECOND, [(0, 3), (1, 4), (2, 5)], [1, 1])
    assert [message_s(three, lane) for lane in (0, 2, 4)] == pytest.approx([3, 3, 3])


def test_with_two_interfaces_two_messages_do_not_meet() -> None:
    wide = replace(SECOND, nodes=tuple(replace(n, nics=2) for n in SECOND.nodes))
    two = sends(wide, [(0, 3), (1, 4)], [1, 1])
    assert [message_s(two, 0), message_s(two, 2)] == pytest.approx([1, 1])


def test_messages_in_opposite_directions_and_inside_nodes_do_not_meet() -> None:
    opposite = sends(SECOND, [(0, 3), (4, 1)], [1, 1])
    assert [message_s(opposite, 0), message_s(opposite, 2)] == pytest.approx([1, 1])
    inside = sends(SECOND, [(0, 3), (1, 2)], [1, 1])
    assert message_s(inside, 0) == pytest.approx(1)
    assert message_s(inside, 2) == pytest.approx(3e-6 + BYTES / 300e9)


def test_messages_share_only_while_both_run() -> None:
    # Devices of node 0 send at the same time to two nodes: both go out through one interface, but arrive apart.
    three = Cluster.homogeneous(
        "a100-80g", num_nodes=3, devices_per_node=2, inter_node_GBps=1, inter_node_latency_us=0, nics=1
    )
    apart = sends(three, [(0, 2), (1, 4)], [1, 1])
    assert [message_s(apart, 0), message_s(apart, 2)] == pytest.approx([2, 2])
    meet = sends(three, [(0, 4), (2, 5)], [1, 1])
    assert [message_s(meet, 0), message_s(meet, 2)] == pytest.approx([2, 2]), "they arrive at one node"


# Equal replicas

MODEL = Model.transformer(
    num_layers=6, hidden_size=64, num_attention_heads=4, sequence_length=64, vocab_size=512, gated_mlp=True,
    num_experts=4, experts_per_token=2, moe_intermediate_size=256,
)  # fmt: skip


def nodes_of(*counts: int) -> Cluster:
    """Slow links, so that sharing shows; nodes of unequal size."""
    base = Cluster.homogeneous("a100-80g")
    intra, nic = Link(bytes_per_s=2e9, latency_s=1e-6), Link(bytes_per_s=2e8, latency_s=5e-6)
    nodes = tuple(
        Node(name=f"n{i}", devices=("a100-80g",) * count, intra=intra, nic=nic, nics=1 + i % 2)
        for i, count in enumerate(counts)
    )
    return replace(base, name="unequal", nodes=nodes)


@st.composite
def settings_of(draw: st.DrawFn) -> tuple[Strategy, Cluster]:
    tp = draw(st.sampled_from([1, 1, 2]))
    ranks, members = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 3, 4, 4]))
    size = draw(st.sampled_from([n for n in (1, 2, 4) if members % n == 0]))
    family, virtual = draw(
        st.sampled_from(
            [("1f1b", 1), ("gpipe", 1), ("interleaved-1f1b", 2), ("zb-h1", 1), ("dualpipe-v", 2), ("dualpipe", 1)]
        )
    )
    if family == "dualpipe":
        ranks = 2
    total = tp * ranks * members
    counts: list[int] = []
    while sum(counts) < total:
        counts.append(draw(st.sampled_from([2, 4, 6])) if tp == 2 else draw(st.integers(1, 5)))
    cluster = nodes_of(*counts)
    shuffled = list(range(0, sum(counts), tp))
    if draw(st.booleans()):
        random.Random(draw(st.integers(0, 99))).shuffle(shuffled)
    devices = [first + t for first in shuffled[: total // tp] for t in range(tp)]
    micro_batch = draw(st.sampled_from([1, 2]))
    count = 8 if family == "dualpipe-v" else draw(st.sampled_from([4, 8]))
    training = Training(global_batch_size=members * micro_batch * count, precision="bf16")
    strategy = Strategy.uniform(
        MODEL, cluster, training, micro_batch_size=micro_batch, tensor_parallel_size=tp, pipeline_parallel_size=ranks,
        virtual_pipeline_parallel_size=virtual, expert_parallel_size=size, schedule=family,
        zero=draw(st.integers(0, 1 if family == "dualpipe" else 3)),
        recompute=draw(st.sampled_from(["none", "full"])), devices=devices,
    )  # fmt: skip
    return replace(strategy, bucket_bytes=draw(st.sampled_from([2**17, 2**20, 2**40]))), cluster


@settings(max_examples=60, deadline=None)
@given(setting=settings_of())
def test_equal_replicas_that_are_not_walked_change_nothing(setting: tuple[Strategy, Cluster]) -> None:
    strategy, cluster = setting
    costs = price(MODEL, cluster, strategy.training, max_samples=2)
    graph = ir.build(strategy, MODEL, cluster)
    folded, everyone = ir.lower(graph), ir.lower_all(graph)
    assert sum(len(p.all_ranks) for p in folded) == len(graph.devices()) == sum(len(p.ranks) for p in everyone)
    one, all_ = simulate(graph, folded, costs), simulate(graph, everyone, costs)
    assert one.makespan_s == pytest.approx(all_.makespan_s)
    assert one.step_time_s == pytest.approx(all_.step_time_s)
    assert one.peak_memory_bytes == pytest.approx(all_.peak_memory_bytes)
    assert one.breakdown == pytest.approx(all_.breakdown)
    lanes = {rank: lane for lane in all_.lanes for rank in lane.ranks}
    for lane in one.lanes:
        own = [(e.kind, e.stage, e.micro_batch, e.start_s, e.end_s) for e in lane.events]
        for rank in lane.ranks:
            other = [(e.kind, e.stage, e.micro_batch, e.start_s, e.end_s) for e in lanes[rank].events]
            assert len(own) == len(other)


def test_a_strategy_of_equal_replicas_is_indeed_folded() -> None:
    cluster = nodes_of(4, 4)
    training = Training(global_batch_size=16, precision="bf16")
    strategy = Strategy.uniform(
        MODEL, cluster, training, pipeline_parallel_size=2, expert_parallel_size=2, devices=range(8)
    )
    graph = ir.build(strategy, MODEL, cluster)
    assert len(ir.lower(graph)) < len(ir.lower_all(graph)) == 8
    with pytest.raises(PlanError, match="expert_parallel_size"):
        Strategy.uniform(MODEL, cluster, training, pipeline_parallel_size=2, expert_parallel_size=3)


def test_parts_of_experts_that_only_some_replicas_hold_are_walked_apart() -> None:
    """One pipeline divides four experts over its members, the other holds all: each part has one holder more elsewhere.

    Were the members of the first one class, the reductions of three parts would not wait for it.
    """
    cluster = nodes_of(1, 1, 1, 1, 1, 1, 1, 1)
    given: list[d.Directive] = [
        d.pipeline(0, [16, 8, 8]), d.pipeline(1, [4, 4]), d.cut(0, 0, blocks=(0, 8)), d.cut(1, 0, blocks=(0, 8)),
        d.place({"PIPE": 0}, range(4)), d.place({"PIPE": 1}, range(4, 8)), d.shard({"PIPE": 0}, range(4)),
    ]  # fmt: skip
    graph = ir.build(Strategy.from_directives(given, Training(global_batch_size=40, precision="bf16")), MODEL, cluster)
    costs = price(MODEL, cluster, graph.training, max_samples=4)
    one, all_ = simulate(graph, ir.lower(graph), costs), simulate(graph, ir.lower_all(graph), costs)
    ends = [{e.action: e.end_s for lane in t.lanes for e in lane.events if 4 in lane.ranks} for t in (one, all_)]
    assert ends[0] == pytest.approx(ends[1])
    assert one.step_time_s == pytest.approx(all_.step_time_s)


def test_what_a_node_can_send_does_not_depend_on_who_was_asked_first() -> None:
    """A node with two interfaces sends to one with one and to two with two, at the same time: two fit, three do not."""
    single, double = (
        Cluster.homogeneous(
            "a100-80g", num_nodes=4, devices_per_node=4, inter_node_GBps=n, inter_node_latency_us=0, nics=n
        ).nodes
        for n in (1, 2)
    )
    base = Cluster.homogeneous("a100-80g", num_nodes=4, devices_per_node=4, inter_node_GBps=2, nics=2)
    cluster = replace(base, nodes=(double[0], replace(single[1]), double[2], double[3]))
    pairs = sends(cluster, [(0, 4), (1, 8)], [1, 1])
    assert [message_s(pairs, 0), message_s(pairs, 2)] == pytest.approx([1, 1])
    three = sends(cluster, [(0, 4), (1, 8), (2, 12)], [1, 1])
    assert [message_s(three, n) for n in (0, 2, 4)] == pytest.approx([1.5, 1.5, 1.5])
