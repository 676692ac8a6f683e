"""The best uniform layout against plain enumeration, and the sampler of the outer choices."""

from __future__ import annotations

import itertools
import random

import pytest

from autopiper import ir
from autopiper.cluster.spec import Cluster, DeviceType, Link, Node
from autopiper.costmodel import simulate
from autopiper.errors import PlanError
from autopiper.model.spec import Model
from autopiper.plan.costs import BlockCost, CostTable
from autopiper.plan.space import Space
from autopiper.plan.strategy import Strategy
from autopiper.plan.training import Training
from autopiper.search.bayes import Dimensions, explore
from autopiper.search.evaluate import Evaluator
from autopiper.search.prices import Prices
from autopiper.search.proposals import Choice
from autopiper.search.uniform import best_uniform, least_step_s


def _world(seed: int) -> tuple[Prices, Evaluator, Space]:
    rng = random.Random(seed)
    blocks, per_node = rng.randint(2, 5), rng.choice((2, 4))
    model = Model.chain(num_blocks=blocks)
    names = ["fast", "slow"][: rng.randint(1, 2)]
    memory = rng.choice((1e9, 6.0, 9.0))
    types = tuple(
        DeviceType(name=n, memory_bytes=memory, peak_flops={"fp32": 1.0}, memory_bytes_per_s=1.0) for n in names
    )
    link = Link(bytes_per_s=1.0)
    cluster = Cluster(
        name="w", device_types=types,
        nodes=tuple(Node(name=n, devices=(n,) * per_node, intra=link, nic=link) for n in names),
    )  # fmt: skip
    costs = CostTable(
        blocks=tuple(
            BlockCost(
                kind=f"layer{b}", device_type=n, samples=k, tensor_parallel_size=tp, forward_s=f, backward_s=2 * f,
                backward_input_s=f, backward_weight_s=f, kept_bytes=0.7 * k / tp, kept_bytes_full=0.1 * k / tp,
            )
            for b in range(blocks)
            for n in names
            for tp in (1, 2)
            for k in (1, 2)
            for f in [(0.3 + k * rng.uniform(0.5, 1)) / tp**0.7 * (2 if n == "slow" else 1)]
        ),
        parameter_bytes=(2.0,) * blocks,
    )  # fmt: skip
    space = Space(micro_batch_sizes=(1, 2))
    training = Training(global_batch_size=8, precision="fp32")
    return Prices(model, cluster, training, costs, space.recompute), Evaluator(model, cluster, costs), space


@pytest.mark.parametrize("seed", range(25))
def test_best_uniform_layout_equals_plain_enumeration(seed: int) -> None:
    prices, evaluate, space = _world(seed)
    cluster = prices.cluster
    sets = [range(cluster.num_devices)]
    sets += [[d.id for d in cluster.devices() if d.type is t] for t in cluster.device_types]  # type: ignore[misc]
    best = None
    for ids, tp, pp, size, again, family in itertools.product(
        sets, (1, 2), range(1, 6), (1, 2), ("none", "full"), ("gpipe", "1f1b")
    ):
        try:
            strategy = Strategy.uniform(
                prices.model, cluster, prices.training, micro_batch_size=size, tensor_parallel_size=tp,
                pipeline_parallel_size=pp, schedule=family, recompute=again, devices=ids,
            )  # fmt: skip
        except PlanError:
            continue
        graph = ir.build(strategy, prices.model, cluster)
        timeline = simulate(graph, ir.lower(graph), prices.costs)
        if all(
            peak <= cluster.device(d).type.usable_bytes
            for lane in timeline.lanes
            for d, peak in zip(lane.devices, [lane.peak_memory_bytes] * len(lane.devices), strict=True)
        ):
            best = min(timeline.step_time_s, best or float("inf"))
    found = best_uniform(prices, evaluate, space, range(cluster.num_devices))
    assert (found is None) == (best is None)
    if found is not None and best is not None:
        assert found[1].step_s == pytest.approx(best, rel=1e-12)
        assert least_step_s(prices, found[0]) <= found[1].step_s * (1 + 1e-9)


DIMENSIONS = Dimensions(
    degrees={"a": (1, 2, 4, 8), "b": (1, 2)}, samples=(1, 2, 4), recompute=(("none", "full"), ("full",)),
    families=("gpipe", "1f1b"), most_pipelines=(1, 2, 3),
)  # fmt: skip


def _seconds(choice: Choice) -> float | None:
    used = dict(choice.degrees)
    if used.get("b") == 1:
        return None
    return abs(used.get("a", 0) - 4) + abs(used.get("b", 0) - 2) + choice.samples + (choice.family == "gpipe")


def test_dimensions_count_their_choices() -> None:
    assert len(DIMENSIONS) == len(list(DIMENSIONS)) == len(set(DIMENSIONS)) == (5 * 3 - 1) * 3 * 2 * 2 * 3


def test_small_spaces_are_exhausted() -> None:
    small = Dimensions(
        degrees={"a": (1, 2)}, samples=(1, 2), recompute=(("none",),), families=("1f1b",), most_pipelines=(1,)
    )
    seen: list[Choice] = []
    assert explore(small, lambda c: seen.append(c), n_trials=4, seed=0) == 4
    assert seen == list(small)


def test_sampling_is_reproducible_starts_with_the_seeds_and_finds_the_best() -> None:
    def run(seed: int) -> list[tuple[Choice, float | None]]:
        seen: list[tuple[Choice, float | None]] = []

        def objective(choice: Choice) -> float | None:
            seen.append((choice, _seconds(choice)))
            return seen[-1][1]

        first = Choice(degrees=(("b", 2),), samples=4, recompute=("full",), family="gpipe", most_pipelines=3)
        explore(DIMENSIONS, objective, n_trials=60, seed=seed, seeds=[first])
        assert seen[0][0] == first
        return seen

    one = run(1)
    assert one == run(1) and one != run(2)
    assert len({c for c, _ in one}) == len(one) <= 60, "no choice is paid for twice"
    assert min(v for _, v in one if v is not None) <= 2
    assert {bool(dict(c.degrees).get("b")) for c, _ in one} == {True, False}
