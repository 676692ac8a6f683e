"""Evaluation: every candidate is built, lowered and simulated like a plan that will run, and checked for memory.

Of long steps only the ends are walked, where that tells the rest to the last digits (`costmodel.fold`); the plan that
is handed out is proven and simulated whole.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from autopiper import ir
from autopiper._collector import no_collection
from autopiper._data import data
from autopiper.cluster.spec import Cluster
from autopiper.costmodel import predict, predict_folded
from autopiper.costmodel.fold import Prediction
from autopiper.ir.graph import TrainingGraph
from autopiper.ir.joint import join
from autopiper.model.spec import Model
from autopiper.plan.actions import Program
from autopiper.plan.costs import CostTable
from autopiper.plan.space import Space
from autopiper.plan.strategy import Pipeline, Strategy

KEPT, KEPT_PER_STAGE = 24, 5
"""Micro-batches of a pipeline that are simulated at least, for the rhythm to set in and to be seen."""
PROOF = 1.5
"""A whole plan is proven too, and takes so much longer than its simulation."""
ROUND = 12
"""Micro-batches are left out in multiples of this: rhythms are of 1, 2, 3, 4, 6, … micro-batches."""


@data
class Outcome:
    """A strategy as the simulator sees it."""

    strategy: Strategy
    step_s: float
    makespan_s: float
    excess_bytes: Mapping[tuple[int, int], float]
    """By (pipeline, stage), the memory that is missing there."""
    worst: tuple[float, int]
    """The largest excess (negative: room left) and the device where it is."""

    @property
    def feasible(self) -> bool:
        """Whether every device holds what it must."""
        return not self.excess_bytes


class Evaluator:
    """Simulates strategies under one cost table, each once."""

    def __init__(self, model: Model, cluster: Cluster, costs: CostTable) -> None:
        self.model, self.cluster, self.costs = model, cluster, costs
        self.simulated = 0
        self._spent_s, self._passes = 0.0, 0
        self._seen: dict[str, Outcome] = {}

    def __call__(self, strategy: Strategy) -> Outcome:
        """Return the outcome of a strategy; raises PlanError or CostError where it is not one that can be priced."""
        short, left_out = shortened(strategy)
        key = hashlib.sha256(repr((short.directives(), left_out)).encode()).hexdigest()
        if key not in self._seen:
            started = time.monotonic()
            with no_collection():
                folded = self._folded(short, left_out) if any(left_out) else None
                programs, found = folded or self._whole(strategy)[1:]
            self.simulated += 1
            self._spent_s += time.monotonic() - started
            self._passes += _passes(short if folded else strategy)
            self._seen[key] = self._outcome(strategy, programs, found)
        return self._seen[key]

    def whole_s(self, strategy: Strategy) -> float:
        """Estimate how long `whole` will take for a strategy, by what simulations have taken so far."""
        return PROOF * self._spent_s * _passes(strategy) / self._passes if self._passes else 0.0

    def _folded(self, short: Strategy, left_out: Sequence[int]) -> tuple[tuple[Program, ...], Prediction] | None:
        graph = ir.build(short, self.model, self.cluster)
        programs = ir.lower(graph)
        found = predict_folded(graph, programs, self.costs, left_out)
        return None if found is None else (programs, found)

    def _whole(
        self, strategy: Strategy, *, proven: bool = False
    ) -> tuple[TrainingGraph, tuple[Program, ...], Prediction]:
        graph = ir.build(strategy, self.model, self.cluster)
        programs = ir.lower(graph)
        joint = join(programs)
        if proven:
            ir.verify(graph, programs, joint)
        return graph, programs, predict(graph, programs, self.costs, joint)

    def _outcome(self, strategy: Strategy, programs: Sequence[Program], found: Prediction) -> Outcome:
        excess: dict[tuple[int, int], float] = {}
        worst = (float("-inf"), -1)
        places = _places(strategy, self.model, self.cluster)
        for program in programs:
            device = program.devices[0]
            over = found.peak_memory_bytes[program.ranks[0]] - self.cluster.device(device).type.usable_bytes
            worst = max(worst, (over, device))
            if over > 0:
                place = places[device]
                excess[place] = max(over, excess.get(place, 0.0))
        return Outcome(
            strategy=strategy,
            step_s=found.step_time_s,
            makespan_s=found.makespan_s,
            excess_bytes=excess,
            worst=worst,
        )

    def whole(self, strategy: Strategy) -> tuple[TrainingGraph, tuple[Program, ...], Prediction] | None:
        """Return graph, Programs and prediction of a strategy, proven and simulated from end to end: a plan to hand out.

        None where a device does not hold what it must.
        """
        with no_collection():
            graph, programs, found = self._whole(strategy, proven=True)
        return (graph, programs, found) if self._outcome(strategy, programs, found).feasible else None


def _passes(strategy: Strategy) -> int:
    """Count micro-batches times members: what a simulation's time is in proportion to."""
    return sum(len(p.micro_batch_sizes) * sum(len(s.group.members) for s in p.stages) for p in strategy.pipelines)


