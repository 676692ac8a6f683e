"""The best uniform 3D layout, found by exhaustion: what the plan is compared with, and never worse than.

Every tensor-, pipeline- and data-parallel size, micro-batch size, recompute choice and schedule, with the blocks left
over on the first stages or, as Megatron-LM has embedding and head, at both ends; on all devices and on the devices of
each type alone. A layout is left out only when its memory without messages already exceeds a device, or
when a bound on its own step shows that it cannot beat the best one simulated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from autopiper._data import data
from autopiper.cluster.spec import Cluster
from autopiper.costmodel.collectives import all_reduce_s, transfer_s
from autopiper.errors import PlanError
from autopiper.plan.space import Space
from autopiper.plan.strategy import Leftover, Strategy, even_sizes
from autopiper.search.evaluate import Evaluator, Outcome
from autopiper.search.prices import MemberCosts, Prices
from autopiper.search.shapes import Shape, neighbours


@data
class Layout:
    """One uniform layout on some devices."""

    devices: tuple[int, ...]
    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    micro_batch_size: int
    recompute: str
    schedule: str
    leftover: Leftover = "first"

    @property
    def words(self) -> str:
        """ "uniform tp 2, pp 4, dp 4, micro-batch 1, recompute none, 1f1b, 32 devices" """
        ends = ", blocks left over at both ends" if self.leftover == "ends" else ""
        return (
            f"uniform tp {self.tensor_parallel_size}, pp {self.pipeline_parallel_size}, dp {self.data_parallel_size}, "
            f"micro-batch {self.micro_batch_size}, recompute {self.recompute}, {self.schedule}{ends}, "
            f"{len(self.devices)} devices"
        )

    def member(self, stage: int, index: int) -> int:
        """Return the first device of a member of a stage."""
        return self.devices[(stage * self.data_parallel_size + index) * self.tensor_parallel_size]

    def shape(self, cluster: Cluster) -> Shape:
        """Return what the layout is made of, its cuts left open."""
        stages, members = range(self.pipeline_parallel_size), range(self.data_parallel_size)
        return Shape(
            types=tuple(tuple(cluster.device(self.member(s, r)).type.name for r in members) for s in stages),
            tensor_parallel_sizes=(self.tensor_parallel_size,) * self.pipeline_parallel_size,
            slices=((self.micro_batch_size,) * self.data_parallel_size,) * self.pipeline_parallel_size,
        )

    def strategy(self, prices: Prices, bucket_bytes: int) -> Strategy:
        """Write the layout as a strategy. Raises PlanError where sizes do not divide."""
        made = Strategy.uniform(
            prices.model, prices.cluster, prices.training, micro_batch_size=self.micro_batch_size,
            tensor_parallel_size=self.tensor_parallel_size, pipeline_parallel_size=self.pipeline_parallel_size,
            schedule=self.schedule, recompute=self.recompute, devices=self.devices, leftover=self.leftover,
        )  # fmt: skip
        return replace(made, bucket_bytes=bucket_bytes)


@data
class BestUniform:
    """The best layout simulated."""

    layout: Layout
    outcome: Outcome
    unseen: int
    """Layouts that could be faster by their bounds and were not simulated, for want of time."""

    @property
    def note(self) -> str:
        """What a reader must know of it, or nothing."""
        return f"{self.unseen} more that may be faster were not simulated for want of time" if self.unseen else ""


def best_uniform(
    prices: Prices, evaluate: Evaluator, space: Space, devices: Sequence[int], *,
    stop: Callable[[], bool] = lambda: False, accept: Callable[[Strategy], bool] = lambda _: True,
) -> BestUniform | None:  # fmt: skip
    """Return the best layout that fits, or None. `stop` ends the enumeration early, `accept` filters layouts."""
    by_type: dict[str, list[int]] = {}
    for d in devices:
        by_type.setdefault(prices.cluster.device(d).type.name, []).append(d)
    sets = [tuple(devices)] + ([tuple(ids) for ids in by_type.values()] if len(by_type) > 1 else [])
    ranked = []
    for number, layout in enumerate(_layouts(prices, space, sets)):
        least_s = least_step_s(prices, layout)
        if least_s < math.inf:
            ranked.append((least_s, number, layout))
    ranked.sort(key=lambda row: row[:2])
    best: BestUniform | None = None
    for place, (least_s, _, layout) in enumerate(ranked):
        if best is not None and least_s >= best.outcome.step_s:
            break
        if best is not None and stop():
            unseen = sum(bound_s < best.outcome.step_s for bound_s, _, _ in ranked[place:])
            return replace(best, unseen=unseen)
        try:
            strategy = layout.strategy(prices, space.bucket_bytes)
            if not accept(strategy):
                continue
            outcome = evaluate(strategy)
        except PlanError:  # a tensor-parallel group across nodes or types
            continue
        if outcome.feasible and (best is None or outcome.step_s < best.outcome.step_s):
            best = BestUniform(layout=layout, outcome=outcome, unseen=0)
    return best


def _layouts(prices: Prices, space: Space, sets: Sequence[tuple[int, ...]]) -> Iterator[Layout]:
    batch, blocks = prices.training.global_batch_size, len(prices.model.blocks)
    for devices in sets:
        names = {prices.cluster.device(d).type.name for d in devices}
        degrees = [set(prices.tensor_parallel_sizes(n, space.tensor_parallel_sizes)) for n in names]
        for tp in sorted(set.intersection(*degrees)):
            for pp in range(1, min(blocks, len(devices) // tp, space.max_stages or blocks) + 1):
                dp, rest = divmod(len(devices), tp * pp)
                for size in space.micro_batch_sizes:
                    if rest or batch % (dp * size):
                        continue
                    for recompute in space.recompute:
                        for schedule in space.schedules:
                            if pp > 1 or schedule == space.schedules[0] or schedule == "1f1b":
                                made = Layout(
                                    devices=devices, tensor_parallel_size=tp, pipeline_parallel_size=pp,
                                    data_parallel_size=dp, micro_batch_size=size, recompute=recompute,
                                    schedule=schedule,
                                )  # fmt: skip
                                yield made
                                if even_sizes(blocks, pp) != even_sizes(blocks, pp, "ends"):
                                    yield replace(made, leftover="ends")


def least_step_s(prices: Prices, layout: Layout) -> float:
    """Return a bound on the step of one layout; infinite where its memory without messages exceeds a device.

    For each stage s with a backward of B, its gradients reduced in R, of m micro-batches: the first of them passes the
    stages before, the last returns through them, and s works on all in between: stages before + m · stage s. Its
    reductions begin within the last backward: m · stage s - B + R. Messages: see `_messages_s`.
    """
    count, pp = len(prices.model.blocks), layout.pipeline_parallel_size
    tp, dp, size = layout.tensor_parallel_size, layout.data_parallel_size, layout.micro_batch_size
    cuts = (0, *accumulate(even_sizes(count, pp, layout.leftover)))
    number = prices.training.global_batch_size // (dp * size)
    before = best = 0.0
    stages: list[dict[str, float]] = []
    for s, (start, stop) in enumerate(pairwise(cuts)):
        ids = layout.devices[s * dp * tp : (s + 1) * dp * tp]
        members: dict[str, MemberCosts] = {}
        for name in {prices.cluster.device(d).type.name for d in ids}:
            member = prices.member(name, tp, size)
            if member is None:
                return math.inf
            members[name] = member
        live = number if layout.schedule == "gpipe" else min(number, pp - s)
        if any(float(m.memory_bytes(layout.recompute, live)[start, stop]) > m.capacity_bytes for m in members.values()):
            return math.inf
        beside = neighbours(s, pp)
        stages.append(
            {name: float(m.time_s[layout.recompute][start, stop]) + m.beside_s(beside) for name, m in members.items()}
        )
        seconds = max(stages[-1].values())
        best = max(best, before + number * seconds)
        before += seconds
        reduced_s = _reduced_s(prices, layout, s, start, stop)
        for name, m in members.items():
            best = max(best, (number - 1) * stages[-1][name] + float(m.forward_s[start:stop].sum()) + reduced_s)
    return max(best, _messages_s(prices, layout, cuts, stages, number))


def _reduced_s(prices: Prices, layout: Layout, stage: int, start: int, stop: int) -> float:
    """Return the least seconds in which a stage's own gradients are summed: in one piece, alone on the network."""
    model, tp = prices.model, layout.tensor_parallel_size
    elements = sum(model.untied_parameters(b) for b in range(start, stop))
    holders = [layout.member(stage, r) for r in range(layout.data_parallel_size)]
    num_bytes = elements * prices.training.gradient_bytes / tp
    return all_reduce_s(prices.costs, prices.cluster, holders, num_bytes, sharing=tp)


