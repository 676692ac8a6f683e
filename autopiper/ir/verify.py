"""Verification: what is proved about a strategy's Programs before anything runs.

The proofs know the graph and the Programs and nothing of `ir.lower`, which wrote them: what must hold is worked out
from the rows, slices and holders of the graph. Taken as given is how Programs are run: a stream works in order; an
action starts when what it waits for is over (or has passed the block); a send and its receive are one event, a
collective is one event over all its ranks. Within a Program, what is over is followed through streams and waits, so a
wait that others imply is not asked for.

Whether the devices have the memory is `costmodel`'s to prove.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from autopiper.errors import PlanError
from autopiper.ir.graph import TrainingGraph
from autopiper.ir.joint import Joint, join
from autopiper.ir.proofs.flow import exchanges, messages
from autopiper.ir.proofs.seats import holdings, seats
from autopiper.ir.proofs.state import State
from autopiper.ir.proofs.together import channels, collectives
from autopiper.ir.proofs.view import View
from autopiper.ir.proofs.work import alive, shapes, work
from autopiper.plan.actions import Program


def verify(graph: TrainingGraph, programs: Sequence[Program], joint: Joint | None = None) -> list[str]:
    """Prove the Programs of a graph right; return what was proved, in words. Raises PlanError with every fault.

    `programs` = one per class of equal ranks (`ir.lower`) or all of them (`ir.lower_all`). `joint` = these Programs
    joined, where that has been done already.
    """
    joint = joint or join(programs)
    order, stuck = joint.topological
    faults = list(joint.faults)
    if stuck:
        shown = ", ".join(joint.nodes[n].text for n in _circle(joint, set(stuck))[:6])
        faults.append(f"deadlock: {len(stuck)} actions wait for each other in a circle, among them {shown}")
    misplaced = seats(graph, programs)
    if misplaced:  # what is not where it should be cannot be judged further
        raise PlanError("the Programs are wrong", faults + misplaced)
    views = _views(graph, programs)
    for view in views:
        wrong = shapes(view)
        faults += wrong or [*work(view), *(_flow(view) if not stuck else ())]
    faults += [*collectives(views, joint), *channels(views, joint)]
    if faults:
        raise PlanError("the Programs are wrong", dict.fromkeys(faults))
    return list(_words(graph, programs, joint, views, len(order)))


def _views(graph: TrainingGraph, programs: Sequence[Program]) -> list[View]:
    rows = {row.members: row for row in graph.rows}
    groups = graph.groups()
    of = {devices: members for members in groups for devices in members}
    held = holdings(graph)
    return [View(graph, p, rows[of[p.devices]], groups[of[p.devices]], held.get(p.devices, ())) for p in programs]


def _flow(view: View) -> list[str]:
    if not view.tick():
        return [f"{view.name}: its actions wait for each other in a circle"]
    return [*messages(view), *exchanges(view), *State(view).faults()]


def _circle(joint: Joint, stuck: set[int]) -> list[int]:
    """Return nodes that wait for each other, one after the other."""
    walk = [min(stuck)]
    seen: dict[int, int] = {}
    while walk[-1] not in seen:
        seen[walk[-1]] = len(walk) - 1
        sources = (*(s for s, _ in joint.waits[walk[-1]]), *joint.stream_before[walk[-1]])
        walk.append(next(s for s in sources if s in stuck))
    return walk[seen[walk[-1]] : -1][::-1]


def _words(
    graph: TrainingGraph, programs: Sequence[Program], joint: Joint, views: Sequence[View], actions: int
) -> Iterator[str]:
    ranks = sum(len(p.all_ranks) for p in programs)
    blocks = graph.gradient_blocks
    count = {
        kind: sum(n.kind.startswith(kind) for n in joint.nodes) for kind in ("TRANSFER", "A2A", "REDUCE", "UNSHARD")
    }
    yield (
        f"complete: {len(graph.pipelines)} pipelines process {graph.training.global_batch_size} samples; every "
        f"micro-batch passes all {len(graph.model.blocks)} blocks forward and backward once, on {ranks} ranks"
    )
    yield f"no deadlock: {actions} actions over {len(programs)} Programs form one acyclic graph"
    yield (
        f"both ends agree on all {count['TRANSFER']} messages, in the same order on every channel; each pass waits for all "
        "its samples, and no message overwrites one that is still to be read"
    )
    if count["A2A"]:
        yield f"every token meets its experts: {count['A2A']} all-to-alls, each over its whole group between two segments"
    regathers = sum(n.kind == "UNSHARD" for n in joint.nodes)
    if count["UNSHARD"] > regathers:
        yield f"parameters are there when they are used (ZeRO 3): {count['UNSHARD'] - regathers} gathers, each with its release"
    if regathers:
        yield f"parameters that are updated in parts (ZeRO 1 and 2) are gathered once, after the update: {regathers} gathers"
    yield (
        f"every gradient is summed over all its holders once: {len(blocks)} gradient blocks, {count['REDUCE']} bucket "
        "reductions; every holder updates its parameters once"
    )
    peaks = sorted((rank, alive(view)) for p, view in zip(programs, views, strict=True) for rank in p.all_ranks)
    runs = [(most, [rank for rank, _ in run]) for most, run in groupby(peaks, key=lambda pair: pair[1])]
    said = ", ".join(
        f"{most} on rank{'s' if len(r) > 1 else ''} {r[0]}{f'..{r[-1]}' if len(r) > 1 else ''}" for most, r in runs[:8]
    )
    yield f"activations alive at once, in micro-batches of a stage: {said}{', …' if len(runs) > 8 else ''}"
