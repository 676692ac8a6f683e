"""Lowering: Programs as written down by hand; verification: every kind of damage is named."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from autopiper import ir
from autopiper.cluster.spec import Cluster
from autopiper.errors import PlanError
from autopiper.ir.joint import join
from autopiper.model.spec import Model, TiedParameter
from autopiper.plan import Action, Program, Strategy, Training, Wait
from autopiper.plan import directives as d

ClusterOf = Callable[..., Cluster]


def tied_model(blocks: int = 4, parameters: int = 100, tied: int = 40) -> Model:
    model = Model.chain(blocks)
    return replace(
        model,
        blocks=tuple(replace(b, dense_parameters=parameters) for b in model.blocks),
        tied=(TiedParameter(name="embedding", blocks=(0, blocks - 1), parameters=tied),),
    )


def two_pipelines(cluster: Cluster, clip: float | None = None) -> tuple[ir.TrainingGraph, tuple[Program, ...]]:
    """Pipeline 0: cut 1/3 on devices 0 and 1+2; pipeline 1: cut 3/1 on devices 3 and 4."""
    written: list[d.Directive] = [
        d.pipeline(0, (2, 1)), d.cut(0, 0, blocks=(0, 1)), d.cut(0, 1, blocks=(1, 4)),
        d.place({"PIPE": 0, "PP": 0}, [0]), d.place({"PIPE": 0, "PP": 1}, [1, 2]),
        d.slices({"PIPE": 0, "PP": 1}, [(1, 1), (0, 1)]),
        d.pipeline(1, (3,)), d.cut(1, 0, blocks=(0, 3)), d.cut(1, 1, blocks=(3, 4)),
        d.place({"PIPE": 1, "PP": 0}, [3]), d.place({"PIPE": 1, "PP": 1}, [4]),
        d.buckets({}, bucket_bytes=400), d.order(schedule="1f1b"),
    ]  # fmt: skip
    training = Training(global_batch_size=6, clip_grad_norm=clip)
    graph = ir.build(Strategy.from_directives(written, training), tied_model(), cluster)
    return graph, ir.lower(graph)


def texts(program: Program, stream: str) -> list[str]:
    return [a.text for a in program.streams.get(stream, ())]


def test_programs_as_written_by_hand(cluster_of: ClusterOf) -> None:
    _, programs = two_pipelines(cluster_of(5))
    first, second, third = programs[:3]
    assert texts(first, "compute") == ["0F0", "0F1", "0B0", "0B1", "g2UPDATE", "g3UPDATE"]
    assert texts(first, "p0:s0.m0>s1.m0:F") == ["0SEND_F0>0[0:1]"]
    assert texts(first, "p0:s0.m0>s1.m1:F") == ["0SEND_F0>1[1:2]", "0SEND_F1>1[0:1]"]
    assert texts(second, "compute")[:2] == ["1F0", "1B0"]
    assert texts(third, "compute")[:4] == ["1F0", "1B0", "1F1", "1B1"]
    assert texts(third, "p0:s1.m1>s0.m0:B") == ["1SEND_B0>0[1:2]", "1SEND_B1>0[0:1]"]


def test_gradient_blocks_intersect_the_cuts_of_all_pipelines(cluster_of: ClusterOf) -> None:
    graph, _ = two_pipelines(cluster_of(5))
    found = [(b.kind, b.blocks, [p.text for p in b.holders], b.elements) for b in graph.gradient_blocks]
    assert found == [
        ("dense", (3,), ["p0.s1.m0", "p0.s1.m1", "p1.s1.m0"], 60),
        ("dense", (2, 1), ["p0.s1.m0", "p0.s1.m1", "p1.s0.m0"], 200),
        ("dense", (0,), ["p0.s0.m0", "p1.s0.m0"], 60),
        ("tied", (3, 0), ["p0.s0.m0", "p1.s0.m0", "p0.s1.m0", "p0.s1.m1", "p1.s1.m0"], 40),
    ]
    assert [(b.start, b.stop, b.lowest_block) for b in graph.gradient_blocks[1].buckets] == [(0, 100, 2), (100, 200, 1)]


@pytest.mark.parametrize("limit", [1, 7, 60, 100, 160, 1000])
def test_buckets_tile_their_block_within_the_limit(cluster_of: ClusterOf, limit: int) -> None:
    model, cluster = tied_model(), cluster_of(2)
    strategy = replace(Strategy.uniform(model, cluster, Training(global_batch_size=4)), bucket_bytes=4 * limit)
    for block in ir.build(strategy, model, cluster).gradient_blocks:
        edges = [e for b in block.buckets for e in (b.start, b.stop)]
        assert edges[0] == 0 and edges[-1] == block.elements
        assert edges[1:-1:2] == edges[2::2]
        assert all(0 < b.stop - b.start <= limit for b in block.buckets)


def test_a_bucket_waits_only_for_the_blocks_it_touches(cluster_of: ClusterOf) -> None:
    _, programs = two_pipelines(cluster_of(5))
    waits = {a.text: a.waits for a in programs[3].actions() if a.kind == "REDUCE_GRAD"}
    assert waits["g1.0REDUCE_GRAD"] == (Wait(action="0B0", block=2),)
    assert waits["g1.1REDUCE_GRAD"] == (Wait(action="0B0", block=1),)
    assert waits["g3.0REDUCE_GRAD"] == (Wait(action="0B0", block=0),)


def test_norm_is_a_barrier_only_with_clipping(cluster_of: ClusterOf) -> None:
    for clip in (None, 1.0):
        _, programs = two_pipelines(cluster_of(5), clip)
        assert all(("norm" in p.streams) == (clip is not None) for p in programs)
        updates = [a for p in programs for a in p.actions() if a.kind == "UPDATE"]
        assert all((Wait(action="NORM") in u.waits) == (clip is not None) for u in updates)


def test_proofs_are_told_in_words(cluster_of: ClusterOf) -> None:
    proofs = ir.verify(*two_pipelines(cluster_of(5), 1.0))
    assert [p.split(":")[0].split(";")[0] for p in proofs] == [
        "complete", "no deadlock", "both ends agree on all 8 messages, in the same order on every channel",
        "every gradient is summed over all its holders once", "activations alive at once, in micro-batches of a stage",
    ]  # fmt: skip
    assert proofs[-1].endswith("2 on rank 0, 1 on ranks 1..4")


def damage(program: Program, stream: str, change: Callable[[list[Action]], list[Action]]) -> Program:
    return replace(program, streams={**program.streams, stream: tuple(change(list(program.streams[stream])))})


def with_waits(actions: list[Action], waits: tuple[Wait, ...]) -> list[Action]:
    return [replace(actions[0], waits=waits), *actions[1:]]


def without(actions: list[Action], position: int) -> list[Action]:
    return actions[:position] + actions[position + 1 :]


@pytest.mark.parametrize(
    ("number", "stream", "change", "words"),
    [
        (0, "compute", lambda a: a[1:], "micro-batch 0 has 0 F, 1 B, 0 I, 0 W; expected 1 F and 1 B"),
        (0, "compute", lambda a: [*a, a[0]], "action 0F0 occurs twice in one Program"),
        (2, "compute", lambda a: [a[1], a[0], *a[2:]], "micro-batch 0 goes backward before forward"),
        (0, "p0:s0.m0>s1.m1:F", lambda a: a[:1], "1RECV_F1<0[0:1] has no other end: nobody sends it"),
        (2, "p0:s0.m0>s1.m1:F", lambda a: a[::-1], "deadlock"),
        (2, "p0:s0.m0>s1.m1:F", lambda a: a[:1], "0SEND_F1>1[0:1] has no other end: nobody receives it"),
        (2, "p0:s0.m0>s1.m1:F", lambda a: [replace(a[0], samples=(0, 2)), a[1]], "has no other end"),
        (1, "compute", lambda a: [replace(a[0], waits=()), *a[1:]], "1F0 needs samples [0, 1) but waits for []"),
        (0, "p0:s0.m0>s1.m0:F", lambda a: [replace(a[0], waits=())], "does not wait for the pass that makes what it sends"),
        (3, "reduce1", lambda a: a[:1], "p1.s0.m0: g1.1REDUCE_GRAD is missing"),
        (3, "reduce1", lambda a: a[::-1], "deadlock"),
        (3, "reduce1", lambda a: [replace(x, waits=(Wait(action="0B0", block=2),)) for x in a], "g1.1REDUCE_GRAD may start before 0B0 has passed block 1"),
        (3, "compute", lambda a: a[:-1], "p1.s0.m0: g3UPDATE is missing"),
        (3, "compute", lambda a: [replace(x, waits=()) if x.kind == "UPDATE" else x for x in a], "g1UPDATE does not wait for LOSS"),
        (3, "compute", lambda a: [replace(x, waits=x.waits[1:2]) if x.kind == "UPDATE" else x for x in a], "g3UPDATE does not wait for g3.0REDUCE_GRAD"),
        (4, "compute", lambda a: [*a, Action(kind="UPDATE", stream="compute", gradient_block=2)], "g2UPDATE is not its business"),
        (4, "loss", lambda a: [], "LOSS is missing"),
        (4, "loss", lambda a: [replace(a[0], waits=())], "LOSS does not wait for the last forward, 1F0"),
        (1, "norm", lambda a: [replace(a[0], waits=())], "NORM does not wait for 1B0"),
        (0, "compute", lambda a: [replace(a[0], waits=(Wait(action="9F9"),)), *a[1:]], "0F0 waits for 9F9, which is not in its Program"),
    ],
)  # fmt: skip
def test_damage_is_named(
    cluster_of: ClusterOf, number: int, stream: str, change: Callable[[list[Action]], list[Action]], words: str
) -> None:
    graph, programs = two_pipelines(cluster_of(5), 1.0)
    broken = list(programs)
    broken[number] = damage(broken[number], stream, change)
    with pytest.raises(PlanError, match=re.escape(words)):
        ir.verify(graph, broken)


def test_crossed_communicators_are_a_deadlock(cluster_of: ClusterOf) -> None:
    """Two collectives, each consistent alone, whose orders cross between two ranks."""
    graph, programs = two_pipelines(cluster_of(5), 1.0)
    crossing = list(programs)
    for number, (first, then) in (
        (1, ("g0.0REDUCE_GRAD", "g1.0REDUCE_GRAD")),
        (2, ("g1.0REDUCE_GRAD", "g0.0REDUCE_GRAD")),
    ):
        stream = next(s for s, actions in crossing[number].streams.items() if actions[0].text == then)
        waits = (*crossing[number].streams[stream][0].waits, Wait(action=first))
        crossing[number] = damage(crossing[number], stream, partial(with_waits, waits=waits))
    with pytest.raises(PlanError, match=r"deadlock: .* wait for each other in a circle"):
        ir.verify(graph, crossing)


def test_a_dropped_action_is_always_refused(cluster_of: ClusterOf) -> None:
    graph, programs = two_pipelines(cluster_of(5), 1.0)
    rng = random.Random(0)
    for _ in range(300):
        broken = list(programs)
        number = rng.randrange(len(programs))
        stream = rng.choice([s for s, a in programs[number].streams.items() if a])
        position = rng.randrange(len(programs[number].streams[stream]))
        broken[number] = damage(broken[number], stream, partial(without, position=position))
        with pytest.raises(PlanError):
            ir.verify(graph, broken)


def test_networkx_view(cluster_of: ClusterOf) -> None:
    import networkx as nx

    graph, programs = two_pipelines(cluster_of(5))
    view = graph.to_networkx()
    assert nx.is_directed_acyclic_graph(view)
    assert len(view) == len(join(programs).nodes)
    assert {data["kind"] for _, data in view.nodes(data=True)} == {
        "F",
        "B",
        "TRANSFER",
        "REDUCE_GRAD",
        "LOSS",
        "UPDATE",
    }
