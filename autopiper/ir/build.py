"""From a strategy to the complete training graph: apply its directives, fill in what follows from them, check it."""

from __future__ import annotations

from dataclasses import replace

from autopiper.cluster.spec import Cluster
from autopiper.errors import PlanError
from autopiper.ir import transform
from autopiper.ir.gradients import gradient_blocks
from autopiper.ir.graph import GraphStage, TrainingGraph
from autopiper.model.spec import Model
from autopiper.plan.strategy import Strategy


def build(strategy: Strategy, model: Model, cluster: Cluster) -> TrainingGraph:
    """Write the training graph of a strategy, starting only from its directives.

    Raises PlanError with every fault where the directives do not make a whole strategy. A training whose precision
    is still None is resolved over the devices that the strategy uses.
    """
    graph = TrainingGraph(model=model, cluster=cluster, training=strategy.training)
    graph = transform.apply(graph, strategy.directives())
    faults = _faults(graph)
    if faults:
        raise PlanError(f"the strategy for '{model.name}' on '{cluster.name}' is not whole", faults)
    graph = replace(
        graph,
        pipelines=tuple(
            replace(p, stages=tuple(_with_slices(s, p.micro_batch_sizes) for s in p.stages)) for p in graph.pipelines
        ),
        training=graph.training.resolve(cluster.device(d).type for d in graph.devices()),
    )
    return replace(graph, gradient_blocks=gradient_blocks(graph))


def _with_slices(stage: GraphStage, sizes: tuple[int, ...]) -> GraphStage:
    """Fill in what `slices` left open: the members share each micro-batch equally."""
    if stage.slices:
        return stage
    members = len(stage.members)
    uneven = next((size for size in sizes if size % members), None)
    if uneven is not None:
        raise PlanError(
            f"micro-batch of {uneven} samples does not divide among the {members} members of stage {stage.tag}; "
            "say with slices(...) who takes how many"
        )
    return replace(stage, slices=tuple((size // members,) * members for size in sizes))


def _faults(graph: TrainingGraph) -> list[str]:
    faults = []
    total = sum(sum(p.micro_batch_sizes) for p in graph.pipelines)
    if not graph.pipelines:
        faults.append("no pipeline: add pipeline(0, micro_batch_sizes) or split({}, num_microbatches=...)")
    elif total != graph.training.global_batch_size:
        shares = " + ".join(str(sum(p.micro_batch_sizes)) for p in graph.pipelines)
        summed = f"shares {shares} = {total} samples" if len(graph.pipelines) > 1 else f"pipeline 0 has {total} samples"
        faults.append(f"{summed}, but global_batch_size is {graph.training.global_batch_size}")
    holder: dict[int, str] = {}
    for pipe in graph.pipelines:
        held = pipe.stages[-1].stop if pipe.stages else 0
        if held != len(graph.model.blocks):
            faults.append(
                f"pipeline {pipe.index} holds blocks [0, {held}) of {len(graph.model.blocks)}; cut the rest too"
            )
        for stage in pipe.stages:
            if not stage.members:
                faults.append(
                    f"stage {stage.tag} is placed nowhere; add place({{'PIPE': {pipe.index}, 'PP': {stage.index}}}, devices)"
                )
            if not stage.order:
                faults.append(f"stage {stage.tag} has no order; add order(schedule='1f1b', pipelines=({pipe.index},))")
            for device in (d for member in stage.members for d in member):
                if device in holder:
                    faults.append(
                        f"device {device} holds stage {holder[device]} and stage {stage.tag}; one stage per device can be planned yet"
                    )
                holder[device] = stage.tag
            for member in stage.members:
                nodes = {graph.cluster.device(d).node for d in member}
                types = {graph.cluster.device(d).type.name for d in member}
                if len(nodes) > 1 or len(types) > 1:
                    faults.append(f"stage {stage.tag}: tensor-parallel ranks {member} must be of one type in one node")
    return faults
