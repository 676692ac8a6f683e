"""The simulator: walks the Programs, never a closed form, and says when everything happens and what it needs.

Each stream keeps its order; a transfer starts when both ends are there, a collective when all its members are; compute
never waits for a send. What is simulated is what is run: the same Programs, the same waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autopiper._collector import no_collection
from autopiper.costmodel.durations import Durations
from autopiper.costmodel.peaks import memory
from autopiper.costmodel.walks import prepare
from autopiper.ir.graph import TrainingGraph
from autopiper.ir.joint import Joint
from autopiper.plan.actions import COMPUTE_STREAM, EXCHANGE_KINDS, GATHER_KINDS, Program
from autopiper.plan.costs import CostTable
from autopiper.plan.timeline import Event, Lane, RankTime, Timeline

EXPOSED_KINDS = {
    "TRANSFER": "send/recv",
    "REDUCE_GRAD": "gradient reduction",
    "LOSS": "loss and norm",
    "NORM": "loss and norm",
    **dict.fromkeys(EXCHANGE_KINDS, "all-to-all"),
    **dict.fromkeys(GATHER_KINDS, "parameter gather"),
}


@no_collection()
def simulate(graph: TrainingGraph, programs: Sequence[Program], costs: CostTable, *, events: bool = True) -> Timeline:
    """Walk two consecutive steps; return the timeline of the first, with the period of the second.

    `events=False` leaves events and the course of memory out. Raises PlanError where the Programs do not fit together (`ir.verify` says everything that is wrong), CostError where a price is missing.
    """
    walks = prepare(graph, programs, costs)
    joint, durations = walks.joint, walks.durations
    start, end = walks.walk({})
    _, second = walks.walk(walks.carried_over(end))
    makespan_s = max(end, default=0.0)
    lanes = []
    for number, program in enumerate(programs):
        held = memory(number, joint, durations, start, end, points=events)
        lanes.append(
            Lane(
                ranks=program.all_ranks,
                devices=program.all_devices,
                events=tuple(_events(number, joint, start, end)) if events else (),
                peak_memory_bytes=held.peak_bytes,
                static_memory_bytes=held.static_bytes,
                peak_live_activations=held.peak_live,
                memory=held.points,
                time=_rank_time(number, joint, durations, start, end, makespan_s),
            )
        )
    precision = graph.training.precision or "fp32"
    types = [durations.devices[d].type for d in graph.devices()]
    return Timeline(
        step_time_s=max(second, default=0.0) - makespan_s,
        makespan_s=makespan_s,
        lanes=tuple(lanes),
        global_batch_size=graph.training.global_batch_size,
        tokens=graph.training.global_batch_size * graph.model.sequence_length,
        model_flops=graph.training.global_batch_size * graph.model.flops,
        peak_flops=sum(t.peak_flops.get(precision, 0.0) for t in types),
        relative_error=durations.relative_error,
    )


def _events(number: int, joint: Joint, start: Sequence[float], end: Sequence[float]) -> list[Event]:
    found = []
    for stream, nodes in joint.by_program.get(number, {}).items():
        for node in nodes:
            action = joint.nodes[node].action_of(number)
            found.append(
                Event(
                    action=action.text, stream=stream, start_s=start[node], end_s=end[node], kind=action.kind,
                    pipeline=None if action.stage is None else action.pipeline, stage=action.stage,
                    micro_batch=action.micro_batch, node=node,
                )
            )  # fmt: skip
    return sorted(found, key=lambda e: (e.start_s, e.end_s))


def _rank_time(
    number: int,
    joint: Joint,
    durations: Durations,
    start: Sequence[float],
    end: Sequence[float],
    makespan_s: float,
) -> RankTime:
    """Say where the step of one Program went: a gap is exposed communication as far as that ended it."""
    compute_s = recompute_s = now = 0.0
    exposed: dict[str, float] = {}
    for node in joint.streams.get((number, COMPUTE_STREAM), ()):
        for kind, waited_s in _exposed(joint, node, now, start, end):
            exposed[kind] = exposed.get(kind, 0.0) + waited_s
        entry = joint.nodes[node]
        again = durations.of_pass(entry)[1] if entry.kind in ("B", "I", "W") else 0.0
        recompute_s += again
        compute_s += end[node] - start[node] - again
        now = end[node]
    bubble_s = makespan_s - compute_s - recompute_s - sum(exposed.values())
    return RankTime(compute_s=compute_s, recompute_s=recompute_s, exposed_s=exposed, bubble_s=max(0.0, bubble_s))


def _exposed(
    joint: Joint, node: int, since_s: float, start: Sequence[float], end: Sequence[float]
) -> Iterator[tuple[str, float]]:
    """Yield (kind, seconds) of the communication that kept a node from starting at `since_s`.

    Follows the chain of transfers and collectives that ended just when the next one, and at last the node, began.
    """
    until_s = start[node]
    while until_s > since_s:
        sources = [s for s, block in joint.waits[node] if block is None] + joint.stream_before[node]
        blamed = [s for s in sources if joint.nodes[s].kind in EXPOSED_KINDS and end[s] >= until_s > start[s]]
        if not blamed:
            return
        node = blamed[0]
        begin_s = max(since_s, start[node])
        yield EXPOSED_KINDS[joint.nodes[node].kind], until_s - begin_s
        until_s = begin_s
