"""A training graph and its Programs as text: the whole strategy on one screen, and golden files for tests.

pipeline 0: 4 micro-batches of 1
  p0.s0  blocks 0..1  on 0 | 1  zero 3  segments 0, 1
devices 0 | 1
  0F0 0F1 (0F2;0B0)OVERLAP_F_B 0B1 0B2
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from autopiper.ir.graph import GraphStage, Members, TrainingGraph
from autopiper.plan.actions import Program
from autopiper.plan.passes import group_text

WIDTH = 116


def graph_text(graph: TrainingGraph) -> str:
    """Write pipelines with their stages, rows of passes, and gradient blocks."""
    return "\n".join(_graph_lines(graph)) + "\n"


def programs_text(programs: Sequence[Program]) -> str:
    """Write Programs stream by stream, each action with what it waits for in brackets."""
    return "\n".join(line for program in programs for line in _program_lines(program)) + "\n"


def _graph_lines(graph: TrainingGraph) -> Iterator[str]:
    for pipe in graph.pipelines:
        sizes = ", ".join(f"{n} of {size}" for size, n in Counter(pipe.micro_batch_sizes).items())
        yield f"pipeline {pipe.index}: micro-batches {sizes}"
        yield from (f"  {_stage_line(stage)}" for stage in pipe.stages)
    for row in graph.rows:
        yield f"devices {_members(row.members)}"
        yield from _wrapped((group_text(group) for group in row.groups), "  ")
    for block in graph.gradient_blocks:
        shard = f", part {block.shard[0]} of {block.shard[1]}" if block.shard else ""
        holders = " ".join(p.text for p in block.holders)
        yield (
            f"g{block.index}: {block.kind}{shard} of blocks {block.blocks[-1]}..{block.blocks[0]}, {block.elements} "
            f"elements in {len(block.buckets)} buckets, ZeRO {block.zero}, held by {holders}"
        )


def _stage_line(stage: GraphStage) -> str:
    said = [f"{stage.tag}  blocks {stage.start}..{stage.stop - 1}  on {_members(stage.members)}"]
    if stage.tensor_parallel_size > 1:
        said.append(f"tensor {stage.tensor_parallel_size}")
    if len(set(map(tuple, (sorted(row) for row in stage.slices)))) > 1 or any(len(set(r)) > 1 for r in stage.slices):
        said.append("slices " + " ".join("/".join(map(str, row)) for row in stage.slices))
    if set(stage.recompute) - {"none"}:
        said.append("recompute " + " ".join(stage.recompute))
    if any(stage.zero):
        said.append("zero " + " ".join(map(str, sorted(set(stage.zero)))))
    if stage.sharded:
        said.append(f"experts of {', '.join(map(str, stage.sharded))} over {stage.expert_parallel_size}")
    if stage.borders:
        said.append(f"{stage.num_segments} segments")
    return "  ".join(said)


def _members(members: Members) -> str:
    return " | ".join("+".join(map(str, member)) for member in members)


def _program_lines(program: Program) -> Iterator[str]:
    copies = f" and {len(program.copies)} equal" if program.copies else ""
    yield f"{program.name} on {'+'.join(map(str, program.devices))}{copies}"
    for stream, actions in program.streams.items():
        yield f"  {stream}"
        texts = (a.text + (f"[{', '.join(w.text for w in a.waits)}]" if a.waits else "") for a in actions)
        yield from _wrapped(texts, "    ")


def _wrapped(words: Iterable[str], indent: str) -> Iterator[str]:
    line = indent
    for word in words:
        if len(line) + len(word) > WIDTH and line.strip():
            yield line.rstrip()
            line = indent
        line += word + " "
    if line.strip():
        yield line.rstrip()
