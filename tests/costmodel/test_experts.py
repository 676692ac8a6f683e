"""Stages whose experts are divided over their members: times against closed forms, and what is held for the exchange."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopiper import ir
from autopiper.cluster import Cluster
from autopiper.costmodel import price, simulate
from autopiper.costmodel.collectives import all_to_all_s
from autopiper.model.spec import Model
from autopiper.plan import CostTable, Strategy, Timeline, Training
from autopiper.plan.costs import BlockCost

LAYERS, SEQUENCE, HIDDEN, CHOSEN = 2, 32, 64, 2
LATENCY_S, PORT, NIC = 3e-6, 300e9, 12.5e9
MODEL = Model.transformer(
    num_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=4, sequence_length=SEQUENCE, vocab_size=256,
    gated_mlp=True, num_experts=4, experts_per_token=CHOSEN, moe_intermediate_size=128,
)  # fmt: skip
NODE = Cluster.homogeneous("a100-80g", devices_per_node=8, intra_node_latency_us=3)
NODES = Cluster.homogeneous(
    "a100-80g", num_nodes=4, devices_per_node=4, intra_node_latency_us=3, inter_node_latency_us=10, inter_node_GBps=50,
    nics=4,
)  # fmt: skip
EMPTY = CostTable(blocks=())


def run(
    cluster: Cluster = NODE, *, members: int = 4, size: int = 4, samples: int = 2, recompute: str = "none",
    micro_batches: int = 1, schedule: str = "1f1b", devices: list[int] | None = None, model: Model = MODEL,
) -> tuple[Timeline, CostTable]:  # fmt: skip
    """One stage of `members`, reduced in one bucket and nothing slowed down, so that exchanges are alone."""
    training = Training(global_batch_size=members * samples * micro_batches, precision="bf16")
    strategy = replace(
        Strategy.uniform(
            model, cluster, training, micro_batch_size=samples, expert_parallel_size=size, schedule=schedule,
            recompute=recompute, devices=devices or list(range(members)),
        ),
        bucket_bytes=2**40,
    )  # fmt: skip
    costs = replace(price(model, cluster, training, tensor_parallel_sizes=[1], max_samples=samples), overlaps=())
    graph = ir.build(strategy, model, cluster)
    programs = ir.lower(graph)
    ir.verify(graph, programs)
    return simulate(graph, programs, costs), costs


def exchange_s(samples: int, size: int = 4) -> float:
    """All-to-all inside a node: to each other member its part of the tokens, in 16 bits, one after the other."""
    num_bytes = CHOSEN * SEQUENCE * HIDDEN * samples * 2
    return (size - 1) * (LATENCY_S + num_bytes / size / PORT)


def prices(costs: CostTable, samples: int) -> list[BlockCost]:
    index = costs.index()
    return [index.block(b.kind, "a100-80g", 1, samples) for b in MODEL.blocks]


def span_s(timeline: Timeline, kinds: str, micro_batch: int = 0, lane: int = 0) -> float:
    """Seconds from the first to the last event of a pass and its exchanges."""
    events = [e for e in timeline.lanes[lane].events if e.micro_batch == micro_batch]
    mine = [e for e in events if e.kind == kinds or e.kind == f"A2A_{kinds}"]
    return max(e.end_s for e in mine) - min(e.start_s for e in mine)


@pytest.mark.parametrize("samples", [1, 2, 4])
def test_a_forward_is_its_blocks_and_two_exchanges_a_layer(samples: int) -> None:
    timeline, costs = run(samples=samples)
    expected = sum(p.forward_s for p in prices(costs, samples)) + 2 * LAYERS * exchange_s(samples)
    assert span_s(timeline, "F") == pytest.approx(expected)


@pytest.mark.parametrize("samples", [1, 2, 4])
def test_a_backward_is_its_blocks_and_two_exchanges_a_layer(samples: int) -> None:
    timeline, costs = run(samples=samples)
    expected = sum(p.backward_s for p in prices(costs, samples)) + 2 * LAYERS * exchange_s(samples)
    assert span_s(timeline, "B") == pytest.approx(expected)


def test_full_recompute_repeats_the_forward_and_its_exchanges() -> None:
    timeline, costs = run(recompute="full")
    expected = sum(p.forward_s + p.backward_s for p in prices(costs, 2)) + 4 * LAYERS * exchange_s(2)
    assert span_s(timeline, "B") == pytest.approx(expected)
    assert span_s(timeline, "F") == pytest.approx(span_s(run()[0], "F"))


def test_selective_recompute_repeats_no_exchange() -> None:
    timeline, costs = run(recompute="selective")
    again = sum(p.selective_forward_s for p in prices(costs, 2))
    assert again > 0
    assert span_s(timeline, "B") == pytest.approx(
        sum(p.backward_s for p in prices(costs, 2)) + again + 2 * LAYERS * exchange_s(2)
    )


def test_experts_and_the_rest_take_turns_with_the_exchanges() -> None:
    timeline, costs = run()
    layer = prices(costs, 2)[1]
    took = {e.action: e.end_s - e.start_s for e in timeline.lanes[0].events}
    assert took["0.1F0"] == pytest.approx(layer.expert_forward_s)
    assert took["0.2F0"] == pytest.approx(layer.forward_s - layer.expert_forward_s)
    assert took["0.3F0"] == pytest.approx(layer.expert_forward_s)
    assert took["0.3B0"] == pytest.approx(layer.expert_backward_s)
    assert took["0.3A2A_F0"] == pytest.approx(exchange_s(2))
    order = [e.action for e in timeline.lanes[0].events if e.kind in ("F", "A2A_F")]
    assert order == ["0F0", "0.1A2A_F0", "0.1F0", "0.2A2A_F0", "0.2F0", "0.3A2A_F0", "0.3F0", "0.4A2A_F0", "0.4F0"]


def test_the_exposed_exchanges_are_all_of_them_where_nothing_overlaps() -> None:
    timeline, _ = run(micro_batches=3)
    assert timeline.lanes[0].time.exposed_s["all-to-all"] == pytest.approx(3 * 4 * LAYERS * exchange_s(2))


@pytest.mark.parametrize(
    ("devices", "between", "inside"),
    [
        ((0, 1, 2, 3), 0, 3),  # one node
        ((0, 4, 8, 12), 3, 0),  # one member on each of four nodes, an interface each
        ((0, 1, 4, 5), 2, 1),  # two on each of two nodes, with two interfaces
        ((0, 1, 2, 4), 1, 2),  # three and one: the node of one sends three parts through its one interface
    ],
)
def test_an_exchange_between_nodes(devices: tuple[int, ...], between: int, inside: int) -> None:
    num_bytes = 40e6
    part = num_bytes / 4
    inside_s = inside * (LATENCY_S + part / PORT)
    between_s = between * (10e-6 + part / NIC)  # its members share as many interfaces as there are of them
    if devices == (0, 1, 2, 4):
        between_s = max(3 * (10e-6 + part / NIC), 1 * (10e-6 + 3 * part / NIC))
    found = all_to_all_s(EMPTY, NODES, devices, num_bytes)
    assert list(found) == pytest.approx([max(inside_s, between_s), inside_s, between_s])


def test_two_groups_that_exchange_over_the_same_interfaces_take_twice_as_long() -> None:
    # Two nodes of four devices and one interface: two groups of two, each with a member on both nodes.
    nodes = Cluster.homogeneous(
        "a100-80g", num_nodes=2, devices_per_node=4, inter_node_GBps=12.5, inter_node_latency_us=0, nics=1
    )
    alone, _ = run(nodes, members=2, size=2, samples=4, devices=[0, 4])
    both, _ = run(nodes, members=4, size=2, samples=4, devices=[0, 4, 1, 5])
    assert len(both.lanes) == 2, "the second group is a copy of the first"

    def exchanges_s(timeline: Timeline) -> set[float]:
        return {round(e.end_s - e.start_s, 12) for e in timeline.lanes[0].events if e.kind == "A2A_F"}

    (one_s,), (two_s,) = exchanges_s(alone), exchanges_s(both)
    assert one_s == pytest.approx(CHOSEN * SEQUENCE * HIDDEN * 4 * 2 / 2 / 12.5e9, rel=1e-5)
    assert two_s == pytest.approx(2 * one_s, rel=1e-5)


def test_experts_are_held_and_updated_in_parts_and_never_reduced_where_one_rank_has_each() -> None:
    divided, _ = run(size=4)
    whole, _ = run(size=1)
    experts = sum(b.expert_parameters for b in MODEL.blocks)
    dense = sum(b.parameters for b in MODEL.blocks) - experts
    assert whole.lanes[0].static_memory_bytes == pytest.approx(18 * (dense + experts))
    assert divided.lanes[0].static_memory_bytes == pytest.approx(18 * (dense + experts / 4))
    reduced = {e.action for lane in divided.lanes for e in lane.events if e.kind == "REDUCE_GRAD"}
    assert len(reduced) == 1, "the dense parameters alone are summed"
    updates = [sum(e.end_s - e.start_s for e in t.lanes[0].events if e.kind == "UPDATE") for t in (whole, divided)]
    index = price(MODEL, NODE, Training(global_batch_size=8, precision="bf16"), max_samples=2).index()
    layer = index.block("moe_layer", "a100-80g", 1, 2)
    saved = LAYERS * layer.update_s * MODEL.blocks[1].expert_parameters / MODEL.blocks[1].parameters * 3 / 4
    assert updates[0] - updates[1] == pytest.approx(saved)


def test_what_arrives_is_held_beside_what_leaves() -> None:
    timeline, _ = run()
    lane = timeline.lanes[0]
    num_bytes = CHOSEN * SEQUENCE * HIDDEN * 2 * 2
    floor = min(p.buffers_bytes for p in lane.memory)
    for event in (e for e in lane.events if e.kind.startswith("A2A")):
        middle = (event.start_s + event.end_s) / 2
        held = [p for p in lane.memory if p.time_s <= middle][-1]
        assert held.buffers_bytes == pytest.approx(floor + num_bytes), event.action
