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
from autopiper.search.layers import LayerPlan, LayerProblem, StageSlot, evaluate
from autopiper.search.prices import Array

Choices: TypeAlias = tuple[str, ...]
Mask: TypeAlias = npt.NDArray[np.bool_]
Steps: TypeAlias = npt.NDArray[np.intp]


@data
class StageTable:
    """Seconds of every possible stage [i, j) on a slot (infinite where it does not fit), and its recompute choices."""

    time_s: Array
    uniform: dict[str, Mask]
    """For each choice, where it is the one for all blocks."""
    mixer: Mixer | None
    """Chooses block by block where no one choice is best."""

    def recompute(self, start: int, stop: int) -> Choices:
        """Return the choice of each block of the stage [start, stop)."""
        for choice, where in self.uniform.items():
            if where[start, stop]:
                return (choice,) * (stop - start)
        if self.mixer is None:
            raise IndexError(f"stage [{start}, {stop}) does not fit")
        return self.mixer.mix(start, stop)


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
        seconds = np.max([m.time_s[choice] + m.beside_s(slot.neighbours) for m in slot.members], axis=0)
        fits = stage & (excess <= 0)
        better = fits & (seconds < time_s)
        for where in uniform.values():
            where[better] = False
        uniform[choice] = better
        time_s = np.where(better, seconds, time_s)
        fits_at_all |= fits
    mixer = None
    if len(choices) > 1:
        mixer = Mixer(slot, choices)
        for i, j in zip(*np.nonzero(fits_at_all & ~uniform[choices[0]]), strict=True):
            seconds = mixer.seconds(int(i), int(j))
            if seconds < time_s[i, j]:
                time_s[i, j] = seconds
                for where in uniform.values():
                    where[i, j] = False
    return StageTable(time_s=time_s, uniform=uniform, mixer=mixer)


class Mixer:
    """Recomputes the blocks that save most per second until a stage fits, then gives back what proves needless.

    Each step of the common order makes one block keep less. Workspace only grows with recompute, so the memory after
    k steps is a sum and a maximum over the first k of the steps that lie in the stage.
    """

    def __init__(self, slot: StageSlot, choices: Choices) -> None:
        self.slot, self.choices = slot, choices
        lead, base = slot.members[0], choices[0]
        kept = {c: lead.kept_bytes[c] for c in choices}
        options = []
        for b in range(len(lead.forward_s)):
            for choice in choices[1:]:
                saved = float(kept[base][b] - kept[choice][b])
                cost = float(lead.extra_s[choice][b] - lead.extra_s[base][b])
                if saved > 0:
                    options.append((-(saved / cost) if cost > 0 else -np.inf, -saved, b, choice))
        now = dict.fromkeys(range(len(lead.forward_s)), base)
        self.steps: list[tuple[int, str]] = []
        saves: list[list[float]] = []
        spaces: list[list[float]] = []
        for _, _, b, choice in sorted(options):
            if kept[choice][b] < kept[now[b]][b]:
                saves.append([float(m.kept_bytes[now[b]][b] - m.kept_bytes[choice][b]) for m in slot.members])
                spaces.append([float(m.workspace_bytes[choice][b]) for m in slot.members])
                self.steps.append((b, choice))
                now[b] = choice
        self.blocks = np.array([b for b, _ in self.steps], dtype=int)
        shape = len(self.steps), len(slot.members)  # no step at all where nothing is kept
        self.saves, self.spaces = (np.array(v, dtype=float).reshape(shape) for v in (saves, spaces))
        self.base = np.stack([m.memory_bytes(base, slot.in_flight) - m.capacity_bytes for m in slot.members], axis=-1)
        self.base += slot.reserve_bytes
        self.base_space = np.stack([m.stage_workspace_bytes[base] for m in slot.members], axis=-1)
        self.base_s = np.stack([m.time_s[base] + m.beside_s(slot.neighbours) for m in slot.members], axis=-1)
        self.costs = np.array(
            [[float(m.extra_s[c][b] - m.extra_s[base][b]) for m in slot.members] for b, c in self.steps], dtype=float
        ).reshape(shape)  # fmt: skip
        self.only = len({b for b, _ in self.steps}) == len(self.steps)

    def _steps(self, start: int, stop: int) -> tuple[Steps, int, float] | None:
        """Return the steps inside a stage, how many of them make it fit, and the bytes then free."""
        inside = np.nonzero((self.blocks >= start) & (self.blocks < stop))[0]
        if not len(inside):
            return None
        before = self.base_space[start, stop]
        space = np.maximum(np.maximum.accumulate(self.spaces[inside], axis=0), before) - before
        saved = self.slot.in_flight * np.cumsum(self.saves[inside], axis=0)
        over = (self.base[start, stop] - saved + space).max(axis=1)
        count = int(np.argmax(over <= 0))
        return (inside, count + 1, -float(over[count])) if over[count] <= 0 else None

    def seconds(self, start: int, stop: int) -> float:
        """Return the time of the stage with the fewest steps that make it fit; infinite where none do."""
        found = self._steps(start, stop)
        if found is None:
            return float("inf")
        taken = found[0][: found[1]]
        if self.only:
            extra = self.costs[taken].sum(axis=0)
        else:  # a later step of a block replaces an earlier one
            last = {int(self.blocks[step]): step for step in taken}
            extra = self.costs[list(last.values())].sum(axis=0)
        return float((self.base_s[start, stop] + extra).max())

    def mix(self, start: int, stop: int) -> Choices:
        """Return the choices of a stage for which `seconds` is finite."""
        found = self._steps(start, stop)
        chosen = [self.choices[0]] * (stop - start)
        if found is None:
            return tuple(chosen)
        inside, count, room = found
        for step in inside[:count]:
            b, choice = self.steps[step]
            chosen[b - start] = choice
        lead = self.slot.members[0]
        for b in sorted(range(start, stop), key=lambda b: -float(lead.extra_s[chosen[b - start]][b])):
            back = self.slot.in_flight * max(
                float(m.kept_bytes[self.choices[0]][b] - m.kept_bytes[chosen[b - start]][b]) for m in self.slot.members
            )
            if chosen[b - start] != self.choices[0] and back <= room:
                room -= back
                chosen[b - start] = self.choices[0]
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
