"""Layers to stages, fast: dynamic programming over the cuts, for the inner loops of the search.

For a limit on the bottleneck, min-plus products of the stages' time matrices give the least fill; the limit is then
lowered from optimum to optimum along the Pareto front of (fill, bottleneck). Exact where every stage makes one choice
of recompute for all its blocks or fits without; where a stage must mix choices, they are picked greedily by bytes
saved per second, and `layers.solve_ilp` may find better.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from autopiper._data import data
from autopiper.search.layers import LayerPlan, LayerProblem, StageSlot, evaluate, excess_bytes
from autopiper.search.prices import Array

Choices: TypeAlias = tuple[str, ...]
Mask: TypeAlias = npt.NDArray[np.bool_]


@data
class StageTable:
    """Seconds of every possible stage [i, j) on a slot (infinite where it does not fit), and its recompute choices."""

    time_s: Array
    uniform: dict[str, Mask]
    """For each choice, where it is the one for all blocks."""
    mixed: dict[tuple[int, int], Choices]

    def recompute(self, start: int, stop: int) -> Choices:
        """Return the choice of each block of the stage [start, stop)."""
        if (start, stop) in self.mixed:
            return self.mixed[start, stop]
        return next((c,) * (stop - start) for c, where in self.uniform.items() if where[start, stop])


class TableCache:
    """Stage tables by slot; one cache serves a whole search over one `Prices`."""

    def __init__(self) -> None:
        self._tables: dict[tuple[object, ...], StageTable] = {}

    def table(self, slot: StageSlot, choices: Choices) -> StageTable:
        """Return the table of a slot, made once."""
        key = (slot.key, choices)
        found = self._tables.get(key)
        if found is None:
            found = self._tables[key] = stage_table(slot, choices)
        return found


def stage_table(slot: StageSlot, choices: Choices) -> StageTable:
    """Price every stage on a slot, with the fastest recompute that fits."""
    size = len(slot.members[0].forward_s) + 1
    stage = np.triu(np.ones((size, size), dtype=bool), 1)
    time_s = np.full((size, size), np.inf)
    uniform: dict[str, Mask] = {}
    fits_at_all = np.zeros((size, size), dtype=bool)
    for choice in choices:
        excess = np.max(
            [m.memory_bytes(choice, slot.in_flight) - m.capacity_bytes for m in slot.members], axis=0
        ) + slot.reserve_bytes  # fmt: skip
        seconds = np.max([m.time_s[choice] for m in slot.members], axis=0)
        fits = stage & (excess <= 0)
        better = fits & (seconds < time_s)
        for where in uniform.values():
            where[better] = False
        uniform[choice] = better
        time_s = np.where(better, seconds, time_s)
        fits_at_all |= fits
    mixed: dict[tuple[int, int], Choices] = {}
    if len(choices) > 1:
        worth = fits_at_all & ~uniform[choices[0]]
        for i, j in zip(*np.nonzero(worth), strict=True):
            chosen = _mix(slot, int(i), int(j), choices)
            if chosen is not None:
                seconds = max(sum(m.block_s(c)[i + k] for k, c in enumerate(chosen)) for m in slot.members)
                if seconds < time_s[i, j]:
                    time_s[i, j], mixed[int(i), int(j)] = seconds, chosen
    return StageTable(time_s=time_s, uniform=uniform, mixed=mixed)


def _mix(slot: StageSlot, start: int, stop: int, choices: Choices) -> Choices | None:
    """Recompute the blocks that save most per second until the stage fits, then give back what proves needless."""
    lead = slot.members[0]
    base = choices[0]
    options = []
    for b in range(start, stop):
        for choice in choices[1:]:
            saved = float(lead.kept_bytes[base][b] - lead.kept_bytes[choice][b])
            cost = float(lead.extra_s[choice][b] - lead.extra_s[base][b])
            if saved > 0:
                options.append((-(saved / cost) if cost > 0 else -np.inf, -saved, b, choice))
    options.sort()
    chosen = [base] * (stop - start)
    low, high = 0, len(options)

    def apply(count: int) -> list[str]:
        out = [base] * (stop - start)
        for _, _, b, choice in options[:count]:
            if lead.kept_bytes[choice][b] < lead.kept_bytes[out[b - start]][b]:
                out[b - start] = choice
        return out

    if excess_bytes(slot, start, stop, apply(high)) > 0:
        return None
    while low < high:  # more recompute keeps less; the workspace may grow at the first step, which the last check sees
        middle = (low + high) // 2
        if excess_bytes(slot, start, stop, apply(middle)) > 0:
            low = middle + 1
        else:
            high = middle
    chosen = apply(low)
    if excess_bytes(slot, start, stop, chosen) > 0:
        return None
    for b in sorted(range(start, stop), key=lambda b: -float(lead.extra_s[chosen[b - start]][b])):
        kept, chosen[b - start] = chosen[b - start], base
        if excess_bytes(slot, start, stop, chosen) > 0:
            chosen[b - start] = kept
    return tuple(chosen)


def solve(problem: LayerProblem, cache: TableCache | None = None) -> LayerPlan | None:
    """Return the best assignment that the method knows; None where nothing fits."""
    cache = cache or TableCache()
    if len(problem.stages) > problem.num_blocks:
        return None
    tables = [cache.table(slot, problem.choices) for slot in problem.stages]
    cuts = problem.even_cuts() if problem.equal_stages else _best_cuts(problem, tables)
    if cuts is None or any(t.time_s[a, b] == np.inf for t, (a, b) in zip(tables, pairwise(cuts), strict=True)):
        return None
    recompute = [t.recompute(a, b) for t, (a, b) in zip(tables, pairwise(cuts), strict=True)]
    return evaluate(problem, cuts, recompute)


def _best_cuts(problem: LayerProblem, tables: Sequence[StageTable]) -> tuple[int, ...] | None:
    further = problem.micro_batches - 1
    free = _least_fill(problem, tables, np.inf)
    if free is None:
        return None
    least_fill, best_cuts, bottleneck = free
    best = least_fill + further * bottleneck
    limits = np.unique(
        np.concatenate([t.time_s[np.isfinite(t.time_s)] for t in {id(t): t for t in tables}.values()]
                       + [np.asarray(d) for d in (*problem.forward_transfer_s, *problem.backward_transfer_s)])
    )  # fmt: skip
    low, high = 0, int(np.searchsorted(limits, bottleneck))
    tightest = None
    while low < high:
        middle = (low + high) // 2
        found = _least_fill(problem, tables, float(limits[middle]))
        if found is None:
            low = middle + 1
        else:
            tightest, high = found, min(middle, int(np.searchsorted(limits, found[2])))
    if tightest is None:
        return best_cuts
    smallest = tightest[2]
    fill, cuts, bottleneck = tightest
    if fill + further * bottleneck < best:
        best, best_cuts = fill + further * bottleneck, cuts
    limit = free[2]
    while True:
        if further:
            limit = min(limit, (best - least_fill) / further)
        limit = float(np.nextafter(limit, -np.inf))
        found = _least_fill(problem, tables, limit) if limit >= smallest else None
        if found is None:
            return best_cuts
        fill, cuts, limit = found
        if fill + further * limit < best:
            best, best_cuts = fill + further * limit, cuts


def _least_fill(
    problem: LayerProblem, tables: Sequence[StageTable], limit: float
) -> tuple[float, tuple[int, ...], float] | None:
    """Return (fill, cuts, bottleneck) of the least fill whose bottleneck is at most `limit`."""
    blocks = problem.num_blocks
    fill = np.full(blocks + 1, np.inf)
    fill[0] = 0.0
    back: list[Array] = []
    for s, table in enumerate(tables):
        time_s = table.time_s if limit == np.inf else np.where(table.time_s <= limit, table.time_s, np.inf)
        sums = fill[:, None] + time_s
        choice = np.argmin(sums, axis=0)
        fill = sums[choice, np.arange(blocks + 1)]
        if s < len(tables) - 1:
            forward, backward = problem.forward_transfer_s[s], problem.backward_transfer_s[s]
            fill = fill + np.where((forward <= limit) & (backward <= limit), forward + backward, np.inf)
        back.append(choice)
    if not np.isfinite(fill[blocks]):
        return None
    cuts = [blocks]
    for choice in reversed(back):
        cuts.append(int(choice[cuts[-1]]))
    cuts.reverse()
    times = [float(t.time_s[a, b]) for t, a, b in zip(tables, cuts[:-1], cuts[1:], strict=True)]
    inner = cuts[1:-1]
    moves = [
        float(d[s][c]) for d in (problem.forward_transfer_s, problem.backward_transfer_s) for s, c in enumerate(inner)
    ]
    return float(fill[blocks]), tuple(cuts), max((*times, *moves))
