"""The whole search on small jobs: what it finds, what it honours, what it says when it cannot."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from autopiper import ir
from autopiper.cluster import catalogue
from autopiper.cluster.spec import Cluster, DeviceType, Link, Node
from autopiper.costmodel import price, simulate
from autopiper.errors import InfeasibleError, PlanError
from autopiper.model.spec import Model
from autopiper.plan.costs import CostTable
from autopiper.plan.plan import Plan, load_plan
from autopiper.plan.space import Space
from autopiper.plan.strategy import Group, Pipeline, Schedule, Stage, Strategy
from autopiper.plan.training import Training
from autopiper.search import search

GIB = 2**30
SPEEDS = (0.84, 0.48, 0.30, 0.18)


def _job(
    speeds: Sequence[float] = SPEEDS, *, blocks: int = 10, batch: int = 18, memory: float = 0.6,
    activation: float = 0.0, weights: Sequence[float] | None = None,
) -> tuple[Model, Cluster, Training, CostTable]:  # fmt: skip
    """Single devices of these speeds, each with room for `memory` of the model's 1 GiB per block."""
    names = [f"q{round(100 * v)}" for v in speeds]
    types = {
        n: DeviceType(
            name=n, memory_bytes=memory * blocks * GIB, peak_flops={"fp32": 1.0}, memory_bytes_per_s=1.0, platform="cpu"
        )
        for n in names
    }
    link = Link(bytes_per_s=1e9)
    cluster = Cluster(
        name="four",
        device_types=tuple(types.values()),
        nodes=(Node(name="n", devices=tuple(names), intra=link, nic=link),),
    )
    work = weights or [1.0] * blocks
    tables = [
        CostTable.from_layers(
            forward_s=[w / 3 / v for w in work], backward_s=[2 * w / 3 / v for w in work],
            parameter_bytes=[GIB] * blocks, activation_bytes=[activation * GIB] * blocks, device_type=n,
        )
        for n, v in dict(zip(names, speeds, strict=True)).items()
    ]  # fmt: skip
    costs = tables[0]
    for table in tables[1:]:
        costs = costs.merge(table)
    return Model.chain(num_blocks=blocks), cluster, Training(global_batch_size=batch), costs


ONE = Space(micro_batch_sizes=(1,), recompute=("none",))


@pytest.fixture(scope="module")
def unequal() -> Plan:
    return search(*_job(), ONE)


def test_unequal_pipelines_beat_equal_ones_and_the_best_single_one(unequal: Plan) -> None:
    pipelines = unequal.strategy.pipelines
    assert sorted(p.share for p in pipelines) == [4, 14]
    assert sorted(s.stop - s.start for p in pipelines for s in p.stages) == [4, 4, 6, 6]
    speeds = sorted(sorted(s.group.devices[0] for s in p.stages) for p in pipelines)
    assert speeds == [[0, 1], [2, 3]], "the two fast devices together, the two slow ones together"
    equal = search(*_job(), replace(ONE, equal_pipelines=True, min_pipelines=2))
    single = search(*_job(), replace(ONE, max_pipelines=1))
    assert len(equal.strategy.pipelines) == 1 and len(equal.strategy.pipelines[0].stages[0].group.members) == 2
    assert len(single.strategy.pipelines) == 1
    assert unequal.step_time_s < single.step_time_s < equal.step_time_s
    assert equal.step_time_s / unequal.step_time_s > 1.4  # 145 : 96 on paper, 160 : 96 with the orders allowed here


