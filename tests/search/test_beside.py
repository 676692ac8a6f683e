"""What hosts spend beside the blocks: the search counts it as the simulator does, and cuts less often where it is much."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopiper import ir
from autopiper.cluster.spec import Cluster, DeviceType, Link, Node
from autopiper.costmodel import simulate
from autopiper.model.spec import Model
from autopiper.plan.costs import CostTable, HostCost
from autopiper.plan.space import Space
from autopiper.plan.training import Training
from autopiper.search import search
from autopiper.search.drafts import Workshop
from autopiper.search.evaluate import Evaluator
from autopiper.search.prices import Prices
from autopiper.search.shapes import Pattern
from autopiper.search.uniform import Layout, least_step_s

BLOCKS, BATCH = 6, 24
HOST = HostCost(device_type="d", forward_s=0.7, backward_s=0.4, message_s=0.3)


def _job(host: HostCost, devices: int = 3) -> tuple[Model, Cluster, Training, CostTable]:
    """Devices that each hold the whole model; the blocks take 1, 2, ... to forward, and messages nothing by themselves."""
    kind = DeviceType(name="d", memory_bytes=1e12, peak_flops={"fp32": 1.0}, memory_bytes_per_s=1.0)
    link = Link(bytes_per_s=1e30)
    cluster = Cluster(
        name="c", device_types=(kind,), nodes=(Node(name="n", devices=("d",) * devices, intra=link, nic=link),)
    )
    forward_s = [1.0 + b for b in range(BLOCKS)]
    costs = CostTable.from_layers(forward_s=forward_s, backward_s=[2 * f for f in forward_s])
    return (
        Model.chain(BLOCKS), cluster, Training(global_batch_size=BATCH, precision="fp32"), replace(costs, hosts=(host,)),
    )  # fmt: skip


@pytest.mark.parametrize("batch", [1, BATCH])
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_estimates_are_what_the_simulator_finds(stages: int, batch: int) -> None:
    model, cluster, training, costs = _job(HOST)
    training = replace(training, global_batch_size=batch)
    shop = Workshop(
        Prices(model, cluster, training, costs, ("none",)), range(stages), batch, Space(micro_batch_sizes=(1,))
    )
    draft = shop.draft([Pattern(stages=(("d", 1),) * stages, samples=1).shape(1)], "1f1b", ("none",), "pipeline")
    assert draft is not None
    graph = ir.build(shop.strategy(draft), model, cluster)
    makespan_s = simulate(graph, ir.lower(graph), costs).makespan_s
    if batch == 1 or stages == 1:  # no bubbles that a closed form would have to guess
        assert draft.estimate_s == pytest.approx(makespan_s)
    assert draft.estimate_s == pytest.approx(makespan_s, rel=0.02)


def test_the_worth_of_a_cut_is_less_than_its_messages_and_calls() -> None:
    cheap, dear = (
        search(*_job(HostCost(device_type="d", forward_s=s, backward_s=s)), Space(max_pipelines=1, micro_batch_sizes=(1,)))
        for s in (0.0, 1e3)
    )  # fmt: skip
    assert max(len(p.stages) for p in dear.strategy.pipelines) == 1 and cheap.step_time_s < dear.step_time_s
    messages = replace(HOST, forward_s=0.0, backward_s=0.0, message_s=100.0)
    space = Space(equal_pipelines=True, max_pipelines=1, min_pipelines=1, micro_batch_sizes=(1,))
    one = search(*_job(messages), space)
    assert (
        len(one.strategy.pipelines[0].stages) == 1
    )  # 63 s a sample on one device; 200 s of messages on the ends of two
    assert len(search(*_job(replace(messages, message_s=0.1)), space).strategy.pipelines[0].stages) == 3


@pytest.mark.parametrize("stages", [1, 3])
def test_bounds_of_uniform_layouts_stay_below_the_simulated_step(stages: int) -> None:
    model, cluster, training, costs = _job(HOST)
    prices = Prices(model, cluster, training, costs, ("none",))
    layout = Layout(
        devices=tuple(range(3)), tensor_parallel_size=1, pipeline_parallel_size=stages, data_parallel_size=3 // stages,
        micro_batch_size=1, recompute="none", schedule="1f1b",
    )  # fmt: skip
    step_s = Evaluator(model, cluster, costs)(layout.strategy(prices, 2**20)).step_s
    blind = Prices(model, cluster, training, replace(costs, hosts=()), ("none",))
    assert least_step_s(blind, layout) < least_step_s(prices, layout) <= step_s * (1 + 1e-9)
