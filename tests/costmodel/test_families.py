"""Every schedule family through Programs and simulator: the known figures of a step, and steps that follow each other."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from autopiper import ir
from autopiper.cluster.spec import Cluster
from autopiper.costmodel.simulate import simulate
from autopiper.ir.schedules import FAMILIES
from autopiper.model.spec import Model
from autopiper.plan import CostTable, Strategy, Timeline, Training
from autopiper.plan import directives as d

ClusterOf = Callable[..., Cluster]
RANKS, MICRO_BATCHES = 4, 12


def step(
    cluster: Cluster, family: str, *, backward_input_s: float = 1.0, recompute: str = "none", blocks: int = 8
) -> Timeline:
    """Equal blocks at F = W = 1 on four ranks with free links."""
    model = Model.chain(blocks)
    costs = CostTable.from_layers(
        forward_s=[1.0] * blocks, backward_input_s=[backward_input_s] * blocks, backward_weight_s=[1.0] * blocks,
        activation_bytes=[1.0] * blocks,
    )  # fmt: skip
    both = FAMILIES[family].num_pipelines
    strategy = Strategy.uniform(
        model, cluster, Training(global_batch_size=MICRO_BATCHES * both), pipeline_parallel_size=RANKS, schedule=family,
        virtual_pipeline_parallel_size=2 if FAMILIES[family].stage_map == "loop" else 1, recompute=recompute,
    )  # fmt: skip
    graph = ir.build(strategy, model, cluster)
    programs = ir.lower(graph)
    ir.verify(graph, programs)
    return simulate(graph, programs, costs)


@pytest.mark.parametrize(
    ("family", "excess", "steady", "live"),
    [
        # Four ranks of two blocks: F = I = W = 2 a stage, 1 where a rank holds two stages (FACTS 1.9, in these units).
        ("gpipe", 18, 18, 12),
        ("1f1b", 18, 18, 4),
        ("interleaved-1f1b", 9, 9, 11),
        ("eager-1f1b", 18, 18, 7),
        ("zb-h1", 6, 6, 4),
        ("zb-h2", 6, 0, 7),
        ("zb-v", 3, 0, 8),
        ("dualpipe-v", 3, 3, 9),
    ],
)
def test_published_bubbles(cluster_of: ClusterOf, family: str, excess: float, steady: float, live: int) -> None:
    timeline = step(cluster_of(RANKS), family)
    work_s = MICRO_BATCHES * 8 / RANKS * 3
    assert timeline.makespan_s == work_s + excess
    assert timeline.step_time_s == work_s + steady
    assert max(lane.peak_live_activations for lane in timeline.lanes) == live


def test_dualpipe_is_two_opposite_pipelines_on_the_same_ranks(cluster_of: ClusterOf) -> None:
    timeline = step(cluster_of(RANKS), "dualpipe")
    work_s = 2 * MICRO_BATCHES * 8 / RANKS * 3
    assert timeline.makespan_s - work_s == 2 * (RANKS / 2 - 1), "S/2 - 1 passes of one stage, of 2 s"
    assert [lane.peak_live_activations for lane in timeline.lanes] == [RANKS + 1] * RANKS
    assert {e.pipeline for e in timeline.lanes[0].events if e.kind == "F"} == {0, 1}


@pytest.mark.parametrize("family", FAMILIES)
def test_each_rank_accounts_for_the_whole_step(cluster_of: ClusterOf, family: str) -> None:
    timeline = step(cluster_of(RANKS), family, backward_input_s=1.5)
    for lane in timeline.lanes:
        assert lane.time.total_s == pytest.approx(timeline.makespan_s)
        assert lane.time.compute_s == pytest.approx(timeline.global_batch_size * 8 / RANKS * 3.5)
    assert timeline.step_time_s <= timeline.makespan_s * (1 + 1e-12)


def test_on_the_first_stage_the_weights_pass_is_the_whole_backward(cluster_of: ClusterOf) -> None:
    timeline = step(cluster_of(RANKS), "zb-h1", backward_input_s=1.5)
    for lane in timeline.lanes:
        seconds = {e.kind: e.end_s - e.start_s for e in lane.events if e.kind in "IW"}
        first = any(e.stage == 0 for e in lane.events if e.kind == "F")
        assert seconds == pytest.approx({"I": 0.0, "W": 5.0} if first else {"I": 3.0, "W": 2.0})


def test_split_backwards_recompute_twice(cluster_of: ClusterOf) -> None:
    split, fused = (step(cluster_of(RANKS), f, recompute="full").lanes[-1].time for f in ("zb-h1", "1f1b"))
    assert fused.recompute_s == MICRO_BATCHES * 2
    assert split.recompute_s == 2 * fused.recompute_s
    assert split.compute_s == fused.compute_s + MICRO_BATCHES * 2, "W goes back through what I went through"


def test_unequal_pipelines_have_a_family_each(cluster_of: ClusterOf) -> None:
    model = Model.chain(6)
    costs = CostTable.from_layers(forward_s=[1.0] * 6, backward_input_s=[1.0] * 6, backward_weight_s=[1.0] * 6)
    given: list[d.Directive] = [d.pipeline(0, [1] * 5), d.pipeline(1, [2] * 3)]
    cuts = {0: [(0, 1), (1, 2), (2, 4), (4, 6)], 1: [(0, 4), (4, 6)]}
    where = {0: [0, 1, 1, 0], 1: [2, 3]}
    for p, stages in cuts.items():
        for s, blocks in enumerate(stages):
            given += [d.cut(p, s, blocks=blocks), d.place({"PIPE": p, "PP": s}, [where[p][s]])]
    given += [d.order(schedule="zb-v", pipelines=[0]), d.order(schedule="zb-h2", pipelines=[1])]
    graph = ir.build(Strategy.from_directives(given, Training(global_batch_size=11)), model, cluster_of(4))
    programs = ir.lower(graph)
    ir.verify(graph, programs)
    timeline = simulate(graph, programs, costs)
    assert [lane.time.compute_s for lane in timeline.lanes] == [45, 45, 72, 36]
    # The deeper cut of pipeline 1 sets the pace: its first stage never rests, its second ends with the last backward.
    assert timeline.step_time_s == 72
