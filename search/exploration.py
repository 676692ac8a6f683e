"""Exploration: one run of the funnel under one precision, from the outer choices to simulated, polished strategies."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from autopiper.plan.plan import Trial
from autopiper.plan.space import Space
from autopiper.plan.strategy import Strategy
from autopiper.search import bayes, polish
from autopiper.search.bayes import Dimensions
from autopiper.search.bounds import BestPrices, Bound, lower_bound
from autopiper.search.drafts import Draft, Workshop
from autopiper.search.evaluate import Evaluator, Outcome, walked
from autopiper.search.prices import Prices
from autopiper.search.proposals import DEFAULT_MOST_PIPELINES, HABITS, Choice, Proposer
from autopiper.search.shapes import Shape

__all__ = ["Candidate", "Exploration", "Journal"]

ESTIMATE_SLACK = 0.12
"""An estimate is trusted to this much: a draft is not simulated when it would lose even if it were that much faster."""
LATE_SLACK = 0.06
"""The same for mixed groups and polish, when the best so far is already good."""
ACTIONS_AT_ONCE = 120_000
"""Actions simulated in one round of alternatives: about two seconds; the smaller the job, the more alternatives."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A strategy that was simulated and fits, with what it is in words."""

    label: str
    outcome: Outcome
    draft: Draft | None = None


@dataclass(slots=True)
class Journal:
    """The clock, the history and the listener of a whole search, over all precisions."""

    deadline_s: float | None = None
    """Seconds after which no further work is begun; None = never."""
    progress: Callable[[int, str, float], object] | None = None
    started: float = field(default_factory=time.monotonic)
    history: list[Trial] = field(default_factory=list)
    best_s: float = float("inf")
    reserve_s: float = 0.0
    """What proving and simulating the best plan from end to end will take, after all work."""

    def elapsed_s(self) -> float:
        """Seconds since the search began."""
        return time.monotonic() - self.started

    def late(self, share: float = 1.0) -> bool:
        """Whether this share of the time is used up; never without a deadline, so that results are reproducible."""
        if self.deadline_s is None:
            return False
        # A step so long that its plan alone takes most of the time is searched for half of the time all the same.
        return self.elapsed_s() >= share * max(self.deadline_s - self.reserve_s, self.deadline_s / 2)

    def note(self, label: str, step_s: float | None) -> None:
        """Add a line to the history and tell the listener."""
        if step_s is not None:
            self.best_s = min(self.best_s, step_s)
        number = len(self.history)
        self.history.append(Trial(number=number, label=label, step_time_s=step_s, elapsed_s=self.elapsed_s()))
        if self.progress is not None:
            self.progress(number, label, self.best_s)


