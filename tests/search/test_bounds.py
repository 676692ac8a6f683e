"""Lower bounds: no plan lies below, and they are tight where a perfect plan exists."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from autopiper import ir
from autopiper.cluster.spec import Cluster, DeviceType, Link, Node
from autopiper.costmodel import simulate
from autopiper.model.spec import Block, Edge, Model, TensorSpec, TiedParameter
from autopiper.plan.costs import BlockCost, CostTable
from autopiper.plan.strategy import Group, Pipeline, Schedule, Stage, Strategy
from autopiper.plan.training import Training
from autopiper.search.bounds import BestPrices, Bound, lower_bound
from autopiper.search.prices import MemberCosts, Prices
from autopiper.search.shapes import bottleneck_bound

BLOCKS = 6
CHOICES = ("none", "full")


class World:
    """A random small model, cluster and cost table, and the bound over all their plans."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        kinds = [f"k{rng.randrange(3)}" for _ in range(BLOCKS)]
        if rng.random() < 0.3:  # a tied parameter must be of one size wherever it is
            kinds[0] = kinds[-1] = "k9"
        sizes = {k: rng.choice((0, 10, 40)) for k in kinds} | {"k9": 20}
        tied = (TiedParameter(name="t", blocks=(0, BLOCKS - 1), parameters=15),) if kinds[0] == "k9" else ()
        self.model = Model(
            name="random",
            blocks=tuple(Block(name=str(i), kind=k, dense_parameters=sizes[k]) for i, k in enumerate(kinds)),
            edges=tuple(
                Edge(source=i, target=i + 1, tensors=(TensorSpec(name="x", shape=(3,)),)) for i in range(BLOCKS - 1)
            ),
            tied=tied,
        )
        names = [f"d{i}" for i in range(rng.randint(1, 3))]
        types = tuple(
            DeviceType(name=n, memory_bytes=1e12, peak_flops={"fp32": 1.0}, memory_bytes_per_s=1.0) for n in names
        )
        link = Link(bytes_per_s=rng.choice((1e3, 1e9)), latency_s=rng.choice((0.0, 0.01)))
        nodes = tuple(
            Node(name=f"n{i}", devices=(rng.choice(names),) * rng.choice((2, 2, 3)), intra=link, nic=link)
            for i in range(2)
        )
        self.cluster = Cluster(name="random", device_types=types, nodes=nodes)
        self.degrees = (1, 2)
        self.costs = CostTable(blocks=tuple(self._prices(set(kinds), names)), precision="fp32")
        self.batch = rng.randint(3, 7)
        self.training = Training(global_batch_size=self.batch, precision="fp32")
        prices = Prices(self.model, self.cluster, self.training, self.costs, CHOICES)
        self.bound: Bound = lower_bound(BestPrices(prices, self.cluster.counts(), None, 4), self.batch)

    def _prices(self, kinds: set[str], names: list[str]) -> list[BlockCost]:
        rng, out = self.rng, []
        for kind in sorted(kinds):
            for name in names:
                for tp in self.degrees:
                    fixed, slope = rng.uniform(0, 1), rng.uniform(0.2, 2) / tp
                    update = rng.choice((0.0, rng.uniform(0, 2) / tp))
                    for samples in (1, 2, 4):
                        seconds = fixed + slope * samples
                        out.append(
                            BlockCost(
                                kind=kind, device_type=name, samples=samples, tensor_parallel_size=tp,
                                forward_s=seconds, backward_s=2 * seconds, backward_input_s=seconds,
                                backward_weight_s=seconds, update_s=update, kept_bytes=1.0 * samples,
                            )
                        )  # fmt: skip
        return out

    def strategy(self) -> Strategy | None:
        """Any plan of the space: random pipelines, groups, cuts, slices, micro-batches, recompute, schedules."""
        rng = self.rng
        groups: list[tuple[int, ...]] = []
        start = 0
        for node in self.cluster.nodes:
            ids = list(range(start, start + len(node.devices)))
            start += len(node.devices)
            while ids:
                size = rng.choice([d for d in self.degrees if d <= len(ids)])
                groups.append(tuple(ids[:size]))
                ids = ids[size:]
        rng.shuffle(groups)
        groups = groups[: rng.randint(1, len(groups))]
        shares = self._split(self.batch, rng.randint(1, min(3, len(groups), self.batch)))
        pipelines = []
        for number, share in enumerate(shares):
            left = len(shares) - number - 1
            own, groups = groups[: len(groups) - left], groups[len(groups) - left :]
            if left:  # leave some to the others
                keep = rng.randint(1, len(own))
                own, groups = own[:keep], own[keep:] + groups
            pipelines.append(self._pipeline(own, share))
        if any(p is None for p in pipelines):
            return None
        return Strategy(
            training=self.training,
            pipelines=tuple(p for p in pipelines if p),
            schedules=tuple(
                Schedule(family=rng.choice(("gpipe", "1f1b")), pipelines=(p,)) for p in range(len(pipelines))
            ),
            bucket_bytes=rng.choice((40, 2**20)),
        )

    def _split(self, total: int, parts: int) -> list[int]:
        borders = [0, *sorted(self.rng.sample(range(1, total), parts - 1)), total]
        return [b - a for a, b in pairwise(borders)]

    def _pipeline(self, groups: list[tuple[int, ...]], share: int) -> Pipeline | None:
        rng = self.rng
        by_size: dict[int, list[tuple[int, ...]]] = {}
        for g in groups:
            by_size.setdefault(len(g), []).append(g)
        stages: list[list[tuple[int, ...]]] = []
        for found in by_size.values():
            parts = self._split(len(found), rng.randint(1, len(found)))
            for part in parts:
                stages.append(found[:part])
                found = found[part:]
        rng.shuffle(stages)
        stages = stages[:BLOCKS]
        sizes = self._split(share, rng.randint(1, share))
        rows: list[tuple[tuple[int, ...], ...]] = []
        for members in stages:
            table = [self._slices(size, len(members)) for size in sizes]
            if any(max(row) > 4 for row in table):
                return None
            rows.append(tuple(table))
        lengths = self._split(BLOCKS, len(stages))
        made, at = [], 0
        for members, length, slices in zip(stages, lengths, rows, strict=True):
            made.append(
                Stage(
                    start=at,
                    stop=at + length,
                    group=Group(members=tuple(members), slices=slices),
                    recompute=tuple(rng.choice(CHOICES) for _ in range(length)),
                )
            )
            at += length
        return Pipeline(micro_batch_sizes=tuple(sizes), stages=tuple(made))

    def _slices(self, size: int, members: int) -> tuple[int, ...]:
        row = [0] * members
        for _ in range(size):
            row[self.rng.randrange(members)] += 1
        return tuple(row)


