"""The simulator against golden figures, closed forms, and an independent walk of the Programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopiper import ir
from autopiper.cluster.spec import Cluster
from autopiper.costmodel.simulate import simulate
from autopiper.model.spec import Model, TensorSpec
from autopiper.plan import CostTable, Program, Strategy, Timeline, Training
from autopiper.plan import directives as d

NEMOTRON = "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"
TICKS = {"M": (268, 430, 176), "-": (185, 191, 169), "*": (193, 245, 65)}
"""F, I, W of each layer in 0.01 ms (SimPipe's published profile, FACTS part D); embedding and head come on top."""
EMBEDDING, HEAD = (76, 287, 0), (1422, 1571, 6)

ClusterOf = Callable[..., Cluster]


def run(strategy: Strategy, model: Model, cluster: Cluster, costs: CostTable) -> Timeline:
    graph = ir.build(strategy, model, cluster)
    programs = ir.lower(graph)
    ir.verify(graph, programs)
    return simulate(graph, programs, costs)


def with_messages(model: Model) -> Model:
    """Give every edge one element, so that messages are not empty and cost the link's latency."""
    edges = tuple(replace(e, tensors=(TensorSpec(name="hidden", shape=(1,)),)) for e in model.edges)
    return replace(model, edges=edges)


def test_golden_nemotron_1f1b(cluster_of: ClusterOf) -> None:
    rows = [list(TICKS[letter]) for letter in NEMOTRON]
    rows[0] = [a + b for a, b in zip(rows[0], EMBEDDING, strict=True)]
    rows[-1] = [a + b for a, b in zip(rows[-1], HEAD, strict=True)]
    costs = CostTable.from_layers(
        forward_s=[r[0] for r in rows], backward_input_s=[r[1] for r in rows], backward_weight_s=[r[2] for r in rows]
    )
    model, cluster = Model.chain(56), cluster_of(4)
    strategy = Strategy.uniform(model, cluster, Training(global_batch_size=8), pipeline_parallel_size=4)
    timeline = run(strategy, model, cluster, costs)
    assert timeline.makespan_s == 133121
    assert timeline.step_time_s == 133121
    assert [lane.time.compute_s for lane in timeline.lanes] == [85000, 76160, 76160, 103456]
    assert [lane.peak_live_activations for lane in timeline.lanes] == [4, 3, 2, 1]


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("micro_batches", [1, 2, 4, 8, 12])
@pytest.mark.parametrize("family", ["gpipe", "1f1b"])
def test_closed_form_without_links(cluster_of: ClusterOf, stages: int, micro_batches: int, family: str) -> None:
    model, cluster = Model.chain(stages), cluster_of(stages)
    costs = CostTable.from_layers(
        forward_s=[1] * stages, backward_input_s=[1.5] * stages, backward_weight_s=[0.5] * stages,
        activation_bytes=[10] * stages,
    )  # fmt: skip
    training = Training(global_batch_size=micro_batches)
    strategy = Strategy.uniform(model, cluster, training, pipeline_parallel_size=stages, schedule=family)
    timeline = run(strategy, model, cluster, costs)
    assert timeline.makespan_s == (micro_batches + stages - 1) * 3
    live = [micro_batches] * stages if family == "gpipe" else [min(stages - s, micro_batches) for s in range(stages)]
    assert [lane.peak_live_activations for lane in timeline.lanes] == live
    assert list(timeline.peak_memory_bytes) == [10 * n for n in live]
    assert timeline.bubble_fraction == pytest.approx((stages - 1) / (micro_batches + stages - 1))


@pytest.mark.parametrize("stages", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 4, 7, 8, 12, 16])
@pytest.mark.parametrize("link_s", [0.0625, 0.25])
def test_closed_form_with_links(cluster_of: ClusterOf, stages: int, micro_batches: int, link_s: float) -> None:
    model, cluster = with_messages(Model.chain(stages)), cluster_of(stages, link_s=link_s)
    costs = CostTable.from_layers(forward_s=[1] * stages, backward_s=[2] * stages)
    p, m, c = stages, micro_batches, link_s
    one = Strategy.uniform(model, cluster, Training(global_batch_size=m), pipeline_parallel_size=p)
    excess = 2 * c * ((p - 1) * ((m - 1) // p) + max(0, (m - 1) % p - 1))
    loss_s = 2 * (p - 1) * c  # the ring that sums the loss runs while the backwards do: it never ends later
    timeline = run(one, model, cluster, costs)
    assert timeline.makespan_s >= (m + p - 1) * 3 + 2 * (p - 1) * c
    no_loss = without_loss(one, model, cluster)
    assert simulate(*no_loss, costs).makespan_s == pytest.approx((m + p - 1) * 3 + 2 * (p - 1) * c + excess)
    assert timeline.makespan_s <= simulate(*no_loss, costs).makespan_s + loss_s
    pipe = replace(one, schedules=(replace(one.schedules[0], family="gpipe"),))
    assert simulate(*without_loss(pipe, model, cluster), costs).makespan_s == pytest.approx(
        (m + p - 1) * 3 + 2 * (p - 1) * c
    )


def without_loss(strategy: Strategy, model: Model, cluster: Cluster) -> tuple[ir.TrainingGraph, list[Program]]:
    """Leave out LOSS and the updates that wait for it: the closed forms know neither."""
    graph = ir.build(strategy, model, cluster)
    programs = []
    for program in ir.lower(graph):
        streams = {
            n: tuple(a for a in actions if a.kind not in ("LOSS", "UPDATE")) for n, actions in program.streams.items()
        }
        programs.append(replace(program, streams={n: a for n, a in streams.items() if a}))
    return graph, programs


def test_recompute_costs_a_forward_and_saves_activations(cluster_of: ClusterOf) -> None:
    model, cluster = Model.chain(4), cluster_of(2)
    costs = CostTable.from_layers(forward_s=[1] * 4, backward_s=[2] * 4, activation_bytes=[100] * 4)
    training = Training(global_batch_size=4)
    plain = run(Strategy.uniform(model, cluster, training, pipeline_parallel_size=2), model, cluster, costs)
    full = run(
        Strategy.uniform(model, cluster, training, pipeline_parallel_size=2, recompute="full"), model, cluster, costs
    )
    assert full.makespan_s == (4 + 1) * (2 + 4 + 2)
    assert full.lanes[0].time.recompute_s == 4 * 2
    assert plain.peak_memory_bytes == (400, 200)
    assert full.peak_memory_bytes == (100, 100)  # one block at a time refills what it did not keep


def test_a_channel_has_two_receive_buffers_and_a_sent_message_waits_in_its_own(cluster_of: ClusterOf) -> None:
    model = Model.chain(2)
    costs = CostTable.from_layers(forward_s=[1, 1], backward_s=[2, 2], output_bytes=[100, 0])

    def peaks(link_s: float) -> tuple[float, ...]:
        cluster = cluster_of(2, link_s=link_s)
        strategy = Strategy.uniform(
            model, cluster, Training(global_batch_size=4), pipeline_parallel_size=2, schedule="gpipe"
        )
        return run(strategy, model, cluster, costs).peak_memory_bytes

    # Links of no time: while one message is used, the buffer of the next one is posted; nothing waits to be sent.
    assert peaks(0) == (200, 200)
    # Messages of 4 s. Stage 0: after 4 s all four wait to be gone, beside a posted receive buffer. Stage 1: backwards
    # end 2 s apart, so when the last one ends, the first message is gone and three are not.
    assert peaks(4) == (500, 300)


def test_static_memory_and_gradient_reduction(cluster_of: ClusterOf) -> None:
    model = Model.chain(2)
    model = replace(model, blocks=tuple(replace(b, dense_parameters=1000) for b in model.blocks))
    cluster = cluster_of(2, link_s=0.5)
    costs = CostTable.from_layers(forward_s=[1, 1], backward_s=[2, 2])
    strategy = Strategy.uniform(model, cluster, Training(global_batch_size=4))
    timeline = run(replace(strategy, bucket_bytes=4000), model, cluster, costs)
    assert timeline.peak_memory_bytes == (2000 * 16, 2000 * 16)
    # Two members, two micro-batches each: 12 s of work. Block 1's bucket is final 2 s before the end and takes a ring
    # of two steps (1 s); block 0's bucket follows at 12 s and is exposed.
    assert timeline.makespan_s == 13
    assert timeline.breakdown["exposed gradient reduction"] == pytest.approx(1)
    # Clipping puts a norm between the reductions and the update: what it waits for is still the reduction's doing.
    training = Training(global_batch_size=4, clip_grad_norm=1.0)
    clipped = run(replace(strategy, training=training, bucket_bytes=4000), model, cluster, costs)
    assert clipped.makespan_s == 14
    assert clipped.breakdown["exposed gradient reduction"] == pytest.approx(1)
    assert clipped.breakdown["exposed loss and norm"] == pytest.approx(1)


def independent_walk(programs: Sequence[Program], graph: ir.TrainingGraph, costs: CostTable, link_s: float) -> float:
    """Let every stream run its head when it may, in rounds, until nothing is left; return the last end."""
    ends: dict[tuple[int, str], tuple[float, float]] = {}
    heads = {(n, s): 0 for n, p in enumerate(programs) for s in p.streams}
    free = dict.fromkeys(heads, 0.0)
    index = costs.index()
    where = {p.places[0]: n for n, p in enumerate(programs)}

    def ready(n: int, s: str) -> float | None:
        action = programs[n].streams[s][heads[n, s]]
        at = free[n, s]
        for wait in action.waits:
            if (n, wait.action) not in ends:
                return None
            begin, end = ends[n, wait.action]
            if wait.block is not None:
                stage = graph.stage(programs[n].places[0].pipeline, programs[n].places[0].stage)
                mb = int(wait.action.split("B")[1])
                samples = stage.slices[mb][programs[n].places[0].member]
                passed = range(wait.block, stage.stop)
                end = begin + sum(
                    index.block(f"layer{b}", "unit", 1, samples).backward_s
                    + (
                        index.block(f"layer{b}", "unit", 1, samples).forward_s
                        if stage.recompute[b - stage.start] == "full"
                        else 0
                    )
                    for b in passed
                )
            at = max(at, end)
        return at

    def finish(n: int, s: str, begin: float, seconds: float) -> None:
        ends[n, programs[n].streams[s][heads[n, s]].text] = (begin, begin + seconds)
        free[n, s] = begin + seconds
        heads[n, s] += 1

    progress = True
    while progress:
        progress = False
        for (n, s), at in list(heads.items()):
            if at >= len(programs[n].streams[s]) or heads[n, s] != at:
                continue
            action, place = programs[n].streams[s][at], programs[n].places[0]
            begin = ready(n, s)
            if begin is None:
                continue
            if action.kind in ("F", "B"):
                stage = graph.stage(place.pipeline, place.stage)
                samples = stage.slices[action.micro_batch or 0][place.member]
                seconds = 0.0
                for b in range(stage.start, stage.stop):
                    price = index.block(f"layer{b}", "unit", 1, samples)
                    again = (
                        price.forward_s if action.kind == "B" and stage.recompute[b - stage.start] == "full" else 0.0
                    )
                    seconds += again + (price.forward_s if action.kind == "F" else price.backward_s)
                finish(n, s, begin, seconds)
            elif action.kind == "UPDATE":
                finish(n, s, begin, 0.0)
            else:
                if action.kind in ("LOSS", "NORM", "REDUCE_GRAD"):
                    group = [m for m, p in enumerate(programs) if any(a.text == action.text for a in p.actions())]
                    seconds = 2 * (len(group) - 1) * link_s
                else:
                    step = 1 if action.kind in ("SEND_F", "RECV_B") else -1
                    group = [n, where[replace(place, stage=place.stage + step, member=action.peer or 0)]]
                    seconds = link_s
                heads_there = []
                for m in group:
                    stream = s if s in programs[m].streams else None
                    row = programs[m].streams[stream][heads[m, s] : heads[m, s] + 1] if stream else ()
                    same = row and (row[0].text == action.text or action.kind[:4] in ("SEND", "RECV"))
                    heads_there.append(ready(m, s) if same else None)
                if any(h is None for h in heads_there):
                    continue
                begin = max(h for h in heads_there if h is not None)
                for m in group:
                    finish(m, s, begin, seconds)
            progress = True
    assert all(heads[n, s] == len(programs[n].streams[s]) for n, s in heads)
    return max(end for _, end in ends.values())


@st.composite
def hand_written(draw: st.DrawFn) -> tuple[list[d.Directive], int, int]:
    """Return random directives of one to three unequal pipelines, the batch and the number of devices."""
    blocks = draw(st.integers(1, 5))
    out: list[d.Directive] = []
    device = batch = 0
    for p in range(draw(st.integers(1, 3))):
        sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=5))
        batch += sum(sizes)
        out.append(d.pipeline(p, sizes))
        cuts = sorted(draw(st.sets(st.integers(1, blocks - 1), max_size=2))) if blocks > 1 else []
        for s, (start, stop) in enumerate(zip([0, *cuts], [*cuts, blocks], strict=True)):
            members = draw(st.integers(1, 2))
            here = {"PIPE": p, "PP": s}
            out += [d.cut(p, s, blocks=(start, stop)), d.place(here, range(device, device + members))]
            device += members
            if members == 2:
                first = [draw(st.integers(0, size)) for size in sizes]
                out.append(d.slices(here, [(a, size - a) for a, size in zip(first, sizes, strict=True)]))
            if draw(st.booleans()):
                out.append(d.recompute(here, [draw(st.sampled_from(["none", "full"])) for _ in range(start, stop)]))
        out.append(d.order(schedule=draw(st.sampled_from(["gpipe", "1f1b"])), pipelines=(p,)))
    out.append(d.buckets({}, bucket_bytes=draw(st.sampled_from([100, 1000, 10**6]))))
    return out, batch, device


