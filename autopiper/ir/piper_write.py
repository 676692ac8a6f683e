"""A strategy as one of Piper's directive programs, or every reason why Piper cannot express it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from autopiper._data import require
from autopiper.cluster.spec import Cluster
from autopiper.errors import ExportError, PlanError
from autopiper.ir.build import build
from autopiper.ir.graph import GraphStage, TrainingGraph
from autopiper.ir.orders import WORDS
from autopiper.model.annotations import EXPERTS
from autopiper.model.spec import Model
from autopiper.plan.file import write_text
from autopiper.plan.strategy import Strategy

MB = 2**20
"""Bytes of one unit of `bucket_size`, as Piper counts them."""
STREAM = "pp_stream"
"""Of sends and receives, which Piper wants to have a name; in AutoPiper each channel is a stream of its own."""


def write_piper(strategy: Strategy, model: Model, cluster: Cluster, path: str | Path) -> Model:
    """Write a strategy as a Piper program and return the model as it must be annotated for it.

    The stages of a Piper program are the regions "PP" of its model, the sharded experts its regions "EP": the model
    that is returned has them at the strategy's cuts (put `annotate("PP")` there in a module of your own), and with it
    `read_piper` builds the strategy's Programs again. Schedule families are written out, one `order` row a device group;
    streams get the names that they have in the Programs. The training (batch, precision, optimizer) is no part of it.
    Raises PlanError where the strategy is wrong, and ExportError with every reason where Piper cannot express it.
    """
    require(PlanError, "strategy", strategy, Strategy)
    require(PlanError, "model", model, Model)
    require(PlanError, "cluster", cluster, Cluster)
    require(PlanError, "path", path, str | Path)
    program, marked = piper_program(build(strategy, model, cluster))
    lines = ",\n".join(json.dumps(each) for each in program)
    try:
        write_text(path, f"[\n{lines}\n]\n")
    except OSError as fault:
        raise ExportError(f"cannot write Piper program '{path}': {fault}") from None
    return marked


def piper_program(graph: TrainingGraph) -> tuple[list[dict[str, Any]], Model]:
    """Return the program of a complete graph, as JSON has it, and the annotated model. Raises ExportError as above."""
    marked = annotated(graph)
    faults = [*_of_pipelines(graph)]
    for stage in graph.stages():
        faults += [f"stage {stage.tag}, {fault}" for fault in _of_stage(graph, stage, marked)]
    if faults:
        raise ExportError("Piper cannot express this strategy", faults)
    return list(_directives(graph, marked)), marked


def annotated(graph: TrainingGraph) -> Model:
    """Return the model with a region "PP" for each stage, and regions "EP" for experts where it has none."""
    model = graph.model
    kept = replace(model, annotations=tuple(a for a in model.annotations if a.name != "PP"))
    found = kept.annotate("PP", *((s.start, s.stop) for s in graph.pipelines[0].stages))
    experts = [(b, b + 1) for b, block in enumerate(model.blocks) if block.num_experts]
    if experts and not any(a.name == EXPERTS for a in model.annotations):
        found = found.annotate(EXPERTS, *experts)
    return found


def _of_pipelines(graph: TrainingGraph) -> Iterator[str]:
    if len(graph.pipelines) > 1:
        yield f"pipelines: there are {len(graph.pipelines)}; a Piper program has one"
    for pipe in graph.pipelines:
        sizes = sorted(set(pipe.micro_batch_sizes))
        if len(sizes) > 1:
            yield f"pipeline {pipe.index}, micro_batch_sizes: {', '.join(map(str, sizes))} samples; split makes equal ones"
    counts = {len(members) * len(members[0]) for members in graph.groups()}
    if len(counts) > 1:
        which = ", ".join(f"{s.tag} has {len(s.members) * len(s.members[0])}" for s in list(graph.stages())[:6])
        yield f"place, devices: {which}; Piper wants equally many for each stage"


def _of_stage(graph: TrainingGraph, stage: GraphStage, marked: Model) -> Iterator[str]:
    if stage.tensor_parallel_size > 1:
        yield f"degrees, tensor_parallel_size: {stage.tensor_parallel_size}; Piper has no tensor parallelism"
    if stage.sequence_parallel:
        yield "degrees, sequence_parallel: true; Piper has no such parallelism"
    if stage.sharded and stage.expert_parallel_size != len(stage.members):
        yield (
            f"degrees, expert_parallel_size: {stage.expert_parallel_size}; in Piper experts are divided over all "
            f"{len(stage.members)} members"
        )
    for m, row in enumerate(stage.slices):
        if len(set(row)) > 1:
            yield f"slices: micro-batch {m} is divided {row}; Piper's members take equal parts"
            break
    if set(stage.recompute) != {"none"}:
        named = ", ".join(sorted(set(stage.recompute) - {"none"}))
        yield f"recompute: {named}; in Piper that is an option of the runtime, not of the program"
    if len(stage.members) > 1 and len(set(stage.zero)) > 1:
        yield f"replicate: its blocks have ZeRO levels {', '.join(map(str, stage.zero))}; replicate gives a stage one"
    if len(stage.members) > 1 and 1 in stage.zero:
        yield "replicate, shard_optimizer (ZeRO 1): Piper shards gradients (2) or gradients and parameters (3)"
    if stage.bucket_bytes % MB and _cuts(graph, stage):
        yield f"buckets, bucket_bytes: {stage.bucket_bytes}; bucket_size is whole MB of {MB} bytes"
    chosen = _expert_filters(graph, stage, marked)
    if isinstance(chosen, str):
        yield chosen


def _cuts(graph: TrainingGraph, stage: GraphStage) -> bool:
    """Whether the bucket size matters: a gradient block of the stage is in several buckets."""
    return any(
        len(block.buckets) > 1
        for block in graph.gradient_blocks
        if any(p.stage == stage.index and p.pipeline == stage.pipeline for p in block.holders)
        or (block.tied is not None and any(stage.start <= b < stage.stop for b in block.blocks))
    )


def _stream(graph: TrainingGraph, stage: GraphStage, kind: str) -> str | None:
    """Return the name of the stream of the stage's own gradient blocks; None where they have none."""
    for block in graph.gradient_blocks:
        if block.kind == "dense" and any(p.stage == stage.index for p in block.holders):
            return getattr(block, kind) or None
    return None


