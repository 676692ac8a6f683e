"""Directives: what they build, and the words of their refusals."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from autopiper import ir
from autopiper.cluster.spec import Cluster
from autopiper.errors import PlanError
from autopiper.model.spec import Model
from autopiper.plan import Strategy, Training
from autopiper.plan import directives as d

ClusterOf = Callable[..., Cluster]
TWO_STAGES: list[d.Directive] = [
    d.pipeline(0, (2, 2, 1)),
    d.cut(0, 0, blocks=(0, 3)),
    d.cut(0, 1, blocks=(3, 4)),
    d.place({"PP": 0}, [0]),
    d.place({"PP": 1}, [1]),
    d.order(schedule="1f1b"),
]


def with_parameters(model: Model, parameters: int = 8) -> Model:
    return replace(model, blocks=tuple(replace(b, dense_parameters=parameters) for b in model.blocks))


def build(given: list[d.Directive], cluster: Cluster, batch: int = 5) -> ir.TrainingGraph:
    return ir.build(Strategy.from_directives(given, Training(global_batch_size=batch)), Model.chain(4), cluster)


def test_the_order_of_the_file_does_not_matter(cluster_of: ClusterOf) -> None:
    assert build(TWO_STAGES, cluster_of(2)) == build(list(reversed(TWO_STAGES[3:])) + TWO_STAGES[:3], cluster_of(2))


def test_strategy_and_its_directives_build_the_same_graph(cluster_of: ClusterOf) -> None:
    model, cluster = Model.chain(4), cluster_of(8)
    training = Training(global_batch_size=16)
    strategy = Strategy.uniform(
        model, cluster, training, micro_batch_size=2, tensor_parallel_size=2, pipeline_parallel_size=2, recompute="full"
    )
    written = Strategy.from_directives(strategy.directives(), training)
    assert ir.build(strategy, model, cluster) == ir.build(written, model, cluster)
    assert ir.build(strategy, model, cluster).pipelines[0].stages[1].members == ((4, 5), (6, 7))


def test_split_makes_equal_micro_batches(cluster_of: ClusterOf) -> None:
    graph = build([d.split({}, num_microbatches=5), *TWO_STAGES[1:]], cluster_of(2))
    assert graph.pipelines[0].micro_batch_sizes == (1,) * 5


def test_explicit_order(cluster_of: ClusterOf) -> None:
    rows = [d.order([[{"PP": s, "MB": m, "PASS": k}] for k in "FB" for m in range(3)]) for s in range(2)]
    graph = build([*TWO_STAGES[:-1], *rows], cluster_of(2))
    assert [p.text for p in graph.rows[0].passes()] == ["0F0", "0F1", "0F2", "0B0", "0B1", "0B2"]
    ir.verify(graph, ir.lower(graph))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (d.place({"PP": 7}, [0]), r"directive 6 (place): {'PP': 7} matches nothing; nearest: {'PP': 1}; the graph has PIPE 0: PP 0..1"),
        (d.place({"PQ": 0}, [0]), "tag 'PQ' is unknown here (did you mean 'PP'?); allowed: PIPE, PP"),
        (d.place({"PP": 0}, [0]), "stage p0.s0 is placed already"),
        (d.cut(0, 2, blocks=(2, 4)), "expected stage 2 with blocks from 4 to at most 4, so that every block is held exactly once"),
        (d.cut(3, 0, blocks=(0, 4)), "cut names pipeline 3; the graph has 1 pipelines"),
        (d.slices({"PP": 0}, [(2,), (2,)]), "slices of p0.s0: 2 rows for 3 micro-batches"),
        (d.slices({"PP": 0}, [(2,), (1,), (1,)]), "micro-batch 1: (1,) must be 1 numbers of 0 or more (one a member) with sum 2; their sum is 1"),
        (d.recompute({"PP": 0}, "ful"), "'ful' (did you mean 'full'?); allowed: none, selective, full"),
        (d.recompute({"PP": 0}, ("none",)), "1 choices for 3 blocks"),
        (d.degrees({"PP": 0}, tensor_parallel_size=2), "1 devices of p0.s0 do not divide by tensor_parallel_size 2"),
        (d.degrees({"PP": 0}, context_parallel_size=2), "context_parallel_size is 2; only 1 can be planned yet"),
        (d.replicate({"PP": 0}, [1]), "devices (1,) are not those of p0.s0, [0]"),
        (d.shard({"PP": 0}, [0]), "directive 6 (shard): {'PP': 0} matches no block with experts; model 'chain' has 0 of them"),
        (d.order(schedule="1f1f"), "schedule '1f1f' is unknown (did you mean '1f1b'?); allowed: gpipe, 1f1b"),
        (d.order(schedule="zb-h1"), "devices (0,) (p0.s0) are ordered already by directive 5 (order)"),
        (d.order(schedule="1f1b", pipelines=[4]), "order names pipeline 4"),
        (d.order([[{"PP": 0, "MB": 0, "PASS": "F"}, {"PP": 0, "MB": 1, "PASS": "B"}]]), "devices (0,) (p0.s0) are ordered already by directive 5 (order)"),
        (d.order([[{"PP": 0, "MB": 0}]]), "group 0: {'PP': 0, 'MB': 0} does not say which PASS; add one of F, B, BI, BW"),
        (d.order([[{"PP": 0, "MB": 0, "PASS": "X"}]]), "PASS is 'X'; allowed: F, B, BI, BW"),
        (d.buckets({}, bucket_bytes=0), "bucket_bytes is 0; it must be 1 or more"),
        (d.replicate({}, bucket_size=float("inf")), "bucket_size is inf; it must be above zero (MB)"),
        (d.replicate({}, bucket_size=float("nan")), "bucket_size is nan; it must be above zero (MB)"),
        (d.replicate({}, bucket_size=-1), "bucket_size is -1; it must be above zero (MB)"),
        (d.split({}, num_microbatches=5), "the micro-batches are given already, by pipeline directives or another split"),
        (d.pipeline(2, (1,)), "pipeline index 2 is out of turn; the next one is 1"),
    ],
)  # fmt: skip
def test_refusals_of_one_directive(cluster_of: ClusterOf, change: d.Directive, words: str) -> None:
    with pytest.raises(PlanError, match=re.escape(words)):
        build([*TWO_STAGES, change], cluster_of(2))


@pytest.mark.parametrize(
    ("given", "batch", "words"),
    [
        (TWO_STAGES, 6, "pipeline 0 has 5 samples, but global_batch_size is 6"),
        (TWO_STAGES[:-1], 5, "stage p0.s0 has no order; add order(schedule='1f1b', pipelines=(0,))"),
        (TWO_STAGES[:4] + TWO_STAGES[5:], 5, "directive 2 (cut): stage p0.s1 is placed nowhere (directives 3 place others); add place({'PIPE': 0, 'PP': 1}, devices)"),
        (TWO_STAGES[:2] + TWO_STAGES[3:4] + TWO_STAGES[5:], 5, "pipeline 0 holds blocks [0, 3) of 4; cut the rest too"),
        ([*TWO_STAGES[:3], d.place({"PP": 0}, [0, 1]), d.place({"PP": 1}, [0]), TWO_STAGES[5]], 5,
         "on ((0,),): both have device 0; stages that share a device must be on the very same devices, in the same members"),
        ([*TWO_STAGES[:4], d.place({"PP": 1}, [1, 2]), TWO_STAGES[5]], 5, "micro-batch of 1 samples does not divide among the 2 members"),
    ],
)  # fmt: skip
def test_refusals_of_the_whole(cluster_of: ClusterOf, given: list[d.Directive], batch: int, words: str) -> None:
    with pytest.raises(PlanError, match=re.escape(words)):
        build(given, cluster_of(3), batch)


def test_every_fault_is_told_at_once(cluster_of: ClusterOf) -> None:
    with pytest.raises(PlanError) as caught:
        build(TWO_STAGES[:3], cluster_of(2), batch=9)
    assert [f.split(": ")[1][:12] for f in caught.value.faults] == ["stage p0.s0 ", "stage p0.s1 "]
    with pytest.raises(PlanError) as caught:
        build([TWO_STAGES[0], d.cut(0, 0, blocks=(0, 3)), TWO_STAGES[3], TWO_STAGES[5]], cluster_of(2), batch=9)
    assert len(caught.value.faults) == 2


def test_what_was_refused_once_is_a_feature_now(cluster_of: ClusterOf) -> None:
    """ZeRO 3, two stages on one device, groups that overlap."""
    alone = ((1, 0, "B"), (1, 1, "F"), (0, 0, "B"), (1, 1, "B"), (0, 1, "B"))
    row: list[list[d.Filter]] = [
        [{"PP": 0, "MB": 0, "PASS": "F"}], [{"PP": 0, "MB": 1, "PASS": "F"}, {"PP": 1, "MB": 0, "PASS": "F"}],
    ]  # fmt: skip
    for s, m, k in alone:
        row.append([{"PP": s, "MB": m, "PASS": k}])
    given: list[d.Directive] = [
        d.pipeline(0, (2, 2)), d.cut(0, 0, blocks=(0, 3)), d.cut(0, 1, blocks=(3, 4)), d.place({}, [0, 1]),
        d.replicate({"PP": 0}, shard_params=True),
        d.order(row),
    ]  # fmt: skip
    model = with_parameters(Model.chain(4))
    graph = ir.build(Strategy.from_directives(given, Training(global_batch_size=4)), model, cluster_of(2))
    proofs = ir.verify(graph, ir.lower(graph))
    assert any("parameters are there when they are used (ZeRO 3)" in line for line in proofs)


def test_unknown_device_is_refused(cluster_of: ClusterOf) -> None:
    with pytest.raises(ValueError, match=re.escape("device 5 does not exist; cluster 'test' has devices 0..1")):
        build([*TWO_STAGES[:3], d.place({"PP": 0}, [5]), *TWO_STAGES[4:]], cluster_of(2))


def test_tensor_parallel_stays_in_a_node_and_divides_heads(cluster_of: ClusterOf) -> None:
    model = Model.transformer(num_layers=2, hidden_size=64, num_attention_heads=4, sequence_length=8, vocab_size=96)
    training = Training(global_batch_size=8)
    crossing = Strategy.uniform(model, cluster_of(1, 1), training, tensor_parallel_size=2)
    with pytest.raises(PlanError, match="must be of one type in one node"):
        ir.build(crossing, model, cluster_of(1, 1))
    eight = Strategy.uniform(model, cluster_of(8), training, tensor_parallel_size=8)
    with pytest.raises(PlanError, match=re.escape("num_attention_heads 4 of block")):
        ir.build(eight, model, cluster_of(8))
