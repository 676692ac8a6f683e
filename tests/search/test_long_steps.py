"""Steps of many micro-batches: simulated by their ends, and in the time given."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest

import autopiper as ap
from autopiper import ir
from autopiper.costmodel import simulate
from autopiper.plan.strategy import Group, Strategy
from autopiper.search import search
from autopiper.search.evaluate import Evaluator, shortened, walked
from autopiper.search.exploration import Journal

MODEL = ap.Model.chain(6)
CLUSTER = ap.Cluster.homogeneous("l4", num_nodes=2, devices_per_node=2, inter_node_GBps=1.0)


def _costs(seed: int = 0, parameter_bytes: float = 1e8) -> ap.CostTable:
    rng = random.Random(seed)
    forward = [rng.uniform(0.5, 1.5) for _ in MODEL.blocks]
    return ap.CostTable.from_layers(
        forward_s=forward, backward_s=[2 * f for f in forward], parameter_bytes=[parameter_bytes] * 6,
        output_bytes=[rng.choice((1e8, 1e9))] * 6, activation_bytes=[1e8] * 6,
    )  # fmt: skip


def _uniform(batch: int, stages: int, schedule: str = "1f1b") -> Strategy:
    training = ap.Training(global_batch_size=batch, precision="fp32")
    return Strategy.uniform(MODEL, CLUSTER, training, pipeline_parallel_size=stages, schedule=schedule)


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("seed", range(3))
def test_evaluations_of_long_steps_are_those_of_the_simulator(seed: int, stages: int) -> None:
    strategy, costs = _uniform(1200, stages), _costs(seed)
    assert shortened(strategy)[1][0] > 0
    outcome = Evaluator(MODEL, CLUSTER, costs)(strategy)
    graph = ir.build(strategy, MODEL, CLUSTER)
    whole = simulate(graph, ir.lower(graph), costs, events=False)
    assert outcome.step_s == pytest.approx(whole.step_time_s, rel=1e-9)
    assert outcome.makespan_s == pytest.approx(whole.makespan_s, rel=1e-9)
    fullest = max(b - CLUSTER.device(0).type.usable_bytes for b in whole.peak_memory_bytes)
    assert outcome.worst[0] == pytest.approx(fullest)


def test_what_is_left_out_is_alike_and_in_a_rhythm() -> None:
    long = _uniform(4000, 4)
    short, left_out = shortened(long)
    number = len(long.pipelines[0].micro_batch_sizes)
    assert number - left_out[0] == walked(number, 4, "1f1b") == len(short.pipelines[0].micro_batch_sizes) < 100
    assert short.training.global_batch_size == short.pipelines[0].share
    assert left_out[0] % 12 == 0
    for same in (
        _uniform(80, 4),
        _uniform(4000, 4, schedule="gpipe"),
        Strategy.from_directives(long.directives(), long.training),
    ):
        assert shortened(same)[0] is same and not any(shortened(same)[1])
    pipe = _uniform(4000, 2).pipelines[0]
    rows = pipe.stages[0].group.slices
    assert len(rows[0]) == 2
    odd = Group(members=pipe.stages[0].group.members, slices=((0, 2), *rows[1:]))
    unlike = replace(pipe, stages=(replace(pipe.stages[0], group=odd), pipe.stages[1]))
    assert not any(shortened(replace(_uniform(4000, 2), pipelines=(unlike,)))[1])


def test_a_plan_that_does_not_fit_from_end_to_end_is_not_handed_out() -> None:
    assert Evaluator(MODEL, CLUSTER, _costs())(_uniform(8, 4)).feasible
    assert Evaluator(MODEL, CLUSTER, _costs()).whole(_uniform(8, 4)) is not None
    assert Evaluator(MODEL, CLUSTER, _costs(parameter_bytes=1e11)).whole(_uniform(8, 4)) is None


def test_time_is_kept_for_the_plan_itself() -> None:
    def late(elapsed_s: float, reserve_s: float, share: float = 1.0) -> bool:
        journal = Journal(deadline_s=100.0, reserve_s=reserve_s, started=time.monotonic() - elapsed_s)
        return journal.late(share)

    assert not late(90, 5) and late(96, 5) and late(48, 5, share=0.5)
    assert not late(45, 1e6) and late(51, 1e6), "half of the time goes to the search in any case"
    assert not Journal(reserve_s=5.0, started=0.0).late()
    evaluate, short, long = Evaluator(MODEL, CLUSTER, _costs()), _uniform(400, 4), _uniform(4000, 4)
    assert evaluate.whole_s(long) == 0.0  # nothing is known yet
    evaluate(short)
    assert evaluate.whole_s(long) == pytest.approx(10 * evaluate.whole_s(short)) and evaluate.whole_s(short) > 0


def test_long_steps_get_plans_that_are_proven_whole() -> None:
    training = ap.Training(global_batch_size=3000, precision="fp32")
    plan = search(MODEL, CLUSTER, training, _costs(), ap.Space(micro_batch_sizes=(1,)), n_trials=4)
    assert ap.verify(plan)
    assert sum(p.share for p in plan.strategy.pipelines) == 3000
    assert plan.uniform is not None and plan.step_time_s <= plan.uniform.step_time_s
    assert plan.lower_bound_s <= plan.step_time_s
    for other in plan.alternatives:
        assert other.step_time_s == pytest.approx(
            ap.simulate(other.strategy, MODEL, CLUSTER, plan.costs).step_time_s, rel=1e-9
        )
