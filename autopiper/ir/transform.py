"""What each directive does to the training graph: one pure function each, graph in, graph out.

`phases` applies them in the compiler's order. `source` names the directive, with its position, where the graph
remembers it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

from autopiper.errors import PlanError, nearest
from autopiper.ir.filters import Selection, select
from autopiper.ir.graph import GraphPipeline, GraphStage, TrainingGraph
from autopiper.model.spec import RECOMPUTE_CHOICES
from autopiper.plan import directives as d


def _update(
    graph: TrainingGraph, found: Iterable[Selection], change: Callable[[GraphStage, tuple[int, ...]], GraphStage]
) -> TrainingGraph:
    """Change the selected stages; `change` gets a stage and its selected blocks."""
    chosen = {(s.stage.pipeline, s.stage.index): s.blocks for s in found}

    def new(stage: GraphStage) -> GraphStage:
        blocks = chosen.get((stage.pipeline, stage.index))
        return stage if blocks is None else change(stage, blocks)

    return replace(graph, pipelines=tuple(replace(p, stages=tuple(new(s) for s in p.stages)) for p in graph.pipelines))


def _whole(found: list[Selection]) -> list[Selection]:
    """Return what was found, where it is whole stages."""
    part = next((s for s in found if not s.whole), None)
    if part is not None:
        raise PlanError(
            f"selects blocks {_words(part.blocks)} of stage {part.stage.tag}, which has {part.stage.start}.."
            f"{part.stage.stop - 1}; this directive is for whole stages: filter by PIPE and PP"
        )
    return found


def _words(blocks: tuple[int, ...]) -> str:
    return ", ".join(map(str, blocks[:6])) + ("…" if len(blocks) > 6 else "")


def pipeline(graph: TrainingGraph, it: d.PipelineDirective, source: str = "") -> TrainingGraph:
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


def split(graph: TrainingGraph, it: d.SplitDirective, source: str = "") -> TrainingGraph:
    """Without `pipeline` directives: one pipeline of equal micro-batches of the global batch.

    Several directives may say the same, as in Piper, each for a part; together they must reach every stage.
    """
    total, count = graph.training.global_batch_size, it.num_microbatches
    if it.dim_name in ("PIPE", "PP", "PASS") or not it.dim_name.isidentifier():
        raise PlanError(f"dim_name '{it.dim_name}' is taken or no name; usual is 'MB'")
    if count < 1 or total % count:
        raise PlanError(
            f"{total} samples do not divide into {count} equal micro-batches"
            + (f"; {total} mod {count} = {total % count}" if count > 0 else "")
        )
    sizes = (total // count,) * count
    if graph.pipelines and [p.micro_batch_sizes for p in graph.pipelines] != [sizes]:
        raise PlanError(
            f"the micro-batches are given already, by pipeline directives or another split, and not as {count} of "
            f"{total // count} samples; one of them must go"
        )
    pipe = GraphPipeline(index=0, micro_batch_sizes=sizes)
    return replace(graph, pipelines=graph.pipelines or (pipe,), micro_batch_tag=it.dim_name)


def cut(graph: TrainingGraph, it: d.CutDirective, source: str = "") -> TrainingGraph:
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
    count = stop - start
    stage = GraphStage(
        pipeline=it.pipeline, index=it.stage, start=start, stop=stop, recompute=("none",) * count, zero=(0,) * count,
        source=source,
    )  # fmt: skip
    pipelines = list(graph.pipelines)
    pipelines[it.pipeline] = replace(pipe, stages=(*pipe.stages, stage))
    return replace(graph, pipelines=tuple(pipelines))


def cut_as_annotated(graph: TrainingGraph) -> TrainingGraph:
    """Without `cut` directives: every pipeline has the stages that the model is annotated with, or a single one."""
    regions = sorted((a for a in graph.model.annotations if a.name == "PP"), key=lambda a: a.index)
    ends = [(f"the model's annotation PP {a.index}", a.start, a.stop) for a in regions]
    ends = ends or [("a model without cut directives and PP annotations", 0, len(graph.model.blocks))]
    for pipe in graph.pipelines:
        for number, (source, start, stop) in enumerate(ends):
            try:
                graph = cut(graph, d.cut(pipe.index, number, blocks=(start, stop)), source)
            except PlanError as fault:
                raise PlanError(f"{source}: {fault}") from None
    return graph


def place(graph: TrainingGraph, it: d.PlaceDirective, source: str = "") -> TrainingGraph:
    """Put stages on devices; `degrees` groups them into tensor-parallel members."""
    if not it.devices or len(set(it.devices)) != len(it.devices):
        raise PlanError(f"{dict(it.filter)}: devices {it.devices} must be one or more different ids")
    for device in it.devices:
        graph.cluster.device(device)
    found = _whole(select(graph, it.filter))
    for each in found:
        if each.stage.members:
            raise PlanError(f"{dict(it.filter)}: stage {each.stage.tag} is placed already, on {each.stage.members}")
    return _update(graph, found, lambda s, _: replace(s, members=tuple((device,) for device in it.devices)))


def degrees(graph: TrainingGraph, it: d.DegreesDirective, source: str = "") -> TrainingGraph:
    """Group the devices of stages into members of `tensor_parallel_size`, and members into expert-parallel groups."""
    tp, ep = it.tensor_parallel_size, it.expert_parallel_size
    if it.context_parallel_size != 1:
        raise PlanError(
            f"{dict(it.filter)}: context_parallel_size is {it.context_parallel_size}; only 1 can be planned yet"
        )
    found = _whole(select(graph, it.filter))
    for stage in (each.stage for each in found):
        flat = [device for member in stage.members for device in member]
        if tp < 1 or not flat or len(flat) % tp:
            raise PlanError(
                f"{dict(it.filter)}: {len(flat)} devices of {stage.tag} do not divide by tensor_parallel_size {tp}"
            )
        members = len(flat) // tp
        if ep < 1 or members % ep:
            raise PlanError(
                f"{dict(it.filter)}: {members} members of {stage.tag} do not divide by expert_parallel_size {ep}; "
                f"{members} mod {ep} = {members % ep if ep > 0 else '?'}"
            )
        for block in graph.model.blocks[stage.start : stage.stop]:
            for name, count in block.tensor_divisors:
                if count % tp:
                    raise PlanError(
                        f"degrees of {stage.tag}: {name} {count} of block '{block.name}' does not divide by "
                        f"tensor_parallel_size {tp}; {count} mod {tp} = {count % tp}"
                    )

    def change(stage: GraphStage, _: tuple[int, ...]) -> GraphStage:
        flat = [device for member in stage.members for device in member]
        members = tuple(tuple(flat[i : i + tp]) for i in range(0, len(flat), tp))
        return replace(
            stage, members=members, tensor_parallel_size=tp, sequence_parallel=it.sequence_parallel,
            expert_parallel_size=ep,
        )  # fmt: skip

    return _update(graph, found, change)


def slices(graph: TrainingGraph, it: d.SlicesDirective, source: str = "") -> TrainingGraph:
    """Share each micro-batch among the members."""
    found = _whole(select(graph, it.filter))
    for stage in (each.stage for each in found):
        sizes = graph.pipelines[stage.pipeline].micro_batch_sizes
        if len(it.slices) != len(sizes):
            raise PlanError(f"slices of {stage.tag}: {len(it.slices)} rows for {len(sizes)} micro-batches")
        for m, (row, size) in enumerate(zip(it.slices, sizes, strict=True)):
            if len(row) != len(stage.members) or min(row) < 0 or sum(row) != size:
                raise PlanError(
                    f"slices of {stage.tag}, micro-batch {m}: {row} must be {len(stage.members)} numbers of 0 or more "
                    f"(one a member) with sum {size}; their sum is {sum(row)}"
                )
    return _update(graph, found, lambda s, _: replace(s, slices=it.slices))


def recompute(graph: TrainingGraph, it: d.RecomputeDirective, source: str = "") -> TrainingGraph:
    """Choose per block what the backward computes again."""

    def change(stage: GraphStage, blocks: tuple[int, ...]) -> GraphStage:
        choices = (it.blocks,) * len(blocks) if isinstance(it.blocks, str) else it.blocks
        if len(choices) != len(blocks):
            raise PlanError(f"recompute of {stage.tag}: {len(choices)} choices for {len(blocks)} blocks")
        new = list(stage.recompute)
        for block, choice in zip(blocks, choices, strict=True):
            if choice not in RECOMPUTE_CHOICES:
                raise PlanError(
                    f"recompute of {stage.tag}: '{choice}'{nearest(choice, RECOMPUTE_CHOICES)}; allowed: {', '.join(RECOMPUTE_CHOICES)}"
                )
            new[block - stage.start] = choice
        return replace(stage, recompute=tuple(new))

    return _update(graph, select(graph, it.filter), change)


def replicate(graph: TrainingGraph, it: d.ReplicateDirective, source: str = "") -> TrainingGraph:
    """Say how gradients are reduced; the reduction itself is inserted for every block with several holders."""
    found = select(graph, it.filter)
    if it.devices is not None:
        for each in found:
            _same_devices(each.stage, it.devices)
    _check_stream(it.reduce_stream)
    _check_stream(it.gather_stream)
    level = 3 if it.shard_params else 2 if it.shard_grads else 1 if it.shard_optimizer else 0
    if it.bucket_size is not None:
        if not (it.bucket_size > 0 and math.isfinite(it.bucket_size)):
            raise PlanError(f"{dict(it.filter)}: bucket_size is {it.bucket_size:g}; it must be above zero (MB)")
        _whole(found)
        graph = buckets(graph, d.buckets(it.filter, bucket_bytes=max(1, round(it.bucket_size * 2**20))))

    def change(stage: GraphStage, blocks: tuple[int, ...]) -> GraphStage:
        zero = list(stage.zero)
        for block in blocks:
            zero[block - stage.start] = level
        return replace(
            stage, zero=tuple(zero), reduce_stream=it.reduce_stream or stage.reduce_stream,
            gather_stream=it.gather_stream or stage.gather_stream,
        )  # fmt: skip

    return _update(graph, found, change)


def _check_stream(name: str | None) -> None:
    """Refuse names of streams that every Program has for something else."""
    if name is not None and (name in ("compute", "loss", "norm") or ":" in name or not name.strip()):
        raise PlanError(
            f"stream '{name}' is taken or no name: 'compute', 'loss' and 'norm' are streams of their own, names with ':' "
            "those of channels; usual are 'dp_stream' and 'ep_stream'"
        )


def _same_devices(stage: GraphStage, devices: tuple[int, ...]) -> None:
    placed = {device for member in stage.members for device in member}
    if placed != set(devices):
        raise PlanError(f"devices {devices} are not those of {stage.tag}, {sorted(placed)}")


def buckets(graph: TrainingGraph, it: d.BucketsDirective, source: str = "") -> TrainingGraph:
    """Set the size of the gradient buckets of stages."""
    if it.bucket_bytes < 1:
        raise PlanError(f"bucket_bytes is {it.bucket_bytes}; it must be 1 or more")
    found = _whole(select(graph, it.filter))
    return _update(graph, found, lambda s, _: replace(s, bucket_bytes=it.bucket_bytes))


def shard(graph: TrainingGraph, it: d.ShardDirective, source: str = "") -> TrainingGraph:
    """Divide the experts of blocks over members: an all-to-all before and after them, forward and backward."""
    _check_stream(it.stream)
    found = select(graph, it.filter)
    chosen: list[Selection] = []
    for each in found:
        stage, model = each.stage, graph.model
        _same_devices(stage, it.devices)
        experts = tuple(b for b in each.blocks if model.blocks[b].num_experts)
        twice = [b for b in experts if b in stage.sharded]
        if twice:
            raise PlanError(
                f"{dict(it.filter)}: the experts of blocks {_words(tuple(twice))} are sharded already; two boundaries on "
                "one region would be decided by the order of the file, so give one"
            )
        size = stage.expert_parallel_size if stage.expert_parallel_size > 1 else len(stage.members)
        for block in experts:
            if model.blocks[block].num_experts % size:
                raise PlanError(
                    f"{dict(it.filter)}: {model.blocks[block].num_experts} experts of block '{model.blocks[block].name}' do not "
                    f"divide over {size} members of {stage.tag}; {model.blocks[block].num_experts} mod {size} = "
                    f"{model.blocks[block].num_experts % size}; say a smaller group with degrees(expert_parallel_size=)"
                )
        if experts:
            chosen.append(Selection(stage=stage, blocks=experts))
    if not chosen:
        raise PlanError(f"{dict(it.filter)} matches no block with experts; model '{graph.model.name}' has "
                        f"{sum(b.num_experts > 0 for b in graph.model.blocks)} of them")  # fmt: skip

    def change(stage: GraphStage, blocks: tuple[int, ...]) -> GraphStage:
        size = stage.expert_parallel_size if stage.expert_parallel_size > 1 else len(stage.members)
        return replace(
            stage, expert_parallel_size=size, sharded=tuple(sorted((*stage.sharded, *blocks))),
            exchange_stream=it.stream or stage.exchange_stream,
        )  # fmt: skip

    return _update(graph, chosen, change)