def _messages_s(
    prices: Prices, layout: Layout, cuts: Sequence[int], stages: Sequence[Mapping[str, float]], number: int
) -> float:
    """Return what messages make of the step at least, for the first and the last member of each stage.

    GPipe: those of all forwards cross a boundary, then those of all backwards. 1F1B, for any run of n stages that ends
    with stage b of p: stage b begins the backward of a micro-batch after p - 1 - b further forwards, so from there on
    every n micro-batches take one journey through the run and back, its stages and messages one after the other.
    """
    pp, best = layout.pipeline_parallel_size, 0.0
    for r in {0, layout.data_parallel_size - 1}:
        types = [prices.cluster.device(layout.member(s, r)).type.name for s in range(pp)]
        times = [row[name] for row, name in zip(stages, types, strict=True)]
        moves = [_message_s(prices, layout, s, r, cuts[s + 1]) for s in range(pp - 1)]  # as long back as there
        if layout.schedule == "gpipe":
            best = max(best, 2 * number * max(moves, default=0.0))
            continue
        for first in range(pp):
            journey = times[first]
            for last in range(first + 1, pp):
                journey += 2 * moves[last - 1] + times[last]
                best = max(best, ((number - pp + last) // (last - first + 1) + 1) * journey)
    return best


def _message_s(prices: Prices, layout: Layout, stage: int, index: int, cut: int) -> float:
    """Price one message of a member to the next stage, its node's interfaces shared by the members there."""
    cluster, tp = prices.cluster, layout.tensor_parallel_size
    part = float(prices.cut_bytes[cut]) * layout.micro_batch_size / tp
    here, there = layout.member(stage, index), layout.member(stage + 1, index)
    nodes = cluster.device(here).node, cluster.device(there).node
    if nodes[0] != nodes[1]:
        for s, node in zip((stage, stage + 1), nodes, strict=True):
            on = sum(cluster.device(layout.member(s, r)).node == node for r in range(layout.data_parallel_size))
            part = max(part, float(prices.cut_bytes[cut]) * layout.micro_batch_size * on / cluster.nodes[node].nics)
    return transfer_s(prices.costs, cluster, here, there, part)
