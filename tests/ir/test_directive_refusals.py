"""What is wrong in a directive is said in one message: its position and op, its filter, what came, and the nearest right one."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import pytest

from autopiper import ir
from autopiper.cluster.spec import Cluster
from autopiper.errors import PlanError
from autopiper.model.spec import Model
from autopiper.plan import Strategy, Training
from autopiper.plan import directives as d

ClusterOf = Callable[..., Cluster]
CHAIN = Model.chain(4).annotate("EP", (1, 2)).annotate("MID", (1, 3))
"""Stages hold blocks 0, 1 and 2, 3; regions EP 0 = block 1, MID 0 = blocks 1 and 2."""
EXPERTS = Model.transformer(
    num_layers=2, num_experts=6, experts_per_token=2, moe_intermediate_size=8, hidden_size=8, num_attention_heads=2,
    sequence_length=4, vocab_size=16,
)  # fmt: skip
SPLIT, CUT, PLACE = d.split({}, num_microbatches=4), [d.cut(0, 0, blocks=(0, 2)), d.cut(0, 1, blocks=(2, 4))], [
    d.place({"PP": 0}, [0, 1]), d.place({"PP": 1}, [2, 3]),
]  # fmt: skip
BASE: list[d.Directive] = [SPLIT, *CUT, *PLACE]
ORDER = d.order(schedule="1f1b")


def pass_of(stage: int, text: str) -> d.Filter:
    return {"PP": stage, "MB": int(text[-1]), "PASS": text[:-1]}


def row(stage: int, text: str) -> d.Directive:
    """Row of one stage, "F0 B0 F1+B1": groups of passes."""
    return d.order([[pass_of(stage, each) for each in group.split("+")] for group in text.split()])


def refused(
    given: Sequence[d.Directive], words: str, cluster: Cluster, model: Model = CHAIN, batch: int = 8
) -> PlanError:
    with pytest.raises(PlanError, match=re.escape(words)) as caught:
        ir.build(Strategy.from_directives(given, Training(global_batch_size=batch)), model, cluster)
    assert len(caught.value.faults) <= 1, "one fault, one message"
    return caught.value


@pytest.mark.parametrize(
    ("filter", "words"),
    [
        ({"PP": 5}, "{'PP': 5} matches nothing; nearest: {'PP': 1}; the graph has PIPE 0: PP 0..1"),
        ({"PIPE": 2, "PP": 0}, "{'PIPE': 2, 'PP': 0} matches nothing; nearest: {'PIPE': 0, 'PP': 0}"),
        ({"MID": 3}, "{'MID': 3} matches nothing; nearest: {'MID': 0}; the graph has PIPE 0: PP 0..1; regions: MID 0 = blocks 1..2"),
        ({"PP": 1, "EP": 0}, "{'PP': 1, 'EP': 0} matches nothing; nearest: {'PP': 0, 'EP': 0}"),
        ({"MIDD": 0}, "{'MIDD': 0}: tag 'MIDD' is unknown here (did you mean 'MID'?); allowed: PIPE, PP, EP, MID"),
        ({"PP": 0, "PASS": "F"}, "{'PP': 0, 'PASS': 'F'}: tag 'PASS' is unknown here"),
        ({"PP": 0, "MB": 0}, "{'PP': 0, 'MB': 0}: tag 'MB' is unknown here"),
        ({"PP": -1}, "{'PP': -1}: PP is -1; allowed: an index of 0 or more, '*' or '-'"),
        ({"PP": "x"}, "{'PP': 'x'}: PP is 'x'; allowed: an index of 0 or more, '*' or '-'"),
        ({"PP": True}, "{'PP': True}: PP is True; allowed"),
        ({"PP": "-"}, "{'PP': '-'}: everything has a PP, so '-' finds nothing"),
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    "make",
    [
        lambda f: d.place(f, [0]),
        lambda f: d.replicate(f),
        lambda f: d.shard(f, [0, 1]),
        lambda f: d.degrees(f),
        lambda f: d.slices(f, [(1, 1)] * 4),
        lambda f: d.recompute(f, "full"),
        lambda f: d.buckets(f, bucket_bytes=8),
    ],
)
def test_filters_that_match_nothing(
    cluster_of: ClusterOf, make: Callable[[d.Filter], d.Directive], filter: d.Filter, words: str
) -> None:
    it = make(filter)
    refused([*BASE, it, ORDER], f"directive 5 ({it.op}): {words}", cluster_of(4))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([*BASE, d.place({"PP": 1}, [2, 3])], "directive 5 (place): {'PP': 1}: stage p0.s1 is placed already, on ((2,), (3,))"),
        ([SPLIT, *CUT, d.place({"MID": 0}, [0])], "directive 3 (place) {'MID': 0}: selects blocks 1 of stage p0.s0, which has 0..1; this directive is for whole stages"),
        ([SPLIT, *CUT, PLACE[0], d.place({"PP": 1}, [2, 2])], "directive 4 (place): {'PP': 1}: devices (2, 2) must be one or more different ids"),
        ([SPLIT, *CUT, PLACE[0], d.place({"PP": 1}, [2, 9])], "directive 4 (place) {'PP': 1}: device 9 does not exist; cluster 'test' has devices 0..3"),
        ([SPLIT, *CUT, PLACE[0], d.place({"PP": 1}, [1, 2])], "directive 3 (place) {'PP': 0} puts stage p0.s0 on ((0,), (1,)), directive 4 (place) {'PP': 1} stage p0.s1 on ((1,), (2,)): both have device 1"),
        ([SPLIT, *CUT, PLACE[1]], "directive 1 (cut): stage p0.s0 is placed nowhere (directives 3 place others); add place({'PIPE': 0, 'PP': 0}, devices)"),
        ([*BASE, d.replicate({"PP": 1}, [0, 1])], "directive 5 (replicate) {'PP': 1}: devices (0, 1) are not those of p0.s1, [2, 3]"),
        ([*BASE, d.replicate({"MID": 0}, bucket_size=1)], "directive 5 (replicate) {'MID': 0}: selects blocks 1 of stage p0.s0"),
        ([*BASE, d.replicate({"PP": 0}, bucket_size=0)], "directive 5 (replicate): {'PP': 0}: bucket_size is 0; it must be above zero (MB)"),
        ([*BASE, d.shard({"PP": 0}, [0, 1])], "directive 5 (shard): {'PP': 0} matches no block with experts; model 'chain' has 0 of them"),
        ([d.split({}, num_microbatches=3), *BASE[1:]], "directive 0 (split) {}: 8 samples do not divide into 3 equal micro-batches; 8 mod 3 = 2"),
        ([d.split({"PP": 0}, num_microbatches=4), *BASE[1:]], "directive 0 (split) {'PP': 0} leaves out (parts of) p0.s1"),
        ([d.split({"MID": "*"}, num_microbatches=4), *BASE[1:]], "directive 0 (split) {'MID': '*'} leaves out (parts of) p0.s0, p0.s1"),
        ([*BASE, d.split({}, num_microbatches=2)], "directive 5 (split) {}: the micro-batches are given already, by pipeline directives or another split, and not as 2 of 4 samples"),
        ([*BASE, d.pipeline(0, [8])], "directive 0 (split) {}: the micro-batches are given already"),
        ([d.split({}, num_microbatches=4, dim_name="PP"), *BASE[1:]], "directive 0 (split) {}: dim_name 'PP' is taken or no name; usual is 'MB'"),
        ([SPLIT, CUT[0], d.cut(0, 1, blocks=(3, 4)), *PLACE], "directive 2 (cut): cut of pipeline 0: stage 1 with blocks [3, 4); expected stage 1 with blocks from 2"),
        ([*BASE, d.degrees({"PP": 0}, tensor_parallel_size=3)], "directive 5 (degrees): {'PP': 0}: 2 devices of p0.s0 do not divide by tensor_parallel_size 3"),
        ([*BASE, d.degrees({"PP": 0}, expert_parallel_size=3)], "directive 5 (degrees): {'PP': 0}: 2 members of p0.s0 do not divide by expert_parallel_size 3; 2 mod 3 = 2"),
        ([*BASE, d.slices({"PP": 0}, [(2, 0)])], "directive 5 (slices) {'PP': 0}: slices of p0.s0: 1 rows for 4 micro-batches"),
        ([*BASE, d.recompute({"PP": 0}, "ful")], "directive 5 (recompute) {'PP': 0}: recompute of p0.s0: 'ful' (did you mean 'full'?); allowed: none, selective, full"),
        ([*BASE, d.buckets({"PP": 0}, bucket_bytes=0)], "directive 5 (buckets) {'PP': 0}: bucket_bytes is 0; it must be 1 or more"),
    ],
)  # fmt: skip
def test_refusals_of_single_directives(cluster_of: ClusterOf, given: list[d.Directive], words: str) -> None:
    refused([*given, ORDER], words, cluster_of(4))


REST = "F1 B1 F2 B2 F3 B3"


@pytest.mark.parametrize(
    ("order", "words"),
    [
        (d.OrderDirective(), "order takes either schedule= (a family) or filters= (explicit groups)"),
        (d.order(schedule="1f1f"), "schedule '1f1f' is unknown (did you mean '1f1b'?); allowed: gpipe, 1f1b,"),
        (d.order(schedule="eager-1f1b", forward_per_hop=1), "schedule 'eager-1f1b' has no parameter 'forward_per_hop' (did you mean 'forwards_per_hop'?); it takes: forwards_per_hop (default 2)"),
        (d.order(schedule="zb-v"), "schedule 'zb-v': its stages lie in a V, r and 2R - 1 - r on device group r of 2; but device group 0 holds 0 instead of 0, 3"),
        (d.order(schedule="dualpipe"), "schedule 'dualpipe' orders 2 pipelines together; order names 1 of them"),
        (d.order(schedule="1f1b", pipelines=[1]), "order names pipeline 1; the graph has pipelines 0..0"),
        (d.order([]), "filters is empty; give at least one group"),
        (d.order([[]]), "group 0 is empty; give at least one filter"),
        (d.order([[pass_of(0, "F0")], [pass_of(1, "F0")]]), "group 1: {'PP': 1, 'MB': 0, 'PASS': 'F'} is on devices (2, 3), the groups before it on (0, 1); a row is for one device group"),
        (row(0, "F9"), "group 0: {'PP': 0, 'MB': 9, 'PASS': 'F'} matches nothing; p0.s0 has MB 0..3; nearest: {'PP': 0, 'MB': 3, 'PASS': 'F'}"),
        (row(0, "F0 FW0"), "group 1: {'PP': 0, 'MB': 0, 'PASS': 'FW'}: PASS is 'FW' (did you mean 'F'?); allowed: F, B, BI, BW"),
        (d.order([[{"PP": 0, "MB": 0}]]), "group 0: {'PP': 0, 'MB': 0} does not say which PASS; add one of F, B, BI, BW"),
        (d.order([[{"MB": 0, "PASS": "F"}]]), "group 0: {'MB': 0, 'PASS': 'F'} selects passes of p0.s0, p0.s1; name one stage"),
        (d.order([[{"PP": 0, "PASS": "F"}, pass_of(0, "B0")]]), "group 0: {'PP': 0, 'PASS': 'F'} selects 4 passes; in a group of several filters each names one: add MB"),
        (d.order([[{"PP": 0, "MBS": 0, "PASS": "F"}]]), "group 0: {'PP': 0, 'MBS': 0, 'PASS': 'F'}: tag 'MBS' is unknown here (did you mean 'MB'?)"),
        (row(0, "F0+B0"), "group 0: {'PP': 0, 'MB': 0, 'PASS': 'F'} and {'PP': 0, 'MB': 0, 'PASS': 'B'} cannot overlap, since one waits for the other"),
        (row(0, f"F0 BI0+BW0 {REST}"), "group 1: {'PP': 0, 'MB': 0, 'PASS': 'BI'} and {'PP': 0, 'MB': 0, 'PASS': 'BW'} cannot overlap"),
        (row(0, "F0 F0 B0"), "{'PP': 0, 'MB': 0, 'PASS': 'F'} stands twice in the row"),
        (row(0, f"B0 F0 {REST}"), "{'PP': 0, 'MB': 0} has B, F in the row (did you mean 'F, B'?); F must come first"),
        (row(0, f"F0 {REST}"), "{'PP': 0, 'MB': 0} has F in the row; F must come first, then either B, or BI and BW"),
        (row(0, f"F0 BI0 {REST}"), "{'PP': 0, 'MB': 0} has F, BI in the row (did you mean 'F, B'?)"),
        (row(0, f"F0 BW0 BI0 {REST}"), "{'PP': 0, 'MB': 0} has F, BW, BI in the row (did you mean 'F, BI, BW'?)"),
        (row(0, f"F0 B0 BW0 {REST}"), "wrong BI/BW pairing: one BI and one BW each, BI first, and no B beside them"),
    ],
)  # fmt: skip
def test_refusals_of_order(cluster_of: ClusterOf, order: d.Directive, words: str) -> None:
    error = refused([*BASE, order], words, cluster_of(4))
    assert str(error).startswith("directive 5 (order): ")


def test_orders_that_belong_together(cluster_of: ClusterOf) -> None:
    straight = f"F0 B0 {REST}"
    refused(
        [*BASE, ORDER, d.order(schedule="gpipe")],
        "directive 6 (order): devices (0, 1) (p0.s0) are ordered already by directive 5 (order)", cluster_of(4),
    )  # fmt: skip
    refused([*BASE, row(0, straight)], "stage p0.s1 has no order; add order(schedule='1f1b', pipelines=(0,)), or a row of "
            "its passes beside directive 5 (order)", cluster_of(4))  # fmt: skip
    crossed = str(refused(
        [*BASE, row(0, straight), row(1, "F1 F0 B0 B1 F2 B2 F3 B3")],
        "the orders go in a circle, each pass waiting for the one before: ", cluster_of(4),
    ))  # fmt: skip
    steps = re.findall(r"(\{[^}]*\}) \((directive \d \(order\))\)", crossed)
    assert steps[0] == steps[-1]
    assert set(steps) == {
        ("{'PP': 0, 'MB': 0, 'PASS': 'B'}", "directive 5 (order)"),
        ("{'PP': 0, 'MB': 1, 'PASS': 'F'}", "directive 5 (order)"),
        ("{'PP': 1, 'MB': 1, 'PASS': 'F'}", "directive 6 (order)"),
        ("{'PP': 1, 'MB': 0, 'PASS': 'F'}", "directive 6 (order)"),
        ("{'PP': 1, 'MB': 0, 'PASS': 'B'}", "directive 6 (order)"),
    }


def test_passes_of_other_micro_batches_and_late_weights_may_overlap(cluster_of: ClusterOf) -> None:
    """One micro-batch's W of the later stage and its B of the earlier one do not wait for each other."""
    both: list[d.Directive] = [SPLIT, *CUT, d.place({}, [0, 1])]
    text = "0F0 1F0 1BI0 1BW0+0B0 0F1 1F1 0F2+1B1 0B1 1F2 0F3+1B2 1F3+0B2 1B3 0B3"
    groups = [[pass_of(int(each[0]), each[1:]) for each in group.split("+")] for group in text.split()]
    graph = ir.build(
        Strategy.from_directives([*both, d.order(groups)], Training(global_batch_size=8)), CHAIN, cluster_of(2)
    )
    assert [len(group) for group in graph.rows[0].groups].count(2) == 4
    groups[3:4] = [[pass_of(1, "BW0"), pass_of(1, "F0")]]
    refused([*both, d.order(groups)], "group 3: {'PP': 1, 'MB': 0, 'PASS': 'BW'} and {'PP': 1, 'MB': 0, 'PASS': 'F'}", cluster_of(2))  # fmt: skip


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ([d.shard({}, [0, 1, 2, 3])], "directive 2 (shard): {}: 6 experts of block 'layers.0' do not divide over 4 members of p0.s0; 6 mod 4 = 2; say a smaller group with degrees(expert_parallel_size=)"),
        ([d.shard({"EP": "*"}, [0, 1])], "directive 2 (shard) {'EP': '*'}: devices (0, 1) are not those of p0.s0, [0, 1, 2, 3]"),
        ([d.degrees({}, expert_parallel_size=2)], "stage p0.s0 has expert_parallel_size 2, but no shard directive says which experts"),
        ([d.degrees({}, expert_parallel_size=2), d.shard({}, [0, 1, 2, 3]), d.shard({"EP": 0}, [0, 1, 2, 3])], "directive 4 (shard): {'EP': 0}: the experts of blocks 1 are sharded already; two boundaries on one region"),
        ([d.degrees({}, expert_parallel_size=2), d.replicate({"EP": "*"}, shard_params=True), d.shard({"EP": 0}, [0, 1, 2, 3])], "directive 3 (replicate) {'EP': '*'} and directive 4 (shard) {'EP': 0} both set the boundary of one region (EP)"),
    ],
)  # fmt: skip
def test_refusals_of_sharding_experts(cluster_of: ClusterOf, more: list[d.Directive], words: str) -> None:
    refused([SPLIT, d.place({}, [0, 1, 2, 3]), *more], words, cluster_of(4), EXPERTS, 16)