class Exploration:
    """Everything that one precision allows: its prices, bound, and the candidates met."""

    def __init__(self, prices: Prices, devices: Sequence[int], space: Space, journal: Journal, slices: int) -> None:
        """`slices` = samples of the largest slice that any admitted plan has."""
        self.prices, self.space, self.journal = prices, space, journal
        self.batch = prices.training.global_batch_size
        self.shop = Workshop(prices, devices, self.batch, space)
        self.best_prices = BestPrices(prices, self.shop.counts, space.tensor_parallel_sizes, slices)
        self.bound: Bound = lower_bound(self.best_prices, self.batch)
        self.proposer = Proposer(self.shop, self.best_prices, stop=lambda: journal.late(0.75))
        self.evaluate = Evaluator(prices.model, prices.cluster, prices.costs)
        self.candidates: dict[str, Candidate] = {}

    @property
    def best(self) -> Candidate | None:
        """The candidate with the least step; the first met among equals."""
        return min(self.candidates.values(), key=lambda c: c.outcome.step_s, default=None)

    @property
    def best_s(self) -> float:
        """Step of the best candidate; infinite while there is none."""
        return self.best.outcome.step_s if self.best else float("inf")

    def admit(self, label: str, outcome: Outcome, draft: Draft | None = None) -> None:
        """Keep a simulated strategy if it fits; of several with the same words the best."""
        known = self.candidates.get(label)
        if outcome.feasible and (known is None or outcome.step_s < known.outcome.step_s):
            if outcome.step_s < self.best_s:
                self.journal.reserve_s = self.evaluate.whole_s(outcome.strategy)
            self.candidates[label] = Candidate(label, outcome, draft)

    def simulate(self, draft: Draft) -> Outcome | None:
        """Simulate a draft; where memory is missing, cut again with that much left free, up to three times."""
        reserve: dict[tuple[int, int], float] = {}
        for _ in range(4):
            outcome = self.evaluate(self.strategy(draft))
            if outcome.feasible:
                self.admit(draft.words, outcome, draft)
                return outcome
            for place, missing in outcome.excess_bytes.items():
                # Messages come and go beside what the cuts count; in whole MiB, so that tables are found again.
                reserve[place] = reserve.get(place, 0.0) + (missing * 1.05 // 2**20 + 1) * 2**20
            shapes = [p.shape for p in draft.pieces]
            again = self.shop.draft(shapes, draft.family, draft.choices, draft.habit, reserve)
            if again is None:
                return None
            draft = again
        return None

    def refine(self, shape: Shape) -> None:
        """Cut a shape as is best for it, where that may beat the best so far."""
        for draft in self._drafts_of([shape], self.space.schedules):
            if draft.estimate_s * (1 - LATE_SLACK) < self.best_s:
                outcome = self.simulate(draft)
                self.journal.note(draft.words, outcome.step_s if outcome else None)

    def strategy(self, draft: Draft) -> Strategy:
        """Write a draft as a strategy."""
        return self.shop.strategy(draft)

    def run(self, n_trials: int, seed: int, hints: Iterable[Choice] = ()) -> None:
        """Explore the outer choices, then single pipelines of unlike members, then polish the best."""
        dimensions = self.dimensions()
        bayes.explore(
            dimensions, self._try, n_trials=n_trials, seed=seed, seeds=[*hints, *self.heuristics(dimensions)],
            stop=lambda: self.journal.late(0.7),
        )  # fmt: skip
        self._mixed()
        self._polish()

    def dimensions(self) -> Dimensions:
        """Return the outer choices that the space and the prices leave open."""
        space = self.space
        degrees = {
            name: sizes
            for name in self.shop.counts
            if (sizes := self.prices.tensor_parallel_sizes(name, space.tensor_parallel_sizes))
            and name in self.proposer.rates
        }
        top = space.max_pipelines or DEFAULT_MOST_PIPELINES
        most = tuple(k for k in (1, 2, 3, top) if space.min_pipelines <= k <= top) or (space.min_pipelines,)
        if space.equal_pipelines:
            most = (1,)
        each = [(c,) for c in space.recompute[1:]]
        return Dimensions(
            degrees=degrees,
            samples=tuple(s for s in sorted(set(space.micro_batch_sizes)) if s <= self.batch),
            recompute=tuple(dict.fromkeys([space.recompute, *each])),
            families=space.schedules,
            most_pipelines=tuple(dict.fromkeys(most)),
        )

    def heuristics(self, dimensions: Dimensions) -> list[Choice]:
        """Return choices worth trying first, all with small micro-batches.

        All types at one degree, and at degrees in inverse proportion to their memory; then each type alone. Degrees at
        which the model needs about four stages of the largest devices come first.
        """
        family = "1f1b" if "1f1b" in dimensions.families else dimensions.families[0]
        names = tuple(dimensions.degrees)
        if not names:
            return []  # not one device can hold any part
        memory = {n: self.prices.cluster.device_type(n).usable_bytes for n in names}
        largest = max(memory.values())
        sets: list[dict[str, float]] = []
        first = self.best_prices.members[names[0]][0]
        model_bytes = float(first.static_bytes[0, -1]) * first.tensor_parallel_size
        stages = max(1.0, model_bytes / largest) if 0 < largest < float("inf") else 1.0

        def far_from_four(base: int) -> tuple[float, int]:
            return (abs(math.log2(max(1.0, stages / base)) - 2), base)

        for base in sorted({d for sizes in dimensions.degrees.values() for d in sizes}, key=far_from_four):
            sets.append({n: base * largest / memory[n] if largest < float("inf") else base for n in names})
            sets.append(dict.fromkeys(names, float(base)))
        sets += [{n: 1.0} for n in names if len(names) > 1]
        return list(
            dict.fromkeys(
                Choice(
                    degrees=tuple(
                        (n, min(dimensions.degrees[n], key=lambda d: (abs(d - wanted), d)))
                        for n, wanted in row.items()
                    ),
                    samples=samples, recompute=dimensions.recompute[0], family=family,
                    most_pipelines=dimensions.most_pipelines[-1],
                )
                for row in sets
                for samples in dimensions.samples[:2]
            )
        )  # fmt: skip

    def _try(self, choice: Choice) -> float | None:
        """Propose, prune by bound and estimate, simulate what is left; return the best step or estimate."""
        counts = {n: self.shop.counts[n] for n, _ in choice.degrees}
        least = lower_bound(BestPrices(self.prices, counts, {tp for _, tp in choice.degrees}, self.slices), self.batch)
        if least.seconds >= self.best_s:
            self.journal.note(f"{choice.words} (bound {least.seconds:.4g} s)", None)
            return least.seconds
        drafts = self.proposer.propose(choice, 3)
        value = min((d.estimate_s for d in drafts), default=None)
        steps = self._simulate_best(drafts)
        self.journal.note(choice.words, min(steps, default=None))
        return min(steps) if steps else value

    @property
    def slices(self) -> int:
        """Samples of the largest slice of the space."""
        return max(self.space.micro_batch_sizes)

    def _simulate_best(self, drafts: Sequence[Draft]) -> list[float]:
        steps: list[float] = []
        for tried, draft in enumerate(drafts):
            if tried >= affordable(draft, 2, 6) or (tried and self.journal.late()):
                break
            if draft.estimate_s * (1 - ESTIMATE_SLACK) >= self.best_s or draft.estimate_s > drafts[0].estimate_s * 1.1:
                break
            outcome = self.simulate(draft)
            if outcome is not None:
                steps.append(outcome.step_s)
        return steps

    def _mixed(self) -> None:
        """Single pipelines whose groups may hold members of unlike types."""
        space = self.space
        if not space.equal_pipelines and space.min_pipelines > 1:
            return
        if self.journal.late(0.8):
            return
        drafts = []
        families = space.schedules if space.equal_pipelines else space.schedules[-1:]
        for shape in self.proposer.mixed_shapes(120 if space.equal_pipelines else 24):
            if self.journal.late(0.8):
                break
            drafts += self._drafts_of([shape], families)
        drafts.sort(key=lambda d: d.estimate_s)
        most = (24 if space.equal_pipelines else 8) if drafts else 0
        for draft in drafts[: most and affordable(drafts[0], 4, most)]:
            if draft.estimate_s * (1 - LATE_SLACK) >= self.best_s or (self.best and self.journal.late(0.85)):
                break
            outcome = self.simulate(draft)
            self.journal.note(draft.words, outcome.step_s if outcome else None)

    def _drafts_of(self, shapes: Sequence[Shape], families: Sequence[str]) -> list[Draft]:
        found = [self.shop.draft(shapes, f, self.space.recompute, h) for f in families for h in HABITS]
        return [d for d in found if d is not None]

    def _polish(self) -> None:
        """Try small changes of the best draft until none helps."""
        for _ in range(6):
            best = self.best
            drafted = [c for c in self.candidates.values() if c.draft is not None]
            if best is None or not drafted or self.journal.late(0.9):
                return
            start = min(drafted, key=lambda c: c.outcome.step_s)
            if start.draft is None:
                return
            before = self.best_s
            moves = []
            for draft in polish.neighbours(self.shop, start.draft):
                if self.journal.late(0.9):
                    break
                moves.append(draft)
            exact = None if self.journal.late(0.9) else polish.exact_cuts(self.shop, start.draft)
            if exact is not None:
                moves.append(exact)
            limit = affordable(start.draft, 3, 80)
            for draft in sorted(moves, key=lambda d: d.estimate_s)[:limit]:
                if self.journal.late(0.95) or draft.estimate_s * (1 - LATE_SLACK) >= self.best_s:
                    break
                self.simulate(draft)
            self.journal.note(f"polish {start.label}", self.best_s if self.best_s < before else None)
            if self.best_s >= before * (1 - 1e-4):
                return


def affordable(draft: Draft, least: int, most: int) -> int:
    """Return how many drafts of this size to simulate in one round."""
    actions = sum(
        6 * walked(p.micro_batches, len(p.members), draft.family) * len(p.members) * p.shape.replicas
        for p in draft.pieces
    )
    return max(least, min(most, ACTIONS_AT_ONCE // max(1, actions)))
