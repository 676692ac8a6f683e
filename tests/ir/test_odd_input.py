"""Whatever is handed over, a directive is refused with a message of AutoPiper's own, or settled into what a plan file can hold."""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import autopiper as ap
from autopiper import ir
from autopiper.cluster.spec import Cluster
from autopiper.errors import AutoPiperError, PlanError
from autopiper.model.spec import Model
from autopiper.plan import Strategy, Training
from autopiper.plan import directives as d

ClusterOf = Callable[..., Cluster]
MODEL = Model.transformer(
    num_layers=2, num_experts=4, experts_per_token=2, moe_intermediate_size=8, hidden_size=8, num_attention_heads=2,
    sequence_length=4, vocab_size=16,
)  # fmt: skip
odd: Any = d
"""The same, without its types."""
ODD: list[Any] = [
    None, True, False, 0, -1, 3, 10**30, 10**400, 10**5000, 1.0, 1.5, float("nan"), float("inf"), np.float64(2), np.bool_(True), np.int64(2),
    "", "x", "*", "1", b"1", [], [1], [[0, 1]], {}, {"PP": 0}, {0}, range(2), object(), int, np.arange(2), np.array(1), 1j,
    Fraction(2), Decimal(2), [None], ["a"], [1.0], [True], {"PP": None}, {"PP": [0]}, {"PP": 0.0}, {0: 0}, {"PP": "0"},
    {"PP": {}}, {"PP": float("nan")}, {"PIPE": 10**18}, {"PP": 10**5000}, {10**5000: 1}, [10**30], [("PP", 0)], [{}], [[{}]], [[None]],
    [[{"PP": 0, "MB": 0, "PASS": None}]], [[{"PP": 0, "MB": 0, "PASS": ["F"]}]], [[{"PP": 0, "MB": 0.0, "PASS": "F"}]],
]  # fmt: skip
MAKERS: dict[str, tuple[Callable[..., d.Directive], dict[str, Any]]] = {
    "pipeline": (d.pipeline, {"index": 0, "micro_batch_sizes": [4] * 4}),
    "cut": (d.cut, {"pipeline": 0, "stage": 0, "blocks": (0, 4)}),
    "place": (d.place, {"filter": {}, "devices": [0, 1, 2, 3], "stream": None}),
    "replicate": (d.replicate, {
        "filter": {}, "devices": None, "reduce_stream": None, "gather_stream": None, "bucket_size": None,
        "shard_grads": False, "shard_params": False, "shard_optimizer": False,
    }),
    "shard": (d.shard, {"filter": {}, "devices": [0, 1, 2, 3], "stream": None}),
    "split": (d.split, {"filter": {}, "num_microbatches": 4, "dim_name": "MB"}),
    "order": (d.order, {"filters": None, "schedule": "eager-1f1b", "pipelines": None, "forwards_per_hop": 2}),
    "degrees": (d.degrees, {
        "filter": {}, "tensor_parallel_size": 1, "context_parallel_size": 1, "expert_parallel_size": 1,
        "sequence_parallel": False,
    }),
    "slices": (d.slices, {"filter": {}, "slices": [(2, 1, 1, 0)] * 4}),
    "recompute": (d.recompute, {"filter": {}, "blocks": "full"}),
    "buckets": (d.buckets, {"filter": {}, "bucket_bytes": 100}),
}  # fmt: skip
BASE = [MAKERS[op][0](**MAKERS[op][1]) for op in ("split", "place", "order")]


def strategy_with(it: d.Directive) -> Strategy:
    clash = {it.op, "split"} if it.op == "pipeline" else {it.op}
    return Strategy.from_directives([*(b for b in BASE if b.op not in clash), it], Training(global_batch_size=16))


