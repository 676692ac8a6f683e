"""Piper's programs: every strategy that it can express comes back as it went, and those of its generators are read."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from piper_programs import (
    DENSE,
    DUAL_PIPE_V,
    EXPERTS,
    GPIPE,
    INTERLEAVED,
    MIRRORED,
    ONE_F_ONE_B,
    TIED,
    ZERO_BUBBLE,
    base,
    ordered,
)

import autopiper as ap
from autopiper import ir
from autopiper.cluster.spec import Cluster
from autopiper.errors import PlanError
from autopiper.model.spec import Model
from autopiper.plan import Strategy, Training
from autopiper.plan import directives as d
from autopiper.plan.strategy import Group, Pipeline, Schedule, Stage

ClusterOf = Callable[..., Cluster]
BATCH = Training(global_batch_size=16)


def comes_back(strategy: Strategy, model: Model, cluster: Cluster, path: Path) -> list[dict[str, Any]]:
    """Write, read, build and lower; return the program as the file has it."""
    marked = ap.write_piper(strategy, model, cluster, path)
    again = Strategy.from_directives(ap.read_piper(path), strategy.training)
    assert ir.lower(ir.build(again, marked, cluster)) == ir.lower(ir.build(strategy, model, cluster))
    program: list[dict[str, Any]] = json.loads(path.read_text())
    return program


@pytest.mark.parametrize(
    ("sizes", "model", "replicate", "passes"),
    [
        ({}, DENSE, {}, {"F", "B"}),  # DP
        ({"zero": 2}, DENSE, {"shard_grads": True}, {"F", "B"}),
        ({"zero": 3}, DENSE, {"shard_grads": True, "shard_params": True}, {"F", "B"}),
        ({"pipeline_parallel_size": 2, "expert_parallel_size": 2}, EXPERTS, {}, {"F", "B"}),
        ({"pipeline_parallel_size": 4, "schedule": "gpipe"}, TIED, None, {"F", "B"}),
        ({"pipeline_parallel_size": 2}, TIED, {}, {"F", "B"}),
        ({"pipeline_parallel_size": 2, "virtual_pipeline_parallel_size": 3, "schedule": "interleaved-1f1b"}, TIED, {}, {"F", "B"}),
        ({"pipeline_parallel_size": 4, "schedule": "zb-h1"}, DENSE, None, {"F", "BI", "BW"}),
        ({"pipeline_parallel_size": 4, "schedule": "zb-h2"}, DENSE, None, {"F", "BI", "BW"}),
        ({"pipeline_parallel_size": 2, "schedule": "zb-v"}, TIED, {}, {"F", "BI", "BW"}),
        ({"pipeline_parallel_size": 2, "schedule": "dualpipe-v", "expert_parallel_size": 2}, EXPERTS, {}, {"F", "B", "BI", "BW"}),
    ],
)  # fmt: skip
def test_every_known_strategy_comes_back(
    tmp_path: Path,
    cluster_of: ClusterOf,
    sizes: dict[str, Any],
    model: Model,
    replicate: dict[str, bool] | None,
    passes: set[str],
) -> None:
    cluster = cluster_of(4)
    strategy = Strategy.uniform(model, cluster, BATCH, **sizes)
    program = comes_back(strategy, model, cluster, tmp_path / "program.json")
    kinds = {f["PASS"] for it in program if it["op"] == "order" for group in it["filters"] for f in group}
    assert kinds == passes
    said = [{k: v for k, v in it.items() if k.startswith("shard")} for it in program if it["op"] == "replicate"]
    assert all(each == replicate for each in said)
    assert bool(said) == (replicate is not None)
    sharded = [it["filter"] for it in program if it["op"] == "shard"]
    assert sharded == ([{"PP": s, "EP": "*"} for s in range(len(sharded))])
    assert bool(sharded) == ("expert_parallel_size" in sizes)
    assert sum(it["op"] == "order" for it in program) == sizes.get("pipeline_parallel_size", 1)
    assert any(len(g) == 2 for it in program if it["op"] == "order" for g in it["filters"]) == (
        sizes.get("schedule") == "dualpipe-v"
    )


def test_zero_3_with_streams_and_buckets_as_the_artifact_has_it(tmp_path: Path, cluster_of: ClusterOf) -> None:
    wide = Model.transformer(
        num_layers=4, hidden_size=8192, num_attention_heads=64, sequence_length=8, vocab_size=96
    ).annotate("PP", (0, 6))
    said = d.replicate(
        {"PP": 0}, [0, 1], gather_stream="gather_stream", reduce_stream="reduce_stream", shard_grads=True,
        shard_params=True, bucket_size=1000,
    )  # fmt: skip
    strategy = Strategy.from_directives(
        [d.place({"PP": 0}, [0, 1]), said, d.split({}, num_microbatches=4)], Training(global_batch_size=8)
    )
    program = comes_back(strategy, wide, cluster_of(2), tmp_path / "program.json")
    assert next(it for it in program if it["op"] == "replicate") == {
        "op": "replicate", "filter": {"PP": 0}, "devices": [0, 1], "reduce_stream": "reduce_stream",
        "gather_stream": "gather_stream", "bucket_size": 1000, "shard_grads": True, "shard_params": True,
    }  # fmt: skip
    graph = ir.build(strategy, wide, cluster_of(2))
    sizes = [b.stop - b.start for g in graph.gradient_blocks for b in g.buckets]
    assert len(sizes) > 2
    assert max(sizes) * graph.training.gradient_bytes <= 1000 * 2**20


@st.composite
def expressible(draw: st.DrawFn) -> tuple[Strategy, Model, int]:
    """Draw cuts, a map of stages to device groups, a family or hand-made order, members, ZeRO, experts and buckets."""
    model = draw(st.sampled_from([DENSE, TIED, EXPERTS, Model.chain(7)]))
    family = draw(
        st.sampled_from(["gpipe", "1f1b", "interleaved-1f1b", "eager-1f1b", "zb-h1", "zb-h2", "zb-v", "dualpipe-v"])
    )
    groups = draw(st.integers(1, 3))
    members = draw(st.sampled_from([1, 2, 4]))
    stages = 2 * groups if family.endswith("-v") else draw(st.integers(groups, 6))
    cuts = sorted(draw(st.sets(st.integers(1, len(model.blocks) - 1), min_size=stages - 1, max_size=stages - 1)))
    where = list(range(groups)) + draw(
        st.lists(st.integers(0, groups - 1), min_size=stages - groups, max_size=stages - groups)
    )
    if family.endswith("-v"):
        where = [*range(groups), *reversed(range(groups))]
    count = draw(st.integers(2 * groups, 8)) if family == "dualpipe-v" else draw(st.integers(1, 8))
    devices = draw(st.permutations(range(groups * members)))
    slice_ = draw(st.integers(1, 2))
    zeros = draw(st.lists(st.sampled_from([0, 2, 3]), min_size=stages, max_size=stages))
    shared = draw(st.booleans())

    def stage(s: int, start: int, stop: int) -> Stage:
        mine = devices[where[s] * members : (where[s] + 1) * members]
        moe = any(b.num_experts for b in model.blocks[start:stop])
        group = Group(
            members=tuple((n,) for n in mine), slices=((slice_,) * members,) * count,
            expert_parallel_size=members if shared and moe else 1,
        )  # fmt: skip
        return Stage(
            start=start, stop=stop, group=group, recompute=("none",) * (stop - start), zero=(zeros[s],) * (stop - start)
        )

    edges = [0, *cuts, len(model.blocks)]
    made = tuple(stage(s, a, b) for s, (a, b) in enumerate(pairwise(edges)))
    pipe = Pipeline(micro_batch_sizes=(slice_ * members,) * count, stages=made)
    strategy = Strategy(
        training=Training(global_batch_size=slice_ * members * count), pipelines=(pipe,),
        schedules=(Schedule(family=family),), bucket_bytes=2**20 * draw(st.sampled_from([1, 25, 1000])),
    )  # fmt: skip
    named = draw(st.sampled_from([None, "dp_stream", "reduce0", "gather1"]))
    if named is not None:
        given_ = [
            replace(it, reduce_stream=named, gather_stream=named) if isinstance(it, d.ReplicateDirective) else it
            for it in strategy.directives()
        ]
        strategy = Strategy.from_directives(given_, strategy.training)
    return strategy, model, groups * members


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=expressible())
def test_random_expressible_strategies_come_back(
    tmp_path: Path, cluster_of: ClusterOf, drawn: tuple[Strategy, Model, int]
) -> None:
    strategy, model, devices = drawn
    program = comes_back(strategy, model, cluster_of(devices), tmp_path / "program.json")
    event("buckets" if any("bucket_size" in it for it in program) else "no buckets")


@pytest.mark.parametrize(
    ("where", "rows", "family"),
    [
        ([0, 1], GPIPE, None),
        ([0, 1], MIRRORED, "gpipe"),
        ([0, 1], ONE_F_ONE_B, "1f1b"),
        ([0, 1, 0, 1], INTERLEAVED, "interleaved-1f1b"),
        ([0, 1], ZERO_BUBBLE, "zb-h1"),
        ([0, 1, 1, 0], DUAL_PIPE_V, None),
    ],
)
@pytest.mark.parametrize("zero", [0, 2, 3])
@pytest.mark.parametrize("model", [DENSE, EXPERTS])
def test_generated_programs_are_read_and_simulated(
    tmp_path: Path,
    cluster_of: ClusterOf,
    where: list[int],
    rows: list[str],
    family: str | None,
    zero: int,
    model: Model,
) -> None:
    program = base(where, zero=zero, experts=model is EXPERTS) + ordered(rows)
    cuts = [round(s * 8 / len(where)) for s in range(len(where) + 1)]
    marked = model.annotate("PP", *pairwise(cuts))
    cluster, training = cluster_of(4), Training(global_batch_size=8)
    strategy = Strategy.from_directives(ap.read_piper(program), training)
    assert ap.simulate(strategy, marked, cluster).step_time_s > 0
    again = comes_back(strategy, marked, cluster, tmp_path / "program.json")
    names = ("op", "filter", "filters", "devices", "shard_grads", "shard_params", "stream", "num_microbatches")
    assert [{k: it[k] for k in names if k in it} for it in again] == [
        {k: it[k] for k in names if k in it} for it in program
    ]
    if family is not None:
        said = [*ap.read_piper(base(where, zero=zero, experts=model is EXPERTS)), d.split({}, num_microbatches=4)]
        named = Strategy.from_directives([*said, d.order(schedule=family)], training)
        assert ir.lower(ir.build(named, marked, cluster)) == ir.lower(ir.build(strategy, marked, cluster))


def test_one_stream_for_everything_is_one_order(cluster_of: ClusterOf) -> None:
    """Piper's small examples put gathers, reductions and all-to-alls of a rank on one stream."""
    program = [
        {k: "dp_stream" if k.endswith("stream") and it["op"] != "place" else v for k, v in it.items()}
        for it in base([0, 1], zero=3, experts=True) + ordered(ONE_F_ONE_B)
    ]
    strategy = Strategy.from_directives(ap.read_piper(program), Training(global_batch_size=8))
    assert ap.simulate(strategy, EXPERTS.annotate("PP", (0, 4), (4, 8)), cluster_of(4)).step_time_s > 0