@settings(max_examples=120, deadline=None)
@given(written=hand_written(), link_s=st.sampled_from([0.0, 0.25, 1.0]), clip=st.sampled_from([None, 1.0]))
def test_equals_independent_walk(
    cluster_of: ClusterOf, written: tuple[list[d.Directive], int, int], link_s: float, clip: float | None
) -> None:
    given_, batch, devices = written
    cluster = cluster_of(devices, link_s=link_s)
    blocks = max(c.blocks[1] for c in given_ if isinstance(c, d.CutDirective))
    model = with_messages(Model.chain(blocks))
    model = replace(model, blocks=tuple(replace(b, dense_parameters=60) for b in model.blocks))
    costs = CostTable.from_layers(
        forward_s=[1 + b / 4 for b in range(blocks)], backward_s=[2 + b / 2 for b in range(blocks)]
    )
    training = Training(global_batch_size=batch, clip_grad_norm=clip)
    graph = ir.build(Strategy.from_directives(given_, training), model, cluster)
    programs = ir.lower(graph)
    ir.verify(graph, programs)
    timeline = simulate(graph, programs, costs)
    everyone = ir.lower_all(graph)  # of equal replicas the simulator walks one
    assert sum(len(p.all_ranks) for p in programs) == len(everyone) == devices
    assert timeline.makespan_s == pytest.approx(independent_walk(everyone, graph, costs, link_s))
    assert simulate(graph, everyone, costs).peak_memory_bytes == pytest.approx(timeline.peak_memory_bytes)
    for lane in timeline.lanes:
        assert lane.time.total_s == pytest.approx(timeline.makespan_s)
        assert lane.time.bubble_s >= -1e-9
    assert sum(timeline.breakdown.values()) == pytest.approx(timeline.makespan_s)