@pytest.mark.parametrize("op", MAKERS)
def test_every_field_of_every_directive_takes_odd_values(cluster_of: ClusterOf, tmp_path: Path, op: str) -> None:
    """Nothing but an AutoPiperError, and what is taken survives the way into a file and back."""
    make, usual = MAKERS[op]
    for name in usual:
        for value in ODD:
            try:
                plan = ap.make_plan(strategy_with(make(**usual | {name: value})), MODEL, cluster_of(4))
            except AutoPiperError as fault:
                assert any(word in str(fault) for word in (op, name, "global_batch_size", "shard_optimizer")), (
                    name,
                    value,
                    fault,
                )
            else:
                plan.save(tmp_path / "plan.json")
                assert ap.load_plan(tmp_path / "plan.json").strategy == plan.strategy, (name, value)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: odd.place({}, 3), "place: devices is 3; give a list of device ids, such as [3]"),
        (lambda: odd.place(None, [0]), "place: filter is None (NoneType); it must be a mapping of tags, such as {'PP': 0}, or {} for everything"),
        (lambda: odd.place({0: 1}, [0]), "place: filter {0: 1}: the tag 0 is no text; tags are PIPE, PP, MB, PASS and regions"),
        (lambda: odd.place({}, [0, 1.0]), "place: devices[1] is 1.0 (float); it must be a whole number"),
        (lambda: odd.place({}, [2**63]), "place: devices[0] is 9223372036854775808 (int); it must be within 64 bits, at most 9223372036854775807"),
        (lambda: odd.cut(0, 0, blocks=[1]), "cut: blocks is [1] (list); it must be a pair (start, stop)"),
        (lambda: odd.replicate({}, shard_params=1), "replicate: shard_params is 1 (int); it must be True or False"),
        (lambda: odd.replicate({}, reduce_stream=""), "replicate: reduce_stream is '' (str); it must be text that is not empty"),
        (lambda: odd.slices({}, [(1, 1), (1, None)]), "slices: slices[1][1] is None (NoneType); it must be a whole number"),
        (lambda: odd.order("F0"), "order: filters is 'F0' (str); it must be a list of groups, each a list of filters, or None"),
        (lambda: odd.order([[{}], None]), "order: filters, group 1 is None (NoneType); it must be a list of filters"),
        (lambda: odd.order(schedule="1f1b", forwards=None), "order: parameters['forwards'] is None (NoneType); it must be a number"),
        (lambda: odd.BucketsDirective(filter={}, bucket_bytes=2.0), "buckets: bucket_bytes is 2.0 (float); it must be a whole number"),
    ],
)  # fmt: skip
def test_wrong_types_are_refused_where_the_directive_is_made(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(PlanError, match=re.escape(words)):
        make()


def test_numbers_of_numpy_and_generators_become_plain_data() -> None:
    number: Any = np.int64
    given: list[Any] = [np.arange(2), np.ones((2, 2), dtype=int), (n for n in (1, 2)), np.float32(1.5)]
    made: Any = [
        d.place({"PP": number(1)}, given[0]), d.slices({}, given[1]), d.pipeline(number(0), given[2]),
        d.replicate({}, bucket_size=given[3]), d.order(schedule="eager-1f1b", forwards_per_hop=number(3)),
    ]  # fmt: skip
    assert made == [
        d.place({"PP": 1}, [0, 1]), d.slices({}, [(1, 1), (1, 1)]), d.pipeline(0, [1, 2]),
        d.replicate({}, bucket_size=1.5), d.order(schedule="eager-1f1b", forwards_per_hop=3),
    ]  # fmt: skip
    plain = [
        *made[0].devices, made[0].filter["PP"], *made[1].slices[0], made[2].index, made[3].bucket_size,
        made[4].parameters["forwards_per_hop"],
    ]  # fmt: skip
    assert {type(each) for each in plain} == {int, float}


@pytest.mark.parametrize(
    ("argument", "allowed", "words"),
    [
        ("sequence_parallel", (True, False), "sequence_parallel is 1.5 (float); it must be True or False"),
        ("leftover", ("first", "ends"), "leftover is 1.5 (float); it must be text"),
        ("zero", (0, 1, 2, 3), "zero is 1.5 (float); it must be a whole number"),
        ("context_parallel_size", (1,), "context_parallel_size is 1.5 (float); it must be a whole number"),
        ("schedule", (), "schedule is 1.5 (float); it must be text"),
        ("recompute", (), "recompute is 1.5 (float); it must be text"),
        ("devices", (None, range(2), [1]), "devices is 1.5 (float)"),
    ],
)
def test_uniform_takes_nothing_odd(
    cluster_of: ClusterOf, tmp_path: Path, argument: str, allowed: tuple[Any, ...], words: str
) -> None:
    training, make = Training(global_batch_size=8), Strategy.uniform
    with pytest.raises(PlanError, match=re.escape(words)):
        make(MODEL, cluster_of(4), training, **{argument: 1.5})  # type: ignore[arg-type]
    for value in ODD:
        try:
            plan = ap.make_plan(make(MODEL, cluster_of(4), training, **{argument: value}), MODEL, cluster_of(4))
        except AutoPiperError:
            continue
        assert any(type(value) is type(each) and value == each for each in allowed) or isinstance(
            value, (np.int64, range)
        )
        plan.save(tmp_path / "plan.json")
        assert ap.load_plan(tmp_path / "plan.json").strategy == plan.strategy


def test_expert_groups_need_experts(cluster_of: ClusterOf) -> None:
    words = "expert_parallel_size is 2, but model 'chain' has no experts to divide; allowed: 1"
    with pytest.raises(PlanError, match=re.escape(words)):
        Strategy.uniform(Model.chain(4), cluster_of(4), Training(global_batch_size=8), expert_parallel_size=2)


@pytest.mark.parametrize("value", [v for v in ODD if not isinstance(v, np.ndarray)], ids=lambda v: type(v).__name__)
def test_odd_arguments_of_the_verbs(cluster_of: ClusterOf, tmp_path: Path, value: Any) -> None:
    training = Training(global_batch_size=8)
    given = [Strategy.uniform(MODEL, cluster_of(4), training), MODEL, cluster_of(4)]
    for at in range(3):
        odd_one: list[Any] = [*given[:at], value, *given[at + 1 :]]
        for verb in (ir.build, ap.make_plan, ap.simulate, ap.verify):
            with pytest.raises(PlanError):
                verb(*odd_one)
        with pytest.raises(PlanError):
            ap.write_piper(odd_one[0], odd_one[1], odd_one[2], tmp_path / "program.json")
    with pytest.raises(PlanError, match="training is "):
        Strategy.from_directives(BASE, value)
    assert not list(tmp_path.iterdir()), "nothing is written for what is refused"


def test_names_that_no_file_can_have(cluster_of: ClusterOf) -> None:
    model = MODEL.annotate("PP", (0, 2), (2, 4))
    plan = ap.make_plan(Strategy.uniform(model, cluster_of(2), Training(global_batch_size=8)), model, cluster_of(2))
    with pytest.raises(OSError, match="no file can be called so"):
        plan.save("a\0b.json")
    with pytest.raises(PlanError, match="path is 3"):
        plan.save(3)  # type: ignore[arg-type]
    with pytest.raises(AutoPiperError, match="no file can be called so"):
        ap.trace(plan, "a\0b.json")
    with pytest.raises(AutoPiperError, match="no file can be called so"):
        ap.write_piper(plan.strategy, model, cluster_of(2), "a\0b.json")


def test_numbers_of_thousands_of_digits_in_a_piper_program(tmp_path: Path) -> None:
    path = tmp_path / "program.json"
    for number in ("9" * 5000, f'"{"9" * 5000}"', "9" * 30):
        path.write_text('[{"op": "place", "filter": {"PP": ' + number + '}, "devices": [0]}]')
        with pytest.raises(PlanError, match=r"place|is not JSON"):
            ap.read_piper(path)
