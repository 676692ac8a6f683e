"""Evaluation: every candidate is built, lowered and simulated like a plan that will run, and checked for memory."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from autopiper import ir
from autopiper._data import data
from autopiper.cluster.spec import Cluster
from autopiper.costmodel import simulate
from autopiper.ir.graph import TrainingGraph
from autopiper.model.spec import Model
from autopiper.plan.actions import Program
from autopiper.plan.costs import CostTable
from autopiper.plan.space import Space
from autopiper.plan.strategy import Strategy
from autopiper.plan.timeline import Timeline


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
        self._seen: dict[str, Outcome] = {}

    def __call__(self, strategy: Strategy) -> Outcome:
        """Return the outcome of a strategy; raises PlanError or CostError where it is not one that can be priced."""
        key = hashlib.sha256(repr(strategy.directives()).encode()).hexdigest()
        if key not in self._seen:
            with _no_collection():
                graph = ir.build(strategy, self.model, self.cluster)
                timeline = simulate(graph, ir.lower(graph), self.costs, events=False)
            self.simulated += 1
            self._seen[key] = self._outcome(strategy, timeline)
        return self._seen[key]

    def _outcome(self, strategy: Strategy, timeline: Timeline) -> Outcome:
        excess: dict[tuple[int, int], float] = {}
        worst = (float("-inf"), -1)
        places = _places(strategy, self.model, self.cluster)
        for lane in timeline.lanes:
            device = lane.devices[0]
            over = lane.peak_memory_bytes - self.cluster.device(device).type.usable_bytes
            worst = max(worst, (over, device))
            if over > 0:
                place = places[device]
                excess[place] = max(over, excess.get(place, 0.0))
        return Outcome(
            strategy=strategy,
            step_s=timeline.step_time_s,
            makespan_s=timeline.makespan_s,
            excess_bytes=excess,
            worst=worst,
        )

    def whole(self, strategy: Strategy) -> tuple[TrainingGraph, tuple[Program, ...], Timeline]:
        """Return graph, Programs and timeline of a strategy, for the plan that is handed out."""
        graph = ir.build(strategy, self.model, self.cluster)
        programs = ir.lower(graph)
        ir.verify(graph, programs)
        return graph, programs, simulate(graph, programs, self.costs)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector away: it would walk tens of thousands of new actions, none of them in a cycle."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


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
