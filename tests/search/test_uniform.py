"""The best uniform layout against plain enumeration, and the sampler of the outer choices."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from autopiper import ir
from autopiper.cluster.spec import Cluster, DeviceType, Link, Node
from autopiper.costmodel import simulate
from autopiper.errors import PlanError
from autopiper.model.spec import Model
from autopiper.plan.costs import BlockCost, CostTable
from autopiper.plan.space import Space
from autopiper.plan.strategy import Leftover, Strategy, even_sizes
from autopiper.plan.training import Training
from autopiper.search.bayes import Dimensions, explore
from autopiper.search.evaluate import Evaluator
from autopiper.search.exploration import Exploration, Journal
from autopiper.search.prices import Prices
from autopiper.search.proposals import Choice
from autopiper.search.uniform import Layout, best_uniform, least_step_s


def _world(seed: int) -> tuple[Prices, Evaluator, Space]:
    rng = random.Random(seed)
    blocks, per_node = rng.randint(2, 5), rng.choice((2, 4))
    chain = Model.chain(num_blocks=blocks)
    parameters = [rng.choice((0, 1, 3)) for _ in range(blocks)]
    model = replace(
        chain, blocks=tuple(replace(b, dense_parameters=n) for b, n in zip(chain.blocks, parameters, strict=True))
    )
    names = ["fast", "slow"][: rng.randint(1, 2)]
    memory = rng.choice((1e9, 6.0, 9.0))
    types = tuple(
        DeviceType(name=n, memory_bytes=memory, peak_flops={"fp32": 1.0}, memory_bytes_per_s=1.0) for n in names
    )
    link = Link(bytes_per_s=rng.choice((1.0, 10.0)), latency_s=rng.choice((0.0, 0.1)))
    cluster = Cluster(
        name="w", device_types=types,
        nodes=tuple(Node(name=n, devices=(n,) * per_node, intra=link, nic=link, nics=rng.choice((1, 2))) for n in names),
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
        output_bytes=tuple(rng.choice((0.0, 0.3, 4.0)) for _ in range(blocks)),
    )  # fmt: skip
    space = Space(micro_batch_sizes=(1, 2))
    training = Training(global_batch_size=8, precision="fp32")
    return Prices(model, cluster, training, costs, space.recompute), Evaluator(model, cluster, costs), space


@pytest.mark.parametrize("seed", range(40))
def test_best_uniform_layout_equals_plain_enumeration(seed: int) -> None:
    prices, evaluate, space = _world(seed)
    cluster = prices.cluster
    sets = [range(cluster.num_devices)]
    sets += [[d.id for d in cluster.devices() if d.type is t] for t in cluster.device_types]  # type: ignore[misc]
    best = None
    leftovers: tuple[Leftover, ...] = ("first", "ends")
    for ids, tp, pp, size, again, family, leftover in itertools.product(
        sets, (1, 2), range(1, 6), (1, 2), ("none", "full"), ("gpipe", "1f1b"), leftovers
    ):
        try:
            strategy = Strategy.uniform(
                prices.model, cluster, prices.training, micro_batch_size=size, tensor_parallel_size=tp,
                pipeline_parallel_size=pp, schedule=family, recompute=again, devices=ids,
                leftover=leftover,
            )  # fmt: skip
        except PlanError:
            continue
        layout = Layout(
            devices=tuple(ids), tensor_parallel_size=tp, pipeline_parallel_size=pp,
            data_parallel_size=len(ids) // (tp * pp), micro_batch_size=size, recompute=again, schedule=family,
            leftover=leftover,
        )  # fmt: skip
        graph = ir.build(strategy, prices.model, cluster)
        timeline = simulate(graph, ir.lower(graph), prices.costs)
        if all(
            peak <= cluster.device(d).type.usable_bytes
            for lane in timeline.lanes
            for d, peak in zip(lane.devices, [lane.peak_memory_bytes] * len(lane.devices), strict=True)
        ):
            best = min(timeline.step_time_s, best or float("inf"))
            assert least_step_s(prices, layout) <= timeline.step_time_s * (1 + 1e-9), layout.words
    found = best_uniform(prices, evaluate, space, range(cluster.num_devices))
    assert (found is None) == (best is None)
    if found is not None and best is not None:
        assert found.outcome.step_s == pytest.approx(best, rel=1e-12)


def test_layouts_left_out_for_want_of_time_are_counted() -> None:
    missed = 0
    for seed in range(12):
        prices, evaluate, space = _world(seed)
        devices = range(prices.cluster.num_devices)
        whole = best_uniform(prices, evaluate, space, devices)
        first = best_uniform(prices, evaluate, space, devices, stop=lambda: True)
        assert whole is not None and first is not None
        assert (whole.unseen, whole.note) == (0, "")
        if first.outcome.step_s > whole.outcome.step_s:
            missed += 1
            assert first.note == f"{first.unseen} more that may be faster were not simulated for want of time"
            assert first.unseen >= 1
    assert missed


def test_the_shape_of_a_layout_is_cut_again_as_is_best_for_it() -> None:
    model = Model.chain(num_blocks=4)
    device = DeviceType(name="d", memory_bytes=1e9, peak_flops={"fp32": 1.0}, memory_bytes_per_s=1.0)
    link = Link(bytes_per_s=1e9)
    cluster = Cluster(
        name="c", device_types=(device,), nodes=(Node(name="n", devices=("d",) * 2, intra=link, nic=link),)
    )
    costs = CostTable.from_layers(forward_s=[3, 1, 1, 1], backward_s=[6, 2, 2, 2])
    training = Training(global_batch_size=8, precision="fp32")
    space = Space(recompute=("none",), micro_batch_sizes=(1,), schedules=("1f1b",))
    exploration = Exploration(Prices(model, cluster, training, costs, space.recompute), (0, 1), space, Journal(), 1)
    layout = Layout(
        devices=(0, 1), tensor_parallel_size=1, pipeline_parallel_size=2, data_parallel_size=1, micro_batch_size=1,
        recompute="none", schedule="1f1b",
    )  # fmt: skip
    exploration.refine(layout.shape(cluster))
    assert exploration.best is not None
    assert [s.stop for s in exploration.best.outcome.strategy.pipelines[0].stages] == [1, 4]
    assert exploration.best_s == pytest.approx((8 + 1) * 9), "1F1B with two equal stages of 9 s"


def test_equal_stages_as_megatron_has_them() -> None:
    assert even_sizes(34, 4) == (9, 9, 8, 8)
    assert even_sizes(34, 4, "ends") == (9, 8, 8, 9), "8 layers each, with the embedding and with the head"
    assert even_sizes(35, 4, "ends") == (9, 9, 8, 9)
    assert even_sizes(8, 4, "ends") == even_sizes(8, 4) == (2, 2, 2, 2)


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
