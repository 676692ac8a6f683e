"""The table of a plan says what the timeline says, and every line of it whole at 100 columns."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

import autopiper as ap
from autopiper import costmodel, ir
from autopiper.model import Block
from autopiper.plan import Alternative, Plan, Provenance, Schedule, Strategy, Timeline
from autopiper.report.summary import block_names, summarize
from autopiper.report.table import count, plan_text, seconds, size

GIB = 2**30


def mixed_plan() -> tuple[Plan, Timeline]:
    """Two unlike pipelines, one device idle: A100s take three quarters of the batch, V100s the rest with recompute."""
    model = ap.Model.from_preset("llama-3-8b", sequence_length=4096)
    fast = ap.Cluster.homogeneous("a100-80g", num_nodes=1, devices_per_node=8)
    slow = ap.Cluster.homogeneous("v100-32g", num_nodes=1, devices_per_node=9)
    nodes = (replace(fast.nodes[0], name="fast"), replace(slow.nodes[0], name="slow"))
    cluster = ap.Cluster(name="mixed", device_types=fast.device_types + slow.device_types, nodes=nodes)
    training = ap.Training(global_batch_size=64).resolve(d.type for d in cluster.devices())
    costs = ap.price(model, cluster, training)
    first = Strategy.uniform(
        model,
        cluster,
        replace(training, global_batch_size=48),
        tensor_parallel_size=4,
        pipeline_parallel_size=1,
        devices=range(8),
    )
    second = Strategy.uniform(
        model, cluster, replace(training, global_batch_size=16), tensor_parallel_size=4, pipeline_parallel_size=2,
        devices=range(8, 16), recompute="full",
    )  # fmt: skip
    strategy = Strategy(
        training=training, pipelines=first.pipelines + second.pipelines,
        schedules=(Schedule(family="gpipe", pipelines=(0,)), Schedule(family="1f1b", pipelines=(1,))),
    )  # fmt: skip
    graph = ir.build(strategy, model, cluster)
    programs = tuple(ir.lower(graph))
    timeline = costmodel.simulate(graph, programs, costs)
    plan = Plan(
        model=model, cluster=cluster, costs=costs, strategy=strategy, programs=programs, step_time_s=timeline.step_time_s,
        makespan_s=timeline.makespan_s, relative_error=timeline.relative_error, peak_memory_bytes=timeline.peak_memory_bytes,
        lower_bound_s=timeline.step_time_s / 1.25, binding="the work of all devices together",
        uniform=Alternative(label="tp 8 x pp 2 x dp 1", step_time_s=timeline.step_time_s * 1.5, strategy=first),
        notes=("1 device idle: it would lengthen every all-reduce " + "and so on " * 20,), provenance=Provenance(autopiper_version="0"),
    )  # fmt: skip
    return plan, timeline


@pytest.fixture(scope="module")
def mixed() -> tuple[Plan, Timeline]:
    return mixed_plan()


def test_summary_says_what_the_timeline_says(mixed: tuple[Plan, Timeline]) -> None:
    plan, timeline = mixed
    s = summarize(plan, timeline)
    assert s["step_time_s"] == timeline.step_time_s
    assert s["gap"] == pytest.approx(0.25)
    assert s["uniform"]["speedup"] == pytest.approx(1.5)
    assert [p["share"] for p in s["pipelines"]] == [0.75, 0.25]
    assert [p["schedule"] for p in s["pipelines"]] == ["gpipe", "1f1b"]
    assert sum(s["breakdown_s"].values()) == pytest.approx(timeline.makespan_s)
    assert s["idle"] == [{"type": "v100-32g", "devices": [16], "nodes": ["slow"]}]
    lanes = {d: lane for lane in timeline.lanes for d in lane.devices}
    seen = []
    for pipe in s["pipelines"]:
        for stage in pipe["stages"]:
            for group in stage["groups"]:
                own = [lanes[d] for d in group["devices"]]
                assert group["peak_memory_bytes"] == max(lane.peak_memory_bytes for lane in own)
                busy = sum(lane.time.compute_s + lane.time.recompute_s for lane in own)
                assert group["busy_fraction"] == pytest.approx(busy / len(own) / timeline.makespan_s)
                assert group["limit_bytes"] == plan.cluster.device_type(group["type"]).usable_bytes
                seen += group["devices"]
    assert sorted(seen) == list(plan.devices)
    assert [stage["recompute"] for stage in s["pipelines"][1]["stages"]] == [{"full": 17}, {"full": 17}]


def test_text_holds_everything_a_newcomer_asks_for(mixed: tuple[Plan, Timeline]) -> None:
    plan, timeline = mixed
    text = plan_text(plan, timeline)
    flat = " ".join(text.split())
    s = summarize(plan, timeline)
    group = s["pipelines"][1]["stages"][0]["groups"][0]
    used, limit = group["peak_memory_bytes"], group["limit_bytes"]
    for words in (
        "llama-3-8b: 8.03 B parameters, sequences of 4,096 tokens",
        "mixed: 1 node of 8 x a100-80g, 300 GB/s inside, 25 GB/s between; 1 node of 9 x v100-32g",
        f"Step time {seconds(timeline.step_time_s)}",
        "1.50 x the speed of the best uniform 3D layout",
        "tp 8 x pp 2 x dp 1",
        f"{timeline.tokens_per_s:,.0f} tokens/s",
        f"MFU {timeline.mfu:.1%}",
        "fp16: best that all used devices support (bf16 is not supported by v100-32g); with dynamic loss scaling",
        "Pipeline 0: 48 samples (75.0% of the batch) in 24 micro-batches of 2; schedule gpipe",
        "Pipeline 1: 16 samples (25.0% of the batch) in 16 micro-batches of 1; schedule 1f1b",
        f"{used / GIB:.1f} / {limit / GIB:.1f} GiB {used / limit:.0%} {group['busy_fraction']:.0%}",
        f"Bubble {timeline.bubble_fraction:.1%}",
        f"{timeline.exposed_fraction:.1%} of device time",
        "bound by the work of all devices together",
        "at most 25.0% longer than the best possible one",
        "Idle 1 x v100-32g on slow",
        "it would lengthen every all-reduce",
    ):
        assert words in flat


@pytest.mark.parametrize("width", range(80, 150, 5))
def test_no_line_is_cut(mixed: tuple[Plan, Timeline], width: int) -> None:
    text = plan_text(*mixed, width=width)
    assert max(len(line) for line in text.splitlines()) <= width
    assert "…" not in text
    assert [line.split()[-3:] for line in text.splitlines() if line.startswith("stage")] == [
        ["memory", "full", "busy"]
    ] * 2
    assert len([line for line in text.splitlines() if re.search(r" GiB +\d+% +\d+%$", line)]) == 3
    assert " ".join(text.split()).count("and so on") == 20
    assert "\x1b" not in text
    assert not [line for line in text.splitlines() if line != line.rstrip()]


def test_unknown_bound_and_no_uniform_layout_are_said(mixed: tuple[Plan, Timeline]) -> None:
    plan, timeline = mixed
    text = plan_text(replace(plan, lower_bound_s=0.0, uniform=None), timeline)
    assert "Lower bound    none known" in text
    assert "Compared    with nothing: it was not searched" in text
    assert "no uniform 3D layout fits this cluster" in plan_text(replace(plan, uniform=None), timeline)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["embedding", "layer0", "layer1", "layer2", "head"], "embedding, layers 0-2, head"),
        (["layer7"], "layer 7"),
        (["model.layers.0", "model.layers.1"], "model.layers 0-1"),
        (["h.0", "h.2", "h.3"], "h 0, h 2-3"),
        (["a", "b"], "a, b"),
        (["0", "1"], "blocks 0-1"),
    ],
)
def test_block_names(names: list[str], expected: str) -> None:
    model = ap.Model(name="m", blocks=tuple(Block(name=n, kind="k") for n in ["before", *names]), edges=())
    assert block_names(model, 1, len(names) + 1) == expected


def test_numbers_in_words() -> None:
    assert [seconds(x) for x in (43.123, 1234.5, 0.01234, 5e-6, 0.0)] == ["43.1 s", "1234 s", "12.3 ms", "5 us", "0 us"]
    assert [count(x) for x in (8.03e9, 3.14e6, 812)] == ["8.03 B", "3.14 M", "812"]
    assert [size(x) for x in (3 * GIB, GIB / 4)] == ["3.0 GiB", "256.0 MiB"]
