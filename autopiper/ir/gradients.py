"""Gradient blocks and buckets: what is reduced together, over whom, and from when on.

Block-wise gradient aggregation (the idea of arXiv 2610.22035; the construction is ours): intersect the cuts of all
pipelines, so that within a gradient block every parameter has the same holders.
"""

from __future__ import annotations

from dataclasses import replace

from autopiper.errors import PlanError
from autopiper.ir.graph import Bucket, GradientBlock, TrainingGraph
from autopiper.plan.actions import Place

MOST_BUCKETS = 2**18
"""Of one gradient block; each is an action of every holder's program."""


def holders_of_block(graph: TrainingGraph, block: int) -> tuple[Place, ...]:
    """Every place that holds a model block, pipelines in order."""
    return tuple(place for stage in graph.stages() if stage.start <= block < stage.stop for place in stage.places())


def gradient_blocks(graph: TrainingGraph) -> tuple[GradientBlock, ...]:
    """Divide all parameters into gradient blocks, in backward order, tied parameters last (they are final last)."""
    model = graph.model
    found: list[GradientBlock] = []
    run: list[int] = []
    run_holders: tuple[Place, ...] = ()

    def close() -> None:
        if run:
            sizes = [model.untied_parameters(b) for b in run]
            if sum(sizes):
                found.append(_make(graph, len(found), "dense", tuple(run), sizes, run_holders, None))

    for block in reversed(range(len(model.blocks))):
        holders = holders_of_block(graph, block)
        if holders != run_holders:
            close()
            run, run_holders = [], holders
        run.append(block)
    close()
    for number, tied in enumerate(model.tied):
        uses = tuple(sorted(set(tied.blocks), reverse=True))
        places = tuple(dict.fromkeys(p for b in sorted(uses) for p in holders_of_block(graph, b)))
        found.append(_make(graph, len(found), "tied", uses, [tied.parameters], places, number))
    return tuple(found)


def _make(
    graph: TrainingGraph,
    index: int,
    kind: str,
    blocks: tuple[int, ...],
    sizes: list[int],
    holders: tuple[Place, ...],
    tied: int | None,
) -> GradientBlock:
    limit = max(1, graph.bucket_bytes // graph.training.gradient_bytes)
    pieces = [(min(blocks), sizes[0])] if kind == "tied" else list(zip(blocks, sizes, strict=True))
    if sum(sizes) > limit * MOST_BUCKETS:
        raise PlanError(
            f"bucket_bytes {graph.bucket_bytes} cuts the {sum(sizes)} gradients of blocks {min(blocks)}..{max(blocks)} into "
            f"{-(-sum(sizes) // limit)} buckets, and at most {MOST_BUCKETS} can be planned; give bucket_bytes of at least "
            f"{-(-sum(sizes) // MOST_BUCKETS) * graph.training.gradient_bytes}"
        )
    buckets: list[Bucket] = []
    at = 0
    for block, size in pieces:
        last = buckets[-1] if buckets else None
        if last and size and last.stop - last.start + size <= limit:
            buckets[-1] = replace(last, stop=at + size, lowest_block=block)
        else:
            for start in range(at, at + size, limit):
                buckets.append(Bucket(start=start, stop=min(start + limit, at + size), lowest_block=block))
        at += size
    return GradientBlock(
        index=index, kind=kind, blocks=blocks, tied=tied, holders=holders, elements=at, buckets=tuple(buckets)
    )
