"""Interleaved 1F1B (Narayanan et al., arXiv 2104.04473, section 2.2.2): several stages a rank, taken in rounds."""

from __future__ import annotations

from itertools import accumulate, pairwise

from autopiper.ir.schedules.alternate import alternate
from autopiper.ir.schedules.chain import chain
from autopiper.ir.schedules.greedy import ahead, greedy
from autopiper.ir.schedules.layout import Family, Layout, Rows


def rows(layout: Layout, split_backward: bool = False) -> Rows:
    """Rank r holds r, r + R, …, V in all, and warms up with (V - 1)R + 2(R - 1 - r) forwards.

    Bubble of equal stages: (R - 1)(F + B)/V; live on the first rank: R(1 + (R - 1)/(RV)) micro-batches. Micro-batches go
    in rounds of R; where R does not divide them, they are dealt to the floor(M/R) rounds as evenly as can be, the
    largest round stands for R in the warm-up, the bubble stays and more are live. (A short last round would hold less,
    but its micro-batches come round before the rank is free: a bubble.)

    `split_backward`: one forward less a hop to warm up, and W follows r I later (ZB-H1, arXiv 2401.10241, interleaved).
    Other maps than the loop go through list scheduling.
    """
    c = chain(layout)
    R, V = c.num_ranks, max(len(held) for held in c.held)
    rounds = deal(c.num_micro_batches, max(1, c.num_micro_batches // R))
    warmups = [(V - 1) * len(rounds[0]) + (1 if split_backward else 2) * (R - 1 - r) for r in range(R)]
    if not c.is_loop:
        return c.rows(greedy(c, kinds="IFW" if split_backward else "BF", live=ahead(c, 3), round=R))
    out = []
    for r, stages in enumerate(c.held):
        forwards = [(s, m) for batch in rounds for s in stages for m in batch]
        backwards = [(s, m) for batch in rounds for s in reversed(stages) for m in batch]
        out.append(alternate(c, forwards, backwards, warmup=warmups[r], delay=r if split_backward else None))
    return c.rows(out)


def deal(count: int, num_rounds: int) -> list[range]:
    """Divide micro-batches into consecutive rounds as even as can be, larger ones first."""
    size, extra = divmod(count, num_rounds)
    ends = list(accumulate((size + (n < extra) for n in range(num_rounds)), initial=0))
    return [range(a, b) for a, b in pairwise(ends)]


FAMILY = Family(
    name="interleaved-1f1b",
    source="Narayanan et al., arXiv 2104.04473",
    rows=rows,
    stage_map="loop",
    parameters={"split_backward": False},
)