def _expert_filters(graph: TrainingGraph, stage: GraphStage, marked: Model) -> list[dict[str, int | str]] | str:
    """Return the filters that select the sharded blocks of a stage, or why there are none."""
    if not stage.sharded:
        return []
    regions = [a for a in marked.annotations if a.name == EXPERTS and a.start < stage.stop and stage.start < a.stop]
    inside: dict[int, set[int]] = {
        a.index: {b for b in range(a.start, a.stop) if graph.model.blocks[b].num_experts} for a in regions
    }
    for a in regions:
        if a.start < stage.start or a.stop > stage.stop:
            return f"shard: the model's region {EXPERTS} {a.index}, blocks {a.start}..{a.stop - 1}, reaches out of the stage"
    whole = set(stage.sharded)
    if set().union(*inside.values()) == whole:
        return [{"PP": stage.index, EXPERTS: "*"}]
    chosen = [index for index, blocks in inside.items() if blocks and blocks <= whole]
    if set().union(*(inside[index] for index in chosen)) == whole:
        return [{"PP": stage.index, EXPERTS: index} for index in chosen]
    return f"shard: the sharded blocks {', '.join(map(str, stage.sharded))} are no regions {EXPERTS} of the model"


def _directives(graph: TrainingGraph, marked: Model) -> Iterator[dict[str, Any]]:
    def devices(stage: GraphStage) -> list[int]:
        return [device for member in stage.members for device in member]

    stages = list(graph.stages())
    for stage in stages:
        placed = {"op": "place", "filter": {"PP": stage.index}, "devices": devices(stage)}
        yield _with(placed, stream=STREAM if len(stages) > 1 else None)
    for stage in stages:
        several, cut = len(stage.members) > 1, _cuts(graph, stage)
        level = max(stage.zero) if several else 0
        if several or cut or stage.reduce_stream:
            yield _with(
                {"op": "replicate", "filter": {"PP": stage.index}, "devices": devices(stage)},
                reduce_stream=stage.reduce_stream or _stream(graph, stage, "reduce_stream"),
                gather_stream=stage.gather_stream or (_stream(graph, stage, "gather_stream") if level == 3 else None),
                bucket_size=stage.bucket_bytes // MB if cut else None,
                shard_grads=level >= 2 or None,
                shard_params=level == 3 or None,
            )
    for stage in stages:
        for chosen in _expert_filters(graph, stage, marked):
            sharded = {"op": "shard", "filter": chosen, "devices": devices(stage)}
            yield _with(sharded, stream=stage.exchange_stream or "a2a")
    tag, count = graph.micro_batch_tag, len(graph.pipelines[0].micro_batch_sizes)
    yield {"op": "split", "filter": {}, "dim_name": tag, "num_microbatches": count}
    for row in graph.rows:
        groups = [[{"PP": p.stage, tag: p.micro_batch, "PASS": WORDS[p.kind]} for p in group] for group in row.groups]
        yield {"op": "order", "filters": groups}


def _with(made: dict[str, Any], **optional: Any) -> dict[str, Any]:
    return made | {name: value for name, value in optional.items() if value is not None}