def test_the_plan_is_complete(unequal: Plan, tmp_path: Path) -> None:
    graph = ir.build(unequal.strategy, unequal.model, unequal.cluster)
    assert ir.verify(graph, unequal.programs)
    timeline = simulate(graph, unequal.programs, unequal.costs)
    assert timeline.step_time_s == unequal.step_time_s and timeline.makespan_s == unequal.makespan_s
    assert unequal.peak_memory_bytes == timeline.peak_memory_bytes
    assert all(
        peak <= unequal.cluster.device(d).type.usable_bytes
        for d, peak in zip(unequal.devices, unequal.peak_memory_bytes, strict=True)
    )
    assert unequal.lower_bound_s == pytest.approx(18 * 10 / sum(SPEEDS)) and 0 <= unequal.gap < 0.3
    assert "compute work" in unequal.binding
    assert unequal.uniform is not None and unequal.uniform.step_time_s >= unequal.step_time_s
    labels = [a.label for a in unequal.alternatives]
    assert len(labels) == len(set(labels)) >= 3
    assert all(a.step_time_s >= unequal.step_time_s for a in unequal.alternatives)
    assert unequal.training.precision == "fp32" and any("precision fp32" in n for n in unequal.notes)
    assert unequal.provenance.seed == 0 and "highspy" in unequal.provenance.libraries
    assert [t.number for t in unequal.provenance.history] == list(range(len(unequal.provenance.history)))
    unequal.save(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == unequal


def test_the_same_seed_and_trials_give_the_same_plan() -> None:
    job = _job(batch=11)
    space = Space(recompute=("none",))
    one, two = (search(*job, space, n_trials=12, seed=5) for _ in range(2))
    assert one.strategy == two.strategy and one.step_time_s == two.step_time_s
    assert [(t.label, t.step_time_s) for t in one.provenance.history] == [
        (t.label, t.step_time_s) for t in two.provenance.history
    ]
    assert one.provenance.n_trials == 12


Row = tuple[tuple[int, ...], tuple[int, ...]]


def _plans(devices: list[int], blocks: int, batch: int) -> Iterator[tuple[list[Row], tuple[int, ...]]]:
    """Every set of pipelines of single devices, each as (devices in order, cuts), with every share."""
    for k in range(1, len(devices) + 1):
        for order in itertools.permutations(devices, k):
            for parts in range(1, k + 1):
                for inner in itertools.combinations(range(1, k), parts - 1):
                    rows = [order[a:b] for a, b in itertools.pairwise((0, *inner, k))]
                    if [r[0] for r in rows] != sorted(r[0] for r in rows):
                        continue  # pipelines in another order
                    for cuts in itertools.product(
                        *(itertools.combinations(range(1, blocks), len(row) - 1) for row in rows)
                    ):
                        for borders in itertools.combinations(range(1, batch), parts - 1):
                            shares = tuple(b - a for a, b in itertools.pairwise((0, *borders, batch)))
                            yield list(zip(rows, cuts, strict=True)), shares


@pytest.mark.parametrize("seed", range(4))
def test_nearly_the_best_of_all_plans(seed: int) -> None:
    rng = random.Random(seed)
    blocks, batch = 4, 5
    speeds = rng.sample((1.0, 0.7, 0.5, 0.3), 3)
    job = _job(speeds, blocks=blocks, batch=batch, memory=rng.choice((0.5, 0.75, 2.0)),
               weights=[rng.uniform(0.5, 2) for _ in range(blocks)])  # fmt: skip
    model, cluster, training, costs = job
    best = float("inf")
    room = int(cluster.device_types[0].memory_bytes / GIB)
    for rows, shares in _plans([0, 1, 2], blocks, batch):
        pipelines = []
        for (ids, cuts), share in zip(rows, shares, strict=True):
            borders = list(itertools.pairwise((0, *cuts, blocks)))
            pipelines.append(
                Pipeline(
                    micro_batch_sizes=(1,) * share,
                    stages=tuple(
                        Stage(start=a, stop=b, recompute=("none",) * (b - a),
                              group=Group(members=((d,),), slices=((1,),) * share))
                        for d, (a, b) in zip(ids, borders, strict=True)
                    ),
                )
            )  # fmt: skip
        if any(s.stop - s.start > room for p in pipelines for s in p.stages):
            continue
        for family in ("1f1b", "gpipe"):
            strategy = Strategy(
                training=replace(training, precision="fp32"),
                pipelines=tuple(pipelines),
                schedules=(Schedule(family=family, pipelines=tuple(range(len(pipelines)))),),
            )
            graph = ir.build(strategy, model, cluster)
            best = min(best, simulate(graph, ir.lower(graph), costs, events=False).step_time_s)
    plan = search(*job, ONE)
    assert plan.step_time_s <= best * 1.02
    assert plan.lower_bound_s <= best


def test_the_plan_is_never_worse_than_the_baseline() -> None:
    model, cluster, training, costs = _job()
    bad = Strategy.uniform(model, cluster, training, pipeline_parallel_size=4)
    plan = search(model, cluster, training, costs, ONE, baseline=bad, n_trials=2)
    note = next(n for n in plan.notes if n.startswith("baseline"))
    graph = ir.build(bad, model, cluster)
    seconds = simulate(graph, ir.lower(graph), costs).step_time_s
    assert f"step {seconds:.4g} s" in note and plan.step_time_s < seconds
    assert any(t.label == "baseline" and t.step_time_s == seconds for t in plan.provenance.history)
    again = search(model, cluster, training, costs, ONE, baseline=plan.strategy, n_trials=1)
    assert again.step_time_s <= plan.step_time_s


def test_the_space_is_honoured() -> None:
    job = _job(memory=2.0)
    two = search(*job, replace(ONE, max_stages=2))
    assert max(len(p.stages) for p in two.strategy.pipelines) <= 2
    few = search(*job, replace(ONE, devices=(0, 2)))
    assert set(few.devices) <= {0, 2}
    assert any("not allowed by space.devices" in n and "q48" in n for n in few.notes)
    even = search(*job, replace(ONE, equal_stages=True))
    for pipe in even.strategy.pipelines:
        sizes = [s.stop - s.start for s in pipe.stages]
        assert max(sizes) - min(sizes) <= 1
    three = search(*job, replace(ONE, min_pipelines=3, max_pipelines=3))
    assert len(three.strategy.pipelines) == 3
    gpipe = search(*job, replace(ONE, schedules=("gpipe",)))
    assert {s.family for s in gpipe.strategy.schedules} == {"gpipe"}


def test_a_device_that_only_slows_things_down_stays_idle_and_the_plan_says_so() -> None:
    job = _job((1.0, 0.01), blocks=3, batch=4, memory=2.0)
    plan = search(*job, ONE)
    assert plan.devices == (0,)
    assert any(n.startswith("idle: 1 x q1 (devices 1)") and "longer" in n for n in plan.notes)
    assert plan.step_time_s == pytest.approx(12.0)


def test_a_batch_that_nothing_divides_is_shared_with_a_smaller_last_micro_batch() -> None:
    job = _job((1.0, 1.0 - 1e-9, 1.0), blocks=2, batch=7, memory=2.0)
    plan = search(*job, Space(micro_batch_sizes=(2,), recompute=("none",)))
    assert sum(p.share for p in plan.strategy.pipelines) == 7
    assert 1 in {n for p in plan.strategy.pipelines for row in p.stages[0].group.slices for n in row}


def test_recompute_is_used_where_memory_asks_for_it() -> None:
    model, cluster, training, costs = _job((1.0, 1.0 - 1e-9), blocks=4, batch=8, memory=0.8, activation=0.5)
    plan = search(model, cluster, training, costs, Space(micro_batch_sizes=(1,)))
    choices = {c for p in plan.strategy.pipelines for s in p.stages for c in s.recompute}
    assert "full" in choices


def test_no_time_still_gives_a_plan() -> None:
    plan = search(*_job(memory=2.0), ONE, timeout=1e-9)
    assert plan.step_time_s > 0
    assert len(plan.provenance.history) < 8


def test_progress_is_told() -> None:
    seen: list[tuple[int, str, float]] = []
    plan = search(*_job(), ONE, n_trials=3, progress=lambda number, label, best: seen.append((number, label, best)))
    assert [n for n, _, _ in seen] == list(range(len(seen)))
    bests = [b for _, _, b in seen]
    assert bests == sorted(bests, reverse=True) and bests[-1] == plan.step_time_s


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (Space(micro_batch_sizes=(1,), recompute=("none",)), "full recompute .* would make it fit"),
        (Space(micro_batch_sizes=(4,), recompute=("none",)), "smaller micro-batches .* would save"),
        (Space(micro_batch_sizes=(1,), recompute=("full",), max_stages=1), "more stages .* would make it fit"),
    ],
)
def test_nothing_fits_names_the_nearest_miss(space: Space, message: str) -> None:
    job = _job((1.0, 0.5), blocks=4, batch=8, memory=0.7, activation=0.5)
    with pytest.raises(InfeasibleError, match=message) as caught:
        search(*job, space, n_trials=2)
    assert "GiB too much" in str(caught.value) and "on q" in str(caught.value)


