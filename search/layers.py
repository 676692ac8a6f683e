"""Layers to stages: contiguous cuts for a given list of stage devices, with memory and recompute.

    minimise   sum of stage times + transfers of one micro-batch + (m - 1) · bottleneck

`solve_ilp` proves the optimum with recompute chosen per block; `search.cuts.solve` is the fast method for inner loops,
of which this is the oracle. Formulation: u[s, b] = 1 when block b lies in a stage up to s. Each u[s, ·] is a prefix,
so a stage, being the difference of two neighbours, is contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from autopiper._data import data
from autopiper.plan.strategy import even_sizes
from autopiper.search.milp import Milp, Solution
from autopiper.search.prices import Array, MemberCosts


@data
class StageSlot:
    """The devices of one stage: one entry for each class of unlike members (usually one)."""

    members: tuple[MemberCosts, ...]
    in_flight: int
    """Most micro-batches between their F and B."""
    reserve_bytes: float = 0.0
    """Memory to leave free."""
    neighbours: int = 0
    """Stages that it exchanges messages with: 0 to 2."""

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for slots with equal matrices."""
        beside_s = tuple(m.beside_s(self.neighbours) for m in self.members)
        return (tuple(m.name for m in self.members), self.in_flight, self.reserve_bytes, beside_s)


@data
class LayerProblem:
    """Which blocks go to which stage."""

    stages: tuple[StageSlot, ...]
    forward_transfer_s: tuple[Array, ...]
    """For each boundary between stages, the seconds of a micro-batch for a cut before each block."""
    backward_transfer_s: tuple[Array, ...]
    micro_batches: int
    choices: tuple[str, ...] = ("none",)
    """Recompute choices, cheapest in time first."""
    equal_stages: bool = False
    """Blocks divided as evenly as possible, the first stages taking what is left over."""

    @property
    def num_blocks(self) -> int:
        """Blocks of the model."""
        return len(self.stages[0].members[0].forward_s)

    def even_cuts(self) -> tuple[int, ...]:
        """Borders of the even division, 0 and the number of blocks included."""
        return (0, *accumulate(even_sizes(self.num_blocks, len(self.stages))))


@data
class LayerPlan:
    """An assignment and its estimate."""

    cuts: tuple[int, ...]
    """Stage s holds the blocks [cuts[s], cuts[s + 1])."""
    recompute: tuple[tuple[str, ...], ...]
    """Per stage and block."""
    stage_s: tuple[float, ...]
    """Forward and backward of one micro-batch, what the host spends beside them included; slowest member."""
    fill_s: float
    """One micro-batch alone, there and back."""
    bottleneck_s: float
    """What a further micro-batch adds: the slowest stage or transfer."""
    bound_s: float
    """No assignment has an estimate below this."""

    def step_s(self, micro_batches: int) -> float:
        """fill + (m - 1) · bottleneck; 0 when idle."""
        return self.fill_s + (micro_batches - 1) * self.bottleneck_s if micro_batches else 0.0


def evaluate(
    problem: LayerProblem, cuts: Sequence[int], recompute: Sequence[Sequence[str]], bound_s: float = 0.0
) -> LayerPlan:
    """Return the plan of given cuts and choices; does not check memory (`excess_bytes` does)."""
    stage_s = tuple(
        max(
            sum(float(m.block_s(choice)[start + i]) for i, choice in enumerate(chosen)) + m.beside_s(slot.neighbours)
            for m in slot.members
        )
        for slot, start, chosen in zip(problem.stages, cuts, recompute, strict=False)
    )  # fmt: skip
    inner = cuts[1:-1]
    forward = [float(t[c]) for t, c in zip(problem.forward_transfer_s, inner, strict=True)]
    backward = [float(t[c]) for t, c in zip(problem.backward_transfer_s, inner, strict=True)]
    return LayerPlan(
        cuts=tuple(cuts),
        recompute=tuple(tuple(r) for r in recompute),
        stage_s=stage_s,
        fill_s=sum(stage_s) + sum(forward) + sum(backward),
        bottleneck_s=max((*stage_s, *forward, *backward)),
        bound_s=bound_s,
    )


def excess_bytes(slot: StageSlot, start: int, stop: int, chosen: Sequence[str]) -> float:
    """Return by how much the fullest member of a stage exceeds its memory (negative: room left)."""
    return max(
        float(m.static_bytes[start, stop])
        + slot.in_flight * sum(float(m.kept_bytes[c][start + i]) for i, c in enumerate(chosen))
        + max(float(m.workspace_bytes[c][start + i]) for i, c in enumerate(chosen))
        + slot.reserve_bytes
        - m.capacity_bytes
        for m in slot.members
    )


