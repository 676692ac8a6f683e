"""Plan files with random damage: refused in words, or a plan that every command can handle."""

from __future__ import annotations

import copy
import io
import json
import math
import random
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import autopiper as ap
from autopiper.errors import AutoPiperError
from autopiper.report.summary import summarize
from autopiper.report.table import plan_table

VALUES: tuple[Any, ...] = (
    None, 0, -1, 1, 99, 10**30, 2**63, 1e308, -0.5, 1.5, math.nan, math.inf, "", "x", "0", "Infinity", "NaN", True, [],
    {}, [0], [[0]], {"a": 1}, "p9:2F5", "LOSS",
)  # fmt: skip


@pytest.fixture(scope="module")
def whole() -> dict[str, Any]:
    from autopiper.plan.file import encode

    model = ap.Model.transformer(
        num_layers=3, hidden_size=64, num_attention_heads=2, sequence_length=16, vocab_size=100, tie_embeddings=True
    )
    cluster = ap.Cluster.homogeneous("a100-80g", devices_per_node=2)
    return json.loads(json.dumps(encode("plan", ap.optimize(model, cluster, global_batch_size=4, n_trials=1))))  # type: ignore[no-any-return]


def paths(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON value."""
    if at:
        yield at
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from paths(inner, (*at, key))


def damage(rng: random.Random, content: dict[str, Any], at: tuple[Any, ...]) -> None:
    """Take away, double, shift, or replace what is at a place."""
    holder: Any = content
    for step in at[:-1]:
        holder = holder[step]
    now, way = holder[at[-1]], rng.randrange(5)
    if way == 0:
        del holder[at[-1]]
    elif way == 1 and isinstance(holder, list):
        holder.insert(at[-1], copy.deepcopy(now))
    elif way == 2 and isinstance(now, (int, float)):
        holder[at[-1]] = now + rng.choice((1, -1, 100))
    else:
        holder[at[-1]] = copy.deepcopy(rng.choice(VALUES))


@pytest.mark.parametrize("seed", range(4))
def test_damage_is_refused_in_words_or_harmless(whole: dict[str, Any], tmp_path: Path, seed: int) -> None:
    alike = defaultdict(
        list
    )  # places that differ in list positions only are drawn as one, lest programs drown the rest
    for at in paths(whole):
        alike[tuple("*" if isinstance(step, int) else step for step in at)].append(at)
    rng, places, loaded = random.Random(seed), list(alike.values()), 0
    for _ in range(150):
        content = copy.deepcopy(whole)
        damage(rng, content, rng.choice(rng.choice(places)))
        path = tmp_path / "plan.json"
        path.write_text(json.dumps(content))
        try:
            plan = ap.load_plan(path)
        except AutoPiperError:
            continue
        loaded += 1
        assert plan.devices or not plan.programs
        for use in (
            lambda p=plan: ap.verify(p),
            lambda p=plan: Console(file=io.StringIO(), width=100).print(plan_table(p, ap.simulate(p))),
            lambda p=plan: json.dumps(summarize(p, ap.simulate(p))),
        ):
            try:
                use()
            except AutoPiperError as fault:
                assert str(fault)
        plan.save(path)
        assert ap.load_plan(path) == plan
    assert 10 < loaded < 140


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("step_time_s", math.nan, "step_time_s is nan; it must be zero or more and finite"),
        ("makespan_s", -1.0, "makespan_s is -1.0"),
        ("lower_bound_s", math.inf, "lower_bound_s is inf"),
        ("peak_memory_bytes", [math.nan, 1.0], r"peak_memory_bytes\[0\] is nan"),
    ],
)
def test_predictions_that_are_no_quantities(
    whole: dict[str, Any], tmp_path: Path, field: str, value: Any, words: str
) -> None:
    (tmp_path / "plan.json").write_text(json.dumps(whole | {field: value}))
    with pytest.raises(ap.PlanError, match=words):
        ap.load_plan(tmp_path / "plan.json")


def test_a_program_with_a_device_too_few(whole: dict[str, Any], tmp_path: Path) -> None:
    content = copy.deepcopy(whole)
    content["programs"][0]["ranks"].append(7)
    (tmp_path / "plan.json").write_text(json.dumps(content))
    with pytest.raises(ap.PlanError, match=r"names ranks \(0, 7\) and devices \(0,\); give one device for each rank"):
        ap.load_plan(tmp_path / "plan.json")
