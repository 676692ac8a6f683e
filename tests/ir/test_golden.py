"""Whole graphs and Programs as text, compared with files that were read and found right.

`AUTOPIPER_UPDATE_GOLDEN=1 pytest tests/ir/test_golden.py` writes them anew; read the difference before committing it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from autopiper import ir
from autopiper.cluster.spec import Cluster
from autopiper.ir.text import graph_text, programs_text
from autopiper.model.spec import Model
from autopiper.plan import Strategy, Training
from autopiper.plan import directives as d

GOLDEN = Path(__file__).parent / "golden"
ClusterOf = Callable[..., Cluster]


def dense(blocks: int) -> Model:
    model = Model.chain(blocks)
    return replace(model, blocks=tuple(replace(b, dense_parameters=60) for b in model.blocks))


def experts() -> Model:
    return Model.transformer(
        num_layers=2, hidden_size=8, num_attention_heads=2, sequence_length=4, vocab_size=16, num_experts=4,
        experts_per_token=2, moe_intermediate_size=16, gated_mlp=True, name="experts",
    )  # fmt: skip


def unlike_pipelines() -> tuple[Model, Strategy, int]:
    """Two pipelines of unlike depth, schedule and share; one stage shares each micro-batch unevenly."""
    given: list[d.Directive] = [
        d.pipeline(0, [3, 3, 3]), d.cut(0, 0, blocks=(0, 2)), d.place({"PIPE": 0, "PP": 0}, [0]),
        d.cut(0, 1, blocks=(2, 4)), d.place({"PIPE": 0, "PP": 1}, [1, 2]),
        d.slices({"PIPE": 0, "PP": 1}, [[2, 1], [1, 2], [3, 0]]),
        d.pipeline(1, [2, 1]), d.cut(1, 0, blocks=(0, 4)), d.place({"PIPE": 1}, [3]),
        d.recompute({"PIPE": 1}, "full"), d.buckets({}, bucket_bytes=400),
        d.order(schedule="1f1b", pipelines=[0]), d.order(schedule="gpipe", pipelines=[1]),
    ]  # fmt: skip
    return dense(4), Strategy.from_directives(given, Training(global_batch_size=12, clip_grad_norm=1.0)), 4


def zero_bubble_with_zero_2() -> tuple[Model, Strategy, int]:
    """ZB-H1 over two stages of two members each, gradients sharded."""
    model = dense(4)
    given: list[d.Directive] = [
        d.split({}, num_microbatches=3), d.cut(0, 0, blocks=(0, 2)), d.cut(0, 1, blocks=(2, 4)),
        d.place({"PP": 0}, [0, 1]), d.place({"PP": 1}, [2, 3]), d.replicate({}, shard_grads=True),
        d.order(schedule="zb-h1"),
    ]  # fmt: skip
    return model, Strategy.from_directives(given, Training(global_batch_size=6)), 4


def dual_pipe_v_of_experts() -> tuple[Model, Strategy, int]:
    """DualPipeV over two ranks of two members, experts divided over them, the rest under ZeRO 3."""
    given: list[d.Directive] = [
        d.split({}, num_microbatches=4),
        *(d.cut(0, s, blocks=(s, s + 1)) for s in range(4)),
        *(d.place({"PP": s}, [0, 1] if s in (0, 3) else [2, 3]) for s in range(4)),
        d.replicate({}, shard_grads=True, shard_params=True, reduce_stream="dp", gather_stream="gather"),
        d.shard({"PP": 1, "EP": "*"}, [2, 3], stream="ep"), d.shard({"PP": 2, "EP": "*"}, [2, 3], stream="ep"),
        d.order(schedule="dualpipe-v"),
    ]  # fmt: skip
    return experts(), Strategy.from_directives(given, Training(global_batch_size=8, precision="fp32")), 4


def dual_pipe() -> tuple[Model, Strategy, int]:
    """DualPipe: two pipelines in opposite directions over the same two ranks."""
    given: list[d.Directive] = []
    for p, where in enumerate(([0, 1], [1, 0])):
        given += [d.pipeline(p, [1, 1]), d.cut(p, 0, blocks=(0, 2)), d.cut(p, 1, blocks=(2, 4))]
        given += [d.place({"PIPE": p, "PP": s}, [device]) for s, device in enumerate(where)]
    given.append(d.order(schedule="dualpipe"))
    return dense(4), Strategy.from_directives(given, Training(global_batch_size=4)), 2


@pytest.mark.parametrize("case", [unlike_pipelines, zero_bubble_with_zero_2, dual_pipe_v_of_experts, dual_pipe])
def test_text_is_the_golden_one(case: Callable[[], tuple[Model, Strategy, int]], cluster_of: ClusterOf) -> None:
    model, strategy, devices = case()
    graph = ir.build(strategy, model, cluster_of(devices))
    programs = ir.lower(graph)
    ir.verify(graph, programs)
    text = f"# {case.__doc__}\n\n{graph_text(graph)}\n{programs_text(programs)}"
    path = GOLDEN / f"{case.__name__}.txt"
    if os.environ.get("AUTOPIPER_UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text(), "see the head of this file for how to write it anew"


def test_streams_stand_in_the_order_in_which_they_are_issued(cluster_of: ClusterOf) -> None:
    model, strategy, devices = dual_pipe_v_of_experts()
    graph = ir.build(strategy, model, cluster_of(devices))
    for program in ir.lower_all(graph):
        kinds = [actions[0].kind for actions in program.streams.values()]
        rank = {"SEND": 0, "UNSH": 1, "A2A_": 2, "REDU": 3, "LOSS": 4, "NORM": 5, "RECV": 7}
        ranks = [rank.get(kind[:4], 6) for kind in kinds]
        assert ranks == sorted(ranks), "sends leave first, receives are posted last (Piper's dispatch order)"
