"""From a strategy to the complete training graph: apply its directives, fill in what follows from them, check it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autopiper._data import require
from autopiper.cluster.spec import Cluster
from autopiper.errors import PlanError
from autopiper.ir import phases
from autopiper.ir.gradients import borders, gradient_blocks
from autopiper.ir.graph import GraphStage, TrainingGraph
from autopiper.model.spec import Model
from autopiper.plan.strategy import Strategy


def build(strategy: Strategy, model: Model, cluster: Cluster) -> TrainingGraph:
    """Write the training graph of a strategy, starting only from its directives.

    Raises PlanError with every fault where the directives do not make a whole strategy. A training whose precision
    is still None is resolved over the devices that the strategy uses.
    """
    require(PlanError, "strategy", strategy, Strategy)
    require(PlanError, "model", model, Model)
    require(PlanError, "cluster", cluster, Cluster)
    graph = TrainingGraph(model=model, cluster=cluster, training=strategy.training)
    graph = phases.apply(graph, strategy.directives())
    faults = _faults(graph)
    if faults:
        raise PlanError(f"the strategy for '{model.name}' on '{cluster.name}' is not whole", faults)
    graph = _each_stage(graph, _with_slices)
    faults = [fault for stage in graph.stages() if stage.sharded for fault in _idle_experts(stage)]
    if faults:
        raise PlanError("experts without samples", faults)
    graph = replace(graph, training=graph.training.resolve(cluster.device(d).type for d in graph.devices()))
    graph = replace(graph, gradient_blocks=gradient_blocks(graph))
    return _each_stage(graph, lambda graph, stage: replace(stage, borders=borders(graph, stage)))


def _each_stage(graph: TrainingGraph, change: Callable[[TrainingGraph, GraphStage], GraphStage]) -> TrainingGraph:
    return replace(
        graph,
        pipelines=tuple(replace(p, stages=tuple(change(graph, s) for s in p.stages)) for p in graph.pipelines),
    )


def _with_slices(graph: TrainingGraph, stage: GraphStage) -> GraphStage:
    """Fill in what `slices` left open: the members share each micro-batch equally."""
    if stage.slices:
        return stage
    members, sizes = len(stage.members), graph.pipelines[stage.pipeline].micro_batch_sizes
    uneven = next((size for size in sizes if size % members), None)
    if uneven is not None:
        raise PlanError(
            f"micro-batch of {uneven} samples does not divide among the {members} members of stage {stage.tag}; "
            "say with slices(...) who takes how many"
        )
    return replace(stage, slices=tuple((size // members,) * members for size in sizes))


def _idle_experts(stage: GraphStage) -> list[str]:
    """Say where a member has no samples while others of its expert group have: its experts would not compute theirs."""
    size = stage.expert_parallel_size
    for mb, row in enumerate(stage.slices):
        for first in range(0, len(row), size):
            part = row[first : first + size]
            if 0 in part and any(part):
                return [
                    f"stage {stage.tag}, micro-batch {mb}: slices {part} of members {first}..{first + size - 1}, which divide the "
                    "experts; one without samples cannot be planned yet: give each at least one"
                ]
    return []


def _faults(graph: TrainingGraph) -> list[str]:
    faults = []
    total = sum(sum(p.micro_batch_sizes) for p in graph.pipelines)
    if total != graph.training.global_batch_size:
        shares = " + ".join(str(sum(p.micro_batch_sizes)) for p in graph.pipelines)
        summed = f"shares {shares} = {total} samples" if len(graph.pipelines) > 1 else f"pipeline 0 has {total} samples"
        faults.append(f"{summed}, but global_batch_size is {graph.training.global_batch_size}")
    for pipe in graph.pipelines:
        held = pipe.stages[-1].stop if pipe.stages else 0
        if held != len(graph.model.blocks):
            faults.append(
                f"pipeline {pipe.index} holds blocks [0, {held}) of {len(graph.model.blocks)}; cut the rest too"
            )
    for members, stages in graph.groups().items():
        held_by: dict[int, str] = {}
        for stage in stages:
            for block in range(stage.start, stage.stop):
                other = held_by.setdefault(block, stage.tag)
                if other != stage.tag:
                    faults.append(
                        f"devices {members} hold block {block} twice, in {other} and {stage.tag}; once is enough"
                    )
            if stage.expert_parallel_size > 1 and not stage.sharded:
                faults.append(
                    f"stage {stage.tag} has expert_parallel_size {stage.expert_parallel_size}, but no shard directive says "
                    f"which experts; add shard({{'PIPE': {stage.pipeline}, 'PP': {stage.index}, 'EP': '*'}}, devices)"
                )
            if {s.tensor_parallel_size for s in stages} != {stage.tensor_parallel_size}:
                faults.append(
                    f"stages {', '.join(s.tag for s in stages)} share devices {members} with unlike tensor degrees"
                )
        for member in members:
            nodes = {graph.cluster.device(d).node for d in member}
            types = {graph.cluster.device(d).type.name for d in member}
            if len(nodes) > 1 or len(types) > 1:
                faults.append(f"stage {stages[0].tag}: tensor-parallel ranks {member} must be of one type in one node")
    return faults
