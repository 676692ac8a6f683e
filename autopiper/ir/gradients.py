"""Gradient blocks and buckets: what is reduced together, over whom, and from when on; and ZeRO's part in it.

Block-wise gradient aggregation (the idea of arXiv 2610.22035; the construction is ours): intersect the cuts of all
pipelines, and the shards of their experts, so that within a gradient block every parameter has the same holders.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from autopiper._data import data
from autopiper.errors import PlanError
from autopiper.ir.graph import Border, Bucket, GradientBlock, GraphStage, TrainingGraph
from autopiper.plan.actions import Place

MOST_BUCKETS = 2**18
"""Of one gradient block; each is an action of every holder's program."""


@data
class _Run:
    """What all parameters of one gradient block have in common."""

    kind: str
    holders: tuple[Place, ...]
    zero: int = 0
    bucket_bytes: int
    shard: tuple[int, int] | None = None
    tied: int | None = None


def gradient_blocks(graph: TrainingGraph) -> tuple[GradientBlock, ...]:
    """Divide all parameters into gradient blocks, in backward order, tied parameters last (they are final last).

    Raises PlanError where the holders of a block do not agree on its ZeRO level, or share it over pipelines above
    level 1: pipelines have different micro-batches, so only what happens once a step can be shared out over them.
    """
    model = graph.model
    runs: dict[_Run, list[tuple[int, int]]] = {}
    """Run -> (block, elements), each run of blocks in backward order"""
    ordered: list[tuple[_Run, list[tuple[int, int]]]] = []
    before: dict[tuple[str, tuple[int, int] | None], _Run] = {}
    for block in reversed(range(len(model.blocks))):
        stages = [s for s in graph.stages() if s.start <= block < s.stop]
        experts = model.blocks[block].expert_parameters
        size = math.lcm(*(s.expert_parallel_size if block in s.sharded else 1 for s in stages))
        whole = model.untied_parameters(block) if size == 1 else model.untied_parameters(block) - experts
        parts: list[tuple[str, tuple[int, int] | None, int]] = [("dense", None, whole)] if whole else []
        if size > 1 and experts:
            parts += [("expert", (part, size), experts // size) for part in range(size)]
        for kind, shard, elements in parts:
            run = _Run(
                kind=kind, shard=shard, holders=_holders(graph, stages, block, shard),
                zero=_level(stages, block, kind), bucket_bytes=min(s.bucket_bytes for s in stages),
            )  # fmt: skip
            if before.get((kind, shard)) != run:
                before[kind, shard] = run
                runs[run] = []
                ordered.append((run, runs[run]))
            runs[run].append((block, elements))
    found: list[GradientBlock] = []
    reduce_names: dict[frozenset[tuple[int, ...]], str] = {}
    gather_names: dict[frozenset[tuple[int, ...]], str] = {}
    for run, pieces in ordered:
        found.append(_make(graph, len(found), run, pieces, reduce_names, gather_names))
    for at, tied in enumerate(model.tied):
        uses = tuple(sorted(set(tied.blocks), reverse=True))
        stages = [s for b in sorted(uses) for s in graph.stages() if s.start <= b < s.stop]
        run = _Run(
            kind="tied", holders=_distinct(graph, [p for s in stages for p in s.places()]), tied=at,
            bucket_bytes=min(s.bucket_bytes for s in stages),
        )  # fmt: skip
        pieces = [(uses[0], tied.parameters)]
        made = _make(graph, len(found), run, pieces, reduce_names, gather_names)
        lowest = tuple(replace(b, lowest_block=uses[-1]) for b in made.buckets)
        found.append(replace(made, blocks=uses, buckets=lowest))
    return tuple(found)


def _holders(
    graph: TrainingGraph, stages: Sequence[GraphStage], block: int, shard: tuple[int, int] | None
) -> tuple[Place, ...]:
    """Return one place for each rank that holds a block, or one of the equal parts of its experts; pipelines in order."""
    places = [p for s in stages for p in s.places()]
    if shard is not None:
        part, of = shard
        sizes = {(s.pipeline, s.index): s.expert_parallel_size if block in s.sharded else 1 for s in stages}
        places = [p for p in places if part * sizes[p.pipeline, p.stage] // of == p.member % sizes[p.pipeline, p.stage]]
    return _distinct(graph, places)


def _distinct(graph: TrainingGraph, places: Sequence[Place]) -> tuple[Place, ...]:
    """Keep the first place of every rank: what a rank uses in several of its stages it holds once."""
    first: dict[tuple[int, ...], Place] = {}
    for p in places:
        first.setdefault(graph.stage(p.pipeline, p.stage).members[p.member], p)
    return tuple(first.values())


def _level(stages: Sequence[GraphStage], block: int, kind: str) -> int:
    """Return the ZeRO level of a block. Experts that are sharded are exempt, as in Piper."""
    if kind == "expert":
        return 0
    levels = {s.tag: s.zero[block - s.start] for s in stages}
    if len(set(levels.values())) > 1:
        said = ", ".join(f"{tag} says {level}" for tag, level in levels.items())
        raise PlanError(f"block {block} has several ZeRO levels: {said}; its holders share it, so give one")
    level = next(iter(levels.values()))
    if level > 1 and len(stages) > 1:
        raise PlanError(
            f"block {block} has ZeRO level {level} and is held by stages {', '.join(levels)}; pipelines have different "
            "micro-batches, so over several of them at most level 1 (shard_optimizer) is possible"
        )
    return level


def _make(
    graph: TrainingGraph,
    index: int,
    run: _Run,
    pieces: list[tuple[int, int]],
    reduce_names: dict[frozenset[tuple[int, ...]], str],
    gather_names: dict[frozenset[tuple[int, ...]], str],
) -> GradientBlock:
    stages = [graph.stage(p.pipeline, p.stage) for p in run.holders]
    # A bucket is what one rank reduces at once, and tensor-parallel ranks have a part each.
    limit = max(1, run.bucket_bytes // graph.training.gradient_bytes) * min(s.tensor_parallel_size for s in stages)
    total = sum(size for _, size in pieces)
    if total > limit * MOST_BUCKETS:
        raise PlanError(
            f"bucket_bytes {run.bucket_bytes} cuts the {total} gradients of blocks {pieces[-1][0]}..{pieces[0][0]} into "
            f"{-(-total // limit)} buckets, and at most {MOST_BUCKETS} can be planned; give bucket_bytes of at least "
            f"{-(-total // MOST_BUCKETS) * graph.training.gradient_bytes}"
        )
    buckets: list[Bucket] = []
    at = 0
    for block, size in pieces:
        last = buckets[-1] if buckets else None
        if last and size and last.stop - last.start + size <= limit:
            buckets[-1] = replace(last, stop=at + size, lowest_block=block)
        else:
            for start in range(at, at + size, limit):
                stop = min(start + limit, at + size)
                buckets.append(Bucket(start=start, stop=stop, highest_block=block, lowest_block=block))
        at += size
    ranks = frozenset(s.members[p.member] for s, p in zip(stages, run.holders, strict=True))
    several = len(run.holders) > 1
    reduce, gather = "", ""
    if several:
        own = reduce_names.setdefault(ranks, f"reduce{len(reduce_names)}")
        reduce = _agreed(s.reduce_stream for s in stages) or own
    if several and run.zero:
        own = gather_names.setdefault(ranks, f"gather{len(gather_names)}")
        gather = _agreed(s.gather_stream for s in stages) or own
    return GradientBlock(
        index=index, kind=run.kind, blocks=tuple(b for b, _ in pieces), tied=run.tied, shard=run.shard,
        holders=run.holders, elements=at, buckets=tuple(buckets), zero=run.zero if several else 0,
        reduce_stream=reduce, gather_stream=gather,
    )  # fmt: skip


def _agreed(names: Iterable[str | None]) -> str | None:
    """Return the name that all stages give; where they differ (tied parameters), none holds."""
    found = set(names)
    return found.pop() if len(found) == 1 else None


def borders(graph: TrainingGraph, stage: GraphStage) -> tuple[Border, ...]:
    """Return where a stage is cut into segments: at the all-to-alls of sharded experts, and between ZeRO-3 buckets.

    A segment then needs the parameters of one bucket, so that the next can be gathered while it computes.
    """
    found: dict[int, Border] = {}
    for block in graph.gradient_blocks:
        mine = [b for b in block.buckets if stage.start <= b.lowest_block < stage.stop]
        if block.zero == 3 and any((p.pipeline, p.stage) == (stage.pipeline, stage.index) for p in block.holders):
            found |= {2 * b.lowest_block: Border(half=2 * b.lowest_block) for b in mine}
            above = block.blocks[0] + 1
            found.setdefault(2 * above, Border(half=2 * above))
    found = {half: border for half, border in found.items() if 2 * stage.start < half < 2 * stage.stop}
    for b in stage.sharded:
        found[2 * b + 1] = Border(half=2 * b + 1, exchange=b)
        found[2 * b + 2] = Border(half=2 * b + 2, exchange=b)
    return tuple(found[half] for half in sorted(found))
