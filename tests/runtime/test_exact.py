"""Training by a plan equals training in one process that loops over the same micro-batches and slices."""

from __future__ import annotations

import random
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import pytest
import torch
from runtime_cases import Case, cpu_cluster, describe, make_plan, random_strategy, run_reference
from torch import Tensor

from autopiper.plan import Group, Pipeline, Plan, Schedule, Stage, Strategy, Training

MODULES = ("llama", "llama_tied", "sequential", "sequential_tied", "traced")
LIMITS = {"fp64": 1e-10, "fp32": 1e-5}


def error(found: Tensor, expected: Tensor, scale: float) -> float:
    """Relative error of a tensor, against the whole where the tensor itself is nothing."""
    found, expected = found.double(), expected.double()
    return float((found - expected).norm() / max(float(expected.norm()), 1e-6 * scale))


def assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], limit: float) -> None:
    scale = float(torch.stack([t.double().norm() for t in expected.values()]).norm())
    worst = {name: error(found[name], tensor, scale) for name, tensor in expected.items()}
    assert max(worst.values()) <= limit, {n: e for n, e in worst.items() if e > limit}


def assert_exact(results: list[dict[str, Any]], reference: dict[str, Any], limit: float) -> None:
    for result in results:
        assert result["losses"] == pytest.approx(reference["losses"], rel=limit)
        assert result["norms"] == pytest.approx(reference["norms"], rel=limit)
        assert result["losses"] == results[0]["losses"]
    for title in ("gradients", "parameters"):
        assert_equal(results[0][title], reference[title], limit)
    # Every holder has the same bits, not just the one whose copy was gathered.
    for result in results:
        for name, tensor in result["own_parameters"].items():
            assert torch.equal(tensor, results[0]["parameters"][name]), name


def drawn(number: int) -> tuple[Plan, Case]:
    """Draw plan and case number so-and-so; the same ones in every run."""
    draw = random.Random(number)
    name = MODULES[number % len(MODULES)]
    precision = "fp32" if number % 4 == 3 else "fp64"
    optimizer = "adamw" if precision == "fp64" and draw.random() < 0.5 else "sgd"
    model = describe(name, precision)
    clip = draw.choice((None, None, 0.05, 1e3))
    strategy = random_strategy(draw, len(model.blocks), precision, clip)
    world = len({d for p in strategy.pipelines for s in p.stages for d in s.group.devices})
    plan = make_plan(model, cpu_cluster(world), strategy)
    return plan, Case(module=name, optimizer=optimizer, whole=number % 3 > 0, factory=number % 6 == 0)


@pytest.mark.parametrize("number", range(30))
def test_random_plans_are_exact(pool: Any, number: int) -> None:
    plan, case = drawn(number)
    results = pool.run(plan, case)
    assert len(results) == len(plan.devices) and not any("refused" in r for r in results), results
    assert_exact(results, run_reference(plan, case, results[0]["initial"]), LIMITS[plan.training.precision or ""])


def test_the_random_plans_have_everything_that_matters() -> None:
    found: set[str] = set()
    for number in range(30):
        plan, case = drawn(number)
        strategy = plan.strategy
        stages = [s for p in strategy.pipelines for s in p.stages]
        found |= {f"{len(plan.devices)} ranks", f"{len(strategy.pipelines)} pipelines", plan.training.precision or ""}
        found |= {s.family for s in strategy.schedules} | {r for s in stages for r in s.recompute} | {case.optimizer}
        found |= {"clipping"} if plan.training.clip_grad_norm else set()
        slices = [row for s in stages for row in s.group.slices]
        found |= {"a member without samples"} if any(0 in row for row in slices) else set()
        found |= {"unequal slices"} if any(len(set(row)) > 1 for row in slices) else set()
        found |= (
            {"unequal micro-batches"} if any(len(set(p.micro_batch_sizes)) > 1 for p in strategy.pipelines) else set()
        )
        cuts = {tuple(s.start for s in p.stages) for p in strategy.pipelines}
        found |= {"unequal cuts"} if len(cuts) > 1 else set()
        for pipe in strategy.pipelines:
            pairs = list(pairwise(pipe.stages))
            found |= (
                {"regions N to M"} if any(len(a.group.members) > 1 < len(b.group.members) for a, b in pairs) else set()
            )
            tied_apart = len(pipe.stages) > 1 and plan.model.tied
            found |= {"tied on two ranks"} if tied_apart else {"tied on one rank"} if plan.model.tied else set()
        buckets = [a.bucket or 0 for p in plan.programs for a in p.actions() if a.kind == "REDUCE_GRAD"]
        found |= {"many buckets"} if max(buckets, default=0) > 1 else set()
    assert found >= {
        "1 ranks", "2 ranks", "3 ranks", "4 ranks", "1 pipelines", "2 pipelines", "3 pipelines", "fp32", "fp64", "gpipe",
        "1f1b", "none", "full", "adamw", "sgd", "clipping", "a member without samples", "unequal slices",
        "unequal micro-batches", "unequal cuts", "regions N to M", "tied on two ranks", "tied on one rank", "many buckets",
    }  # fmt: skip


@pytest.mark.parametrize("cut", range(1, 7))
def test_no_one_and_many_tensors_cross_a_cut(pool: Any, cut: int) -> None:
    """Behind a block without parameters nothing comes back; `Double` and `Both` put out two tensors."""
    model, cluster = describe("sequential", "fp64"), cpu_cluster(3)
    group = [Group(members=((0,),), slices=((3,), (2,))), Group(members=((1,), (2,)), slices=((1, 2), (2, 0)))]
    strategy = Strategy(
        training=Training(global_batch_size=5, precision="fp64", optimizer="sgd-momentum"),
        pipelines=(
            Pipeline(
                micro_batch_sizes=(3, 2),
                stages=(
                    Stage(start=0, stop=cut, group=group[0], recompute=("none",) * cut),
                    Stage(start=cut, stop=7, group=group[1], recompute=("none",) * (7 - cut)),
                ),
            ),
        ),
        schedules=(Schedule(family="1f1b", pipelines=(0,)),),
    )
    plan, case = make_plan(model, cluster, strategy), Case(module="sequential", steps=2)
    results = pool.run(plan, case)
    assert_exact(results, run_reference(plan, case, results[0]["initial"]), 1e-10)


def test_stages_may_begin_in_place(pool: Any) -> None:
    model, cluster = describe("in_place", "fp64"), cpu_cluster(3)
    strategy = Strategy(
        training=Training(global_batch_size=5, precision="fp64", optimizer="sgd-momentum"),
        pipelines=(
            Pipeline(
                micro_batch_sizes=(3, 2),
                stages=tuple(
                    Stage(
                        start=start, stop=stop, group=Group(members=((rank,),), slices=((3,), (2,))),
                        recompute=("none",) * (stop - start),
                    )
                    for rank, (start, stop) in enumerate(((0, 1), (1, 3), (3, 5)))
                ),
            ),
        ),
        schedules=(Schedule(family="gpipe", pipelines=(0,)),),
    )  # fmt: skip
    plan, case = make_plan(model, cluster, strategy), Case(module="in_place", steps=2)
    results = pool.run(plan, case)
    assert_exact(results, run_reference(plan, case, results[0]["initial"]), 1e-10)
