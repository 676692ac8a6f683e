"""Shapes: what the pipelines of a candidate are made of, before anyone knows which devices and which blocks."""

from __future__ import annotations

from collections import Counter

import numpy as np

from autopiper._data import data
from autopiper.search.prices import MemberCosts, Prices


@data
class Pattern:
    """What one replica of a pipeline is made of: device type and tensor-parallel size of each stage, in order."""

    stages: tuple[tuple[str, int], ...]
    samples: int
    """Slice of each member."""

    @property
    def use(self) -> Counter[str]:
        """Devices of each type in one replica."""
        found: Counter[str] = Counter()
        for name, tp in self.stages:
            found[name] += tp
        return found

    def members(self, prices: Prices) -> list[MemberCosts]:
        """Return the costs of each stage's member. The pattern must be priced."""
        found = [prices.member(name, tp, self.samples) for name, tp in self.stages]
        return [m for m in found if m is not None]

    def shape(self, replicas: int) -> Shape:
        """Return the pipeline of so many equal replicas."""
        return Shape(
            types=tuple((name,) * replicas for name, _ in self.stages),
            tensor_parallel_sizes=tuple(tp for _, tp in self.stages),
            slices=((self.samples,) * replicas,) * len(self.stages),
        )


@data
class Shape:
    """One pipeline with its data-parallel members, of which the types may differ."""

    types: tuple[tuple[str, ...], ...]
    """Device type of each member of each stage."""
    tensor_parallel_sizes: tuple[int, ...]
    slices: tuple[tuple[int, ...], ...]
    """Samples of a whole micro-batch that each member of each stage takes."""

    @property
    def quantum(self) -> int:
        """Samples of a whole micro-batch."""
        return sum(self.slices[0])

    @property
    def replicas(self) -> int:
        """Data-parallel members of each stage."""
        return len(self.types[0])

    def classes(self, prices: Prices, stage: int) -> tuple[MemberCosts, ...]:
        """Return the distinct kinds of members of a stage that have work. Empty where one is not priced."""
        tp = self.tensor_parallel_sizes[stage]
        pairs = dict.fromkeys(p for p in zip(self.types[stage], self.slices[stage], strict=True) if p[1])
        found = [prices.member(name, tp, samples) for name, samples in pairs]
        return tuple(m for m in found if m is not None) if None not in found else ()

    @property
    def words(self) -> str:
        """ "4 x [2 x a100 tp2 | 1 x v100 tp4]" """
        runs: list[list[object]] = []
        for names, tp in zip(self.types, self.tensor_parallel_sizes, strict=True):
            kinds = "+".join(f"{n} {t}" if len(set(names)) > 1 else t for t, n in Counter(names).items())
            text = f"{kinds} tp{tp}" if tp > 1 else kinds
            if runs and runs[-1][1] == text:
                runs[-1][0] = int(str(runs[-1][0])) + 1
            else:
                runs.append([1, text])
        inside = " | ".join(f"{count} x {text}" for count, text in runs)
        return f"{self.replicas} x [{inside}]" if self.replicas > 1 else f"[{inside}]"


def neighbours(stage: int, num_stages: int) -> int:
    """Return how many stages of a pipeline a stage exchanges messages with."""
    return (stage > 0) + (stage < num_stages - 1)


def bottleneck_bound(members: list[MemberCosts]) -> float:
    """Return seconds per micro-batch that no cut of the blocks over these stages goes below (memory left aside).

    For any weights w of the blocks, a stage that takes T seconds, of them h beside its blocks, holds at most
    (T - h) · r of weight, r = max_b(w_b / price_b), so T >= (sum(w) + sum of h · r) / sum of r over the stages (duality).
    The prices on each stage in turn serve as weights.
    """
    kinds = {m.name: m for m in members}
    counts = Counter(m.name for m in members)
    beside = dict.fromkeys(kinds, 0.0)
    for s, m in enumerate(members):
        beside[m.name] += m.beside_s(neighbours(s, len(members)))
    best = float(np.min([m.fastest_s for m in kinds.values()], axis=0).max())
    for lender in kinds.values():
        rates = {name: m.most_weight(lender) for name, m in kinds.items()}
        room = sum(count * rates[name] for name, count in counts.items())
        if 0 < room < float("inf"):
            lost = sum(beside[name] * rate for name, rate in rates.items())
            best = max(best, (float(lender.fastest_s.sum()) + lost) / room)
    return best
