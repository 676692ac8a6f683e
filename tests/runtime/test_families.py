"""Every schedule family trains exactly: virtual stages on any map, opposite pipelines, split backwards, orders by hand."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from runtime_cases import Case, cpu_cluster, describe, make_plan, run_reference
from runtime_schedules import KINDS, draw_strategy
from test_exact import LIMITS, MODULES, assert_equal, assert_exact

from autopiper import ir
from autopiper.ir.schedules import FAMILIES
from autopiper.plan import Group, Pipeline, Plan, Schedule, Stage, Strategy, Training
from autopiper.plan.directives import ReplicateDirective
from autopiper.runtime.checks import plan_faults

COUNT = 3 * len(KINDS)


def drawn(number: int) -> tuple[Plan, Case]:
    """Draw plan and case number so-and-so; the same ones in every run."""
    draw = random.Random(100 + number)
    family, name = KINDS[number % len(KINDS)], MODULES[(number + number // len(KINDS)) % len(MODULES)]
    precision = "fp32" if number % 7 == 3 else "fp64"
    optimizer = "adamw" if precision == "fp64" and draw.random() < 0.5 else "sgd"
    model = describe(name, precision)
    strategy = draw_strategy(draw, family, len(model.blocks), precision, draw.choice((None, None, 0.05)))
    world = len({d for p in strategy.pipelines for s in p.stages for d in s.group.devices})
    case = Case(module=name, optimizer=optimizer, steps=4, whole=number % 3 > 0, factory=number % 4 == 0)
    return make_plan(model, cpu_cluster(world), strategy), case


@pytest.mark.parametrize("number", range(COUNT))
def test_random_plans_of_every_family_are_exact(pool: Any, number: int) -> None:
    plan, case = drawn(number)
    results = pool.run(plan, case)
    assert len(results) == len(plan.devices) and not any("refused" in r for r in results), results
    assert_exact(results, run_reference(plan, case, results[0]["initial"]), LIMITS[plan.training.precision or ""])


def test_the_random_plans_have_everything_that_matters() -> None:
    found: set[str] = set()
    for number in range(COUNT):
        plan, case = drawn(number)
        schedules, pipelines = plan.strategy.schedules, plan.strategy.pipelines
        found |= {s.family for s in schedules} | {case.optimizer, plan.training.precision or ""}
        found |= {"unlike families"} if len({s.family for s in schedules}) > 1 else set()
        found |= {"overlap"} if any("OVERLAP" in text for s in schedules for row in s.rows for text in row) else set()
        found |= {f"passes {a.kind}" for p in plan.programs for a in p.actions() if a.kind in "FBIW"}
        found |= {"a factory"} if case.factory else set()
        for program in plan.programs:
            found |= {"opposite pipelines"} if len({p.pipeline for p in program.places}) > 1 else set()
            found |= {f"{min(3, len(program.places))} places"}
        for pipe in pipelines:
            ends = pipe.stages[0], pipe.stages[-1]
            if len(pipe.stages) > 1 and ends[0].group.members == ends[1].group.members and plan.model.tied:
                found.add("tied parameters, first and last stage on one rank")
            for one, two in pairwise(pipe.stages):
                if one.group.members == two.group.members:
                    unlike = one.group.slices != two.group.slices
                    found.add("neighbours in one group, unlike slices" if unlike else "neighbours in one group")
            for stage in pipe.stages:
                found |= {"full recompute"} if "full" in stage.recompute else set()
    assert found >= {
        *FAMILIES, "searched", "adamw", "sgd", "fp32", "fp64", "unlike families", "overlap", "a factory", "full recompute",
        "passes F", "passes B", "passes I", "passes W", "opposite pipelines", "1 places", "2 places", "3 places",
        "tied parameters, first and last stage on one rank", "neighbours in one group",
        "neighbours in one group, unlike slices",
    }  # fmt: skip


def uniform(name: str, num_devices: int, precision: str = "fp64", **given: Any) -> Plan:
    model, cluster = describe(name, precision), cpu_cluster(num_devices)
    training = Training(global_batch_size=8, precision=precision, optimizer="sgd-momentum")
    return make_plan(model, cluster, Strategy.uniform(model, cluster, training, **given))


@pytest.mark.parametrize("factory", [False, True])
def test_a_parameter_that_a_rank_uses_twice_is_one_parameter(pool: Any, factory: bool) -> None:
    plan, case = uniform("llama_tied", 2, pipeline_parallel_size=2, schedule="zb-v"), Case(module="llama_tied", steps=3)
    case = replace(case, factory=factory)
    results = pool.run(plan, case)
    assert_exact(results, run_reference(plan, case, results[0]["initial"]), 1e-10)
    shared = {"model.embed_tokens.weight", "lm_head.weight"}
    assert [len(shared & set(r["own_parameters"])) for r in results] == [1, 0]
    assert not [a for p in plan.programs for a in p.actions() if a.kind == "REDUCE_GRAD"]


def test_equal_replicas_are_stored_once_and_run(pool: Any) -> None:
    plan = uniform("llama", 4, pipeline_parallel_size=2, schedule="interleaved-1f1b", virtual_pipeline_parallel_size=2)
    assert len(plan.programs) == 2 and all(p.copies for p in plan.programs)
    case = Case(module="llama", steps=3)
    results = pool.run(plan, case)
    assert len(results) == 4
    assert_exact(results, run_reference(plan, case, results[0]["initial"]), 1e-10)


def test_a_stream_by_name_carries_the_sums_of_several_rank_sets(pool: Any) -> None:
    """Two pipelines cut unlike, and two members: holder sets differ on one rank, and all use the stream "sync"."""
    number = next(n for n in range(1000) if len(_holder_sets(_two(n))) > 2)
    strategy, model = _two(number), describe("llama", "fp64")
    named = [
        replace(it, reduce_stream="sync") if isinstance(it, ReplicateDirective) else it for it in strategy.directives()
    ]
    plan = make_plan(model, cpu_cluster(4), Strategy.from_directives(named, strategy.training))
    reduces = [a for p in plan.programs for a in p.actions() if a.kind == "REDUCE_GRAD"]
    assert {a.stream for a in reduces} == {"sync"}
    case = Case(module="llama", steps=3)
    results = pool.run(plan, case)
    assert_exact(results, run_reference(plan, case, results[0]["initial"]), 1e-10)


def _two(number: int) -> Strategy:
    """Draw two pipelines on four ranks."""
    draw = random.Random(number)
    for _ in range(1000):
        found = draw_strategy(draw, draw.choice(("1f1b", "zb-h1", "searched")), 6, "fp64", None)
        if (
            len(found.pipelines) == 2
            and len({d for p in found.pipelines for s in p.stages for d in s.group.devices}) == 4
        ):
            return found
    raise AssertionError


def _holder_sets(strategy: Strategy) -> set[frozenset[int]]:
    graph = ir.build(strategy, describe("llama", "fp64"), cpu_cluster(4))
    held = [
        frozenset(graph.stage(h.pipeline, h.stage).members[h.member][0] for h in block.holders)
        for block in graph.gradient_blocks
    ]
    several = {ranks for ranks in held if len(ranks) > 1}
    return {ranks for ranks in several if any(ranks & other and ranks != other for other in several)}


def test_what_stays_on_a_rank_is_not_spoiled_by_work_in_place(pool: Any) -> None:
    """Three stages on one rank and on three ranks: the next stage overwrites what the one before keeps."""
    model, training = describe("in_place", "fp64"), Training(global_batch_size=4, precision="fp64")
    model = replace(model, blocks=(*model.blocks[:1], *(model.blocks[1],) * 4, model.blocks[2]), edges=())
    group = [Group(members=((rank,),), slices=((2,), (2,))) for rank in range(3)]
    found = []
    for ranks in ((0, 1, 2), (0, 0, 0)):
        stages = tuple(
            Stage(start=start, stop=stop, group=group[rank], recompute=("none",) * (stop - start))
            for rank, (start, stop) in zip(ranks, ((0, 2), (2, 4), (4, 6)), strict=True)
        )
        strategy = Strategy(
            training=training, pipelines=(Pipeline(micro_batch_sizes=(2, 2), stages=stages),),
            schedules=(Schedule(family="zb-h1"),),
        )  # fmt: skip
        plan = make_plan(model, cpu_cluster(len(set(ranks))), strategy)
        found.append(pool.run(plan, Case(module="kept_in_place", steps=3))[0])
    assert found[0]["losses"] == found[1]["losses"]
    assert_equal(found[1]["parameters"], found[0]["parameters"], 0.0)


def test_the_order_of_micro_batches_is_free(pool: Any) -> None:
    """All forwards in another order on the last stage than on the first: losses and messages go by number."""
    strategy = uniform("sequential", 2, pipeline_parallel_size=2).strategy
    rows = (
        ("0F0", "0F1", "0F2", "0F3", "0F4", "0F5", "0F6", "0F7", *(f"0B{m}" for m in (5, 4, 7, 6, 1, 0, 3, 2))),
        ("1F1", "1F0", "1F3", "1F2", "1F5", "1F4", "1F7", "1F6", *(f"1B{m}" for m in (7, 6, 5, 4, 1, 0, 3, 2))),
    )
    strategy = replace(strategy, schedules=(replace(strategy.schedules[0], family="searched", rows=rows),))
    plan, case = make_plan(describe("sequential", "fp64"), cpu_cluster(2), strategy), Case(module="sequential", steps=3)
    results = pool.run(plan, case)
    assert_exact(results, run_reference(plan, case, results[0]["initial"]), 1e-10)


def test_what_cannot_be_run_yet_is_refused_in_words() -> None:
    model, cluster = describe("llama", "fp32"), cpu_cluster(2)
    training = Training(global_batch_size=4, precision="fp32")
    strategy = Strategy.uniform(model, cluster, training, zero=2)
    graph = ir.build(strategy, model, cluster)
    plan: Any = None
    assert plan_faults(plan, graph, 2) == ["stage p0.s0: ZeRO level 2 cannot be run yet; only 0"]
    alone = ir.build(Strategy.uniform(model, cluster, training, zero=2, devices=[1]), model, cluster)
    assert plan_faults(plan, alone, 1) == []  # nobody to share with
