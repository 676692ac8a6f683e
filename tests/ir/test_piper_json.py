"""Piper's programs: every strategy that it can express comes back as it went; what it cannot is refused, and why."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import autopiper as ap
from autopiper import ir
from autopiper.cluster.spec import Cluster
from autopiper.errors import ExportError, PlanError
from autopiper.model.spec import Model
from autopiper.plan import Strategy, Training
from autopiper.plan import directives as d
from autopiper.plan.strategy import Group, Pipeline, Schedule, Stage
from tests.conftest import make_cluster

ClusterOf = Callable[..., Cluster]
SMALL: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "sequence_length": 8, "vocab_size": 96}
DENSE = Model.transformer(num_layers=6, **SMALL)
TIED = Model.transformer(num_layers=6, tie_embeddings=True, **SMALL)
EXPERTS = Model.transformer(
    num_layers=6, num_experts=4, experts_per_token=2, moe_intermediate_size=32, intermediate_size=64, **SMALL
)
BATCH = Training(global_batch_size=16)


def comes_back(strategy: Strategy, model: Model, cluster: Cluster, path: Path) -> list[dict[str, Any]]:
    """Write, read, build and lower; return the program as the file has it."""
    marked = ap.write_piper(strategy, model, cluster, path)
    again = Strategy.from_directives(ap.read_piper(path), strategy.training)
    assert ir.lower(ir.build(again, marked, cluster)) == ir.lower(ir.build(strategy, model, cluster))
    program: list[dict[str, Any]] = json.loads(path.read_text())
    return program


def uniform(model: Model = DENSE, **sizes: Any) -> tuple[Strategy, Model, Cluster]:
    cluster = make_cluster(4)
    return Strategy.uniform(model, cluster, BATCH, **sizes), model, cluster


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
    tmp_path: Path, sizes: dict[str, Any], model: Model, replicate: dict[str, bool] | None, passes: set[str]
) -> None:
    program = comes_back(*uniform(model, **sizes), tmp_path / "program.json")
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
def expressible(draw: st.DrawFn) -> tuple[Strategy, Model, Cluster]:
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
    return strategy, model, make_cluster(groups * members)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=expressible())
def test_random_expressible_strategies_come_back(tmp_path: Path, drawn: tuple[Strategy, Model, Cluster]) -> None:
    comes_back(*drawn, tmp_path / "program.json")


# Programs as Piper's own generators write them: a base of place, replicate and shard, to which split and order are added.

RANKS, COPIES = 2, 2


def base(where: list[int], *, zero: int = 0, experts: bool = False) -> list[dict[str, Any]]:
    """`where[stage]` is its rank; rank r has the devices r, r + R, r + 2R, …"""
    devices = [[r + copy * RANKS for copy in range(COPIES)] for r in where]
    place = [{"op": "place", "filter": {"PP": s}, "devices": on, "stream": "pp_stream"} for s, on in enumerate(devices)]
    levels: dict[str, Any] = {2: {"shard_grads": True}}.get(zero, {})
    if zero == 3:
        levels = {"gather_stream": "gather_stream", "shard_grads": True, "shard_params": True, "bucket_size": 1000}
    replicate = [
        {"op": "replicate", "filter": {"PP": s}, "devices": on, "reduce_stream": "reduce_stream", **levels}
        for s, on in enumerate(devices)
    ]
    shard = [
        {"op": "shard", "filter": {"PP": s, "EP": "*"}, "devices": on, "stream": "ep_stream"}
        for s, on in enumerate(devices) if experts
    ]  # fmt: skip
    return [*place, *replicate, *shard]


def ordered(rows: list[str], count: int = 4) -> list[dict[str, Any]]:
    """Rows such as "0F0 1F0+0B1": groups of stage, pass and micro-batch."""

    def filter_of(text: str) -> dict[str, Any]:
        stage, kind, mb = re.fullmatch(r"(\d+)(F|BI|BW|B)(\d+)", text).groups()  # type: ignore[union-attr]
        return {"PP": int(stage), "MB": int(mb), "PASS": kind}

    split = {"op": "split", "filter": {}, "dim_name": "MB", "num_microbatches": count}
    return [
        split,
        *({"op": "order", "filters": [[filter_of(t) for t in g.split("+")] for g in row.split()]} for row in rows),
    ]


GPIPE = ["0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3", "1F0 1F1 1F2 1F3 1B0 1B1 1B2 1B3"]
MIRRORED = ["0F0 0F1 0F2 0F3 0B3 0B2 0B1 0B0", "1F0 1F1 1F2 1F3 1B3 1B2 1B1 1B0"]
ONE_F_ONE_B = ["0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3", "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3"]
INTERLEAVED = [
    "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
    "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
]
ZERO_BUBBLE = [
    "0F0 0F1 0BI0 0BW0 0F2 0BI1 0BW1 0F3 0BI2 0BW2 0BI3 0BW3",
    "1F0 1BI0 1F1 1BI1 1BW0 1F2 1BI2 1BW1 1F3 1BI3 1BW2 1BW3",
]
DUAL_PIPE_V = [
    "0F0 0F1 0F2 3F0 3BI0 3BW0 3F1 0F3+3B1 3F2+0B0 3B2 3F3+0B1 3B3 0BI2 0BW2 0BI3 0BW3",
    "1F0 2F0 1F1 2F1 1F2 2B0 2F2+1B0 1F3+2B1 2F3+1B1 2B2 1B2 2BI3 1BI3 2BW3 1BW3",
]


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


# Refusals of reading


def changed(position: int, **fields: Any) -> list[dict[str, Any]]:
    program = base([0, 1]) + ordered(ONE_F_ONE_B)
    program[position] = {k: v for k, v in (program[position] | fields).items() if v != "gone"}
    return program


def row(*groups: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    return list(groups)


F0 = {"PP": 0, "MB": 0, "PASS": "F"}


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ({}, "Piper program is {}; it must be a JSON array of directives"),
        ([], "Piper program is empty"),
        ([7], "directive 0: it is 7; it must be an object with 'op'"),
        ([{"filter": {}}], "directive 0: 'op' is null; it must be one of place, replicate, shard, split, order"),
        (changed(5, op="oder"), "directive 5 (oder): op 'oder' is unknown in Piper (did you mean 'order'?); allowed: place,"),
        (changed(0, op="cut"), "directive 0 (cut): op 'cut' is unknown in Piper (it is AutoPiper's own)"),
        (changed(1, device=[1]), "directive 1 (place): field 'device' is unknown (did you mean 'devices'?); allowed: filter, devices, stream"),
        (changed(2, stream="x"), "directive 2 (replicate): field 'stream' is unknown (did you mean 'reduce_stream'?)"),
        (changed(1, devices="gone"), "directive 1 (place): field 'devices' is missing"),
        (changed(1, devices=[1, "3"]), 'directive 1 (place): devices is [1, "3"]; it must be a list of one device number or more'),
        (changed(1, devices=[1, 1]), "directive 1 (place): devices is [1, 1]"),
        (changed(1, filter=[]), "directive 1 (place): filter is []; it must be an object"),
        (changed(1, filter={"PP": -1}), "directive 1 (place): filter {'PP': -1}: PP is -1; allowed: an index of 0 or more, '*' or null"),
        (changed(1, filter={"PP": True}), "directive 1 (place): filter {'PP': True}: PP is true"),
        (changed(1, filter={"PIPE": 0}), "directive 1 (place): filter {'PIPE': 0}: tag 'PIPE' is AutoPiper's own"),
        (changed(1, filter={"PP": 2}), "directive 1 (place): filter {'PP': 2} leaves a gap: no directive places PP 1; the stages that are placed are 0, 2"),
        (changed(1, filter={"PP": 0}), "directive 1 (place): filter {'PP': 0} places PP 0 again; directive 0 (place) has placed it"),
        (changed(1, filter={}), "directive 1 (place): filter {} must name one stage, as {'PP': 0} does"),
        (changed(1, devices=[1]), "directive 1 (place): filter {'PP': 1} has 1 devices [1], directive 0 (place) has 2"),
        (changed(1, stream="other"), "directive 1 (place): stream 'other' differs from 'pp_stream'"),
        (changed(2, shard_grads=1), "directive 2 (replicate): shard_grads is 1; it must be true or false"),
        (changed(2, bucket_size=0.5), "directive 2 (replicate): bucket_size is 0.5; it must be a whole number MB of 1 or more"),
        (changed(2, reduce_stream=7), "directive 2 (replicate): reduce_stream is 7; it must be a name"),
        (changed(4, num_microbatches=0), "directive 4 (split): num_microbatches is 0; it must be a whole number of 1 or more"),
        ([*changed(4), {"op": "split", "filter": {}, "dim_name": "MB", "num_microbatches": 2}], "directive 7 (split): num_microbatches is 2, directive 4 (split) says 4; they must agree"),
        ([*changed(4, num_microbatches=3)[:6], *ordered(["1F0 1B0 1F1 1B1 1F2 1B2"])[1:]], "directive 5 (order), group 5: filter {'PP': 0, 'MB': 3, 'PASS': 'F'} matches nothing; MB runs 0..2; nearest: {'PP': 0, 'MB': 2, 'PASS': 'F'}"),
        ([it for it in changed(4) if it["op"] != "split"], "directive 4 (order), group 0: filter {'PP': 0, 'MB': 0, 'PASS': 'F'} names micro-batches, but there is no split directive"),
        (changed(5, filters=[[F0]]), "directive 5 (order): filters is 1 groups; it must be a list of 2 groups or more"),
        (changed(5, filters=row([F0], [])), "directive 5 (order): filters: group 1 is []"),
        (changed(5, filters=row([F0], [F0 | {"PASS": "W"}])), "directive 5 (order): group 1, filter {'PP': 0, 'MB': 0, 'PASS': 'W'}: PASS is \"W\" (did you mean 'BW'?); allowed: F, B, BI, BW"),
        (changed(5, filters=row([F0], [F0 | {"PP": 5}])), "directive 5 (order), group 1: filter {'PP': 5, 'MB': 0, 'PASS': 'F'} names PP 5, which no directive places; nearest: {'PP': 1, 'MB': 0, 'PASS': 'F'}"),
        (changed(5, filters=row([F0], [F0 | {"PASS": "BW"}], [F0 | {"PASS": "BI"}])), "directive 5 (order): {'MB': 0, 'PP': 0} has BW in directive 5 (order), group 1, BI in directive 5 (order), group 2 (did you mean 'BI, BW'?); allowed: one B, or one BI and then one BW in the same directive"),
        (changed(5, filters=row([F0], [F0 | {"PASS": "BI"}])), "directive 5 (order): {'MB': 0, 'PP': 0} has BI in directive 5 (order), group 1"),
        ([it for it in changed(5) if it["op"] != "place"], "there is no place directive"),
    ],
)  # fmt: skip
def test_refusals_of_reading(program: Any, words: str) -> None:
    with pytest.raises(PlanError, match=re.escape(words)) as caught:
        ap.read_piper(program)
    assert not caught.value.faults, "one fault, one message"


def test_every_fault_of_a_program_is_told_at_once() -> None:
    program = changed(1, devics=[1], stream=3)
    program[4]["num_microbatches"] = "4"
    with pytest.raises(PlanError) as caught:
        ap.read_piper(program)
    assert [fault.split(":")[0] for fault in caught.value.faults] == [
        "directive 1 (place)", "directive 1 (place)", "directive 4 (split)",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[{"op": "place"', "is not JSON"),
        ('[{"op": "place", "op": "order"}]', "field 'op' stands twice"),
        ('[{"op": "split", "filter": {}, "dim_name": "MB", "num_microbatches": NaN}]', "NaN is no JSON number"),
        ("[" * 100_000, "is not JSON"),
        ("__import__('os').abort()", "is not JSON"),
    ],
)
def test_files_that_are_no_programs(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "program.json"
    path.write_text(text)
    with pytest.raises(PlanError, match=re.escape(words)) as caught:
        ap.read_piper(path)
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="there is no such file"):
        ap.read_piper(tmp_path / "none.json")
    with pytest.raises(PlanError, match="cannot read"):
        ap.read_piper(tmp_path)


def without(program: list[dict[str, Any]], *positions: int) -> list[dict[str, Any]]:
    return [it for i, it in enumerate(program) if i not in positions]


THREE = base([0, 1]) + ordered(ONE_F_ONE_B)


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (
            THREE[:5] + ordered(["1F0 1F1 1F2 1F3 1B0 1B1 1B2 1B3", "0B0 0B1 0B2 0B3 0F0 0F1 0F2 0F3"])[1:],
            "directive 6 (order): {'PP': 0, 'MB': 0} has B, F in the row",
        ),
        (
            THREE[:5] + ordered(["0F1 0F0 0F2 0F3 0B0 0B1 0B2 0B3", "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3"])[1:],
            None,  # stage 1 only waits
        ),
        (
            THREE[:5] + ordered(["0F0 0B0 0F1 0B1 0F2 0B2 0F3 0B3", "1F1 1F0 1B0 1B1 1F2 1B2 1F3 1B3"])[1:],
            "the orders go in a circle, each pass waiting for the one before: "
            "{'PP': 0, 'MB': 0, 'PASS': 'B'} (directive 5 (order)) -> {'PP': 0, 'MB': 1, 'PASS': 'F'} (directive 5 (order)) -> "
            "{'PP': 1, 'MB': 1, 'PASS': 'F'} (directive 6 (order))",
        ),
        (without(THREE, 6), "stage p0.s1 has no order"),
        ([*THREE[:4], {**THREE[2], "filter": {"QP": "*"}}, *THREE[4:]], "directive 4 (replicate): {'QP': '*'}: tag 'QP' is unknown here"),
        ([*THREE[:2], {**THREE[2], "devices": [0, 1]}, *THREE[3:]], "directive 2 (replicate): devices (0, 1) are not those of p0.s0, [0, 2]"),
    ],
)  # fmt: skip
def test_refusals_of_building_name_the_position_in_the_file(
    cluster_of: ClusterOf, program: list[dict[str, Any]], words: str | None
) -> None:
    strategy = Strategy.from_directives(ap.read_piper(program), Training(global_batch_size=8))
    marked = DENSE.annotate("PP", (0, 4), (4, 8))
    if words is None:
        ir.build(strategy, marked, cluster_of(4))
        return
    with pytest.raises(PlanError, match=re.escape(words)):
        ir.build(strategy, marked, cluster_of(4))


def test_a_stage_that_nobody_places(cluster_of: ClusterOf) -> None:
    strategy = Strategy.from_directives(ap.read_piper(THREE), Training(global_batch_size=8))
    marked = DENSE.annotate("PP", (0, 4), (4, 6), (6, 8))
    words = "the model's annotation PP 2: stage p0.s2 is placed nowhere (directives 0, 1 place others)"
    with pytest.raises(PlanError, match=re.escape(words)) as caught:
        ir.build(strategy, marked, cluster_of(4))
    assert len(caught.value.faults) == 1


# Refusals of writing


def test_what_piper_cannot_express_is_refused_with_every_reason(tmp_path: Path, cluster_of: ClusterOf) -> None:
    strategy = Strategy.from_directives(
        [
            d.pipeline(0, (4, 2)), d.cut(0, 0, blocks=(0, 3)), d.cut(0, 1, blocks=(3, 8)),
            d.pipeline(1, (2,)), d.cut(1, 0, blocks=(0, 8)),
            d.place({"PIPE": 0, "PP": 0}, [0, 1]), d.place({"PIPE": 0, "PP": 1}, [2, 3, 4, 5]), d.place({"PIPE": 1}, [6, 7]),
            d.degrees({"PIPE": 0, "PP": 1}, tensor_parallel_size=2, sequence_parallel=True),
            d.slices({"PIPE": 0, "PP": 0}, [(3, 1), (2, 0)]), d.recompute({"PIPE": 1}, "full"),
            d.replicate({}, shard_optimizer=True), d.buckets({}, bucket_bytes=1000), d.order(schedule="1f1b"),
        ],
        Training(global_batch_size=8),
    )  # fmt: skip
    with pytest.raises(ExportError) as caught:
        ap.write_piper(strategy, DENSE, cluster_of(8), tmp_path / "program.json")
    wanted = [
        "pipelines: there are 2", "pipeline 0, micro_batch_sizes: 2, 4 samples", "place, devices: p0.s0 has 2, p0.s1 has 4, p1.s0 has 2",
        "stage p0.s0, slices: micro-batch 0 is divided (3, 1)", "stage p0.s0, replicate, shard_optimizer (ZeRO 1)",
        "stage p0.s0, buckets, bucket_bytes: 1000", "stage p0.s1, degrees, tensor_parallel_size: 2",
        "stage p0.s1, degrees, sequence_parallel: true", "stage p0.s1, replicate, shard_optimizer (ZeRO 1)",
        "stage p0.s1, buckets, bucket_bytes: 1000", "stage p1.s0, recompute: full",
        "stage p1.s0, replicate, shard_optimizer (ZeRO 1)", "stage p1.s0, buckets, bucket_bytes: 1000",
    ]  # fmt: skip
    assert len(caught.value.faults) == len(wanted)
    for fault, start in zip(caught.value.faults, wanted, strict=True):
        assert fault.startswith(start)
        assert fault in str(caught.value)
    assert not (tmp_path / "program.json").exists()


def on_two_devices(more: d.Directive) -> Strategy:
    given: list[d.Directive] = [d.place({}, [0, 1]), d.split({}, num_microbatches=2), more]
    return Strategy.from_directives(given, Training(global_batch_size=4))


def test_experts_and_levels_that_piper_cannot_express(tmp_path: Path, cluster_of: ClusterOf) -> None:
    strategy = Strategy.uniform(EXPERTS, cluster_of(4), BATCH, expert_parallel_size=2)
    with pytest.raises(ExportError, match="expert_parallel_size: 2; in Piper experts are divided over all 4 members"):
        ap.write_piper(strategy, EXPERTS, cluster_of(4), tmp_path / "program.json")
    some = EXPERTS.annotate("HALF", (0, 3), (3, 8))
    strategy = on_two_devices(d.replicate({"HALF": 0}, shard_params=True))
    with pytest.raises(
        ExportError, match="its blocks have ZeRO levels 3, 3, 3, 0, 0, 0, 0, 0; replicate gives a stage one"
    ):
        ap.write_piper(strategy, some, cluster_of(2), tmp_path / "program.json")
    program = comes_back(on_two_devices(d.shard({"HALF": 0}, [0, 1])), some, cluster_of(2), tmp_path / "program.json")
    assert [it["filter"] for it in program if it["op"] == "shard"] == [{"PP": 0, "EP": 0}, {"PP": 0, "EP": 1}]
    coarse = replace(EXPERTS, annotations=()).annotate("EP", (1, 4), (4, 7)).annotate("HALF", (0, 3), (3, 8))
    strategy = on_two_devices(d.shard({"HALF": 0}, [0, 1]))
    with pytest.raises(ExportError, match="the sharded blocks 1, 2 are no regions EP of the model"):
        ap.write_piper(strategy, coarse, cluster_of(2), tmp_path / "program.json")
    strategy = Strategy.uniform(
        EXPERTS, cluster_of(6), BATCH, pipeline_parallel_size=3, expert_parallel_size=2, micro_batch_size=1
    )
    with pytest.raises(ExportError, match=re.escape("region EP 0, blocks 1..3, reaches out of the stage")):
        ap.write_piper(strategy, coarse, cluster_of(6), tmp_path / "program.json")


def test_the_model_comes_back_annotated(tmp_path: Path) -> None:
    strategy, model, cluster = uniform(EXPERTS, pipeline_parallel_size=2)
    bare = replace(model, annotations=())
    marked = ap.write_piper(strategy, bare, cluster, tmp_path / "program.json")
    assert [(a.name, a.index, a.start, a.stop) for a in marked.annotations] == [
        ("PP", 0, 0, 4), ("PP", 1, 4, 8), *(("EP", i, i + 1, i + 2) for i in range(6)),
    ]  # fmt: skip
    assert (
        ap.write_piper(strategy, marked, cluster, tmp_path / "program.json").annotations[-2:]
        == (marked.annotations[:2])
    )


def lines(program: Path) -> Iterator[str]:
    yield from program.read_text().splitlines()


def test_the_file_has_one_directive_a_line(tmp_path: Path) -> None:
    ap.write_piper(*uniform(pipeline_parallel_size=2), tmp_path / "new" / "program.json")
    found = list(lines(tmp_path / "new" / "program.json"))
    assert found[0] == "["
    assert found[-1] == "]"
    assert [json.loads(line.removesuffix(","))["op"] for line in found[1:-1]] == [
        "place", "place", "replicate", "replicate", "split", "order", "order",
    ]  # fmt: skip
