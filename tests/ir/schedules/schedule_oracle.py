"""An oracle for rows, written apart from the code it judges: is an order valid, and when does each pass run?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from autopiper.ir.schedules import Layout, Rows
from autopiper.plan.passes import Pass

EQUAL = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
Time = Callable[[Pass], float]


def layout(*held: tuple[int, ...], micro_batches: int) -> Layout:
    """One pipeline; `held`: the stages of each device group."""
    return Layout(
        holds=tuple(tuple((0, s) for s in each) for each in held),
        num_stages={0: sum(map(len, held))},
        num_micro_batches={0: micro_batches},
    )


def one(ranks: int, micro_batches: int) -> Layout:
    return layout(*((r,) for r in range(ranks)), micro_batches=micro_batches)


def loop(ranks: int, virtual: int, micro_batches: int) -> Layout:
    return layout(*(tuple(range(r, ranks * virtual, ranks)) for r in range(ranks)), micro_batches=micro_batches)


def vee(ranks: int, micro_batches: int) -> Layout:
    return layout(*((r, 2 * ranks - 1 - r) for r in range(ranks)), micro_batches=micro_batches)


def opposite(ranks: int, micro_batches: int) -> Layout:
    """`micro_batches` in each direction."""
    return Layout(
        holds=tuple(((0, r), (1, ranks - 1 - r)) for r in range(ranks)),
        num_stages={0: ranks, 1: ranks},
        num_micro_batches={0: micro_batches, 1: micro_batches},
    )


def needs(p: Pass, num_stages: int, done: Mapping[str, Pass]) -> list[Pass]:
    """The passes whose results `p` reads; `done` tells whether a backward is split."""

    def find(kinds: str, stage: int) -> Pass:
        prefix = f"p{p.pipeline}:" if p.pipeline else ""
        found = [done[text] for k in kinds if (text := f"{prefix}{stage}{k}{p.micro_batch}") in done]
        assert len(found) == 1, f"{p.text} reads {kinds} of stage {stage}: {found}"
        return found[0]

    if p.kind == "F":
        return [find("F", p.stage - 1)] if p.stage else []
    if p.kind == "W":
        return [find("I", p.stage)]
    return [find("F", p.stage)] + ([find("BI", p.stage + 1)] if p.stage < num_stages - 1 else [])


@dataclass
class Played:
    """What came of a walk through rows."""

    start: dict[str, float]
    end: dict[str, float]
    makespan: float
    spans: list[float]
    """Per device group, from its first pass to its last."""
    busy: list[float]
    live: list[int]
    """Per device group, the most (stage, micro-batch) held from the start of F to the end of B or W."""

    @property
    def excess(self) -> float:
        """Makespan beyond the busiest device group's work."""
        return self.makespan - max(self.busy)

    @property
    def span_bubble(self) -> float:
        return max(s - b for s, b in zip(self.spans, self.busy, strict=True))


def play(
    rows: Rows, given: Layout, time: Mapping[str, float] | Time = EQUAL, link: float = 0.0, pair: float | None = None
) -> Played:
    """Check that rows are complete and in an order that can run, and time them.

    Messages between device groups take `link`; they neither occupy a device group nor each other. `pair`: a group of
    two is one atomic action of this length, which needs the inputs of both; None = one pass after the other.
    """
    cost: Time = time if callable(time) else lambda p: time[p.kind]
    passes = {p.text: p for row in rows for group in row for p in group}
    assert sum(len(group) for row in rows for group in row) == len(passes), "a pass occurs twice"
    for pipeline, stages in given.num_stages.items():
        prefix = f"p{pipeline}:" if pipeline else ""
        for s in range(stages):
            for m in range(given.num_micro_batches[pipeline]):
                kinds = "".join(k for k in "FBIW" if passes.pop(f"{prefix}{s}{k}{m}", None))
                assert kinds in ("FB", "FIW"), f"stage {s}, micro-batch {m} has passes {kinds!r}"
    assert not passes, f"passes of nothing: {sorted(passes)[:5]}"
    passes = {p.text: p for row in rows for group in row for p in group}
    home = {}
    for place, (row, held) in enumerate(zip(rows, given.holds, strict=True)):
        for group in row:
            for p in group:
                assert (p.pipeline, p.stage) in held, f"{p.text} in row {place}, which holds {held}"
                home[p.text] = place

    start: dict[str, float] = {}
    end: dict[str, float] = {}
    at, free = [0] * len(rows), [0.0] * len(rows)

    def arrival(p: Pass, place: int) -> float | None:
        latest = 0.0
        for need in needs(p, given.num_stages[p.pipeline], passes):
            if need.text not in end:
                return None
            latest = max(latest, end[need.text] + (link if home[need.text] != place else 0.0))
        return latest

    moved = True
    while moved:
        moved = False
        for place, row in enumerate(rows):
            while at[place] < len(row):
                group = row[at[place]]
                arrivals = [arrival(p, place) for p in group]
                if pair is None or len(group) == 1:
                    done = 0
                    for p in group:  # a later one may read an earlier one of its own group
                        ready = arrival(p, place)
                        if p.text in end:
                            done += 1
                            continue
                        if ready is None:
                            break
                        start[p.text] = max(free[place], ready)
                        end[p.text] = free[place] = start[p.text] + cost(p)
                        done, moved = done + 1, True
                    if done < len(group):
                        break
                else:
                    known = [a for a in arrivals if a is not None]
                    if len(known) < len(group):
                        break
                    begin = max([free[place], *known])
                    free[place] = begin + pair
                    for p in group:
                        start[p.text], end[p.text] = begin, begin + pair
                    moved = True
                at[place] += 1
    stuck = [(place, row[at[place]]) for place, row in enumerate(rows) if at[place] < len(row)]
    assert not stuck, f"rows wait for each other: {stuck[:4]}"
    live = []
    for row in rows:
        now = peak = 0
        for group in row:
            now += sum(p.kind == "F" for p in group)
            peak = max(peak, now)
            now -= sum(p.kind in "BW" for p in group)
        live.append(peak)
    singles = [[p.text for group in row for p in group] for row in rows]
    return Played(
        start=start,
        end=end,
        makespan=max(end.values()),
        spans=[max(end[t] for t in each) - min(start[t] for t in each) for each in singles],
        busy=[sum(pair if pair is not None and len(g) > 1 else sum(cost(p) for p in g) for g in row) for row in rows],
        live=live,
    )
