"""What no plan can beat: lower bounds on the step time, valid for every plan of a space under one cost table.

Compute work: each block of each sample is computed, forward and backward, by some member; a member of tensor-parallel
size t keeps t devices busy for its price. The linear program spreads that work over the device types as if it could be
divided at will; the busiest type then says how long a step lasts at least. Critical path: one micro-batch passes all
blocks there and back before the first block can be updated, and is updated before the next step begins.
Memory enters only where a single block does not fit a device. Ours; no closed form of a schedule is used, so plans of
any schedule stay above.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property

import numpy as np

from autopiper._data import data
from autopiper.errors import CostError
from autopiper.model.spec import Model
from autopiper.search.milp import Milp
from autopiper.search.prices import Array, MemberCosts, Prices

SOLVER_TOLERANCE = 5e-7
"""What HiGHS may be wrong by (it meets constraints to 1e-7, near 1): given away, so that the bound stays one."""


@data
class Bound:
    """The tightest bound and what it says."""

    seconds: float
    binding: str
    parts: Mapping[str, float]
    """Every bound that was computed, by name."""


class BestPrices:
    """For each device type the least that a block can cost there, over degrees, slices and recompute that fit."""

    def __init__(self, prices: Prices, counts: Mapping[str, int], degrees: Iterable[int] | None, largest: int) -> None:
        """`counts` = devices of each type that may be used; `largest` = samples of the largest slice."""
        self.prices, self.counts = prices, {t: n for t, n in counts.items() if n}
        allowed = None if degrees is None else tuple(degrees)
        sizes = "any tensor-parallel size" if allowed is None else f"tensor_parallel_sizes {allowed}"
        self.asked = f"{sizes} and slices of 1 to {largest} samples"
        self.members: dict[str, list[MemberCosts]] = {}
        for name in self.counts:
            found = [
                member
                for tp in prices.tensor_parallel_sizes(name, allowed)
                for samples in range(1, largest + 1)
                if (member := prices.member(name, tp, samples)) is not None
            ]
            if found:
                self.members[name] = found

    def _least(self, name: str, per_device: bool) -> Array:
        best = np.full(len(self.prices.model.blocks), np.inf)
        for m in self.members[name]:
            weight = m.tensor_parallel_size / m.samples if per_device else 1.0
            for choice in m.choices:
                alone = m.block_static_bytes + m.kept_bytes[choice] + m.workspace_bytes[choice]
                fits = alone <= m.capacity_bytes
                best = np.minimum(best, np.where(fits, m.block_s(choice) * weight, np.inf))
        return best

    @cached_property
    def device_seconds(self) -> dict[str, Array]:
        """Device-seconds per sample of each block on each type."""
        return {name: self._least(name, True) for name in self.members}

    @cached_property
    def shortest_s(self) -> Array:
        """Least seconds in which a micro-batch can pass each block, there and back, on any type."""
        out: Array = np.min([self._least(name, False) for name in self.members], axis=0)
        return out

    @cached_property
    def update_device_seconds(self) -> dict[str, Array]:
        """Device-seconds of the update of each block's own (untied) parameters on each type."""
        own = _own_share(self.prices.model)
        return {
            name: np.min([m.update_s * m.tensor_parallel_size for m in found], axis=0) * own
            for name, found in self.members.items()
        }

    @cached_property
    def shortest_update_s(self) -> Array:
        """Least seconds of the update of each block's own parameters."""
        own = _own_share(self.prices.model)
        out: Array = np.min([m.update_s for found in self.members.values() for m in found], axis=0) * own
        return out


def _own_share(model: Model) -> Array:
    """Of each block's parameters, the share that is not tied to another block."""
    own = np.ones(len(model.blocks))
    for b, block in enumerate(model.blocks):
        if block.parameters:
            own[b] = model.untied_parameters(b) / block.parameters
    return own


def lower_bound(best: BestPrices, global_batch_size: int) -> Bound:
    """Return the tightest bound, in seconds of a step, and its words."""
    if not best.members:
        raise CostError(
            f"none of {', '.join(best.counts) or 'the devices'} has prices for the whole model at {best.asked}; "
            "such a size must fit into a node, divide the model, and be priced"
        )
    work, shares = _work_s(best, global_batch_size)
    path = float(best.shortest_s.sum()) + float(best.shortest_update_s[0])
    slow = [name for name, share in shares.items() if share > 0]
    parts = {"compute work": work, "critical path": path}
    if work >= path:
        words = f"compute work: {' and '.join(slow)} busy from the first to the last moment, at their best prices"
    else:
        words = "critical path: one micro-batch through all blocks and back on the fastest devices, then the update"
    return Bound(seconds=max(work, path), binding=words, parts=parts)


def _work_s(best: BestPrices, batch: int) -> tuple[float, dict[str, float]]:
    """Solve the linear program over (kind of block, device type); return seconds and the work of each type."""
    groups: dict[tuple[float, ...], list[int]] = {}
    names = list(best.members)
    for b in range(len(best.prices.model.blocks)):
        key = tuple(float(row[name][b]) for row in (best.device_seconds, best.update_device_seconds) for name in names)
        groups.setdefault(key, []).append(b)
    scale = max((k for key in groups for k in key if np.isfinite(k)), default=0.0) * batch or 1.0
    milp = Milp("work")
    step = milp.variable("step")
    busy: dict[str, list[object]] = {name: [] for name in names}
    for g, (key, blocks) in enumerate(groups.items()):
        samples, copies = [], []
        for t, name in enumerate(names):
            if not np.isfinite(key[t]):
                continue
            x, u = milp.variable(f"x_{g}_{t}"), milp.variable(f"u_{g}_{t}")  # blocks x batch, blocks
            samples.append(x)
            copies.append(u)
            busy[name] += [x * (key[t] * batch / scale), u * (key[len(names) + t] / scale)]
        if not samples:
            return float("inf"), {}
        milp.require(Milp.sum(samples) >= len(blocks))
        milp.require(Milp.sum(copies) >= len(blocks))
    for name in names:
        milp.require(Milp.sum(busy[name]) <= best.counts[name] * step)
    milp.objective(step)
    found = milp.solve()
    work = {
        name: sum(v for key, v in found.values.items() if key.startswith("x_") and key.endswith(f"_{t}"))
        for t, name in enumerate(names)
    }
    return found.objective * scale * (1 - SOLVER_TOLERANCE), work
