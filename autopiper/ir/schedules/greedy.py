"""List scheduling: rows for maps of stages to device groups for which no closed form is known.

All passes are played in unit times (F = I = W = 1, B = 2, links free); a rank that is free takes, of the passes whose
inputs are there, a backward first, else a forward within its limit of live passes, else a W. The rows are the orders
in which passes began, so they cannot wait for each other in a circle.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from autopiper.ir.schedules.chain import Chain
from autopiper.plan.passes import PassGroup

TIMES = {"F": 1, "B": 2, "I": 1, "W": 1}


def greedy(chain: Chain, *, kinds: str = "BF", live: Sequence[int], round: int = 1) -> list[list[PassGroup]]:
    """Return one row per rank, of the passes named by `kinds`, those to be preferred first ("F", "BF" or "IFW").

    `live[stage]`, 1 or more: how many micro-batches a stage may hold at once, from F to B or W. The oldest one under way
    is always let in, as the stages that it has not reached hold none: hence there is always one that can go on.
    `round`: of the passes of a kind that could run, those of an earlier round of so many micro-batches come first, and in
    a round the forwards of an earlier stage, the backwards of a later one.
    """
    stages, count = chain.num_stages, chain.num_micro_batches
    back, last = kinds[0], kinds[-1] if "W" in kinds else kinds[0]
    rank_of = {s: r for r, held in enumerate(chain.held) for s in held}
    next_mb = {(kind, s): 0 for kind in kinds for s in range(stages)}
    end: dict[tuple[str, int, int], int] = {}
    free, holding = [0] * chain.num_ranks, [0] * stages
    rows: list[list[PassGroup]] = [[] for _ in chain.held]

    def ready(kind: str, s: int, m: int, now: int) -> bool:
        if kind == "F":
            needs = [("F", s - 1)] if s else []
        elif kind == "W":
            needs = [(back, s)]
        else:
            needs = [("F", s)] + ([(back, s + 1)] if s + 1 < stages else [])
        return all(end.get((k, at, m), now + 1) <= now for k, at in needs)

    def choose(rank: int, now: int) -> tuple[str, int, int] | None:
        for kind in kinds:
            found = []
            for s in chain.held[rank]:
                m = next_mb[kind, s]
                if m < count and (kind != "F" or holding[s] < live[s]) and ready(kind, s, m, now):
                    found.append((m // round, s if kind == "F" else -s, m))
            if found:
                _, s, m = min(found)
                return kind, abs(s), m
        return None

    events = [(0, rank) for rank in range(chain.num_ranks)]
    while events:
        now, rank = heapq.heappop(events)
        if free[rank] > now or (chosen := choose(rank, now)) is None:
            continue
        kind, s, m = chosen
        rows[rank].append((chain.make(kind, s, m),))
        next_mb[kind, s] += 1
        end[chosen] = free[rank] = now + TIMES[kind]
        holding[s] += (kind == "F") - (kind == last)
        neighbour = min(s + 1, stages - 1) if kind == "F" else max(s - 1, 0)
        for each in {rank, rank_of[neighbour]}:
            heapq.heappush(events, (free[rank], each))
    return rows


def ahead(chain: Chain, times: int = 2) -> list[int]:
    """For each stage, how many micro-batches it may hold where ranks hold several stages.

    A micro-batch is away from stage s for what the S - s stages from there on take, while the fullest rank lets one in
    for each of its V stages: at least (S - s)/V are live. Every stage waits for its rank's others, so `times` as many.
    """
    most = max(len(held) for held in chain.held)
    return [-(-times * (chain.num_stages - s) // most) for s in range(chain.num_stages)]