def test_streams_of_names_that_programs_use_are_refused() -> None:
    model, cluster = Model.chain(2), Cluster.local(num_devices=2, ideal=True)
    for name in ("compute", "loss", "norm", "p0:s0.m0>s1.m0:F", " "):
        given: list[d.Directive] = [d.place({}, [0, 1]), d.replicate({}, reduce_stream=name)]
        strategy = Strategy.from_directives(given, Training(global_batch_size=2))
        with pytest.raises(
            PlanError, match=re.escape(f"directive 1 (replicate) {{}}: stream '{name}' is taken or no name")
        ):
            ir.build(strategy, model, cluster)


def test_members_that_divide_experts_all_have_samples() -> None:
    model = Model.transformer(
        num_layers=1, hidden_size=8, num_attention_heads=2, sequence_length=4, vocab_size=16, num_experts=4,
        experts_per_token=2,
    )  # fmt: skip
    given: list[d.Directive] = [d.place({}, [0, 1]), d.shard({"EP": "*"}, [0, 1]), d.slices({}, [[2, 0]])]
    strategy = Strategy.from_directives(given, Training(global_batch_size=2))
    with pytest.raises(
        PlanError, match=r"p0.s0, micro-batch 0: slices \(2, 0\) of members 0..1, which divide the experts"
    ):
        ir.build(strategy, model, Cluster.local(num_devices=2, ideal=True))
