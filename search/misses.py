"""When nothing fits: the nearest miss, by how much on which device, and what would help."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np

from autopiper._data import data
from autopiper.errors import InfeasibleError
from autopiper.model.spec import RECOMPUTE_CHOICES
from autopiper.plan.space import Space
from autopiper.plan.strategy import even_sizes
from autopiper.search.bounds import BestPrices
from autopiper.search.drafts import Workshop
from autopiper.search.patterns import enumerate_patterns, groups
from autopiper.search.prices import Prices
from autopiper.search.proposals import Proposer
from autopiper.search.shapes import Pattern

GIB = 2**30


@data
class Miss:
    """One pattern at the cut that misses least, with the recompute that keeps least."""

    pattern: Pattern
    cuts: tuple[int, ...]
    stage: int
    over_bytes: float
    """What the fullest stage lacks; negative: room left."""


def nearest_miss(prices: Prices, devices: Sequence[int], space: Space) -> Miss | None:
    """Return the pattern that comes nearest to fitting with one micro-batch of the smallest size (None: no pattern)."""
    shop = Workshop(prices, devices, prices.training.global_batch_size, space)
    samples = min(space.micro_batch_sizes)
    proposer = Proposer(shop, BestPrices(prices, shop.counts, space.tensor_parallel_sizes, samples))
    best: Miss | None = None
    degrees = {n: prices.tensor_parallel_sizes(n, space.tensor_parallel_sizes) for n in shop.counts}
    names = [n for n, sizes in degrees.items() if sizes]
    most = max((len(degrees[n]) for n in names), default=0)
    for rank in range(most):  # the first, second, … degree of each type
        chosen = {n: degrees[n][min(rank, len(degrees[n]) - 1)] for n in names}
        available = {n: groups(prices.cluster, devices, n, tp) for n, tp in chosen.items()}
        for pattern in enumerate_patterns(available, chosen, samples, max_stages=proposer.max_stages):
            found = _least_excess(pattern, prices, space.equal_stages)
            if found is not None and (best is None or found.over_bytes < best.over_bytes):
                best = found
    return best


def _least_excess(pattern: Pattern, prices: Prices, equal_stages: bool) -> Miss | None:
    """Minimise the largest excess over the cuts, by dynamic programming."""
    members = pattern.members(prices)
    count = len(prices.model.blocks)
    if len(members) != len(pattern.stages) or len(members) > count:
        return None
    stage = np.triu(np.ones((count + 1, count + 1), dtype=bool), 1)
    excess = []
    for m in members:
        used = np.min([m.memory_bytes(c, 1) for c in m.choices], axis=0)
        over = used - m.capacity_bytes
        excess.append(np.where(stage, over, np.inf))
    if equal_stages:
        cuts = [0, *accumulate(even_sizes(count, len(members)))]
    else:
        worst = np.where(np.arange(count + 1) == 0, -np.inf, np.inf)
        back = []
        for row in excess:
            sums = np.maximum(worst[:, None], row)
            back.append(np.argmin(sums, axis=0))
            worst = sums.min(axis=0)
        cuts = [count]
        for choice in reversed(back):
            cuts.append(int(choice[cuts[-1]]))
        cuts.reverse()
    overs = [float(row[a, b]) for row, a, b in zip(excess, cuts[:-1], cuts[1:], strict=True)]
    s = int(np.argmax(overs))
    return Miss(pattern=pattern, cuts=tuple(cuts), stage=s, over_bytes=overs[s])


def infeasible(prices: Prices, devices: Sequence[int], space: Space) -> InfeasibleError:
    """Return the error that says what the nearest miss lacks, and which freedom would make it fit."""
    miss = nearest_miss(prices, devices, space)
    model = prices.model.name
    if miss is None:
        return InfeasibleError(
            f"no plan for '{model}': no pipeline of the devices in the space has at most {space.max_stages} stages and prices"
        )
    name, tp = miss.pattern.stages[miss.stage]
    start, stop = miss.cuts[miss.stage], miss.cuts[miss.stage + 1]
    need = miss.over_bytes + prices.cluster.device_type(name).usable_bytes
    have = prices.cluster.device_type(name).usable_bytes
    fits = miss.over_bytes <= 0
    nearest = (
        f"the nearest miss is {miss.pattern.shape(1).words} with micro-batches of {miss.pattern.samples}: stage "
        f"{miss.stage} (blocks {start}..{stop - 1}) on {name}" + (f" (tp {tp})" if tp > 1 else "")
    )
    if fits:
        nearest += (
            f" holds its parameters and one micro-batch in {need / GIB:.2f} of {have / GIB:.2f} GiB, but not several in "
            "flight with their messages"
        )
    else:
        nearest += f" needs {need / GIB:.2f} GiB and has {have / GIB:.2f} GiB: {miss.over_bytes / GIB:.2f} GiB too much"
    return InfeasibleError(f"no plan for '{model}' fits the memory; {nearest}. {_help(prices, devices, space, miss)}")


def _help(prices: Prices, devices: Sequence[int], space: Space, miss: Miss) -> str:
    """Name the freedoms of the space that are closed and would help, each tried."""
    tries = {
        "full recompute (space.recompute)": replace(space, recompute=(*space.recompute, "full")),
        "more stages (space.max_stages)": replace(space, max_stages=None),
        "smaller micro-batches (space.micro_batch_sizes)": replace(space, micro_batch_sizes=(1,)),
        "other tensor-parallel sizes (space.tensor_parallel_sizes)": replace(space, tensor_parallel_sizes=None),
        "unequal stages (space.equal_stages)": replace(space, equal_stages=False),
        "all devices (space.devices)": replace(space, devices=None),
    }
    helps, most = [], 0.0
    for words, freer in tries.items():
        freer = replace(freer, recompute=tuple(c for c in RECOMPUTE_CHOICES if c in freer.recompute))
        if freer == space:
            continue
        ids = devices if freer.devices is not None else tuple(range(prices.cluster.num_devices))
        wider = Prices(prices.model, prices.cluster, prices.training, prices.costs, freer.recompute)
        found = nearest_miss(wider, ids, freer)
        if found is not None and found.over_bytes < miss.over_bytes:
            saved = (miss.over_bytes - found.over_bytes) / GIB
            enough = found.over_bytes <= 0 < miss.over_bytes
            helps.append((-saved, f"{words} would {'make it fit' if enough else f'save {saved:.2f} GiB'}"))
            most = max(most, saved)
    if helps:
        return "; ".join(text for _, text in sorted(helps))
    return "What would help: more devices or more memory on each, or an optimizer with fewer states"
