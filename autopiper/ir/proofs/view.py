"""View: one Program as the proofs read it, with what is certainly over when each of its actions starts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autopiper.ir.graph import Bucket, GradientBlock, GraphStage, Row, TrainingGraph
from autopiper.plan.actions import COMPUTE_KINDS, COMPUTE_STREAM, Action, Program

BACKWARD = ("B", "I")
"""What makes the gradient of a stage's input."""
FINAL = ("B", "W")
"""What makes the gradients of its weights."""

PassKey = tuple[int, int, str, int]
"""(pipeline, stage, kind, micro-batch)."""


class View:
    """Actions by number (in the order of the streams), by text, and by what they are; and a clock.

    The clock says for each action how many actions of each stream are over when it starts, by stream order and waits
    of this Program alone. A wait for a block proves less: see `passed`.
    """

    def __init__(
        self,
        graph: TrainingGraph,
        program: Program,
        row: Row,
        stages: Sequence[GraphStage],
        held: Iterable[GradientBlock],
    ) -> None:
        self.graph, self.program, self.row, self.stages = graph, program, row, stages
        self.held = {block.index for block in held}
        self.name, self.member = program.name, program.member
        self.actions: list[Action] = list(program.actions())
        self.at: dict[str, int] = {}
        """Text -> number."""
        self.stream: list[int] = []
        self.position: list[int] = []
        self.compute: dict[PassKey, dict[int, int]] = {}
        """Pass -> segment -> number."""
        for number, actions in enumerate(program.streams.values()):
            for position, action in enumerate(actions):
                self.at.setdefault(action.text, len(self.stream))
                if action.kind in COMPUTE_KINDS:
                    key = (action.pipeline, action.stage or 0, action.kind, action.micro_batch or 0)
                    self.compute.setdefault(key, {}).setdefault(action.segment, len(self.stream))
                self.stream.append(number)
                self.position.append(position)
        self.before: list[list[int]] = []
        self.partly: list[dict[int, int]] = []

    def holds(self, block: GradientBlock) -> bool:
        """Whether these ranks hold a gradient block."""
        return block.index in self.held

    def samples(self, stage: GraphStage, micro_batch: int) -> int:
        """Samples of a micro-batch that this member takes."""
        return stage.slices[micro_batch][self.member]

    def tick(self) -> bool:
        """Work out the clock. False where the actions wait for each other in a circle."""
        names = list(self.program.streams)
        rows: list[list[int]] = [[] for _ in names]
        for number, stream in enumerate(self.stream):
            rows[stream].append(number)
        self.before = [[] for _ in self.actions]
        self.partly = [{} for _ in self.actions]
        over = [False] * len(self.actions)
        blocked: dict[int, list[int]] = {}
        reached = [0] * len(rows)
        todo = list(range(len(rows)))
        none = [0] * len(rows)
        while todo:
            stream = todo.pop()
            row = rows[stream]
            while reached[stream] < len(row):
                number = row[reached[stream]]
                found = [(self.at.get(w.action), w.block) for w in self.actions[number].waits]
                sources = [(source, block) for source, block in found if source is not None]
                late = next((source for source, _ in sources if not over[source]), None)
                if late is not None:
                    blocked.setdefault(late, []).append(stream)
                    break
                if reached[stream]:
                    sources.append((row[reached[stream] - 1], None))
                self._start(number, sources, none)
                over[number] = True
                reached[stream] += 1
                todo += blocked.pop(number, ())
        return all(over)

    def _start(self, number: int, sources: Iterable[tuple[int, int | None]], none: list[int]) -> None:
        clock = none
        partly: dict[int, int] = {}
        for source, block in sources:
            clock = list(map(max, clock, self.before[source]))
            if block is None:
                clock[self.stream[source]] = max(clock[self.stream[source]], self.position[source] + 1)
            for other, passed in (*self.partly[source].items(), *(() if block is None else ((source, block),))):
                partly[other] = min(passed, partly.get(other, passed))
        self.before[number] = clock
        if partly:
            self.partly[number] = {n: b for n, b in partly.items() if clock[self.stream[n]] <= self.position[n]}

    def over(self, first: int, then: int) -> bool:
        """Whether an action is certainly over when another one starts."""
        return self.before[then][self.stream[first]] > self.position[first]

    def passed(self, backward: int, block: int, then: int) -> bool:
        """Whether a backward has certainly passed a block when another action starts."""
        reached = self.partly[then].get(backward)
        return self.over(backward, then) or (reached is not None and reached <= block)

    def halves(self, action: Action) -> tuple[int, int]:
        """Half blocks [low, high) that a pass computes in this action; W takes its whole stage."""
        stage = self.graph.stage(action.pipeline, action.stage or 0)
        return (2 * stage.start, 2 * stage.stop) if action.kind == "W" else stage.segment(action.segment)

    def computing(self, kinds: Sequence[str]) -> list[tuple[int, tuple[int, int]]]:
        """Return (number, half blocks) of the passes of these kinds, in the order of the compute stream."""
        start = 0
        for name, actions in self.program.streams.items():
            if name == COMPUTE_STREAM:
                return [(start + n, self.halves(a)) for n, a in enumerate(actions) if a.kind in kinds]
            start += len(actions)
        return []


def touched(block: GradientBlock, bucket: Bucket, halves: tuple[int, int]) -> list[int]:
    """Return the model blocks whose parameters in a bucket lie among half blocks [low, high)."""
    return [
        b for b in block.blocks
        if bucket.lowest_block <= b <= bucket.highest_block and halves[0] <= 2 * b + block.low_half < halves[1]
    ]  # fmt: skip
