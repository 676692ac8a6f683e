"""Training by a plan equals training in one process that loops over the same micro-batches and slices."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from runtime_cases import Case, cpu_cluster, describe, make_plan, random_strategy, run_reference
from torch import Tensor

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


@pytest.mark.parametrize("number", range(30))
def test_random_plans_are_exact(pool: Any, number: int) -> None:
    draw = random.Random(number)
    name = MODULES[number % len(MODULES)]
    precision = "fp32" if number % 4 == 3 else "fp64"
    optimizer = "adamw" if precision == "fp64" and draw.random() < 0.5 else "sgd"
    model = describe(name, precision)
    clip = draw.choice((None, None, 0.05, 1e3))
    strategy = random_strategy(draw, len(model.blocks), precision, clip)
    world = len({d for p in strategy.pipelines for s in p.stages for d in s.group.devices})
    plan = make_plan(model, cpu_cluster(world), strategy)
    case = Case(module=name, optimizer=optimizer, whole=number % 3 > 0, factory=number % 6 == 0)
    results = pool.run(plan, case)
    assert len(results) == world and not any("refused" in r for r in results), results
    assert_exact(results, run_reference(plan, case, results[0]["initial"]), LIMITS[precision])
