"""Filters: which stages, blocks and passes a directive speaks of (Piper's filters, with `PIPE` for pipelines).

A filter is {tag: value}, and all of it must hold; {} is everything. `PIPE` is the pipeline, `PP` the stage in it, `MB`
(or what `split` named it) the micro-batch, `PASS` one of F, B, BI, BW; any other tag is a region that the model is
annotated with. A value is an index, "*" (any, but it must be there) or "-" (not in any such region).
"""

from __future__ import annotations

from autopiper._data import data
from autopiper.errors import PlanError, nearest
from autopiper.ir.graph import GraphStage, TrainingGraph
from autopiper.plan.directives import Filter
from autopiper.plan.passes import Pass

PASSES = {"F": "F", "B": "B", "BI": "I", "BW": "W"}
"""Piper's word for each kind of pass."""


@data
class Selection:
    """What a filter finds in one stage."""

    stage: GraphStage
    blocks: tuple[int, ...]
    """Model block numbers, rising."""

    @property
    def whole(self) -> bool:
        """Whether every block of the stage is selected."""
        return len(self.blocks) == self.stage.stop - self.stage.start


def regions(graph: TrainingGraph) -> tuple[str, ...]:
    """Names of the annotated regions that a filter may name, stages aside."""
    return tuple(dict.fromkeys(a.name for a in graph.model.annotations if a.name != "PP"))


def check_tags(graph: TrainingGraph, filter: Filter, *, passes: bool = False) -> None:
    """Raise PlanError where a filter has a tag that means nothing here, or a value that no tag can have."""
    known = ("PIPE", "PP", *regions(graph), *((graph.micro_batch_tag, "PASS") if passes else ()))
    for tag, value in filter.items():
        if tag not in known:
            raise PlanError(
                f"{dict(filter)}: tag '{tag}' is unknown here{nearest(tag, known)}; allowed: {', '.join(known)}"
            )
        if tag == "PASS":
            if not isinstance(value, str) or value not in PASSES:
                raise PlanError(
                    f"{dict(filter)}: PASS is {value!r}{nearest(str(value), PASSES)}; allowed: {', '.join(PASSES)}"
                )
        elif value not in ("*", "-") and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            raise PlanError(f"{dict(filter)}: {tag} is {value!r}; allowed: an index of 0 or more, '*' or '-'")
        elif value == "-" and tag not in regions(graph):
            raise PlanError(f"{dict(filter)}: everything has a {tag}, so '-' finds nothing; allowed: an index or '*'")


def _in_regions(graph: TrainingGraph, block: int, filter: Filter) -> bool:
    for name, value in filter.items():
        found = {a.index for a in graph.model.annotations if a.name == name and a.start <= block < a.stop}
        if bool(found) == (value == "-") or (isinstance(value, int) and value not in found):
            return False
    return True


def select(graph: TrainingGraph, filter: Filter) -> list[Selection]:
    """Return what a filter selects, stage by stage. Raises PlanError where that is nothing, with what there is."""
    check_tags(graph, filter)
    inside = {tag: value for tag, value in filter.items() if tag not in ("PIPE", "PP")}
    found = []
    for stage in graph.stages():
        if filter.get("PIPE", "*") in ("*", stage.pipeline) and filter.get("PP", "*") in ("*", stage.index):
            blocks = tuple(b for b in range(stage.start, stage.stop) if _in_regions(graph, b, inside))
            if blocks:
                found.append(Selection(stage=stage, blocks=blocks))
    if not found:
        have = "; ".join(f"PIPE {p.index}: PP 0..{len(p.stages) - 1}" for p in graph.pipelines if p.stages)
        where = [
            f"{a.name} {a.index} = blocks {a.start}..{a.stop - 1}" for a in graph.model.annotations if a.name in inside
        ]
        raise PlanError(
            f"{dict(filter)} matches nothing{_nearest_filter(graph, filter)}; the graph has "
            f"{have or 'no stages (add cut directives)'}{'; regions: ' + ', '.join(where) if where else ''}"
        )
    return found


def _nearest_filter(graph: TrainingGraph, filter: Filter) -> str:
    """Say which filter with one value changed would match something."""
    pipe, stage = filter.get("PIPE", "*"), filter.get("PP", "*")
    last = len(graph.pipelines) - 1
    if isinstance(pipe, int) and pipe > last >= 0:
        return f"; nearest: {dict(filter) | {'PIPE': last}}"
    deepest = max((len(p.stages) for p in graph.pipelines if pipe in ("*", p.index)), default=0)
    if isinstance(stage, int) and stage >= deepest > 0:
        return f"; nearest: {dict(filter) | {'PP': deepest - 1}}"
    for name, value in filter.items():
        there = [a for a in graph.model.annotations if a.name == name]
        if name in regions(graph) and isinstance(value, int) and value >= len(there):
            return f"; nearest: {dict(filter) | {name: len(there) - 1}}"
    inside = {tag: value for tag, value in filter.items() if tag not in ("PIPE", "PP")}
    for other in graph.stages():
        if pipe in ("*", other.pipeline) and any(_in_regions(graph, b, inside) for b in range(other.start, other.stop)):
            return f"; nearest: {dict(filter) | {'PP': other.index}}"
    return ""


def passes(graph: TrainingGraph, filter: Filter) -> list[Pass]:
    """Return the passes that a filter of an `order` row selects, by micro-batch. Raises PlanError where it is unclear.

    A row is one device group's, so the stage must be certain; without a micro-batch all of them are meant.
    """
    check_tags(graph, filter, passes=True)
    tag = graph.micro_batch_tag
    if "PASS" not in filter:
        raise PlanError(f"{dict(filter)} does not say which PASS; add one of {', '.join(PASSES)}")
    found = select(graph, {t: v for t, v in filter.items() if t not in ("PASS", tag)})
    if len(found) != 1:
        which = ", ".join(s.stage.tag for s in found)
        raise PlanError(
            f"{dict(filter)} selects passes of {which}; name one stage, with PP, and with PIPE where needed"
        )
    stage = found[0].stage
    count = len(graph.pipelines[stage.pipeline].micro_batch_sizes)
    chosen = filter.get(tag, "*")
    if isinstance(chosen, int) and chosen >= count:
        raise PlanError(
            f"{dict(filter)} matches nothing; {stage.tag} has {tag} 0..{count - 1}; nearest: {dict(filter) | {tag: count - 1}}"
        )
    numbers = range(count) if isinstance(chosen, str) else (chosen,)
    kind = PASSES[str(filter["PASS"])]
    return [Pass(pipeline=stage.pipeline, stage=stage.index, kind=kind, micro_batch=m) for m in numbers]
