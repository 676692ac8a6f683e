"""A plan or cost table survives the way through its file unchanged; whatever is wrong with a file is named."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopiper.cluster import Cluster, DeviceType, Link, Node
from autopiper.errors import CostError, PlanError
from autopiper.model import Block, Edge, Model, TensorSpec
from autopiper.plan import (
    Action,
    Alternative,
    BlockCost,
    CostTable,
    LinkCost,
    Place,
    Plan,
    Program,
    Provenance,
    Strategy,
    Training,
    Trial,
    Wait,
    file,
    load_plan,
)  # fmt: skip
from autopiper.plan import directives as d

positive = st.floats(1e-9, 1e18, allow_nan=False)
number = st.floats(0, 1e18, allow_nan=False)
name = st.text(max_size=8)


@st.composite
def cost_tables(draw: st.DrawFn) -> CostTable:
    keys = draw(st.lists(st.tuples(name, name, st.integers(1, 8), st.integers(1, 9)), max_size=4, unique=True))
    blocks = tuple(
        BlockCost(
            kind=k, device_type=t, tensor_parallel_size=tp, samples=n, forward_s=draw(number), backward_s=draw(number),
            backward_input_s=draw(number), backward_weight_s=draw(number), kept_bytes=draw(number),
            evidence=draw(st.sampled_from(["analytic", "measured", "interpolated", "given"])),
        )
        for k, t, tp, n in keys
    )  # fmt: skip
    rate = positive | st.just(float("inf"))
    links = draw(st.lists(st.builds(LinkCost, tier=name, latency_s=number, bytes_per_s=rate), max_size=2))
    return CostTable(
        blocks=blocks, links=tuple(links), precision=draw(st.none() | name), proportional=draw(st.booleans()),
        output_bytes=draw(st.none() | st.lists(number, max_size=3).map(tuple)), source=draw(name),
    )  # fmt: skip


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    pp, blocks = draw(st.integers(1, 3)), draw(st.integers(3, 6))
    rate = positive | st.just(float("inf"))
    kind = DeviceType(
        name=draw(name), memory_bytes=draw(rate), memory_bytes_per_s=draw(rate), peak_flops={"fp32": draw(positive)},
        price_per_hour=draw(st.none() | number),
    )  # fmt: skip
    link = Link(bytes_per_s=draw(rate), latency_s=draw(number))
    cluster = Cluster(
        name=draw(name), device_types=(kind,), nodes=(Node(name="n", devices=(kind.name,) * pp, intra=link, nic=link),)
    )
    model = Model(
        name=draw(name),
        blocks=tuple(
            Block(name=f"b{i}", kind="k", dense_parameters=draw(st.integers(0, 2**60))) for i in range(blocks)
        ),
        edges=(Edge(source=0, target=1, tensors=(TensorSpec(name="h", shape=(3, 4)),)),),
    )
    training = Training(global_batch_size=draw(st.integers(1, 6)), precision="fp32")
    strategy = Strategy.uniform(model, cluster, training, pipeline_parallel_size=pp)
    if draw(st.booleans()):
        strategy = Strategy.from_directives(
            [*strategy.directives(), d.order([[{"PP": 0, "MB": "*"}, {"PASS": "B"}]], fast=True, depth=2, scale=0.5), d.split({}, num_microbatches=2)],
            training,
        )  # fmt: skip
    program = Program(
        ranks=(0,), devices=(0,), places=(Place(pipeline=1, stage=0, member=0),),
        streams={
            "compute": (Action(kind="F", stream="compute", pipeline=1, stage=0, micro_batch=0),),
            "p1:s0.m0>s1.m0:F": (
                Action(
                    kind="SEND_F", stream="p1:s0.m0>s1.m0:F", pipeline=1, stage=0, micro_batch=0, peer=0, samples=(0, 2),
                    waits=(Wait(action="0F0"), Wait(action="0B0", block=draw(st.integers(0, 9)))),
                ),
            ),
        },
    )  # fmt: skip
    return Plan(
        model=model, cluster=cluster, costs=draw(cost_tables()), strategy=strategy,
        programs=(program,) * draw(st.integers(0, 2)), step_time_s=draw(positive), makespan_s=draw(positive),
        relative_error=draw(number), peak_memory_bytes=tuple(draw(st.lists(number, max_size=3))),
        lower_bound_s=draw(positive), binding=draw(name), notes=tuple(draw(st.lists(name, max_size=2))),
        uniform=draw(st.none() | st.builds(Alternative, label=name, step_time_s=positive, strategy=st.just(strategy))),
        provenance=Provenance(
            autopiper_version="0", libraries={"torch": "1"},
            history=(Trial(number=0, label="x", step_time_s=draw(st.none() | positive), elapsed_s=1.0),),
        ),
    )  # fmt: skip


@given(cost_tables())
def test_costs_round_trip(table: CostTable) -> None:
    text = json.dumps(file.encode("costs", table), allow_nan=False)  # standard JSON: no Infinity outside a string
    assert file.decode(json.loads(text), "costs", CostTable, CostError) == table


@settings(max_examples=60, deadline=None)
@given(plans())
def test_plans_round_trip(plan: Plan) -> None:
    text = json.dumps(file.encode("plan", plan), allow_nan=False)
    assert file.decode(json.loads(text), "plan", Plan, PlanError) == plan


def small_plan() -> Plan:
    kind = DeviceType(name="x", memory_bytes=1e9, memory_bytes_per_s=1e9, peak_flops={"fp32": 1e12})
    link = Link(bytes_per_s=float("inf"))
    cluster = Cluster(name="c", device_types=(kind,), nodes=(Node(name="n", devices=("x",), intra=link, nic=link),))
    model = Model.chain(2)
    training = Training(global_batch_size=2, precision="fp32")
    return Plan(
        model=model, cluster=cluster, costs=CostTable.from_layers(forward_s=[1, 1], backward_s=[2, 2]),
        strategy=Strategy.uniform(model, cluster, training), programs=(), step_time_s=6.0, makespan_s=6.0,
        relative_error=0.0, peak_memory_bytes=(0.0,), lower_bound_s=3.0, binding="compute",
        provenance=Provenance(autopiper_version="0"),
    )  # fmt: skip


def written(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    path = tmp_path / "plan.json"
    small_plan().save(path)
    return path, json.loads(path.read_text())


def test_a_saved_plan_loads(tmp_path: Path) -> None:
    path, content = written(tmp_path)
    assert load_plan(path) == small_plan()
    assert (content["autopiper"], content["schema_version"]) == ("plan", 2)
    assert load_plan(path).gap == 1.0


def spoil(content: dict[str, Any], where: str, key: str, value: Any) -> None:
    *parents, last = where.split(".")
    for step in parents:
        content = content[int(step) if isinstance(content, list) else step]
    if value is None:
        del content[last]
    if key:
        content[key] = content.pop(last, value)
    elif value is not None:
        content[last] = value


@pytest.mark.parametrize(
    ("where", "key", "value", "words"),
    [
        ("step_time_s", "step_time", 0, r"step_time: unknown field \(did you mean 'step_time_s'\?\)"),
        ("binding", "", None, "binding: .*required"),
        ("step_time_s", "", "fast", r"step_time_s: .*valid number.*\(came: 'fast'\)"),
        ("strategy.bucket_bytes", "bucket_byte", 0, r"strategy.bucket_byte: unknown field \(did you mean 'bucket_bytes'\?\)"),
        ("cluster.nodes.0.nics", "", 0, "node 'n': nics is 0; it must be 1 or more"),
        ("strategy.training.optimizer", "", "adamww", r"optimizer 'adamww' is unknown \(did you mean 'adamw'\?\)"),
        ("model.blocks.0.kernels", "", "many", r"model.blocks.0.kernels: .*valid integer.*\(came: 'many'\)"),
        ("schema_version", "", 7, "schema_version is 7; this AutoPiper reads 2"),
        ("autopiper", "", "costs", "its key 'autopiper' says 'costs', expected 'plan'"),
        ("programs", "", [{"ranks": [0], "devices": [0], "places": [[0, 0, 0]], "streams": {"compute": ["0F0 tail"]}}], "'0F0 tail' is not an action"),
        ("programs", "", [{"ranks": [0], "devices": [0], "places": [[0, 0, 0]], "streams": {"compute": ["0F0 after 0B0@x"]}}], "wait '0B0@x' names block 'x'; expected a number"),
        ("programs", "", None, r"its programs are wrong:\n  - programs: Input should be a valid tuple"),
        ("programs", "", [{"rank": [0], "devices": [0], "places": [], "streams": {}}], r"programs\.0\.rank: unknown field \(did you mean 'ranks'\?\)"),
        ("strategy.pipelines.0.stages.0.group.slices", "slicez", 0, r"stages\.0\.group\.slicez: unknown field \(did you mean 'slices'\?\)"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(tmp_path: Path, where: str, key: str, value: Any, words: str) -> None:
    path, content = written(tmp_path)
    spoil(content, where, key, value)
    path.write_text(json.dumps(content))
    with pytest.raises(PlanError, match=words) as fault:
        load_plan(path)
    assert str(path) in str(fault.value)


@pytest.mark.parametrize("keep", [0.0, 0.3, 0.999])
def test_a_truncated_file_is_said_to_be_one(tmp_path: Path, keep: float) -> None:
    path, _ = written(tmp_path)
    text = path.read_text().rstrip()
    path.write_text(text[: int(len(text) * keep)])
    with pytest.raises(PlanError, match=r"is not complete JSON: .*; was it cut off while being written\?"):
        load_plan(path)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"cannot read plan file '.*absent.json'"):
        load_plan(tmp_path / "absent.json")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanError, match=r"cannot read plan file '.*binary'"):
        load_plan(tmp_path / "binary")
    (tmp_path / "list").write_text("[1]")
    with pytest.raises(PlanError, match=r"is not an AutoPiper plan file: its key 'autopiper' says 'list'"):
        load_plan(tmp_path / "list")
    (tmp_path / "deep").write_text("[" * 100_000)
    with pytest.raises(PlanError, match="is not complete JSON"):
        load_plan(tmp_path / "deep")
    small_plan().save(tmp_path / "plan.json")
    with pytest.raises(
        CostError, match=r"is not an AutoPiper costs file: its key 'autopiper' says 'plan', expected 'costs'"
    ):
        CostTable.load(tmp_path / "plan.json")


def test_a_failed_write_leaves_the_old_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.json"
    file.write_text(path, "old")

    def fail(descriptor: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="no space left"):
        file.write_text(path, "new and longer")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]