def test_splits_may_come_stage_by_stage_and_devices_as_text_of_numbers(cluster_of: ClusterOf) -> None:
    whole = base([0, 1]) + ordered(ONE_F_ONE_B)
    parts = [it | {"filter": {"PP": s}} for it in whole if it["op"] == "split" for s in ("0", 1)]
    program = [it for it in whole if it["op"] != "split"] + parts
    marked, training = DENSE.annotate("PP", (0, 4), (4, 8)), Training(global_batch_size=8)
    one, other = (
        ir.lower(ir.build(Strategy.from_directives(ap.read_piper(p), training), marked, cluster_of(4)))
        for p in (whole, program)
    )
    assert one == other
    with pytest.raises(PlanError, match=re.escape("directive 6 (split) {'PP': 0} leaves out (parts of) p0.s1")):
        ir.build(Strategy.from_directives(ap.read_piper(program[:-1]), training), marked, cluster_of(4))


def test_what_is_not_bucketed_stays_whole(cluster_of: ClusterOf) -> None:
    """Piper leaves gradients uncut where bucket_size is absent, however large."""
    wide = Model.transformer(num_layers=4, hidden_size=4096, num_attention_heads=32, sequence_length=8, vocab_size=96)
    smallest = [
        {"op": "place", "filter": {"PP": 0}, "devices": [0, 1]},
        {"op": "replicate", "filter": {"PP": 0}, "devices": [0, 1], "reduce_stream": "dp_stream"},
    ]
    strategy = Strategy.from_directives(ap.read_piper(smallest), Training(global_batch_size=8))
    graph = ir.build(strategy, wide, cluster_of(2))
    assert [len(g.buckets) for g in graph.gradient_blocks] == [1]
    assert graph.gradient_blocks[0].reduce_stream == "dp_stream"