def shortened(strategy: Strategy) -> tuple[Strategy, tuple[int, ...]]:
    """Leave out micro-batches from the middle of long pipelines; return what is left, and how many went from each.

    Only where whole micro-batches are alike, the last aside, and are scheduled by 1F1B (see `costmodel.fold`).
    """
    if strategy.given:
        return strategy, ()
    families = {p: s.family for s in strategy.schedules for p in s.pipelines}
    left_out = tuple(
        _superfluous(pipe) if families.get(p) == "1f1b" else 0 for p, pipe in enumerate(strategy.pipelines)
    )
    if not any(left_out):
        return strategy, left_out
    pipelines = tuple(
        replace(
            pipe,
            micro_batch_sizes=pipe.micro_batch_sizes[k:],
            stages=tuple(replace(s, group=replace(s.group, slices=s.group.slices[k:])) for s in pipe.stages),
        )
        for k, pipe in zip(left_out, strategy.pipelines, strict=True)
    )
    training = replace(strategy.training, global_batch_size=sum(p.share for p in pipelines))
    return replace(strategy, training=training, pipelines=pipelines), left_out


def _superfluous(pipe: Pipeline) -> int:
    number = len(pipe.micro_batch_sizes)
    rows = [pipe.micro_batch_sizes, *(s.group.slices for s in pipe.stages)]
    if any(len(set(row[:-1])) > 1 for row in rows):
        return 0
    return number - walked(number, len(pipe.stages), "1f1b")


def walked(micro_batches: int, num_stages: int, family: str) -> int:
    """Return how many micro-batches of a pipeline are simulated at first."""
    kept = KEPT + KEPT_PER_STAGE * num_stages
    if family != "1f1b" or micro_batches < 2 * kept:
        return micro_batches
    return micro_batches - (micro_batches - kept) // ROUND * ROUND


def _places(strategy: Strategy, model: Model, cluster: Cluster) -> dict[int, tuple[int, int]]:
    if strategy.given:
        graph = ir.build(strategy, model, cluster)
        return {d: (s.pipeline, s.index) for s in graph.stages() for m in s.members for d in m}
    return {
        d: (p, s)
        for p, pipe in enumerate(strategy.pipelines)
        for s, stage in enumerate(pipe.stages)
        for d in stage.group.devices
    }


def outside(graph: TrainingGraph, space: Space, schedules: Sequence[str]) -> str | None:
    """Say why a strategy is not one of the space; None where it is. `schedules` = families that it uses."""
    pipes = graph.pipelines
    replicas = len(pipes[0].stages[0].members) if space.equal_pipelines and len(pipes) == 1 else len(pipes)
    if space.equal_pipelines and len(pipes) > 1:
        return f"it has {len(pipes)} unlike pipelines"
    if replicas < space.min_pipelines or (space.max_pipelines is not None and replicas > space.max_pipelines):
        return f"it has {replicas} pipelines, and {space.min_pipelines}..{space.max_pipelines or 'any'} are allowed"
    allowed = None if space.devices is None else set(space.devices)
    for stage in graph.stages():
        if allowed is not None and not {d for m in stage.members for d in m} <= allowed:
            return "it uses devices that are not allowed"
        if max(max(row) for row in stage.slices) > max(space.micro_batch_sizes):
            return f"a slice exceeds {max(space.micro_batch_sizes)} samples"
        if space.tensor_parallel_sizes is not None and stage.tensor_parallel_size not in space.tensor_parallel_sizes:
            return f"tensor_parallel_size {stage.tensor_parallel_size} is not allowed"
        if not set(stage.recompute or ("none",)) <= set(space.recompute):
            return "its recompute is not allowed"
    for pipe in pipes:
        if space.max_stages is not None and len(pipe.stages) > space.max_stages:
            return f"it has {len(pipe.stages)} stages, and {space.max_stages} are allowed"
        sizes = [s.stop - s.start for s in pipe.stages]
        if space.equal_stages and max(sizes) - min(sizes) > 1:
            return "its stages are unequal"
    unknown = set(schedules) - set(space.schedules)
    return f"schedule {', '.join(sorted(unknown))} is not allowed" if unknown else None
