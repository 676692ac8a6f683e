"""The oracle of the kernel: the same walk in the plainest way, every rate worked out anew at every event.

Quadratic, for tests and for the benchmark; `kernel` says what happens and why.
"""

from __future__ import annotations

from autopiper.costmodel.kernel import Work


def walk_plainly(work: Work) -> tuple[list[float], list[float]]:
    """Return the start and the end of every node, in seconds; nan in both for a node that never starts."""
    nodes = range(len(work.seconds))
    seconds: list[float] = work.seconds.tolist()
    earliest: list[float] = work.earliest.tolist()
    kind: list[int] = work.kind.tolist()
    after = [work.after[work.after_start[n] : work.after_start[n + 1]].tolist() for n in nodes]
    lanes = [set(work.member[work.member_start[n] : work.member_start[n + 1]].tolist()) for n in nodes]
    uses = [
        [(int(work.use[u]), float(work.demand[u])) for u in range(work.use_start[n], work.use_start[n + 1])]
        for n in nodes
    ]
    capacity: list[float] = work.capacity.tolist()
    slowdown: list[list[float]] = work.slowdown.tolist()
    start = [float("nan")] * len(nodes)
    end = [float("nan")] * len(nodes)
    missing = work.missing.tolist()
    waiting = {n for n in nodes if missing[n] == 0}  # only for their earliest time
    left: dict[int, float] = {}  # of the nodes that run

    def factor(node: int) -> float:
        load: dict[int, float] = {}
        for other in left:
            for resource, demand in uses[other]:
                load[resource] = load.get(resource, 0.0) + demand
        share: float = max([1.0, *(load[resource] / capacity[resource] for resource, _ in uses[node])])
        met = [other for other in left if other != node and lanes[node] & lanes[other]]
        slow: float = max([1.0, *(slowdown[kind[node]][kind[other]] for other in met)])
        return share * slow

    now = min((earliest[n] for n in waiting), default=0.0)
    while waiting or left:
        over = []
        for node in sorted(waiting):
            if earliest[node] <= now:
                waiting.remove(node)
                start[node] = now
                if seconds[node] > 0:
                    left[node] = seconds[node]
                else:
                    over.append(node)
        if not over:
            factors = {node: factor(node) for node in left}
            ends = {node: now + left[node] * factors[node] for node in left}
            then = min([*ends.values(), *(earliest[node] for node in waiting)])
            over = [node for node in left if ends[node] <= then]
            for node in left:
                left[node] = max(0.0, left[node] - (then - now) / factors[node])
            now = then
        for node in over:
            left.pop(node, None)
            end[node] = now
            for other in after[node]:
                missing[other] -= 1
                if missing[other] == 0:
                    waiting.add(other)
    return start, end
