"""Estimates of drafts against the simulator: what a further micro-batch adds, on slow links too."""

from __future__ import annotations

from math import inf

import pytest

from autopiper import ir
from autopiper.cluster.spec import Cluster, DeviceType, Link, Node
from autopiper.costmodel import simulate
from autopiper.model.spec import Model
from autopiper.plan.costs import CostTable
from autopiper.plan.space import Space
from autopiper.plan.training import Training
from autopiper.search.drafts import Draft, Workshop, further_s_of
from autopiper.search.prices import Prices
from autopiper.search.shapes import Pattern

FORWARD_S, BACKWARD_S = 1.0, 2.0


def _draft(
    stages: int, message_s: float, family: str, micro_batches: int, slow_last: float, *, shared: bool = False
) -> tuple[Draft, float]:
    """One pipeline of equal stages, the last slower by a factor; return its draft and the simulated makespan.

    A message takes `message_s`: on its way or, `shared`, of the bandwidth that both directions share at their ends.
    """
    training = Training(global_batch_size=micro_batches, precision="fp32")
    device = DeviceType(name="d", memory_bytes=1e12, peak_flops={"fp32": 1.0}, memory_bytes_per_s=1.0)
    link = Link(bytes_per_s=1.0) if shared else Link(bytes_per_s=inf, latency_s=message_s)
    nodes = tuple(Node(name=str(i), devices=("d",), intra=link, nic=link) for i in range(stages))
    cluster = Cluster(name="c", device_types=(device,), nodes=nodes)
    speeds = [1.0] * (stages - 1) + [slow_last]
    costs = CostTable.from_layers(
        forward_s=[FORWARD_S * v for v in speeds], backward_s=[BACKWARD_S * v for v in speeds],
        output_bytes=[message_s if shared else 1.0] * stages,
    )  # fmt: skip
    model = Model.chain(stages)
    shop = Workshop(
        Prices(model, cluster, training, costs, ("none",)), range(stages), micro_batches, Space(micro_batch_sizes=(1,))
    )
    draft = shop.draft([Pattern(stages=(("d", 1),) * stages, samples=1).shape(1)], family, ("none",), "pipeline")
    assert draft is not None
    graph = ir.build(shop.strategy(draft), model, cluster)
    return draft, simulate(graph, ir.lower(graph), costs).makespan_s


@pytest.mark.parametrize("family", ["1f1b", "gpipe"])
@pytest.mark.parametrize("slow_last", [1.0, 1.5])
@pytest.mark.parametrize("message_s", [0.0, 0.2, 0.7, 1.0, 2.5])
@pytest.mark.parametrize("stages", [2, 3, 5])
def test_a_further_micro_batch_adds_what_the_simulator_finds(
    stages: int, message_s: float, slow_last: float, family: str
) -> None:
    rounds = 12 * stages
    draft, short_s = _draft(stages, message_s, family, rounds, slow_last)
    _, long_s = _draft(stages, message_s, family, 2 * rounds, slow_last)
    piece = draft.pieces[0]
    found = (long_s - short_s) / rounds
    estimate = further_s_of(piece.layers, piece.problem, family)
    # GPipe's two halves have bottlenecks of their own; a stage's time is not told apart into them.
    assert estimate == pytest.approx(found, rel=0.02 if family == "1f1b" else 0.1)
    assert estimate <= found * (1 + 1e-9) + 1e-9


@pytest.mark.parametrize("message_s", [0.2, 0.7, 2.5])
@pytest.mark.parametrize("stages", [2, 3, 5])
def test_where_messages_share_a_link_the_estimate_is_never_above(stages: int, message_s: float) -> None:
    rounds = 12 * stages
    draft, short_s = _draft(stages, message_s, "1f1b", rounds, 1.0, shared=True)
    _, long_s = _draft(stages, message_s, "1f1b", 2 * rounds, 1.0, shared=True)
    piece = draft.pieces[0]
    estimate = further_s_of(piece.layers, piece.problem, "1f1b")
    assert 0.75 * (long_s - short_s) / rounds <= estimate <= (long_s - short_s) / rounds * (1 + 1e-9)
