"""Sharing out data: both balances against brute force on small random instances."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest

from autopiper.costmodel.balance import PipelinePace, share_batch, share_micro_batch, step_s
from autopiper.errors import PlanError


def _all_counts(paces: list[PipelinePace], total: int, *, ragged: bool) -> Iterator[tuple[int, ...]]:
    tops = [-(-total // p.quantum) for p in paces]
    for counts in itertools.product(*(range(t + 1) for t in tops)):
        whole = sum(c * p.quantum for c, p in zip(counts, paces, strict=True))
        if whole == total or (ragged and whole > total):
            yield counts


def _brute(paces: list[PipelinePace], total: int, *, ragged: bool = False) -> float | None:
    """The least step over every way to share: each pipeline's micro-batches make up (or, ragged, cover) the batch."""
    steps = [
        max(p.time_s(c) for p, c in zip(paces, counts, strict=True))
        for counts in _all_counts(paces, total, ragged=ragged)
    ]
    return min(steps, default=None)


def _paces(rng: random.Random, *, equal: bool) -> list[PipelinePace]:
    quantum = rng.randint(1, 3)
    integral = rng.random() < 0.5  # ties are where greedy methods go wrong

    def number(low: float, high: float) -> float:
        return float(rng.randint(int(low), int(high))) if integral else rng.uniform(low, high)

    return [
        PipelinePace(
            fill_s=number(1, 9), bottleneck_s=number(0, 5), quantum=quantum if equal else rng.choice((1, 2, 3, 4, 6))
        )
        for _ in range(rng.randint(1, 3))
    ]


@pytest.mark.parametrize("seed", range(200))
def test_equal_micro_batches_are_shared_as_by_brute_force(seed: int) -> None:
    rng = random.Random(seed)
    paces = _paces(rng, equal=True)
    total = rng.randint(1, 9) * paces[0].quantum
    shares = share_batch(paces, total)
    assert sum(shares) == total
    assert all(s % p.quantum == 0 for s, p in zip(shares, paces, strict=True))
    assert step_s(paces, shares) == _brute(paces, total)


@pytest.mark.parametrize("seed", range(300))
def test_unequal_micro_batches_are_shared_as_by_brute_force(seed: int) -> None:
    rng = random.Random(1000 + seed)
    paces = _paces(rng, equal=False)
    total = rng.randint(1, 14)
    best = _brute(paces, total)
    if best is None:
        with pytest.raises(PlanError, match=r"no sum of whole micro-batches"):
            share_batch(paces, total)
    else:
        shares = share_batch(paces, total)
        assert sum(shares) == total
        assert all(s % p.quantum == 0 for s, p in zip(shares, paces, strict=True))
        assert step_s(paces, shares) == best
    shares = share_batch(paces, total, ragged=True)
    assert sum(shares) == total
    assert step_s(paces, shares) == _brute(paces, total, ragged=True)


def test_the_completion_time_counts_not_the_marginal_one() -> None:
    paces = [
        PipelinePace(fill_s=1 + 1, bottleneck_s=1, quantum=1),  # fill 1, then 1 for each micro-batch
        PipelinePace(fill_s=1 + 3, bottleneck_s=3, quantum=1),
    ]
    assert step_s(paces, share_batch(paces, 8)) == 7  # marginal time alone gives all 8 to the first, and 9


def test_a_slow_pipeline_stays_idle() -> None:
    paces = [
        PipelinePace(fill_s=1, bottleneck_s=1, quantum=1),
        PipelinePace(fill_s=100, bottleneck_s=1, quantum=1),
    ]
    assert share_batch(paces, 10) == (10, 0)


@pytest.mark.parametrize("seed", range(200))
def test_slices_are_shared_as_by_brute_force(seed: int) -> None:
    rng = random.Random(seed)
    members, samples = rng.randint(1, 4), rng.randint(1, 8)
    tables = []
    for _ in range(members):
        steps = [rng.choice((0.0, rng.uniform(0, 3))) for _ in range(samples + 1)]  # monotone, with plateaus
        tables.append([0.0, *itertools.accumulate(steps)])
    largest = rng.choice((None, rng.randint(-(-samples // members), samples)))
    slices = share_micro_batch([lambda n, t=t: t[n] for t in tables], samples, largest=largest)  # type: ignore[misc]
    assert sum(slices) == samples

    def slowest(parts: tuple[int, ...]) -> float:
        return max(t[n] for t, n in zip(tables, parts, strict=True))

    allowed = range((largest or samples) + 1)
    best = min(slowest(c) for c in itertools.product(allowed, repeat=members) if sum(c) == samples)
    assert slowest(slices) == best


def test_refusals_say_the_sum() -> None:
    with pytest.raises(PlanError, match="2 x 3 = 6"):
        share_micro_batch([float, float], 7, largest=3)
    with pytest.raises(PlanError, match="cannot share 4 samples over 0 pipelines"):
        share_batch([], 4)
    with pytest.raises(PlanError, match="micro-batch of 0 samples"):
        PipelinePace(fill_s=1, bottleneck_s=1, quantum=0)
