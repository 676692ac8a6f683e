"""What torch's pipelining runs with silently wrong gradients: refused here, or right here and proved so by running it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from symbolic_run import Wrong, run

from autopiper import ir
from autopiper.cluster.spec import Cluster
from autopiper.errors import PlanError
from autopiper.model.spec import Model
from autopiper.plan import Program, Strategy, Training, Wait
from autopiper.plan import directives as d

ClusterOf = Callable[..., Cluster]


def model(blocks: int) -> Model:
    found = Model.chain(blocks)
    return replace(found, blocks=tuple(replace(b, dense_parameters=4) for b in found.blocks))


def built(cluster: Cluster, given: Sequence[d.Directive], batch: int, blocks: int = 2) -> ir.TrainingGraph:
    return ir.build(Strategy.from_directives(given, Training(global_batch_size=batch)), model(blocks), cluster)


def two_stages(orders: Sequence[d.Directive]) -> list[d.Directive]:
    return [
        d.pipeline(0, (1, 1, 1, 1)), d.cut(0, 0, blocks=(0, 1)), d.cut(0, 1, blocks=(1, 2)),
        d.place({"PP": 0}, [0]), d.place({"PP": 1}, [1]), *orders,
    ]  # fmt: skip


def row(stage: int, passes: Sequence[tuple[str, int]]) -> d.OrderDirective:
    return d.order([[{"PP": stage, "MB": m, "PASS": k}] for k, m in passes])


@pytest.mark.parametrize("named", [True, False])
def test_two_swapped_receives_are_refused(cluster_of: ClusterOf, named: bool) -> None:
    """torch simulates and runs them, and each micro-batch gets the other's activations.

    `named`: whether the receives keep their waits, or take over those of the place where they now stand.
    """
    graph = built(cluster_of(2), two_stages([d.order(schedule="1f1b")]), 4)
    programs = list(ir.lower(graph))
    channel = "p0:s0.m0>s1.m0:F"
    actions = list(programs[1].streams[channel])
    assert [a.text for a in actions[:2]] == ["1RECV_F0<0[0:1]", "1RECV_F1<0[0:1]"]
    first, second = actions[:2]
    actions[:2] = (second, first) if named else (replace(second, waits=first.waits), replace(first, waits=second.waits))
    programs[1] = replace(programs[1], streams={**programs[1].streams, channel: tuple(actions)})
    words = "sends 0SEND_F0>0[0:1] where p0.s1.m0 receives 1RECV_F1<0[0:1]; 1RECV_F0<0[0:1] must come before it"
    with pytest.raises(PlanError, match=re.escape(words)):
        ir.verify(graph, programs)
    with pytest.raises(Wrong, match="reads"):  # what torch does without a word
        run(graph, programs, 0)


@pytest.mark.parametrize("last", [(1, 0, 3, 2), (3, 2, 1, 0), (2, 0, 3, 1)])
def test_forwards_of_the_last_stage_in_any_order_are_right(cluster_of: ClusterOf, last: tuple[int, ...]) -> None:
    """torch looks losses up by their place in a list; here losses and messages are those of their micro-batch."""
    straight = [(k, m) for k in "FB" for m in range(4)]
    permuted = [("F", m) for m in last] + [("B", m) for m in range(4)]
    graph = built(cluster_of(2), two_stages([row(0, straight), row(1, permuted)]), 4)
    programs = ir.lower(graph)
    assert [a.text for a in programs[1].streams["compute"]][:4] == [f"1F{m}" for m in last]
    ir.verify(graph, programs)
    for timing in range(50):
        run(graph, programs, timing)


def in_turn(program: Program, first: str) -> Program:
    """Make a rank work off one of the streams A and B before the other, through what it computes or by a wait."""
    streams = {name: list(row) for name, row in program.streams.items()}
    if first == "A":  # the reduction of stage 1 is ready before stage 0 goes backward, and that before stream B
        name, number = "compute", next(i for i, a in enumerate(streams["compute"]) if a.kind == "B" and a.stage == 0)
    else:
        name, number = "A", 0
    action = streams[name][number]
    streams[name][number] = replace(action, waits=(*action.waits, Wait(action=streams[first][-1].text)))
    return replace(program, streams={name: tuple(row) for name, row in streams.items()})


def test_crossing_communicators_are_refused_as_a_circle(cluster_of: ClusterOf) -> None:
    """Each stream has one order on both ranks, and each rank alone can be worked off; together they cannot."""
    graph = built(
        cluster_of(2),
        [
            d.pipeline(0, (2,)), d.cut(0, 0, blocks=(0, 1)), d.cut(0, 1, blocks=(1, 2)), d.place({}, [0, 1]),
            d.replicate({"PP": 0}, reduce_stream="B"), d.replicate({"PP": 1}, reduce_stream="A"),
            d.order([[{"PP": s, "MB": 0, "PASS": k}] for s, k in ((0, "F"), (1, "F"), (1, "B"), (0, "B"))]),
        ],
        2,
    )  # fmt: skip
    programs = ir.lower_all(graph)
    assert ir.verify(graph, programs)
    for first in "AB":  # both ranks alike: either turn is right
        alike = [in_turn(program, first) for program in programs]
        assert ir.verify(graph, alike)
        run(graph, alike, 0)
    broken = [in_turn(programs[0], "A"), in_turn(programs[1], "B")]
    for stream in "AB":
        assert len({tuple(a.text for a in p.streams[stream]) for p in broken}) == 1
    with pytest.raises(
        PlanError, match=r"deadlock: \d+ actions wait for each other in a circle, among them .*REDUCE_GRAD"
    ):
        ir.verify(graph, broken)
    with pytest.raises(Wrong, match="stuck"):
        run(graph, broken, 0)
