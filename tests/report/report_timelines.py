"""Timelines made by hand, of which every time is known: what the tests of the trace and the picture draw."""

from __future__ import annotations

from dataclasses import replace

from autopiper.plan import Event, Lane, MemoryPoint, RankTime, Timeline

TIME = RankTime(compute_s=1.0, recompute_s=0.0, exposed_s={}, bubble_s=0.0)


def lane(number: int, events: list[Event], *, memory: tuple[MemoryPoint, ...] = ()) -> Lane:
    return Lane(
        ranks=(number,), devices=(number,), events=tuple(sorted(events, key=lambda e: (e.start_s, e.end_s))),
        peak_memory_bytes=1.0, static_memory_bytes=1.0, peak_live_activations=1, time=TIME, memory=memory,
    )  # fmt: skip


def timeline(lanes: list[Lane], makespan_s: float | None = None) -> Timeline:
    end_s = max((e.end_s for each in lanes for e in each.events), default=0.0)
    return Timeline(
        step_time_s=end_s, makespan_s=end_s if makespan_s is None else makespan_s, lanes=tuple(lanes),
        global_batch_size=1, tokens=1, model_flops=1.0, peak_flops=1.0,
    )  # fmt: skip


def compute(
    kind: str, stage: int, micro_batch: int, start_s: float, end_s: float, *, pipeline: int = 0, node: int = -1
) -> Event:
    return Event(
        action=f"{stage}{kind}{micro_batch}", stream="compute", start_s=start_s, end_s=end_s, kind=kind,
        pipeline=pipeline, stage=stage, micro_batch=micro_batch, node=node,
    )  # fmt: skip


def gpipe(
    stages: int, micro_batches: int, *, message_s: float = 0.25, kinds: str = "FB", scale: float = 1.0
) -> Timeline:
    """One rank per stage, each pass one second: all forwards, then all backwards, a message between neighbours."""
    events: list[list[Event]] = [[] for _ in range(stages)]
    node = 0
    free = [0.0] * stages
    for number, kind in enumerate(kinds):
        order = range(stages) if number == 0 else range(stages - 1, -1, -1)
        for micro_batch in range(micro_batches):
            ready = 0.0
            for stage in order:
                start = max(ready, free[stage])
                free[stage] = start + 1.0
                events[stage].append(compute(kind, stage, micro_batch, start * scale, free[stage] * scale, node=node))
                ready = free[stage] + message_s
                there = stage + (1 if number == 0 else -1)
                if 0 <= there < stages and kind != "W":
                    way = "F" if number == 0 else "B"
                    for sort, at, sign in (("SEND", stage, ">"), ("RECV", there, "<")):
                        events[at].append(
                            Event(
                                action=f"{at}{sort}_{way}{micro_batch}{sign}0[0:1]", stream=f"p0:s{stage}>s{there}:{way}",
                                start_s=free[stage] * scale, end_s=ready * scale, kind=f"{sort}_{way}", pipeline=0,
                                stage=at, micro_batch=micro_batch, node=node + 1,
                            )
                        )  # fmt: skip
                node += 2
    return timeline([lane(stage, events[stage]) for stage in range(stages)])


def with_memory(one: Timeline) -> Timeline:
    """The same, each lane with parameters from the start and a byte of activations more at every event."""
    lanes = []
    for each in one.lanes:
        points = [
            MemoryPoint(
                time_s=event.start_s, parameters_bytes=8.0, gradients_bytes=4.0, optimizer_bytes=16.0,
                activations_bytes=float(number), buffers_bytes=0.5,
            )
            for number, event in enumerate(each.events)
        ]  # fmt: skip
        lanes.append(replace(each, memory=tuple(points)))
    return replace(one, lanes=tuple(lanes))
