"""The course of memory of odd strategies: nothing below none, nothing above the peak, tied parameters whole under ZeRO."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from autopiper import costmodel, ir
from autopiper.cluster.spec import Cluster
from autopiper.model.spec import Model, TiedParameter
from autopiper.plan import CostTable, Strategy, Training
from autopiper.plan import directives as d

ClusterOf = Callable[..., Cluster]


@pytest.mark.parametrize("level", range(4))
def test_zero_leaves_tied_parameters_whole(cluster_of: ClusterOf, level: int) -> None:
    """Ends of 16 parameters, 6 of them tied, and 8 between: ZeRO divides what is not tied by two members."""
    chain = Model.chain(3)
    blocks = [replace(b, dense_parameters=n) for b, n in zip(chain.blocks, (16, 8, 16), strict=True)]
    model = replace(chain, blocks=tuple(blocks), tied=(TiedParameter(name="embedding", blocks=(0, 2), parameters=6),))
    given: list[d.Directive] = [
        d.split({}, num_microbatches=2), d.place({}, [0, 1]),
        d.replicate({}, shard_optimizer=level == 1, shard_grads=level == 2, shard_params=level == 3),
    ]  # fmt: skip
    training = Training(global_batch_size=4, precision="fp32")
    graph = ir.build(Strategy.from_directives(given, training), model, cluster_of(2))
    one = [1e-3] * 3
    costs = CostTable.from_layers(
        forward_s=one, backward_input_s=one, backward_weight_s=one, activation_bytes=[8] * 3, output_bytes=[8] * 3
    )
    lane = costmodel.simulate(graph, ir.lower(graph), costs).lanes[0]
    untied, tied = 10 + 8 + 10, 6  # the tied ones are held once
    weights, gradients, adam = (untied / (2 if level >= n else 1) + tied for n in (3, 2, 1))
    assert lane.static_memory_bytes == 4 * weights + 4 * gradients + 8 * adam


def test_memory_is_never_below_none_nor_above_its_peak(cluster_of: ClusterOf) -> None:
    """One member with nothing to do gathers and lets go at one moment, over free links."""
    for seed in range(20):
        rng = random.Random(seed)
        given: list[d.Directive] = [
            d.pipeline(0, [1, 2, 1]), d.place({}, [0, 1, 2]), d.replicate({}, shard_params=True),
            d.slices({}, [(1, 0, 0), (2, 0, 0), (0, 1, 0)]), d.buckets({}, bucket_bytes=rng.choice((16, 40, 80))),
        ]  # fmt: skip
        chain = Model.chain(3)
        model = replace(chain, blocks=tuple(replace(b, dense_parameters=rng.choice((3, 10, 24))) for b in chain.blocks))
        graph = ir.build(
            Strategy.from_directives(given, Training(global_batch_size=4, precision="fp32")), model, cluster_of(3)
        )
        one = [rng.uniform(1e-3, 2e-3) for _ in range(3)]
        costs = CostTable.from_layers(
            forward_s=one, backward_input_s=one, backward_weight_s=one, activation_bytes=[8] * 3, output_bytes=[8] * 3
        )
        for lane in costmodel.simulate(graph, ir.lower(graph), costs).lanes:
            for at in lane.memory:
                parts = (
                    at.parameters_bytes,
                    at.gradients_bytes,
                    at.optimizer_bytes,
                    at.activations_bytes,
                    at.buffers_bytes,
                )
                assert min(parts) >= 0, at
                assert at.total_bytes <= lane.peak_memory_bytes * (1 + 1e-12)
