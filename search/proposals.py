"""Proposals: from one setting of the outer choices to drafts, by patterns, packing and cuts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations

import numpy as np

from autopiper._data import data
from autopiper.costmodel.balance import PipelinePace, share_micro_batch
from autopiper.search import cuts
from autopiper.search.bounds import BestPrices
from autopiper.search.drafts import Draft, Workshop
from autopiper.search.layers import LayerProblem
from autopiper.search.patterns import (
    LEAST_OF_A_KIND,
    Limits,
    PacedPattern,
    Packing,
    enumerate_patterns,
    groups,
    pack,
    promising,
)
from autopiper.search.placement import Habit
from autopiper.search.shapes import Pattern, Shape, bottleneck_bound, neighbours

HABITS: tuple[Habit, ...] = ("pipeline", "data")
KEEP_PATTERNS = 96
DEFAULT_MOST_PIPELINES = 4
"""Different pipelines at once unless the space says more; each further one brings its own holder sets to reduce over."""


@data
class Choice:
    """One setting of what the ILPs take as given."""

    degrees: tuple[tuple[str, int], ...]
    """Tensor-parallel size of each device type that is used."""
    samples: int
    recompute: tuple[str, ...]
    """Choices open to each block."""
    family: str
    most_pipelines: int

    @property
    def words(self) -> str:
        """Short text for the history."""
        kinds = ", ".join(f"{name} tp {tp}" for name, tp in self.degrees)
        again = "/".join(self.recompute)
        return (
            f"{kinds}; micro-batch {self.samples}; recompute {again}; {self.family}; <= {self.most_pipelines} pipelines"
        )


class Proposer:
    """Makes drafts; patterns and their paces are kept between calls."""

    def __init__(self, shop: Workshop, best: BestPrices, stop: Callable[[], bool] = lambda: False) -> None:
        """`stop` = whether to be content with what there is."""
        self.shop, self.best, self.stop = shop, best, stop
        self.rates = {
            name: 1 / seconds for name, row in best.device_seconds.items() if 0 < (seconds := float(row.sum())) < np.inf
        }
        """Samples per second of one device at its best prices."""
        self._paced: dict[tuple[object, ...], list[PacedPattern]] = {}

    @property
    def max_stages(self) -> int:
        """Stages that a pipeline may have."""
        blocks = len(self.shop.prices.model.blocks)
        return min(blocks, self.shop.space.max_stages or blocks)

    def propose(self, choice: Choice, count: int = 1) -> list[Draft]:
        """Return up to `count` drafts, each of another set of patterns, best estimate first."""
        paced = self.paced(choice)
        space = self.shop.space
        limits = Limits(
            min_pipelines=space.min_pipelines, max_pipelines=max(space.min_pipelines, choice.most_pipelines)
        )
        if space.equal_pipelines:
            limits = Limits(max_pipelines=1, min_replicas=space.min_pipelines, max_replicas=space.max_pipelines)
        drafts: list[Draft] = []
        found: list[Packing] = []
        while len(found) < count and not (found and self.stop()):
            packing = pack(
                paced, self.shop.cluster, self.shop.devices, self.shop.batch,
                limits=limits, forbidden=found,
            )  # fmt: skip
            if packing is None:
                break
            found.append(packing)
            shapes = [paced_.pattern.shape(n) for paced_, n in packing.replicas]
            drafts += [d for d in (self.shop.draft(shapes, choice.family, choice.recompute, h) for h in HABITS) if d]
        return sorted(drafts, key=lambda d: d.estimate_s)

    def paced(self, choice: Choice) -> list[PacedPattern]:
        """Return the promising patterns of a choice with their paces (transfers left aside)."""
        key = (choice.degrees, choice.samples, choice.recompute, choice.family)
        if key not in self._paced:
            degrees = dict(choice.degrees)
            available = {n: groups(self.shop.cluster, self.shop.devices, n, tp) for n, tp in degrees.items()}
            patterns = list(enumerate_patterns(available, degrees, choice.samples, max_stages=self.max_stages))
            counts = {n: self.shop.counts[n] for n in degrees}
            kept = promising(patterns, self.shop.prices, self.rates, counts, self.shop.batch, KEEP_PATTERNS)
            paced: list[PacedPattern] = []
            self._paced[key] = paced
            for pattern in kept:
                if len(paced) >= LEAST_OF_A_KIND and self.stop():
                    break
                made = self._pace(pattern, choice)
                if made is not None:
                    paced.append(made)
        return self._paced[key]

    def _pace(self, pattern: Pattern, choice: Choice) -> PacedPattern | None:
        whole = sum(self.rates[n] * c for n, c in self.shop.counts.items() if n in self.rates)
        rate = sum(self.rates[n] * c for n, c in pattern.use.items())
        number = max(1, round(self.shop.batch * rate / whole / pattern.samples))
        shape = pattern.shape(1)
        slots = self.shop.slots(shape, number, choice.family, {})
        if slots is None:
            return None
        free = (np.zeros(len(self.shop.prices.cut_bytes)),) * (len(slots) - 1)
        problem = LayerProblem(
            stages=slots, forward_transfer_s=free, backward_transfer_s=free, micro_batches=number,
            choices=choice.recompute, equal_stages=self.shop.space.equal_stages,
        )  # fmt: skip
        layers = cuts.solve(problem, self.shop.tables)
        if layers is None:
            return None
        pace = PipelinePace(fill_s=layers.fill_s, bottleneck_s=layers.bottleneck_s, quantum=pattern.samples)
        return PacedPattern(pattern=pattern, pace=pace)

    def groups_of(self, names: Sequence[str], tp: int) -> list[str]:
        """Return the type of every tensor-parallel group that these types offer, fastest first."""
        fast = sorted((n for n in names if n in self.rates), key=lambda n: (-self.rates[n], n))
        return [n for n in fast for _ in range(groups(self.shop.cluster, self.shop.devices, n, tp))]

    def mixed_shapes(self, keep: int) -> list[Shape]:
        """Return single pipelines whose groups may hold members of unlike types, the most promising first.

        The members of a stage are neighbours in speed. Slices are equal under `equal_pipelines`; otherwise each member
        also gets a slice by its speed.
        """
        space, prices = self.shop.space, self.shop.prices
        scored = []
        for number, shape in enumerate(self._mixed()):
            stages = [shape.classes(prices, s) for s in range(len(shape.types))]
            if not all(stages) or shape.quantum > self.shop.batch:
                continue
            slowest = [max(c, key=lambda m: float(m.time_s[m.choices[0]][0, -1])) for c in stages]
            count = -(-self.shop.batch // shape.quantum)
            least = bottleneck_bound(slowest) * (count + (len(stages) - 1) * 0.5)
            scored.append((least, number, shape))
            if not space.equal_pipelines:
                balanced = self._balanced(shape)
                if balanced is not None:
                    scored.append((least * 0.8, number, balanced))
        scored.sort(key=lambda row: row[:2])
        return [shape for _, _, shape in scored[:keep]]

    def _mixed(self) -> Iterator[Shape]:
        space = self.shop.space
        names = sorted(self.shop.counts)
        for k in range(1, len(names) + 1):
            for subset in combinations(names, k):
                sizes = [set(self.shop.prices.tensor_parallel_sizes(n, space.tensor_parallel_sizes)) for n in subset]
                for tp in sorted(set.intersection(*sizes)):
                    row = self.groups_of(subset, tp)
                    yield from self._chunks(row, tp)

    def _chunks(self, row: Sequence[str], tp: int) -> Iterator[Shape]:
        """Divide the groups into stages of equally many members, in both orders."""
        space = self.shop.space
        low = space.min_pipelines if space.equal_pipelines else 1
        high = (space.max_pipelines if space.equal_pipelines else None) or len(row)
        for stages in range(1, min(self.max_stages, len(row)) + 1):
            replicas = len(row) // stages
            for count in dict.fromkeys((replicas, 2 ** (replicas.bit_length() - 1))):
                if not low <= count <= high:
                    continue
                chunks = tuple(tuple(row[s * count : (s + 1) * count]) for s in range(stages))
                for types in dict.fromkeys((chunks, chunks[::-1])):
                    for samples in space.micro_batch_sizes:
                        yield Shape(
                            types=types,
                            tensor_parallel_sizes=(tp,) * stages,
                            slices=((samples,) * count,) * stages,
                        )

    def _balanced(self, shape: Shape) -> Shape | None:
        """Give the members of each stage slices by their speed, or None where all are alike."""
        if all(len(set(types)) == 1 for types in shape.types):
            return None
        largest = max(self.shop.space.micro_batch_sizes)
        rows = []
        for s, (types, tp) in enumerate(zip(shape.types, shape.tensor_parallel_sizes, strict=True)):
            beside = neighbours(s, len(shape.types))
            curves = {name: self._curve(name, tp, largest, beside) for name in set(types)}
            prices = [lambda n, c=curves[name]: c[n] for name in types]
            try:
                rows.append(share_micro_batch(prices, shape.quantum, largest=largest))
            except ValueError:
                return None
        return Shape(types=shape.types, tensor_parallel_sizes=shape.tensor_parallel_sizes, slices=tuple(rows))

    def _curve(self, name: str, tp: int, largest: int, beside: int) -> Mapping[int, float]:
        found: dict[int, float] = {}
        for n in range(1, largest + 1):
            member = self.shop.prices.member(name, tp, n)
            found[n] = (
                float(member.time_s[member.choices[0]][0, -1]) + member.beside_s(beside) if member else float("inf")
            )
        return found
