"""The simulator: walks the Programs, never a closed form, and says when everything happens and what it needs.

Each stream keeps its order; a transfer starts when both ends are there, a collective when all its members are; compute
never waits for a send. What is simulated is what is run: the same Programs, the same waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from autopiper.costmodel.durations import Durations
from autopiper.costmodel.peaks import memory
from autopiper.errors import PlanError
from autopiper.ir.graph import TrainingGraph
from autopiper.ir.joint import Joint, join
from autopiper.plan.actions import COMPUTE_STREAM, Program
from autopiper.plan.costs import CostTable
from autopiper.plan.timeline import Event, Lane, RankTime, Timeline

EXPOSED_KINDS = {
    "TRANSFER": "send/recv",
    "REDUCE_GRAD": "gradient reduction",
    "LOSS": "loss and norm",
    "NORM": "loss and norm",
}


def simulate(graph: TrainingGraph, programs: Sequence[Program], costs: CostTable, *, events: bool = True) -> Timeline:
    """Walk two consecutive steps; return the timeline of the first, with the period of the second.

    `events=False` leaves the events of the timeline out. Raises PlanError where the Programs do not fit together (`ir.verify` says everything that is wrong), CostError where a price is missing.
    """
    walks = prepare(graph, programs, costs)
    joint, durations = walks.joint, walks.durations
    start, end = walks.walk({})
    _, second = walks.walk(walks.carried_over(end))
    makespan_s = max(end, default=0.0)
    lanes = []
    for number, program in enumerate(programs):
        static, peak, live = memory(number, joint, durations, start, end)
        lanes.append(
            Lane(
                ranks=program.ranks,
                devices=program.devices,
                events=tuple(_events(number, joint, start, end)) if events else (),
                peak_memory_bytes=peak,
                static_memory_bytes=static,
                peak_live_activations=live,
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


class Walks:
    """What walks of a step need: the joint graph, its nodes in order, and their seconds."""

    def __init__(self, joint: Joint, durations: Durations) -> None:
        self.joint, self.durations = joint, durations
        self.order = joint.topological[0]
        self.seconds = durations.all(joint)
        self.below = _below(joint, durations)

    def walk(self, carried: Mapping[int, float]) -> tuple[list[float], list[float]]:
        """Return start and end of every node; `carried` = earliest starts left over from the step before."""
        before, waits, seconds, below = self.joint.stream_before, self.joint.waits, self.seconds, self.below
        start = [0.0] * len(seconds)
        end = [0.0] * len(seconds)
        for node in self.order:
            at = carried.get(node, 0.0)
            for source in before[node]:
                if end[source] > at:
                    at = end[source]
            for source, block in waits[node]:
                ready = end[source] if block is None else end[source] - below[source, block]
                if ready > at:
                    at = ready
            start[node] = at
            end[node] = at + seconds[node]
        return start, end

    def carried_over(self, end: Sequence[float]) -> dict[int, float]:
        """Return when the first node of each stream can start in the step that follows."""
        carried: dict[int, float] = {}
        for nodes in self.joint.streams.values():  # one node may open several streams
            if nodes:
                carried[nodes[0]] = max(carried.get(nodes[0], 0.0), end[nodes[-1]])
        return carried


def prepare(graph: TrainingGraph, programs: Sequence[Program], costs: CostTable, joint: Joint | None = None) -> Walks:
    """Join the Programs, unless that has been done already, and price them. Raises as `simulate` does."""
    joint = joint or join(programs)
    stuck = joint.topological[1]
    if joint.faults or stuck:
        circle = [f"{len(stuck)} actions wait for each other in a circle"] if stuck else []
        raise PlanError("the Programs cannot be simulated", [*joint.faults, *circle])
    return Walks(joint, Durations(graph, programs, costs))


def _below(joint: Joint, durations: Durations) -> dict[tuple[int, int], float]:
    """(node, block) -> seconds from the moment a backward has passed the block to its end, where a wait names it."""
    found: dict[tuple[int, int], float] = {}
    for waits in joint.waits:
        for source, block in waits:
            if block is not None and (source, block) not in found:
                node = joint.nodes[source]
                stage = durations.graph.stage(durations.programs[node.programs[0]].places[0])
                found[source, block] = durations.of_pass(node)[2][block - stage.start]
    return found


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
        again = durations.of_pass(entry)[1] if entry.kind in ("B", "I") else 0.0
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
