"""Filters: which stages and passes a directive speaks of (Piper's filters, with `PIPE` for pipelines)."""

from __future__ import annotations

from autopiper.errors import PlanError, nearest
from autopiper.ir.graph import GraphStage, TrainingGraph
from autopiper.plan.directives import Filter

STAGE_TAGS = ("PIPE", "PP")
PASS_TAGS = (*STAGE_TAGS, "MB", "PASS")
PASSES = {"F": "F", "B": "B", "BI": "I", "BW": "W"}


def check_tags(filter: Filter, tags: tuple[str, ...], op: str) -> None:
    """Raise PlanError where a filter has a tag that is not in `tags`, or a value that no tag can have."""
    for tag, value in filter.items():
        if tag not in tags:
            raise PlanError(
                f"{op} {dict(filter)}: tag '{tag}' is unknown here{nearest(tag, tags)}; allowed: {', '.join(tags)}"
            )
        if tag == "PASS":
            if value not in PASSES:
                raise PlanError(f"{op} {dict(filter)}: PASS is {value!r}; allowed: {', '.join(PASSES)}")
        elif value != "*" and not (isinstance(value, int) and value >= 0):
            raise PlanError(f"{op} {dict(filter)}: {tag} is {value!r}; allowed: an index of 0 or more, or '*'")


def matches(graph: TrainingGraph, filter: Filter, op: str) -> list[GraphStage]:
    """Return the stages that a filter selects. Raises PlanError where it selects none, with what there is."""
    check_tags(filter, STAGE_TAGS, op)
    wanted = {k: v for k, v in filter.items() if v != "*"}
    found = [
        s
        for s in graph.stages()
        if wanted.get("PIPE", s.pipeline) == s.pipeline and wanted.get("PP", s.index) == s.index
    ]
    if not found:
        have = ", ".join(f"PIPE {p.index}: PP 0..{len(p.stages) - 1}" for p in graph.pipelines if p.stages)
        raise PlanError(
            f"{op} {dict(filter)} matches nothing; the graph has {have or 'no stages (add cut directives)'}"
        )
    return found
