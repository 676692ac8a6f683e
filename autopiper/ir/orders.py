"""The `order` directive: rows of passes, one per device group, from a schedule family or written out; and their proofs.

A row is right when every pass of its stages is in it once, forward before backward, I before W, and when all rows
together can be worked off: no circle through the passes of one micro-batch and the orders of the groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

from autopiper.errors import PlanError, nearest
from autopiper.ir import schedules
from autopiper.ir.filters import PASSES, passes, select
from autopiper.ir.graph import GraphStage, Members, Row, TrainingGraph
from autopiper.plan import directives as d
from autopiper.plan.passes import Pass, PassGroup

WORDS = {kind: word for word, kind in PASSES.items()}


def check_placed(graph: TrainingGraph, given: Sequence[d.Directive]) -> None:
    """Raise PlanError with every stage that no directive places."""
    placing = [i for i, each in enumerate(given) if each.op == "place"]
    where = f"directives {', '.join(map(str, placing))} place others" if placing else "there is no place directive"
    faults = [
        f"{stage.source or stage.tag}: stage {stage.tag} is placed nowhere ({where}); add "
        f"place({{'PIPE': {stage.pipeline}, 'PP': {stage.index}}}, devices)"
        for stage in graph.stages()
        if not stage.members
    ]
    if faults:
        raise PlanError("stages without devices", faults)
    by = {
        (found.stage.pipeline, found.stage.index): f"directive {i} (place) {dict(it.filter)}"
        for i, it in enumerate(given) if isinstance(it, d.PlaceDirective) for found in select(graph, it.filter)
    }  # fmt: skip
    holder: dict[int, GraphStage] = {}
    for stage in graph.stages():
        for device in (device for member in stage.members for device in member):
            other = holder.setdefault(device, stage)
            if other.members != stage.members:
                one, two = by.get((other.pipeline, other.index)), by.get((stage.pipeline, stage.index))
                faults.append(
                    f"{one} puts stage {other.tag} on {other.members}, {two} stage {stage.tag} on {stage.members}: both have "
                    f"device {device}; stages that share a device must be on the very same devices, in the same members"
                )
    if faults:
        raise PlanError("device groups overlap", faults[:20])


def order(graph: TrainingGraph, it: d.OrderDirective, source: str = "") -> TrainingGraph:
    """Order passes: by a schedule family over whole pipelines, or one row of explicit groups for one device group."""
    if (it.schedule is None) == (it.filters is None):
        raise PlanError("order takes either schedule= (a family) or filters= (explicit groups)")
    if it.filters is not None:
        return _add(graph, _written_out(graph, it.filters, source))
    chosen = tuple(range(len(graph.pipelines))) if it.pipelines is None else it.pipelines
    for p in chosen:
        if not 0 <= p < len(graph.pipelines):
            raise PlanError(f"order names pipeline {p}; the graph has pipelines 0..{len(graph.pipelines) - 1}")
    if len(set(chosen)) != len(chosen) or not chosen:
        raise PlanError(f"order names pipelines {chosen}; give one or more, each once")
    name = str(it.schedule)
    at_once = schedules.FAMILIES[name].num_pipelines if name in schedules.FAMILIES else 1
    if len(chosen) % at_once:
        raise PlanError(f"schedule '{name}' orders {at_once} pipelines together; order names {len(chosen)} of them")
    for at in range(0, len(chosen), at_once):
        together = chosen[at : at + at_once]
        held = {members: [s for s in stages if s.pipeline in together] for members, stages in graph.groups().items()}
        held = {members: stages for members, stages in held.items() if stages}
        layout = schedules.Layout(
            holds=tuple(tuple((s.pipeline, s.index) for s in stages) for stages in held.values()),
            num_stages={p: len(graph.pipelines[p].stages) for p in together},
            num_micro_batches={p: len(graph.pipelines[p].micro_batch_sizes) for p in together},
        )
        rows = schedules.rows(name, layout, it.parameters)
        for members, row in zip(held, rows, strict=True):
            graph = _add(graph, Row(members=members, groups=tuple(row), source=source))
    return graph


def _add(graph: TrainingGraph, row: Row) -> TrainingGraph:
    other = next((r for r in graph.rows if r.members == row.members), None)
    if other is not None:
        held = ", ".join(s.tag for s in graph.groups()[row.members])
        raise PlanError(
            f"devices {_flat(row.members)} ({held}) are ordered already by {other.source or 'another order'}; all stages of "
            "one device group stand in one row: name them in one directive"
        )
    _check(graph, row)
    return replace(graph, rows=(*graph.rows, row))


def _flat(members: Members) -> tuple[int, ...]:
    return tuple(device for member in members for device in member)


def _written_out(graph: TrainingGraph, groups: tuple[tuple[d.Filter, ...], ...], source: str) -> Row:
    row: list[PassGroup] = []
    members: Members | None = None
    for number, group in enumerate(groups):
        if not group:
            raise PlanError(f"group {number} is empty; give at least one filter")
        found: list[Pass] = []
        for filter in group:
            try:
                matched = passes(graph, filter)
            except PlanError as fault:
                raise PlanError(f"group {number}: {fault}") from None
            stage = graph.stage(matched[0].pipeline, matched[0].stage)
            if members is not None and stage.members != members:
                raise PlanError(
                    f"group {number}: {dict(filter)} is on devices {_flat(stage.members)}, the groups before it on "
                    f"{_flat(members)}; a row is for one device group, and orders do not reach across groups"
                )
            members = stage.members
            if len(group) > 1 and len(matched) > 1:
                raise PlanError(
                    f"group {number}: {dict(filter)} selects {len(matched)} passes; in a group of several filters each "
                    f"names one: add {graph.micro_batch_tag}"
                )
            found += matched
        row += [tuple(found)] if len(group) > 1 else [(each,) for each in found]
    if members is None:
        raise PlanError("filters is empty; give at least one group")
    return Row(members=members, groups=tuple(row), source=source)


def _as_filter(graph: TrainingGraph, it: Pass) -> dict[str, int | str]:
    pipe = {"PIPE": it.pipeline} if len(graph.pipelines) > 1 else {}
    return {**pipe, "PP": it.stage, graph.micro_batch_tag: it.micro_batch, "PASS": WORDS[it.kind]}


def _depend(one: Pass, other: Pass) -> bool:
    """Whether one of two passes waits for the other through their micro-batch, directly or not."""
    if (one.pipeline, one.micro_batch) != (other.pipeline, other.micro_batch):
        return False
    if "W" not in (one.kind, other.kind):
        return True
    weight, it = (one, other) if one.kind == "W" else (other, one)
    return it.kind == "F" or (it.kind != "W" and it.stage >= weight.stage)


def _check(graph: TrainingGraph, row: Row) -> None:
    """Raise PlanError where a row does not hold every pass of its stages once, in an order that can be."""
    for number, group in enumerate(row.groups):
        for one, other in combinations(group, 2):
            if _depend(one, other):
                raise PlanError(
                    f"group {number}: {_as_filter(graph, one)} and {_as_filter(graph, other)} cannot overlap, since one waits "
                    "for the other; make them two groups"
                )
    at: dict[tuple[int, int, int], list[str]] = {}
    for it in row.passes():
        kinds = at.setdefault((it.pipeline, it.stage, it.micro_batch), [])
        if it.kind in kinds:
            raise PlanError(f"{_as_filter(graph, it)} stands twice in the row")
        kinds.append(it.kind)
    for stage in graph.groups()[row.members]:
        for mb in range(len(graph.pipelines[stage.pipeline].micro_batch_sizes)):
            kinds = at.pop((stage.pipeline, stage.index, mb), [])
            if kinds in (["F", "B"], ["F", "I", "W"]):
                continue
            one = Pass(pipeline=stage.pipeline, stage=stage.index, micro_batch=mb, kind="F")
            name = {t: v for t, v in _as_filter(graph, one).items() if t != "PASS"}
            have = ", ".join(WORDS[k] for k in kinds) or "nothing"
            why = "F must come first, then either B, or BI and BW in this order"
            if "I" in kinds or "W" in kinds:
                why += " (wrong BI/BW pairing: one BI and one BW each, BI first, and no B beside them)"
            raise PlanError(f"{name} has {have} in the row{nearest(have, ['F, B', 'F, BI, BW'])}; {why}")
    if at:
        pipeline, stage_, mb = next(iter(at))
        raise PlanError(f"pipeline {pipeline}, stage {stage_}, micro-batch {mb} is not of this device group")


def complete(graph: TrainingGraph) -> TrainingGraph:
    """Give a row to every device group that has none, where that needs no choice, and check all rows together."""
    faults = []
    for members, stages in graph.groups().items():
        if any(row.members == members for row in graph.rows):
            continue
        if len(stages) == 1 and len(graph.pipelines[stages[0].pipeline].stages) == 1:
            p = stages[0].pipeline
            count = len(graph.pipelines[p].micro_batch_sizes)
            groups = [(Pass(pipeline=p, stage=0, kind=k, micro_batch=m),) for m in range(count) for k in "FB"]
            graph = replace(graph, rows=(*graph.rows, Row(members=members, groups=tuple(groups), source="no order")))
            continue
        others = ", ".join(dict.fromkeys(row.source for row in graph.rows if row.source.startswith("directive")))
        faults += [
            f"stage {s.tag} has no order; add order(schedule='1f1b', pipelines=({s.pipeline},))"
            + (f", or a row of its passes beside {others}" if others else "")
            for s in stages
        ]
    if faults:
        raise PlanError("passes without an order", faults)
    _check_circles(graph)
    return graph


def _check_circles(graph: TrainingGraph) -> None:
    """Raise PlanError where the rows wait for each other in a circle, naming the directives and passes on it."""
    number: dict[tuple[int, int, str, int], int] = {}
    every: list[tuple[Pass, Row]] = []
    before: list[list[int]] = []
    for row in graph.rows:
        for position, it in enumerate(row.passes()):
            number[it.pipeline, it.stage, it.kind, it.micro_batch] = len(every)
            before.append([len(every) - 1] if position else [])
            every.append((it, row))
    for n, (it, _) in enumerate(every):
        p, s, m = it.pipeline, it.stage, it.micro_batch
        if it.kind == "F":
            sources = [number.get((p, s - 1, "F", m))]
        elif it.kind == "W":
            sources = []
        elif s == len(graph.pipelines[p].stages) - 1:
            sources = [number.get((p, s, "F", m))]
        else:
            sources = [number.get((p, s + 1, kind, m)) for kind in ("B", "I")]
        before[n] += [source for source in sources if source is not None]
    missing = [len(sources) for sources in before]
    after: list[list[int]] = [[] for _ in every]
    for n, earlier in enumerate(before):
        for one in earlier:
            after[one].append(n)
    ready = [n for n, count in enumerate(missing) if not count]
    for n in ready:  # grows while it is walked
        for target in after[n]:
            missing[target] -= 1
            if not missing[target]:
                ready.append(target)
    stuck = {n for n, count in enumerate(missing) if count}
    if not stuck:
        return
    circle = [next(iter(sorted(stuck)))]
    while (previous := next(s for s in before[circle[-1]] if s in stuck)) not in circle:
        circle.append(previous)
    circle = [*circle[circle.index(previous) :], previous][::-1]
    shown = [f"{_as_filter(graph, every[n][0])} ({every[n][1].source})" for n in circle]
    if len(shown) > 8:
        shown = [*shown[:4], "…", *shown[-3:]]
    raise PlanError(f"the orders go in a circle, each pass waiting for the one before: {' -> '.join(shown)}")