def test_the_nearest_miss_says_how_much() -> None:
    with pytest.raises(InfeasibleError) as caught:
        search(*_job((1.0, 0.5), blocks=4, batch=4, memory=0.4), ONE, n_trials=2)
    # Two devices of 1.6 GiB for four blocks of 1 GiB: two blocks each, 2 - 1.6 = 0.4 too much.
    assert "needs 2.00 GiB and has 1.60 GiB: 0.40 GiB too much" in str(caught.value)
    assert "more devices or more memory" in str(caught.value)


def test_impossible_requests_say_the_sum() -> None:
    model, cluster, training, costs = _job(batch=3)
    with pytest.raises(PlanError, match=r"min_pipelines 2 x smallest of space.micro_batch_sizes 2 = 4 samples"):
        search(model, cluster, training, costs, Space(min_pipelines=2, micro_batch_sizes=(2, 4)))
    with pytest.raises(PlanError, match=r"space.devices names \[9\]; cluster 'four' has devices 0..3"):
        search(model, cluster, training, costs, Space(devices=(0, 9)))
    with pytest.raises(PlanError, match="timeout is 0"):
        search(model, cluster, training, costs, timeout=0)
    with pytest.raises(PlanError, match="precision 'bf16' is not supported by q84"):
        search(model, cluster, replace(training, precision="bf16"), costs)


