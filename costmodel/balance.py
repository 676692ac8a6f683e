"""Sharing out data in whole samples: the global batch over unequal pipelines, a micro-batch over unlike members.

HPP (arXiv 2610.22035) balances unequal pipelines by the data that each gets; how it does so is not public, and what
stands here is ours. A pipeline is summed up by its fill and its bottleneck:

    T(m) = fill + (m - 1) · bottleneck   for m >= 1 micro-batches,   T(0) = 0

Both balances minimise a maximum of functions that never fall, so the least limit T under which everything finds room
is the optimum; it is one of the finitely many values that a T(m) takes.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence

from autopiper._data import data
from autopiper.errors import PlanError


@data
class PipelinePace:
    """How a pipeline takes micro-batches."""

    fill_s: float
    """Seconds of a step with one micro-batch."""
    bottleneck_s: float
    """Seconds that every further micro-batch adds."""
    quantum: int
    """Samples of one micro-batch, over all members."""

    def __post_init__(self) -> None:
        if self.quantum < 1 or self.fill_s < 0 or self.bottleneck_s < 0:
            raise PlanError(
                f"pipeline pace {self.fill_s} s + {self.bottleneck_s} s per micro-batch of {self.quantum} samples: "
                "times must be zero or more, the micro-batch one sample or more"
            )

    def time_s(self, micro_batches: int) -> float:
        """Seconds of a step with so many micro-batches; an idle pipeline takes none."""
        return self.fill_s + (micro_batches - 1) * self.bottleneck_s if micro_batches else 0.0

    def capacity(self, limit_s: float, most: int) -> int:
        """Most micro-batches, up to `most`, that end within `limit_s`."""
        if most < 1 or self.time_s(1) > limit_s:
            return 0
        if self.time_s(most) <= limit_s:
            return most
        count = min(most, int((limit_s - self.fill_s) / self.bottleneck_s) + 1)
        while count > 1 and self.time_s(count) > limit_s:  # the quotient may be rounded up or down
            count -= 1
        while count < most and self.time_s(count + 1) <= limit_s:
            count += 1
        return count


def share_batch(paces: Sequence[PipelinePace], global_batch_size: int, *, ragged: bool = False) -> tuple[int, ...]:
    """Return the samples of each pipeline, so that the slowest ends as early as whole micro-batches allow.

    Every share is a multiple of the pipeline's quantum, and 0 means idle. With `ragged`, a pipeline may end with one
    smaller micro-batch, which is taken to cost as much as a whole one; then any batch can be shared out.
    Raises PlanError where no whole micro-batches make up the batch.
    """
    if not paces or global_batch_size < 1:
        raise PlanError(
            f"cannot share {global_batch_size} samples over {len(paces)} pipelines; give one or more of each"
        )
    quanta = {p.quantum for p in paces}
    if len(quanta) == 1 and global_batch_size % paces[0].quantum == 0:
        counts = _greedy(paces, global_batch_size // paces[0].quantum)
        return tuple(c * p.quantum for c, p in zip(counts, paces, strict=True))
    most = [-(-global_batch_size // p.quantum) if ragged else global_batch_size // p.quantum for p in paces]
    limits = sorted({p.time_s(m) for p, top in zip(paces, most, strict=True) for m in range(top + 1)})
    room = _whole_room if not ragged else _ragged_room
    if not room(paces, most, limits[-1], global_batch_size):
        raise PlanError(
            f"global_batch_size {global_batch_size} is no sum of whole micro-batches of "
            f"{', '.join(str(q) for q in sorted(quanta))} samples; greatest common divisor {math.gcd(*quanta)}, "
            f"{global_batch_size} mod {math.gcd(*quanta)} = {global_batch_size % math.gcd(*quanta)}; choose "
            "micro-batch sizes that divide the batch"
        )
    low, high = 0, len(limits) - 1
    while low < high:
        middle = (low + high) // 2
        if room(paces, most, limits[middle], global_batch_size):
            high = middle
        else:
            low = middle + 1
    counts = [p.capacity(limits[low], top) for p, top in zip(paces, most, strict=True)]
    if _reachable(paces, counts, global_batch_size)[-1] >> global_batch_size & 1:
        return _pick(paces, counts, global_batch_size)
    shares = [c * p.quantum for c, p in zip(counts, paces, strict=True)]
    surplus = sum(shares) - global_batch_size
    for i in sorted(range(len(shares)), key=lambda i: -paces[i].time_s(counts[i])):  # relieve the slowest first
        given = min(shares[i], surplus)
        shares[i], surplus = shares[i] - given, surplus - given
    return tuple(shares)


def _greedy(paces: Sequence[PipelinePace], micro_batches: int) -> list[int]:
    """Give each micro-batch to the pipeline that would end first with it: optimal where all micro-batches are alike.

    While some are left, a pipeline below its share in an optimum exists, and with one more it ends within the optimum;
    so the earliest end does too.
    """
    counts = [0] * len(paces)
    heap = [(p.time_s(1), i) for i, p in enumerate(paces)]
    heapq.heapify(heap)
    for _ in range(micro_batches):
        _, i = heap[0]
        counts[i] += 1
        heapq.heapreplace(heap, (paces[i].time_s(counts[i] + 1), i))
    return counts


def _reachable(paces: Sequence[PipelinePace], counts: Sequence[int], total: int) -> list[int]:
    """Return, before each pipeline and after the last, the sums that can be made, as bits of an integer."""
    mask = (1 << (total + 1)) - 1
    bits = [1]
    for pace, count in zip(paces, counts, strict=True):
        reach, step = bits[-1], 1
        while count:  # 1, 2, 4, … copies make up any number up to `count`
            step = min(step, count)
            reach |= reach << (step * pace.quantum) & mask
            count, step = count - step, step * 2
        bits.append(reach)
    return bits


def _pick(paces: Sequence[PipelinePace], counts: Sequence[int], total: int) -> tuple[int, ...]:
    bits = _reachable(paces, counts, total)
    shares = [0] * len(paces)
    for i in reversed(range(len(paces))):
        quantum = paces[i].quantum
        wanted = next(
            c for c in range(counts[i], -1, -1) if c * quantum <= total and bits[i] >> (total - c * quantum) & 1
        )
        shares[i] = wanted * quantum
        total -= shares[i]
    return tuple(shares)


def _whole_room(paces: Sequence[PipelinePace], most: Sequence[int], limit_s: float, total: int) -> bool:
    counts = [p.capacity(limit_s, top) for p, top in zip(paces, most, strict=True)]
    return bool(_reachable(paces, counts, total)[-1] >> total & 1)


def _ragged_room(paces: Sequence[PipelinePace], most: Sequence[int], limit_s: float, total: int) -> bool:
    return sum(p.quantum * p.capacity(limit_s, top) for p, top in zip(paces, most, strict=True)) >= total


def step_s(paces: Sequence[PipelinePace], shares: Sequence[int]) -> float:
    """Return when the slowest pipeline ends with these shares (a smaller last micro-batch costs a whole one)."""
    return max(p.time_s(-(-share // p.quantum)) for p, share in zip(paces, shares, strict=True))


def share_micro_batch(
    prices: Sequence[Callable[[int], float]], samples: int, *, largest: int | None = None
) -> tuple[int, ...]:
    """Return the slice of each member, so that the slowest member ends as early as whole samples allow.

    `prices[j](n)` are the seconds of member j for n >= 1 samples and must never fall as n rises; a slice may be 0.
    `largest` limits a slice. Each sample goes to the member that would end first with it: optimal for such prices,
    by the argument of `_greedy`. Raises PlanError where the slices cannot hold the micro-batch.
    """
    if not prices or samples < 1:
        raise PlanError(f"cannot share {samples} samples among {len(prices)} members; give one or more of each")
    top = samples if largest is None else largest
    if top * len(prices) < samples:
        raise PlanError(
            f"a micro-batch of {samples} samples does not fit {len(prices)} members of at most {top} samples: "
            f"{len(prices)} x {top} = {len(prices) * top}"
        )
    slices = [0] * len(prices)
    heap = [(price(1), j) for j, price in enumerate(prices)]
    heapq.heapify(heap)
    for _ in range(samples):
        _, j = heapq.heappop(heap)
        slices[j] += 1
        if slices[j] < top:
            heapq.heappush(heap, (prices[j](slices[j] + 1), j))
    return tuple(slices)
