"""Long steps by their ends: what the whole simulation finds, or None; never anything else."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

import autopiper as ap
from autopiper import ir
from autopiper.costmodel import predict, predict_folded, simulate
from autopiper.costmodel.walks import prepare
from autopiper.errors import PlanError
from autopiper.plan.costs import HostCost
from autopiper.plan.strategy import Group, Pipeline, Schedule, Stage, Strategy

GIB = 2**30


def _strategy(rng: random.Random, shapes: list[tuple[int, int]], numbers: list[int], blocks: int) -> Strategy:
    """Pipelines of (stages, members) on devices 0, 1, …, of so many micro-batches, the last one smaller at times."""
    device, pipelines = 0, []
    for (stages, members), number in zip(shapes, numbers, strict=True):
        rows = [[rng.choice((1, 2)) for _ in range(members)] for _ in range(stages)]
        size = max(sum(r) for r in rows)
        rows = [[*r[:-1], r[-1] + size - sum(r)] for r in rows]
        last = rng.random() < 0.5
        cuts = [0, *sorted(rng.sample(range(1, blocks), stages - 1)), blocks]
        made = []
        for s in range(stages):
            group = Group(
                members=tuple((device + m,) for m in range(members)),
                slices=(tuple(rows[s]),) * (number - last)
                + (((1,) + (0,) * (members - 1),) if last else ()),
            )  # fmt: skip
            device += members
            made.append(
                Stage(start=cuts[s], stop=cuts[s + 1], group=group, recompute=("none",) * (cuts[s + 1] - cuts[s]))
            )
        pipelines.append(Pipeline(micro_batch_sizes=(size,) * (number - last) + (1,) * last, stages=tuple(made)))
    return Strategy(
        training=ap.Training(global_batch_size=sum(p.share for p in pipelines), precision="fp32"),
        pipelines=tuple(pipelines),
        schedules=(Schedule(family="1f1b", pipelines=tuple(range(len(pipelines)))),),
    )


def _shortened(strategy: Strategy, left_out: list[int]) -> Strategy:
    pipelines = tuple(
        replace(
            p, micro_batch_sizes=p.micro_batch_sizes[k:],
            stages=tuple(replace(s, group=replace(s.group, slices=s.group.slices[k:])) for s in p.stages),
        )
        for p, k in zip(strategy.pipelines, left_out, strict=True)
    )  # fmt: skip
    training = replace(strategy.training, global_batch_size=sum(p.share for p in pipelines))
    return replace(strategy, training=training, pipelines=pipelines)


def _check(strategy: Strategy, left_out: list[int], model: ap.Model, cluster: ap.Cluster, costs: ap.CostTable) -> bool:
    """Compare a folded step with the whole one; return whether its rhythm was found."""
    graph, short = (ir.build(s, model, cluster) for s in (strategy, _shortened(strategy, left_out)))
    whole = simulate(graph, ir.lower(graph), costs)
    found = predict_folded(short, ir.lower(short), costs, left_out)
    if found is None:
        return False
    walks = prepare(graph, ir.lower(graph), costs)
    close = 5e-3 if walks.shared(*walks.walk({})) else 1e-9  # where links are shared, off by a part of a micro-batch
    assert found.step_time_s == pytest.approx(whole.step_time_s, rel=close)
    assert found.makespan_s == pytest.approx(whole.makespan_s, rel=close)
    assert found.relative_error == pytest.approx(whole.relative_error)
    assert found.peak_memory_bytes == pytest.approx(whole.peak_memory_bytes, rel=1e-12)
    return True


def _world(rng: random.Random, devices: int, blocks: int) -> tuple[ap.Model, ap.Cluster, ap.CostTable]:
    speed = rng.choice((1e6, 1e7, 1e8, 1e9))
    cluster = ap.Cluster.homogeneous(
        "l4", num_nodes=-(-devices // 2), devices_per_node=2, intra_node_GBps=speed / 1e6, inter_node_GBps=speed / 1e7
    )
    forward = [rng.choice((0.5, 1.0, rng.uniform(0.2, 2.0))) for _ in range(blocks)]
    costs = ap.CostTable.from_layers(
        forward_s=forward, backward_s=[2 * f for f in forward], parameter_bytes=[1e8] * blocks,
        output_bytes=[rng.choice((1e8, 1e9, 1e10))] * blocks, activation_bytes=[3e7] * blocks,
    )  # fmt: skip
    if rng.random() < 0.3:
        costs = replace(costs, hosts=(HostCost(device_type="l4", forward_s=0.1, backward_s=0.2, message_s=0.05),))
    return ap.Model.chain(blocks), cluster, costs


def test_what_is_folded_is_what_the_whole_simulation_finds() -> None:
    found = 0
    for seed in range(60):
        rng = random.Random(seed)
        shapes = [(rng.randint(1, 4), rng.randint(1, 2)) for _ in range(rng.choice((1, 1, 2)))]
        left_out = [12 * rng.randint(1, 5) for _ in shapes]
        model, cluster, costs = _world(rng, sum(a * b for a, b in shapes), 6)
        strategy = _strategy(rng, shapes, [k + 44 for k in left_out], 6)
        found += _check(strategy, left_out, model, cluster, costs)
    assert found >= 30, "most rhythms set in within some forty micro-batches"


def test_a_rhythm_of_two_micro_batches_leaves_out_an_even_number() -> None:
    # A link as slow as the stages: of two micro-batches in flight each takes the whole journey, there and back.
    cluster = ap.Cluster.homogeneous(
        "l4", num_nodes=2, devices_per_node=1, inter_node_GBps=1.0, inter_node_latency_us=0
    )
    costs = ap.CostTable.from_layers(forward_s=[0.5, 0.3], backward_s=[0.5, 0.9], output_bytes=[1e9] * 2)
    for left_out, sure in ((12, True), (13, False), (14, True)):
        strategy = _strategy(random.Random(1), [(2, 1)], [40 + left_out], 2)
        assert _check(strategy, [left_out], ap.Model.chain(2), cluster, costs) == sure


def test_too_few_micro_batches_show_no_rhythm() -> None:
    model, cluster, costs = _world(random.Random(0), 4, 6)
    strategy = _strategy(random.Random(0), [(4, 1)], [30], 6)
    assert not _check(strategy, [24], model, cluster, costs)


def test_the_prediction_of_a_step_is_that_of_its_timeline() -> None:
    model, cluster, costs = _world(random.Random(3), 6, 6)
    graph = ir.build(_strategy(random.Random(3), [(3, 1), (1, 2)], [5, 7], 6), model, cluster)
    programs = ir.lower(graph)
    timeline, found = simulate(graph, programs, costs), predict(graph, programs, costs)
    assert (found.step_time_s, found.makespan_s) == (timeline.step_time_s, timeline.makespan_s)
    assert found.peak_memory_bytes == timeline.peak_memory_bytes
    assert found.relative_error == timeline.relative_error
    lame = (replace(programs[0], streams={"compute": programs[0].streams["compute"]}), *programs[1:])
    with pytest.raises(PlanError, match="the Programs cannot be simulated"):
        predict(graph, lame, costs)