def test_the_model_comes_back_annotated(tmp_path: Path, cluster_of: ClusterOf) -> None:
    cluster = cluster_of(4)
    strategy = Strategy.uniform(EXPERTS, cluster, BATCH, pipeline_parallel_size=2)
    bare = replace(EXPERTS, annotations=())
    marked = ap.write_piper(strategy, bare, cluster, tmp_path / "program.json")
    assert [(a.name, a.index, a.start, a.stop) for a in marked.annotations] == [
        ("PP", 0, 0, 4), ("PP", 1, 4, 8), *(("EP", i, i + 1, i + 2) for i in range(6)),
    ]  # fmt: skip
    assert (
        ap.write_piper(strategy, marked, cluster, tmp_path / "program.json").annotations[-2:]
        == (marked.annotations[:2])
    )


def test_the_file_has_one_directive_a_line(tmp_path: Path, cluster_of: ClusterOf) -> None:
    strategy = Strategy.uniform(DENSE, cluster_of(4), BATCH, pipeline_parallel_size=2)
    ap.write_piper(strategy, DENSE, cluster_of(4), tmp_path / "new" / "program.json")
    found = (tmp_path / "new" / "program.json").read_text().splitlines()
    assert found[0] == "["
    assert found[-1] == "]"
    assert [json.loads(line.removesuffix(","))["op"] for line in found[1:-1]] == [
        "place", "place", "replicate", "replicate", "split", "order", "order",
    ]  # fmt: skip
