"""Patterns: what one pipeline can be made of, and how many of each fit the cluster.

A pattern lists its stages by device type and tensor-parallel size, stages of one type side by side (the types in any
order). Identical devices and nodes are interchangeable, so a pattern is counted, never placed here; equal replicas are
one pipeline with data parallelism inside its groups. Packing is an integer program over replica counts: under a limit
T on the step, a replica takes a known number of samples, and the most samples that the cluster can take are asked for;
T is lowered from solution to solution until the batch no longer fits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations, product

from autopiper._data import data
from autopiper.cluster.spec import Cluster
from autopiper.costmodel.balance import PipelinePace
from autopiper.search.milp import Milp
from autopiper.search.prices import MemberCosts, Prices
from autopiper.search.shapes import Pattern, bottleneck_bound

MOST_PATTERNS = 4000
"""Beyond this many, the counts of stages of a type are thinned out (1, 2, 3, 4, 6, 8, 12, 16, 24, …)."""


LEAST_OF_A_KIND = 12
"""Patterns of each set of device types that are kept in any case."""


def groups(cluster: Cluster, devices: Sequence[int], name: str, tensor_parallel_size: int) -> int:
    """Return how many tensor-parallel groups of a type fit, each inside one node."""
    held = Counter(cluster.device(d).node for d in devices if cluster.device(d).type.name == name)
    return sum(count // tensor_parallel_size for count in held.values())


def enumerate_patterns(
    available: Mapping[str, int], degrees: Mapping[str, int], samples: int, *, max_stages: int
) -> Iterator[Pattern]:
    """Yield every pattern of these types, each at its one degree; `available` = groups of each type that fit."""
    names = [n for n in degrees if available.get(n, 0) > 0]
    counts = {n: list(range(1, min(available[n], max_stages) + 1)) for n in names}
    if _size(counts) > MOST_PATTERNS:
        thin = sorted({f * 2**k for k in range(12) for f in (2, 3)} | {1})
        counts = {n: [c for c in values if c in thin or c == values[-1]] for n, values in counts.items()}
    while _size(counts) > MOST_PATTERNS and max(len(v) for v in counts.values()) > 2:
        widest = max(counts, key=lambda n: len(counts[n]))
        counts[widest] = counts[widest][::2]
    for k in range(1, len(names) + 1):
        for order in permutations(names, k):
            for numbers in product(*(counts[n] for n in order)):
                if sum(numbers) <= max_stages:
                    stages = tuple((n, degrees[n]) for n, c in zip(order, numbers, strict=True) for _ in range(c))
                    yield Pattern(stages=stages, samples=samples)


def _size(counts: Mapping[str, Sequence[int]]) -> int:
    total, ways = 0, {0: 1}
    for values in counts.values():  # subsets of the types, times their orders
        ways = {k: ways.get(k, 0) + ways.get(k - 1, 0) * len(values) for k in range(len(ways) + 1)}
    factorial = 1
    for k, number in ways.items():
        factorial *= max(1, k)
        total += number * factorial if k else 0
    return total


def promising(
    patterns: Sequence[Pattern], prices: Prices, rates: Mapping[str, float], available: Mapping[str, int], batch: int,
    keep: int,
) -> list[Pattern]:  # fmt: skip
    """Return the `keep` patterns that waste least of their devices, by a bound on their rate.

    `rates` = samples per second of one device of each type at its best; `available` = devices of each type. A pattern's
    waste is its least time for the samples that fall to its devices, fill included, against their time at their best.
    Memory is asked for in sum only. The first few patterns of each set of types are kept in any case.
    """
    whole = sum(rates[name] * count for name, count in available.items() if name in rates)
    scored = []
    for number, pattern in enumerate(patterns):
        members = pattern.members(prices)
        if len(members) != len(pattern.stages):
            continue
        rate = sum(rates[name] * count for name, count in pattern.use.items())
        further = max(0.0, batch * rate / whole / pattern.samples - 1)
        if not _memory_may_fit(members, int(further) + 1):
            continue
        least_s = (len(members) + further) * bottleneck_bound(members)
        scored.append((least_s * rate / ((further + 1) * pattern.samples), number, pattern))
    scored.sort(key=lambda row: row[:2])
    kept = [p for _, _, p in scored[:keep]]
    kinds = Counter(frozenset(p.use) for p in kept)
    for _, _, pattern in scored[keep:]:
        if kinds[frozenset(pattern.use)] < LEAST_OF_A_KIND:
            kinds[frozenset(pattern.use)] += 1
            kept.append(pattern)
    return kept


def _memory_may_fit(members: Sequence[MemberCosts], micro_batches: int) -> bool:
    """Whether the stages can hold the model, if it could be divided at will, all its blocks being alike.

    A stage has as many micro-batches in flight as 1F1B gives it, each under the recompute that keeps least.
    """
    room = 0.0
    for s, m in enumerate(members):
        live = min(micro_batches, len(members) - s)
        kept = min(float(k[0, -1]) for k in m.stage_kept_bytes.values())
        held = float(m.static_bytes[0, -1]) + live * kept
        room += m.capacity_bytes / held if held else float("inf")
    return room >= 1.0


@data
class PacedPattern:
    """A pattern with its pace: what one replica takes."""

    pattern: Pattern
    pace: PipelinePace


@data
class Packing:
    """How many replicas of which pattern, and the step that the paces promise."""

    replicas: tuple[tuple[PacedPattern, int], ...]
    step_s: float


@data
class Limits:
    """How many different patterns a packing may have, and how many replicas of each."""

    min_pipelines: int = 1
    max_pipelines: int | None = None
    min_replicas: int = 1
    max_replicas: int | None = None


def pack(
    candidates: Sequence[PacedPattern], cluster: Cluster, devices: Sequence[int], batch: int, *,
    limits: Limits | None = None, forbidden: Sequence[Packing] = (), node_limit: int = 2000,
) -> Packing | None:  # fmt: skip
    """Return the packing with the least step, to whole micro-batches; None where nothing takes the batch.

    `forbidden` packings (their sets of patterns) are not found again.
    """
    best: Packing | None = None
    limit = max((c.pace.time_s(-(-batch // c.pace.quantum)) for c in candidates), default=0.0)
    while candidates:
        found = _most_samples(candidates, cluster, devices, batch, limit, limits or Limits(), forbidden, node_limit)
        if found is None:
            break
        step_s = _step_s(found, batch)
        if best is not None and step_s >= best.step_s:
            break
        best = Packing(replicas=tuple(found), step_s=step_s)
        limit = step_s * (1 - 1e-6)
    return best


def _step_s(found: Sequence[tuple[PacedPattern, int]], batch: int) -> float:
    """Least limit under which these replicas take the batch."""
    low, high = 0.0, max(c.pace.time_s(-(-batch // c.pace.quantum)) for c, _ in found)

    def takes(limit: float) -> bool:
        return sum(n * c.pace.quantum * c.pace.capacity(limit, batch) for c, n in found) >= batch

    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if takes(middle) else (middle, high)
    return high


def _most_samples(
    candidates: Sequence[PacedPattern], cluster: Cluster, devices: Sequence[int], batch: int, limit: float,
    limits: Limits, forbidden: Sequence[Packing], node_limit: int,
) -> list[tuple[PacedPattern, int]] | None:  # fmt: skip
    """Return replicas that take the batch within the limit, or None where the cluster cannot."""
    milp = Milp("packing", maximise=True)
    count = cluster_counts(cluster, devices)
    rows = []
    for i, c in enumerate(candidates):
        room = c.pace.quantum * c.pace.capacity(limit, batch)
        most = min(count[name] // used for name, used in c.pattern.use.items())
        most = most if limits.max_replicas is None else min(most, limits.max_replicas)
        if room and most >= limits.min_replicas:
            rows.append((i, c, room, most, milp.variable(f"n_{i}", 0, most, integer=True)))
    if not rows:
        return None
    for name, have in count.items():
        milp.require(Milp.sum(c.pattern.use[name] * n for _, c, _, _, n in rows if name in c.pattern.use) <= have)
        for tp in sorted({tp for _, c, _, _, _ in rows for t, tp in c.pattern.stages if t == name and tp > 1}):
            fit = groups(cluster, devices, name, tp)
            if fit * tp < have:  # nodes do not divide by the degree
                uses = [sum(t == name and size >= tp for t, size in c.pattern.stages) * n for _, c, _, _, n in rows]
                milp.require(Milp.sum(uses) <= fit)
    fewer = limits.max_pipelines is not None and limits.max_pipelines < len(rows)
    if fewer or forbidden or limits.min_pipelines > 1 or limits.min_replicas > 1:
        used = {i: milp.binary(f"z_{i}") for i, *_ in rows}
        for i, _, _, most, n in rows:
            milp.require(n <= most * used[i])
            milp.require(n >= limits.min_replicas * used[i])
        milp.require(Milp.sum(used.values()) >= limits.min_pipelines)
        if limits.max_pipelines is not None:
            milp.require(Milp.sum(used.values()) <= limits.max_pipelines)
        for old in forbidden:
            names = {p.pattern for p, _ in old.replicas}
            inside = [used[i] for i, c, *_ in rows if c.pattern in names]
            outside = [used[i] for i, c, *_ in rows if c.pattern not in names]
            if len(inside) == len(names):
                milp.require(Milp.sum(inside) - Milp.sum(outside) <= len(names) - 1)
    # Fewer replicas for the same samples: a small price on each keeps idle ones out.
    milp.objective(Milp.sum((min(room, batch) - 1e-3) * n for _, _, room, _, n in rows))
    found = milp.solve(gap=1e-3, node_limit=node_limit)
    if not found.found:
        return None
    chosen = [(c, round(found.values[f"n_{i}"])) for i, c, *_ in rows]
    chosen = [(c, n) for c, n in chosen if n]
    takes = sum(n * c.pace.quantum * c.pace.capacity(limit, batch) for c, n in chosen)
    return chosen if takes >= batch else None


def cluster_counts(cluster: Cluster, devices: Sequence[int]) -> dict[str, int]:
    """Return how many of these devices are of each type."""
    return dict(Counter(cluster.device(d).type.name for d in devices))