def _mixed(a100: int, v100: int) -> tuple[Model, Cluster]:
    model = Model.transformer(
        num_layers=6, hidden_size=1024, num_attention_heads=8, sequence_length=1024, vocab_size=8192, name="small"
    )
    link = Link(bytes_per_s=1e11, latency_s=1e-6)
    nodes = [
        Node(name=name, devices=(name,) * count, intra=link, nic=link)
        for name, count in (("a100-80g", a100), ("v100-32g", v100))
        if count
    ]
    types = tuple(catalogue.get(n.name) for n in nodes)
    return model, Cluster(name="mixed", device_types=types, nodes=tuple(nodes))


def test_all_used_devices_share_the_best_precision_that_they_support() -> None:
    model, cluster = _mixed(2, 2)
    training = Training(global_batch_size=64)
    mixed = search(model, cluster, training, price(model, cluster, training), n_trials=6)
    assert mixed.training.precision == "fp16" and mixed.costs.precision == "fp16"
    assert any("bf16 is not supported by v100-32g" in n for n in mixed.notes)
    only = search(model, cluster, training, price(model, cluster, training), Space(devices=(0, 1)), n_trials=6)
    assert only.training.precision == "bf16" and only.costs.precision == "bf16"
    fixed = replace(training, precision="bf16")
    able = _mixed(2, 0)[1]
    forced = search(model, cluster, fixed, price(model, able, fixed), n_trials=6)
    assert forced.devices == (0, 1)


def test_leaving_out_what_lacks_the_better_precision_is_considered() -> None:
    model, cluster = _mixed(8, 1)
    training = Training(global_batch_size=8)
    plan = search(model, cluster, training, price(model, cluster, training), n_trials=6)
    assert plan.training.precision == "bf16" and set(plan.devices) <= set(range(8))
    assert any(n.startswith("idle: 1 x v100-32g") for n in plan.notes)


def test_importing_the_search_is_light() -> None:
    script = "import sys, autopiper.search; print([m for m in ('torch', 'optuna') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_search_is_silent(capfd: pytest.CaptureFixture[str]) -> None:
    search(*_job(), Space(recompute=("none",)), n_trials=4)
    assert capfd.readouterr() == ("", "")
