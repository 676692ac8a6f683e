"""What each directive does to the training graph: one pure function each, graph in, graph out.

Directives are applied in the compiler's order (`PHASES`), not in the order of the file, as Piper's passes are; within
one phase the file's order holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from autopiper.errors import PlanError, nearest
from autopiper.ir import schedules
from autopiper.ir.filters import PASS_TAGS, PASSES, STAGE_TAGS, check_tags, matches
from autopiper.ir.graph import GraphPipeline, GraphStage, Pass, TrainingGraph
from autopiper.model.spec import RECOMPUTE_CHOICES
from autopiper.plan import directives as d


def _update(
    graph: TrainingGraph, stages: Iterable[GraphStage], change: Callable[[GraphStage], GraphStage]
) -> TrainingGraph:
    chosen = {(s.pipeline, s.index) for s in stages}
    return replace(
        graph,
        pipelines=tuple(
            replace(p, stages=tuple(change(s) if (s.pipeline, s.index) in chosen else s for s in p.stages))
            for p in graph.pipelines
        ),
    )


def pipeline(graph: TrainingGraph, it: d.PipelineDirective) -> TrainingGraph:
    """Add a pipeline with its micro-batches."""
    if it.index != len(graph.pipelines):
        raise PlanError(f"pipeline index {it.index} is out of turn; the next one is {len(graph.pipelines)}")
    if not it.micro_batch_sizes or min(it.micro_batch_sizes) < 1:
        raise PlanError(
            f"pipeline {it.index}: micro_batch_sizes {it.micro_batch_sizes} must be one or more sizes of 1 or more"
        )
    return replace(
        graph, pipelines=(*graph.pipelines, GraphPipeline(index=it.index, micro_batch_sizes=it.micro_batch_sizes))
    )


def split(graph: TrainingGraph, it: d.SplitDirective) -> TrainingGraph:
    """Without `pipeline` directives: one pipeline of equal micro-batches of the global batch."""
    total, count = graph.training.global_batch_size, it.num_microbatches
    if graph.pipelines:
        raise PlanError("split cannot be combined with pipeline directives, which hold the micro-batches already")
    if it.filter or it.dim_name != "MB":
        raise PlanError(
            f"split {dict(it.filter)} dim_name '{it.dim_name}': only the whole graph, as 'MB', can be split yet; say the micro-batches of one pipeline with pipeline(index, micro_batch_sizes)"
        )
    if count < 1 or total % count:
        raise PlanError(f"split: {total} samples do not divide into {count} equal micro-batches")
    return replace(graph, pipelines=(GraphPipeline(index=0, micro_batch_sizes=(total // count,) * count),))


def cut(graph: TrainingGraph, it: d.CutDirective) -> TrainingGraph:
    """Add a stage to a pipeline."""
    start, stop = it.blocks
    last = len(graph.model.blocks)
    if not 0 <= it.pipeline < len(graph.pipelines):
        raise PlanError(f"cut names pipeline {it.pipeline}; the graph has {len(graph.pipelines)} pipelines")
    pipe = graph.pipelines[it.pipeline]
    expected = pipe.stages[-1].stop if pipe.stages else 0
    if it.stage != len(pipe.stages) or start != expected or not start < stop <= last:
        raise PlanError(
            f"cut of pipeline {it.pipeline}: stage {it.stage} with blocks [{start}, {stop}); expected stage {len(pipe.stages)} "
            f"with blocks from {expected} to at most {last}, so that every block is held exactly once"
        )
    stage = GraphStage(
        pipeline=it.pipeline, index=it.stage, start=start, stop=stop, recompute=("none",) * (stop - start)
    )
    pipelines = list(graph.pipelines)
    pipelines[it.pipeline] = replace(pipe, stages=(*pipe.stages, stage))
    return replace(graph, pipelines=tuple(pipelines))


def place(graph: TrainingGraph, it: d.PlaceDirective) -> TrainingGraph:
    """Put stages on devices; `degrees` groups them into tensor-parallel members."""
    if not it.devices or len(set(it.devices)) != len(it.devices):
        raise PlanError(f"place {dict(it.filter)}: devices {it.devices} must be one or more different ids")
    for device in it.devices:
        graph.cluster.device(device)
    found = matches(graph, it.filter, "place")
    for stage in found:
        if stage.members:
            raise PlanError(f"place {dict(it.filter)}: stage {stage.tag} is placed already, on {stage.members}")
    return _update(graph, found, lambda s: replace(s, members=tuple((device,) for device in it.devices)))


def degrees(graph: TrainingGraph, it: d.DegreesDirective) -> TrainingGraph:
    """Group the devices of stages into members of `tensor_parallel_size`."""
    tp = it.tensor_parallel_size
    for name in ("context_parallel_size", "expert_parallel_size"):
        if getattr(it, name) != 1:
            raise PlanError(f"degrees {dict(it.filter)}: {name} is {getattr(it, name)}; only 1 can be planned yet")
    found = matches(graph, it.filter, "degrees")
    for stage in found:
        flat = [device for member in stage.members for device in member]
        if tp < 1 or not flat or len(flat) % tp:
            raise PlanError(
                f"degrees {dict(it.filter)}: {len(flat)} devices of {stage.tag} do not divide by tensor_parallel_size {tp}"
            )
        for block in graph.model.blocks[stage.start : stage.stop]:
            for name, count in block.tensor_divisors:
                if count % tp:
                    raise PlanError(
                        f"degrees of {stage.tag}: {name} {count} of block '{block.name}' does not divide by "
                        f"tensor_parallel_size {tp}; {count} mod {tp} = {count % tp}"
                    )

    def change(stage: GraphStage) -> GraphStage:
        flat = [device for member in stage.members for device in member]
        members = tuple(tuple(flat[i : i + tp]) for i in range(0, len(flat), tp))
        return replace(stage, members=members, tensor_parallel_size=tp, sequence_parallel=it.sequence_parallel)

    return _update(graph, found, change)


def slices(graph: TrainingGraph, it: d.SlicesDirective) -> TrainingGraph:
    """Share each micro-batch among the members."""
    found = matches(graph, it.filter, "slices")
    for stage in found:
        sizes = graph.pipelines[stage.pipeline].micro_batch_sizes
        if len(it.slices) != len(sizes):
            raise PlanError(f"slices of {stage.tag}: {len(it.slices)} rows for {len(sizes)} micro-batches")
        for m, (row, size) in enumerate(zip(it.slices, sizes, strict=True)):
            if len(row) != len(stage.members) or min(row) < 0 or sum(row) != size:
                raise PlanError(
                    f"slices of {stage.tag}, micro-batch {m}: {row} must be {len(stage.members)} numbers of 0 or more "
                    f"(one a member) with sum {size}; their sum is {sum(row)}"
                )
    return _update(graph, found, lambda s: replace(s, slices=it.slices))


def recompute(graph: TrainingGraph, it: d.RecomputeDirective) -> TrainingGraph:
    """Choose per block what the backward computes again."""
    found = matches(graph, it.filter, "recompute")

    def change(stage: GraphStage) -> GraphStage:
        count = stage.stop - stage.start
        choices = (it.blocks,) * count if isinstance(it.blocks, str) else it.blocks
        if len(choices) != count:
            raise PlanError(f"recompute of {stage.tag}: {len(choices)} choices for {count} blocks")
        for choice in choices:
            if choice not in RECOMPUTE_CHOICES:
                raise PlanError(
                    f"recompute of {stage.tag}: '{choice}'{nearest(choice, RECOMPUTE_CHOICES)}; allowed: {', '.join(RECOMPUTE_CHOICES)}"
                )
        return replace(stage, recompute=choices)

    return _update(graph, found, change)


def replicate(graph: TrainingGraph, it: d.ReplicateDirective) -> TrainingGraph:
    """Check what is said of the reduction; the reduction itself is inserted for every block with several holders."""
    for name in ("shard_grads", "shard_params"):
        if getattr(it, name):
            raise PlanError(f"replicate {dict(it.filter)}: {name} (ZeRO) cannot be planned yet; leave it False")
    found = matches(graph, it.filter, "replicate")
    if it.devices is not None:
        for stage in found:
            placed = {device for member in stage.members for device in member}
            if placed != set(it.devices):
                raise PlanError(
                    f"replicate {dict(it.filter)}: devices {it.devices} are not those of {stage.tag}, {sorted(placed)}"
                )
    if it.bucket_size is not None:
        if not (it.bucket_size > 0 and math.isfinite(it.bucket_size)):
            raise PlanError(f"replicate {dict(it.filter)}: bucket_size is {it.bucket_size}; it must be above zero (MB)")
        return buckets(graph, d.buckets(it.filter, bucket_bytes=int(it.bucket_size * 1e6)))
    return graph


def buckets(graph: TrainingGraph, it: d.BucketsDirective) -> TrainingGraph:
    """Set the size of gradient buckets; one size for the whole graph so far."""
    if it.bucket_bytes < 1:
        raise PlanError(f"buckets: bucket_bytes is {it.bucket_bytes}; it must be 1 or more")
    if it.filter:
        raise PlanError(
            f"buckets {dict(it.filter)}: one bucket size for the whole graph, filter {{}}, can be planned yet"
        )
    return replace(graph, bucket_bytes=it.bucket_bytes)


def order(graph: TrainingGraph, it: d.OrderDirective) -> TrainingGraph:
    """Order passes: by a schedule family over whole pipelines, or one row of explicit passes for one stage."""
    if (it.schedule is None) == (it.filters is None):
        raise PlanError("order takes either schedule= (a family) or filters= (explicit groups)")
    if it.filters is not None:
        return _explicit(graph, it.filters)
    if it.parameters:
        raise PlanError(f"order: schedule '{it.schedule}' takes no parameters, got {', '.join(it.parameters)}")
    chosen = tuple(range(len(graph.pipelines))) if it.pipelines is None else it.pipelines
    for p in chosen:
        if not 0 <= p < len(graph.pipelines):
            raise PlanError(f"order names pipeline {p}; the graph has pipelines 0..{len(graph.pipelines) - 1}")
    stages = [s for s in graph.stages() if s.pipeline in chosen]

    def change(stage: GraphStage) -> GraphStage:
        pipe = graph.pipelines[stage.pipeline]
        return replace(
            stage,
            order=schedules.order(
                str(it.schedule),
                stage=stage.index,
                num_stages=len(pipe.stages),
                num_micro_batches=len(pipe.micro_batch_sizes),
            ),
        )

    return _update(graph, stages, change)


def _explicit(graph: TrainingGraph, groups: tuple[tuple[d.Filter, ...], ...]) -> TrainingGraph:
    passes: list[Pass] = []
    stage: GraphStage | None = None
    for number, group in enumerate(groups):
        if len(group) != 1:
            raise PlanError(
                f"order, group {number}: {len(group)} filters; overlap groups cannot be planned yet, give one filter a group"
            )
        filter = group[0]
        check_tags(filter, PASS_TAGS, "order")
        missing = [t for t in ("PP", "MB", "PASS") if not isinstance(filter.get(t), int if t != "PASS" else str)]
        if missing:
            raise PlanError(
                f"order, group {number}: {dict(filter)} must name one pass; missing or not concrete: {', '.join(missing)}"
            )
        found = matches(graph, {k: v for k, v in filter.items() if k in STAGE_TAGS}, "order")
        if len(found) != 1 or (
            stage is not None and (found[0].pipeline, found[0].index) != (stage.pipeline, stage.index)
        ):
            raise PlanError(
                f"order, group {number}: {dict(filter)}: one order row is for one stage of one pipeline; add PIPE, or another row"
            )
        stage = found[0]
        passes.append(Pass(kind=PASSES[str(filter["PASS"])], micro_batch=int(filter["MB"])))
    if stage is None:
        raise PlanError("order: filters is empty; give at least one group")
    row = tuple(passes)
    return _update(graph, [stage], lambda s: replace(s, order=row))


def shard(graph: TrainingGraph, it: d.ShardDirective) -> TrainingGraph:
    """Refuse: expert parallelism is not planned yet."""
    raise PlanError(f"shard {dict(it.filter)}: expert parallelism cannot be planned yet; leave experts replicated")


PHASES: dict[str, Callable[[TrainingGraph, Any], TrainingGraph]] = {
    "pipeline": pipeline,
    "split": split,
    "cut": cut,
    "place": place,
    "degrees": degrees,
    "slices": slices,
    "recompute": recompute,
    "replicate": replicate,
    "buckets": buckets,
    "shard": shard,
    "order": order,
}


def apply(graph: TrainingGraph, directives: Iterable[d.Directive]) -> TrainingGraph:
    """Apply directives in the compiler's order. Raises PlanError naming the directive's position in the list."""
    phases = list(PHASES)
    numbered = sorted(enumerate(directives), key=lambda pair: (phases.index(pair[1].op), pair[0]))
    for position, directive in numbered:
        try:
            graph = PHASES[directive.op](graph, directive)
        except PlanError as error:
            raise PlanError(f"directive {position} ({directive.op}): {error}") from None
    return graph
