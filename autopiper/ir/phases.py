"""The compiler's passes: directives are applied by kind, in the order of `PHASES`, as Piper's are.

Within one kind the file's order holds. Messages name a directive by its position in the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from autopiper.errors import ClusterError, PlanError
from autopiper.ir import orders, transform
from autopiper.ir.filters import select
from autopiper.ir.graph import TrainingGraph
from autopiper.plan import directives as d

PHASES: dict[str, Callable[[TrainingGraph, Any, str], TrainingGraph]] = {
    "pipeline": transform.pipeline,
    "split": transform.split,
    "cut": transform.cut,
    "place": transform.place,
    "degrees": transform.degrees,
    "slices": transform.slices,
    "recompute": transform.recompute,
    "buckets": transform.buckets,
    "replicate": transform.replicate,
    "shard": transform.shard,
    "order": orders.order,
}


def apply(graph: TrainingGraph, directives: Iterable[d.Directive]) -> TrainingGraph:
    """Apply directives in the compiler's order. Raises PlanError naming the directive's position in the list."""
    given = list(directives)
    _one_boundary(given)
    for op, change in PHASES.items():
        if op == "cut" and not graph.pipelines:  # as in Piper: nothing said, the batch stays whole
            graph = transform.pipeline(graph, d.pipeline(0, [graph.training.global_batch_size]))
        if op == "place" and not any(each.op == "cut" for each in given):
            graph = transform.cut_as_annotated(graph)
        if op == "place":
            check_split(graph, given)
        if op == "order":
            orders.check_placed(graph, given)
        for position, directive in enumerate(given):
            if directive.op == op:
                source = f"directive {position} ({op})"
                try:
                    graph = change(graph, directive, source)
                except (PlanError, ClusterError) as fault:
                    raise PlanError(f"{source}{_filter(directive, str(fault))}: {fault}") from None
    return orders.complete(graph)


def _filter(directive: d.Directive, message: str) -> str:
    """Return the directive's filter for a message that does not show it."""
    if isinstance(directive, d.PipelineDirective | d.CutDirective | d.OrderDirective):
        return ""
    shown = str(dict(directive.filter))
    return "" if shown in message else f" {shown}"


def _one_boundary(given: list[d.Directive]) -> None:
    """Refuse `replicate` with sharding on the very regions that `shard` divides: Piper lets the file's order decide."""
    own = {"PIPE", "PP"}
    sharding = [(i, r) for i, r in enumerate(given) if isinstance(r, d.ReplicateDirective)
                and (r.shard_grads or r.shard_params or r.shard_optimizer) and set(r.filter) - own]  # fmt: skip
    for j, shard_ in ((j, s) for j, s in enumerate(given) if isinstance(s, d.ShardDirective)):
        for i, rep in sharding:
            common = (set(rep.filter) & set(shard_.filter)) - own
            if common and all("*" in (rep.filter[t], shard_.filter[t]) or rep.filter[t] == shard_.filter[t]
                              for t in set(rep.filter) & set(shard_.filter)):  # fmt: skip
                raise PlanError(
                    f"directive {i} (replicate) {dict(rep.filter)} and directive {j} (shard) {dict(shard_.filter)} both set the "
                    f"boundary of one region ({', '.join(sorted(common))}); experts that are sharded are not ZeRO-sharded too: drop one"
                )


def check_split(graph: TrainingGraph, given: Iterable[d.Directive]) -> None:
    """Raise PlanError where the `split` directives leave out a part of the model."""
    splits = [(i, each) for i, each in enumerate(given) if isinstance(each, d.SplitDirective)]
    reached: set[tuple[int, int, int]] = set()
    for position, it in splits:
        try:
            reached |= {(s.stage.pipeline, s.stage.index, b) for s in select(graph, it.filter) for b in s.blocks}
        except PlanError as fault:
            raise PlanError(f"directive {position} (split): {fault}") from None
    left = [s for s in graph.stages() if not {(s.pipeline, s.index, b) for b in range(s.start, s.stop)} <= reached]
    if splits and left:
        named = ", ".join(f"directive {i} (split) {dict(it.filter)}" for i, it in splits)
        raise PlanError(
            f"{named} leaves out (parts of) {', '.join(s.tag for s in left[:6])}; every stage of a pipeline works on the same "
            "micro-batches: split the whole with {}, or give those of one pipeline with pipeline(index, micro_batch_sizes)"
        )
