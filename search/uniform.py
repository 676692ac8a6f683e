"""The best uniform 3D layout, found by exhaustion: what the plan is compared with, and never worse than.

Every tensor-, pipeline- and data-parallel size, micro-batch size, recompute choice and schedule, on all devices and on
the devices of each type alone. A layout is left out only when its memory without messages already exceeds a device, or
when a bound on its own step shows that it cannot beat the best one simulated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from autopiper._data import data
from autopiper.errors import PlanError
from autopiper.plan.space import Space
from autopiper.plan.strategy import Strategy
from autopiper.search.evaluate import Evaluator, Outcome
from autopiper.search.prices import MemberCosts, Prices


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

    @property
    def words(self) -> str:
        """ "uniform tp 2, pp 4, dp 4, micro-batch 1, recompute none, 1f1b, 32 devices" """
        return (
            f"uniform tp {self.tensor_parallel_size}, pp {self.pipeline_parallel_size}, dp {self.data_parallel_size}, "
            f"micro-batch {self.micro_batch_size}, recompute {self.recompute}, {self.schedule}, {len(self.devices)} devices"
        )

    def strategy(self, prices: Prices, bucket_bytes: int) -> Strategy:
        """Write the layout as a strategy. Raises PlanError where sizes do not divide."""
        from dataclasses import replace

        made = Strategy.uniform(
            prices.model, prices.cluster, prices.training, micro_batch_size=self.micro_batch_size,
            tensor_parallel_size=self.tensor_parallel_size, pipeline_parallel_size=self.pipeline_parallel_size,
            schedule=self.schedule, recompute=self.recompute, devices=self.devices,
        )  # fmt: skip
        return replace(made, bucket_bytes=bucket_bytes)


def best_uniform(
    prices: Prices, evaluate: Evaluator, space: Space, devices: Sequence[int], *,
    stop: Callable[[], bool] = lambda: False, accept: Callable[[Strategy], bool] = lambda _: True,
) -> tuple[Layout, Outcome] | None:  # fmt: skip
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
    best: tuple[Layout, Outcome] | None = None
    for least_s, _, layout in ranked:
        if best is not None and (least_s >= best[1].step_s or stop()):
            break
        try:
            strategy = layout.strategy(prices, space.bucket_bytes)
            if not accept(strategy):
                continue
            outcome = evaluate(strategy)
        except PlanError:  # a tensor-parallel group across nodes or types
            continue
        if outcome.feasible and (best is None or outcome.step_s < best[1].step_s):
            best = layout, outcome
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
                                yield Layout(
                                    devices=devices, tensor_parallel_size=tp, pipeline_parallel_size=pp,
                                    data_parallel_size=dp, micro_batch_size=size, recompute=recompute,
                                    schedule=schedule,
                                )  # fmt: skip


def least_step_s(prices: Prices, layout: Layout) -> float:
    """Return a bound on the step of one layout; infinite where its memory without messages exceeds a device.

    For each stage b: the first micro-batch passes the stages before b and the last one returns through them, and b
    works on all of them in between: sum of the stages before b + m · stage b. Holds for gpipe and 1f1b.
    """
    count, pp = len(prices.model.blocks), layout.pipeline_parallel_size
    tp, dp, size = layout.tensor_parallel_size, layout.data_parallel_size, layout.micro_batch_size
    base, extra = divmod(count, pp)
    cuts = [0]
    for s in range(pp):
        cuts.append(cuts[-1] + base + (s < extra))
    number = prices.training.global_batch_size // (dp * size)
    before = best = 0.0
    for s, (start, stop) in enumerate(pairwise(cuts)):
        ids = layout.devices[s * dp * tp : (s + 1) * dp * tp]
        members: list[MemberCosts] = []
        for name in {prices.cluster.device(d).type.name for d in ids}:
            member = prices.member(name, tp, size)
            if member is None:
                return math.inf
            members.append(member)
        live = number if layout.schedule == "gpipe" else min(number, pp - s)
        if any(float(m.memory_bytes(layout.recompute, live)[start, stop]) > m.capacity_bytes for m in members):
            return math.inf
        seconds = max(float(m.time_s[layout.recompute][start, stop]) for m in members)
        best = max(best, before + number * seconds)
        before += seconds
    return best
