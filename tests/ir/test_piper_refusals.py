"""Piper's programs: what is wrong in one is refused with its position; what Piper cannot express, with every reason."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from piper_programs import DENSE, EXPERTS, ONE_F_ONE_B, base, ordered

import autopiper as ap
from autopiper import ir
from autopiper.cluster.spec import Cluster
from autopiper.errors import ExportError, PlanError
from autopiper.plan import Strategy, Training
from autopiper.plan import directives as d

ClusterOf = Callable[..., Cluster]
BATCH = Training(global_batch_size=16)


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
        ([*THREE[:2], {**THREE[2], "devices": [0, 1]}, *THREE[3:]], "directive 2 (replicate) {'PP': 0}: devices (0, 1) are not those of p0.s0, [0, 2]"),
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
    ap.write_piper(on_two_devices(d.shard({"HALF": 0}, [0, 1])), some, cluster_of(2), tmp_path / "program.json")
    assert [it.filter for it in ap.read_piper(tmp_path / "program.json") if isinstance(it, d.ShardDirective)] == [
        {"PP": 0, "EP": 0}, {"PP": 0, "EP": 1},
    ]  # fmt: skip
    coarse = replace(EXPERTS, annotations=()).annotate("EP", (1, 4), (4, 7)).annotate("HALF", (0, 3), (3, 8))
    strategy = on_two_devices(d.shard({"HALF": 0}, [0, 1]))
    with pytest.raises(ExportError, match="the sharded blocks 1, 2 are no regions EP of the model"):
        ap.write_piper(strategy, coarse, cluster_of(2), tmp_path / "program.json")
    strategy = Strategy.uniform(
        EXPERTS, cluster_of(6), BATCH, pipeline_parallel_size=3, expert_parallel_size=2, micro_batch_size=1
    )
    with pytest.raises(ExportError, match=re.escape("region EP 0, blocks 1..3, reaches out of the stage")):
        ap.write_piper(strategy, coarse, cluster_of(6), tmp_path / "program.json")