def test_no_plan_of_10000_random_ones_lies_below_the_bound() -> None:
    rng = random.Random(2)
    count, closest = 0, float("inf")
    bindings = set()
    while count < 10_000:
        world = World(rng)
        bindings.add(world.bound.binding.split(":")[0])
        for _ in range(25):
            strategy = world.strategy()
            if strategy is None:
                continue
            graph = ir.build(strategy, world.model, world.cluster)
            step_s = simulate(graph, ir.lower(graph), world.costs, events=False).step_time_s
            assert step_s >= world.bound.seconds * (1 - 1e-9), (strategy, world.bound)
            closest = min(closest, step_s / world.bound.seconds)
            count += 1
    assert bindings == {"compute work", "critical path"}, "both bounds are the tightest somewhere"
    assert closest < 1.4, "some plan comes near, so the bound is no triviality"


def _one_device(forward_s: list[float], update_s: float) -> tuple[Bound, float]:
    model = Model(
        name="m",
        blocks=tuple(Block(name=str(i), kind=f"layer{i}", dense_parameters=1) for i in range(len(forward_s))),
        edges=tuple(
            Edge(source=i, target=i + 1, tensors=(TensorSpec(name="x", shape=(1,)),)) for i in range(len(forward_s) - 1)
        ),
    )
    cluster = Cluster(
        name="c",
        device_types=(DeviceType(name="d", memory_bytes=1e9, peak_flops={"fp32": 1.0}, memory_bytes_per_s=1.0),),
        nodes=(Node(name="n", devices=("d",), intra=Link(bytes_per_s=1.0), nic=Link(bytes_per_s=1.0)),),
    )
    training = Training(global_batch_size=5, precision="fp32")
    costs = CostTable.from_layers(
        forward_s=forward_s, backward_s=[2 * f for f in forward_s], update_s=[update_s] * len(forward_s)
    )
    prices = Prices(model, cluster, training, costs, ("none",))
    strategy = Strategy.uniform(model, cluster, training)
    graph = ir.build(strategy, model, cluster)
    return lower_bound(BestPrices(prices, {"d": 1}, None, 1), 5), simulate(graph, ir.lower(graph), costs).step_time_s


def test_one_device_reaches_the_bound() -> None:
    bound, step_s = _one_device([1.0, 2.0, 0.5], 0.25)
    assert bound.seconds == pytest.approx(5 * 3 * 3.5 + 3 * 0.25)  # 5 samples, F + B = 3 F, three updates
    assert step_s == pytest.approx(bound.seconds)
    assert "compute work" in bound.binding


@pytest.mark.parametrize("seed", range(50))
def test_no_cut_has_a_bottleneck_below_its_bound(seed: int) -> None:
    rng = random.Random(seed)
    blocks, stages = rng.randint(2, 7), rng.randint(1, 3)
    members = [
        MemberCosts(
            name=f"m{s}", forward_s=[rng.uniform(0, 2) for _ in range(blocks)], backward_s=[0.0] * blocks,
            extra_s={"none": [0.0] * blocks}, kept_bytes={"none": [0.0] * blocks},
            workspace_bytes={"none": [0.0] * blocks}, static_bytes=[0.0] * blocks, capacity_bytes=1.0,
            pass_s=rng.choice((0.0, rng.uniform(0, 2))), message_s=rng.choice((0.0, rng.uniform(0, 1))),
        )
        for s in range(stages)
    ]  # fmt: skip
    best = float("inf")
    for code in range((blocks + 1) ** (stages - 1)):  # every pair of borders, empty stages included
        borders = [0, *sorted((code // (blocks + 1) ** s) % (blocks + 1) for s in range(stages - 1)), blocks]
        spans = pairwise(borders)
        times = [
            float(m.forward_s[a:b].sum()) + m.pass_s + 2 * ((s > 0) + (s < stages - 1)) * m.message_s
            for s, (m, (a, b)) in enumerate(zip(members, spans, strict=True))
        ]
        best = min(best, max(times))
    assert bottleneck_bound(members) <= best * (1 + 1e-9)
