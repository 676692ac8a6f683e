"""What a search asks of a step, without a timeline; long steps by their ends, the middle added as a shift.

A pipeline under 1F1B works, once full, in a rhythm: some micro-batches later everything starts by the same time later
(max-plus linear recursions become periodic: Baccelli et al., Synchronization and Linearity, 1992, theorem 3.109). What
starts a pass or a message lies no further back than the stages of the pipeline and the receive buffers reach. Where the
rhythm has held for that long it holds until the micro-batches run out, so a step with more of them ends that much later.

That is exact where nothing shares a link. Where messages slow each other down, what comes first may depend on what runs
beside it, so the rhythm must have held three times as long, and the prediction may be off by a part of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopiper._data import data
from autopiper.costmodel.peaks import memory
from autopiper.costmodel.walks import Walks, prepare
from autopiper.ir.graph import TrainingGraph
from autopiper.ir.joint import Joint
from autopiper.ir.regions import RECEIVE_DEPTH
from autopiper.plan.actions import COMPUTE_STREAM, Program
from autopiper.plan.costs import CostTable

TOLERANCE = 1e-10
"""Relative to the time since the step began: what sums of floats may differ by."""


@data
class Prediction:
    """What `simulate` says of a step, its timeline left aside."""

    step_time_s: float
    makespan_s: float
    relative_error: float
    peak_memory_bytes: tuple[float, ...]
    """Of each rank, by rank."""


def predict(
    graph: TrainingGraph, programs: Sequence[Program], costs: CostTable, joint: Joint | None = None
) -> Prediction:
    """Simulate a step. Raises as `simulate` does. `joint` = the Programs joined, where that has been done already."""
    walks = prepare(graph, programs, costs, joint)
    start, end = walks.walk({})
    second = walks.walk(walks.carried_over(end))[1]
    return _prediction(programs, walks, start, end, second)


def predict_folded(
    graph: TrainingGraph, programs: Sequence[Program], costs: CostTable, left_out: Sequence[int]
) -> Prediction | None:
    """Simulate a step that begins with `left_out[p]` more micro-batches in pipeline p than the graph has.

    Those left out must be as those that are there (but for the last), and the pipeline be scheduled by 1F1B. Returns
    None where the micro-batches that are there are too few to be sure of the rhythm. Raises as `simulate` does.
    """
    walks = prepare(graph, programs, costs)
    start, end = walks.walk({})
    patience = 3 if walks.shared(start, end) else 1
    later = _shifts(graph, programs, walks.joint, start, left_out, patience)
    if later is None:
        return None
    start, end = walks.walk(later)
    carried = walks.carried_over(end)
    for node, more_s in later.items():
        carried[node] += more_s
    second_start, second = walks.walk(carried)
    # The second step begins otherwise than the first, so its rhythm must be seen too.
    again = _shifts(graph, programs, walks.joint, second_start, left_out, patience)
    if again is None or any(abs(again[n] - s) > _allowed(s) for n, s in later.items()):
        return None
    return _prediction(programs, walks, start, end, second)


def _prediction(
    programs: Sequence[Program], walks: Walks, start: Sequence[float], end: Sequence[float],
    second: Sequence[float],
) -> Prediction:  # fmt: skip
    """Sum up two steps: where the first starts and ends its nodes, where the second ends them."""
    makespan_s = max(end, default=0.0)
    peaks: dict[int, float] = {}
    for number, program in enumerate(programs):
        held = memory(number, walks.joint, walks.durations, start, end, points=False)
        peaks |= dict.fromkeys(program.all_ranks, held.peak_bytes)
    return Prediction(
        step_time_s=max(second, default=0.0) - makespan_s,
        makespan_s=makespan_s,
        relative_error=walks.durations.relative_error,
        peak_memory_bytes=tuple(peaks[rank] for rank in sorted(peaks)),
    )


def _allowed(shift_s: float) -> float:
    """What two sums of rhythms may differ by: each may be off by TOLERANCE of a much shorter time."""
    return 1e4 * TOLERANCE * shift_s


def _shifts(
    graph: TrainingGraph, programs: Sequence[Program], joint: Joint, start: Sequence[float], left_out: Sequence[int],
    patience: int,
) -> dict[int, float] | None:  # fmt: skip
    """Return by the first pass of each Program how much later all its passes are; None where no rhythm is sure."""
    later: list[float] = []
    for number, program in enumerate(programs):
        missing = left_out[program.places[0].pipeline]
        found = _rhythm(graph, program, number, joint, start, patience) if missing else (1, 0.0)
        if found is None or missing % found[0]:
            return None
        later.append(missing // found[0] * found[1])
    for node in joint.nodes:  # who exchanges messages keeps one time
        if node.kind == "TRANSFER":
            a, b = later[node.programs[0]], later[node.programs[-1]]
            if abs(a - b) > _allowed(max(a, b)):
                return None
    firsts = {n: joint.streams[n, COMPUTE_STREAM] for n in range(len(programs))}
    return {nodes[0]: later[n] for n, nodes in firsts.items() if nodes}


def _rhythm(
    graph: TrainingGraph, program: Program, number: int, joint: Joint, start: Sequence[float], patience: int
) -> tuple[int, float] | None:
    """Return (micro-batches, seconds) after which the passes and sends of a Program repeat; None where none do yet.

    Looked at up to the last forward but one: what follows is the drain, or of another size.
    """
    place = program.places[0]
    stages = len(graph.pipelines[place.pipeline].stages)
    rows: dict[tuple[str, str], list[float]] = {}
    for stream, nodes in joint.by_program.get(number, {}).items():
        for n in nodes:
            entry = joint.nodes[n]
            if entry.kind in ("F", "B"):
                rows.setdefault((entry.kind, stream), []).append(start[n])
            elif entry.kind == "TRANSFER" and entry.programs[0] == number:
                rows.setdefault((entry.actions[0].kind[-1], stream), []).append(start[n])
    forwards = len(rows.get(("F", COMPUTE_STREAM), ()))
    if not forwards:
        return 1, 0.0
    ahead = {"F": 1, "B": stages - place.stage}  # backwards are that many micro-batches behind the last forward but one
    seen = [row[: forwards - ahead[kind]] for (kind, _), row in rows.items()]
    reach = patience * (stages + RECEIVE_DEPTH + 1)
    shortest = min(len(row) for row in seen)
    for count in range(1, min(stages, shortest - reach) + 1):
        seconds = seen[0][-1] - seen[0][-1 - count]
        if all(abs(row[i] - row[i - count] - seconds) <= TOLERANCE * row[-1] for row in seen for i in range(-reach, 0)):
            return count, seconds
    return None
