"""ZeRO 1, 2 and 3 against closed forms: what is held, what collectives take, when parameters come and go."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from autopiper import ir
from autopiper.cluster import Cluster
from autopiper.costmodel import simulate
from autopiper.ir.member import GATHER_DEPTH
from autopiper.model.spec import Model
from autopiper.plan import CostTable, Event, Lane, Strategy, Timeline, Training
from autopiper.plan.costs import BlockCost

LATENCY_S, PORT, NIC = 3e-6, 300e9, 12.5e9
MEMBERS = 4
BLOCK = 3_000_000
"""Parameters of one block."""
FORWARD_S, BACKWARD_S = 0.02, 0.04
NODE = Cluster.homogeneous("a100-80g", devices_per_node=8, intra_node_latency_us=3)
WEIGHT, GRADIENT, OPTIMIZER = 2, 4, 12
"""Bytes of one parameter: bf16 weights, fp32 gradients, fp32 master weights and both states of Adam."""


def model(blocks: int) -> Model:
    chain = Model.chain(blocks)
    return replace(chain, blocks=tuple(replace(b, dense_parameters=BLOCK) for b in chain.blocks))


def costs(blocks: int) -> CostTable:
    """Every block takes as long; nothing is kept, so that memory is parameters, gradients and states alone."""
    return CostTable(
        blocks=tuple(
            BlockCost(
                kind=f"layer{i}", device_type="*", samples=1, forward_s=FORWARD_S, backward_s=BACKWARD_S,
                backward_input_s=BACKWARD_S / 2, backward_weight_s=BACKWARD_S / 2, update_s=0.004,
            )
            for i in range(blocks)
        ),
        overlaps=(), proportional=True,
    )  # fmt: skip


def run(
    level: int, *, blocks: int = 4, micro_batches: int = 3, ranks: int = 1, schedule: str = "1f1b", virtual: int = 1,
    bucket_bytes: int = BLOCK * GRADIENT, cluster: Cluster = NODE, devices: list[int] | None = None,
    optimizer: str = "adamw",
) -> tuple[Timeline, ir.TrainingGraph]:  # fmt: skip
    """`ranks` stages of four members; by default a bucket is a block."""
    training = Training(global_batch_size=MEMBERS * micro_batches, precision="bf16", optimizer=optimizer)
    strategy = Strategy.uniform(
        model(blocks), cluster, training, pipeline_parallel_size=ranks, virtual_pipeline_parallel_size=virtual,
        schedule=schedule, zero=level, devices=devices or list(range(ranks * MEMBERS)),
    )  # fmt: skip
    graph = ir.build(replace(strategy, bucket_bytes=bucket_bytes), model(blocks), cluster)
    programs = ir.lower(graph)
    ir.verify(graph, programs)
    return simulate(graph, programs, costs(blocks)), graph


def ring_s(num_bytes: float, members: int = MEMBERS) -> float:
    """Reduce-scatter or all-gather of a ring inside a node."""
    return (members - 1) * (LATENCY_S + num_bytes / members / PORT)


def events(lane: Lane, *kinds: str) -> list[Event]:
    return [e for e in lane.events if e.kind in kinds]


def took(lane: Lane, *kinds: str) -> set[float]:
    return {round(e.end_s - e.start_s, 10) for e in events(lane, *kinds)}


# What is held


@pytest.mark.parametrize(
    ("level", "each"),
    [
        (0, WEIGHT + GRADIENT + OPTIMIZER),
        (1, WEIGHT + GRADIENT + OPTIMIZER / MEMBERS),
        (2, WEIGHT + (GRADIENT + OPTIMIZER) / MEMBERS),
        (3, (WEIGHT + GRADIENT + OPTIMIZER) / MEMBERS),
    ],
)
def test_what_stays_is_divided_by_the_members(level: int, each: float) -> None:
    timeline, _ = run(level)
    for lane in timeline.lanes:
        assert lane.static_memory_bytes == pytest.approx(4 * BLOCK * each)


@pytest.mark.parametrize("level", [0, 1])
def test_levels_0_and_1_hold_nothing_beside(level: int) -> None:
    timeline, _ = run(level)
    assert timeline.lanes[0].peak_memory_bytes == pytest.approx(timeline.lanes[0].static_memory_bytes)


def test_level_2_holds_the_gradients_of_one_block_where_reductions_keep_up() -> None:
    # A block's backward takes 40 ms, its reduction 0.04 ms: while the next one grows, the one before has gone; only
    # where they meet are there two for a moment.
    lane = run(2)[0].lanes[0]
    bucket = BLOCK * GRADIENT
    growing = [p.gradients_bytes - 4 * bucket / MEMBERS for p in lane.memory]
    assert max(growing) == pytest.approx(2 * bucket)
    assert min(growing) == pytest.approx(0)
    long_s = 10 * ring_s(bucket)
    kept = [g for g, p, q in zip(growing, lane.memory, lane.memory[1:], strict=False) if q.time_s - p.time_s > long_s]
    assert max(kept) == pytest.approx(bucket)
    assert lane.peak_memory_bytes == pytest.approx(lane.static_memory_bytes + 2 * bucket)


def test_level_2_in_one_bucket_holds_all_gradients_of_a_chain() -> None:
    lane = run(2, bucket_bytes=2**40)[0].lanes[0]
    assert lane.peak_memory_bytes == pytest.approx(lane.static_memory_bytes + 4 * BLOCK * GRADIENT)


def test_level_2_holds_more_where_reductions_are_slower_than_backwards() -> None:
    nodes = Cluster.homogeneous("a100-80g", num_nodes=4, devices_per_node=1, inter_node_GBps=0.1)
    slow = run(2, cluster=nodes, devices=[0, 1, 2, 3])[0].lanes[0]
    fast = run(2)[0].lanes[0]
    assert slow.peak_memory_bytes > fast.peak_memory_bytes + BLOCK * GRADIENT


def test_level_3_holds_the_parameters_of_two_blocks() -> None:
    # That in use and that which arrives while it is used.
    lane = run(3)[0].lanes[0]
    gathered = [p.parameters_bytes - 4 * BLOCK * WEIGHT / MEMBERS for p in lane.memory]
    assert max(gathered) == pytest.approx((1 + GATHER_DEPTH) * BLOCK * WEIGHT)
    assert gathered[-1] == pytest.approx(0)


# What it takes


def test_a_reduce_scatter_and_a_gather_are_each_half_an_all_reduce() -> None:
    whole, parts = run(0)[0].lanes[0], run(1)[0].lanes[0]
    (reduce_s,), (scatter_s,), (gather_s,) = (
        took(whole, "REDUCE_GRAD"),
        took(parts, "REDUCE_GRAD"),
        took(parts, "UNSHARD"),
    )
    assert reduce_s == pytest.approx(2 * ring_s(BLOCK * GRADIENT), rel=1e-5)
    assert scatter_s == pytest.approx(ring_s(BLOCK * GRADIENT), rel=1e-5)
    assert gather_s == pytest.approx(ring_s(BLOCK * WEIGHT), rel=1e-5)


def test_the_optimizer_works_on_a_part() -> None:
    whole, part = (sum(e.end_s - e.start_s for e in events(run(z)[0].lanes[0], "UPDATE")) for z in (0, 1))
    assert whole == pytest.approx(4 * 0.004)
    assert part == pytest.approx(0.004)


@pytest.mark.parametrize("level", [1, 2])
def test_the_weights_are_gathered_once_a_step_after_the_update(level: int) -> None:
    lane = run(level)[0].lanes[0]
    assert len(events(lane, "UNSHARD")) == 4
    assert min(e.start_s for e in events(lane, "UNSHARD")) >= events(lane, "UPDATE")[0].end_s - 1e-12
    assert not events(lane, "UNSHARD_F", "UNSHARD_B")


@pytest.mark.parametrize("level", [2, 3])
def test_levels_2_and_3_reduce_after_every_backward(level: int) -> None:
    lane = run(level, micro_batches=5)[0].lanes[0]
    reduced = events(lane, "REDUCE_GRAD")
    assert sorted(e.action for e in reduced) == sorted(f"g0.{b}REDUCE_GRAD{m}" for b in range(4) for m in range(5))
    if level == 2:  # one segment: a block is passed after as many blocks' times
        begin = {e.micro_batch: e.start_s for e in events(lane, "B")}
        for e in reduced:
            bucket = int(e.action[3])
            assert e.start_s == pytest.approx(begin[e.micro_batch] + (bucket + 1) * BACKWARD_S)


@pytest.mark.parametrize("level", [0, 1])
def test_levels_0_and_1_reduce_once_a_step(level: int) -> None:
    lane = run(level, micro_batches=5)[0].lanes[0]
    assert sorted(e.action for e in events(lane, "REDUCE_GRAD")) == [f"g0.{b}REDUCE_GRAD" for b in range(4)]


@pytest.mark.parametrize("level", [2, 3])
def test_backwards_of_one_stage_in_a_row_are_reduced_at_once(level: int) -> None:
    # gpipe: all forwards, then all backwards, the first micro-batch last.
    lane = run(level, micro_batches=5, schedule="gpipe", ranks=2)[0].lanes[-1]
    reduced = {e.action for e in events(lane, "REDUCE_GRAD")}
    assert reduced == {f"g0.{b}REDUCE_GRAD0" for b in range(2)}


# When parameters come and go


@pytest.mark.parametrize(
    ("schedule", "ranks", "virtual"),
    [
        ("1f1b", 1, 1),
        ("1f1b", 2, 1),
        ("gpipe", 2, 1),
        ("interleaved-1f1b", 2, 2),
        ("zb-h1", 2, 1),
        ("dualpipe-v", 2, 2),
    ],
)
def test_nothing_computes_without_its_parameters_and_nothing_is_gathered_too_early(
    schedule: str, ranks: int, virtual: int
) -> None:
    timeline, graph = run(3, blocks=8, micro_batches=4, ranks=ranks, schedule=schedule, virtual=virtual)
    for lane in timeline.lanes:
        passes = events(lane, "F", "B", "I", "W")
        gathers = events(lane, "UNSHARD_F", "UNSHARD_B", "UNSHARD_I", "UNSHARD_W")
        releases = events(lane, "RESHARD_F", "RESHARD_B", "RESHARD_I", "RESHARD_W")
        assert len(gathers) == len(releases) > 0
        spans: dict[tuple[int, int], list[tuple[float, float, float]]] = {}
        """(gradient block, bucket) -> (gather begins, gather is over, let go)"""
        for key in {_bucket(e) for e in gathers}:
            mine = sorted((e.start_s, e.end_s) for e in gathers if _bucket(e) == key)
            gone = sorted(e.end_s for e in releases if _bucket(e) == key)
            spans[key] = [(a, b, c) for (a, b), c in zip(mine, gone, strict=True)]
        for event in passes:
            stage = graph.stage(event.pipeline or 0, event.stage or 0)
            segment = int(event.action.split(event.kind)[0].partition(".")[2] or 0)
            low, high = (2 * stage.start, 2 * stage.stop) if event.kind == "W" else stage.segment(segment)
            for block in range(low // 2, high // 2):
                key = _of_block(graph, stage, block)
                held = [s for s in spans[key] if s[1] <= event.start_s + 1e-9 and s[2] >= event.end_s - 1e-9]
                assert held, f"{event.action} runs without the parameters of block {block}"
        for key, found in spans.items():
            for start_s, _, released in found:
                users = [
                    n for n, e in enumerate(passes) if _uses(graph, e, key) and start_s - 1e-9 <= e.start_s <= released
                ]
                assert users, f"bucket {key} is gathered for nobody"
                before = users[0] - GATHER_DEPTH - 1
                assert before < 0 or start_s >= passes[before].end_s - 1e-9, f"bucket {key} is gathered too early"


def test_a_gather_is_hidden_by_the_pass_before() -> None:
    # 40 or 20 ms of a block against 0.02 ms of its gather: only the very first one is waited for.
    timeline, _ = run(3)
    lane = timeline.lanes[0]
    assert lane.time.exposed_s["parameter gather"] == pytest.approx(ring_s(BLOCK * WEIGHT))
    work_s = 3 * 4 * (FORWARD_S + BACKWARD_S)
    assert lane.time.compute_s == pytest.approx(work_s + 0.004)
    assert timeline.makespan_s == pytest.approx(
        ring_s(BLOCK * WEIGHT) + work_s + ring_s(BLOCK * GRADIENT) + 0.004, rel=1e-4
    )


def test_a_gather_slower_than_the_pass_is_the_pace() -> None:
    nodes = Cluster.homogeneous(
        "a100-80g", num_nodes=4, devices_per_node=1, inter_node_GBps=0.05, inter_node_latency_us=0
    )
    lane = run(3, cluster=nodes, devices=[0, 1, 2, 3], micro_batches=1)[0].lanes[0]
    gather_s = 3 / 4 * BLOCK * WEIGHT / 0.05e9
    assert list(took(lane, "UNSHARD_F")) == [pytest.approx(gather_s)]
    for before, after in pairwise(events(lane, "F")):
        assert after.start_s - before.start_s == pytest.approx(gather_s)


@pytest.mark.parametrize(("micro_batches", "ranks"), [(1, 1), (3, 1), (4, 2), (6, 2)])
def test_as_many_gathers_as_chains(micro_batches: int, ranks: int) -> None:
    """A bucket is gathered once for passes that follow each other: once for each F and B, less where they meet."""
    per_stage = 4 // ranks

    def count(schedule: str, lane: int) -> int:
        timeline, _ = run(3, micro_batches=micro_batches, ranks=ranks, schedule=schedule)
        return len(events(timeline.lanes[lane], "UNSHARD_F", "UNSHARD_B"))

    m = micro_batches
    # The last stage runs F0 B0 F1 B1 …: its top block ends an F and begins the B, its lowest ends a B and begins the F.
    assert count("1f1b", ranks - 1) == per_stage * 2 * m - m - (m - 1)
    # All forwards, then all backwards: segments of different micro-batches alternate, but for the top block, once.
    assert count("gpipe", ranks - 1) == per_stage * 2 * m - 1


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_stage_of_one_bucket_is_gathered_once_for_passes_in_a_row(schedule: str) -> None:
    timeline, _ = run(3, blocks=2, micro_batches=4, ranks=2, schedule=schedule)
    last, first = timeline.lanes[1], timeline.lanes[0]
    assert len(events(last, "UNSHARD_F", "UNSHARD_B")) == 1, "the last stage never does anything else"
    assert len(events(first, "UNSHARD_F", "UNSHARD_B")) == 1
    assert len(events(last, "RESHARD_F", "RESHARD_B")) == 1


# Memory over time


@pytest.mark.parametrize("level", range(4))
@pytest.mark.parametrize(
    ("schedule", "ranks", "virtual"),
    [("1f1b", 2, 1), ("interleaved-1f1b", 2, 2), ("zb-h1", 2, 1), ("dualpipe-v", 2, 2)],
)
def test_the_course_of_memory_peaks_at_the_peak_and_comes_back(
    level: int, schedule: str, ranks: int, virtual: int
) -> None:
    timeline, _ = run(level, blocks=8, micro_batches=4, ranks=ranks, schedule=schedule, virtual=virtual)
    for lane in timeline.lanes:
        times = [p.time_s for p in lane.memory]
        assert times == sorted(set(times))
        assert times[-1] <= timeline.makespan_s * (1 + 1e-9)
        assert max(p.total_bytes for p in lane.memory) <= lane.peak_memory_bytes * (1 + 1e-12)
        assert lane.peak_memory_bytes >= lane.static_memory_bytes * (1 - 1e-12)
        end = lane.memory[-1]
        assert end.parameters_bytes + end.gradients_bytes + end.optimizer_bytes == pytest.approx(
            lane.static_memory_bytes
        )
        assert end.activations_bytes == pytest.approx(0, abs=1)
        assert lane.peak_memory_bytes == pytest.approx(max(p.total_bytes for p in lane.memory))


def _bucket(event: Event) -> tuple[int, int]:
    block, bucket = event.action.split("UNSHARD")[0].split("RESHARD")[0][1:].split(".")
    return int(block), int(bucket)


def _of_block(graph: ir.TrainingGraph, stage: ir.GraphStage, block: int) -> tuple[int, int]:
    return next(
        (g.index, n)
        for g in graph.gradient_blocks
        if (g.holders[0].pipeline, g.holders[0].stage) == (stage.pipeline, stage.index)
        for n, b in enumerate(g.buckets)
        if b.lowest_block <= block <= b.highest_block
    )


def _uses(graph: ir.TrainingGraph, event: Event, key: tuple[int, int]) -> bool:
    block = graph.gradient_blocks[key[0]]
    home, piece = block.holders[0], block.buckets[key[1]]
    if (event.pipeline, event.stage) != (home.pipeline, home.stage):
        return False
    stage = graph.stage(home.pipeline, home.stage)
    segment = int(event.action.split(event.kind)[0].partition(".")[2] or 0)
    low, high = (2 * stage.start, 2 * stage.stop) if event.kind == "W" else stage.segment(segment)
    return low < 2 * piece.highest_block + 1 and high > 2 * piece.lowest_block