def solve_ilp(
    problem: LayerProblem, *, gap: float = 0.0, time_limit_s: float | None = None, node_limit: int | None = None
) -> LayerPlan | None:
    """Return the best assignment, proven to `gap`; None where no assignment fits the memory (or a limit struck first)."""
    blocks, count = problem.num_blocks, len(problem.stages)
    if count > blocks:
        return None
    milp = Milp("layers")
    u = _prefixes(milp, problem)
    x = [[u[s][b] - (u[s - 1][b] if s else 0) for b in range(blocks)] for s in range(count)]
    y = [
        [{c: milp.binary(f"y_{s}_{b}_{c}") for c in problem.choices} for b in range(blocks)]
        if len(problem.choices) > 1
        else [{problem.choices[0]: x[s][b]} for b in range(blocks)]
        for s in range(count)
    ]
    scale = _time_scale(problem)
    bottleneck = milp.variable("bottleneck")
    fill: list[Any] = []
    for s, slot in enumerate(problem.stages):
        milp.require(Milp.sum(x[s]) >= 1)
        if len(problem.choices) > 1:
            for b in range(blocks):
                milp.require(Milp.sum(y[s][b].values()) == x[s][b])
        stage = milp.variable(f"time_{s}")
        fill.append(stage)
        milp.require(stage <= bottleneck)
        for member in slot.members:
            times = {c: member.block_s(c) / scale for c in problem.choices}
            blocks_s = Milp.sum(times[c][b] * y[s][b][c] for b in range(blocks) for c in problem.choices)
            milp.require(stage >= blocks_s + member.beside_s(slot.neighbours) / scale)
        _memory(milp, s, slot, x[s], y[s], problem.choices)
    for s in range(count - 1):
        for direction in (problem.forward_transfer_s[s], problem.backward_transfer_s[s]):
            seconds = Milp.sum(direction[c] / scale * (u[s][c - 1] - u[s][c]) for c in range(1, blocks))
            fill.append(seconds)
            milp.require(seconds <= bottleneck)
    milp.objective(Milp.sum(fill) + (problem.micro_batches - 1) * bottleneck)
    found = milp.solve(gap=gap, time_limit_s=time_limit_s, node_limit=node_limit)
    return _read(problem, found, scale) if found.found else None


def _prefixes(milp: Milp, problem: LayerProblem) -> list[list[Any]]:
    blocks, count = problem.num_blocks, len(problem.stages)
    if problem.equal_stages:
        cuts = problem.even_cuts()
        return [[int(b < cuts[s + 1]) for b in range(blocks)] for s in range(count)]
    u: list[list[Any]] = [[milp.binary(f"u_{s}_{b}") for b in range(blocks)] for s in range(count - 1)]
    u.append([1] * blocks)
    for s in range(count - 1):
        for b in range(blocks - 1):
            milp.require(u[s][b] >= u[s][b + 1])
        if s:
            for b in range(blocks):
                milp.require(u[s][b] >= u[s - 1][b])
    return u


def _time_scale(problem: LayerProblem) -> float:
    """Seconds of the whole model on the slowest stage: the solver wants numbers near 1."""
    return (
        max((float(m.time_s[problem.choices[0]][0, -1]) for s in problem.stages for m in s.members), default=1.0) or 1.0
    )


def _memory(
    milp: Milp, s: int, slot: StageSlot, x: list[Any], y: list[dict[str, Any]], choices: tuple[str, ...]
) -> None:
    for k, member in enumerate(slot.members):
        if not np.isfinite(member.capacity_bytes):
            continue
        unit = member.capacity_bytes
        workspace = milp.variable(f"workspace_{s}_{k}")
        used = [workspace]
        for b, row in enumerate(y):
            used.append(member.block_static_bytes[b] / unit * x[b])
            for c in choices:
                used.append(slot.in_flight * member.kept_bytes[c][b] / unit * row[c])
                milp.require(workspace >= member.workspace_bytes[c][b] / unit * row[c])
        for t, (blocks, copy_bytes) in enumerate(member.tied):
            uses = sorted(set(blocks))
            for first, second in pairwise(uses):
                both = milp.variable(f"tied_{s}_{k}_{t}_{first}", 0, 1)
                milp.require(both <= x[first])
                milp.require(both <= x[second])
                used.append(-copy_bytes / unit * both)
        milp.require(Milp.sum(used) <= 1 - slot.reserve_bytes / unit)


def _read(problem: LayerProblem, found: Solution, scale: float) -> LayerPlan:
    blocks, count = problem.num_blocks, len(problem.stages)
    if problem.equal_stages:
        cuts = problem.even_cuts()
    else:
        ends = [sum(round(found.values[f"u_{s}_{b}"]) for b in range(blocks)) for s in range(count - 1)]
        cuts = (0, *ends, blocks)
    only = problem.choices[0]
    recompute = [
        [
            max(problem.choices, key=lambda c: found.values.get(f"y_{s}_{b}_{c}", float(c == only)))
            for b in range(cuts[s], cuts[s + 1])
        ]
        for s in range(count)
    ]
    return evaluate(problem, cuts, recompute, found.bound * scale)
