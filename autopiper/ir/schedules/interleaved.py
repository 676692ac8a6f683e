"""Interleaved 1F1B (Narayanan et al., arXiv 2104.04473, section 2.2.2): several stages a rank, taken in rounds."""

from __future__ import annotations

from autopiper.ir.schedules.alternate import alternate
from autopiper.ir.schedules.chain import chain
from autopiper.ir.schedules.greedy import greedy
from autopiper.ir.schedules.layout import Family, Layout, Rows


def rows(layout: Layout, split_backward: bool = False) -> Rows:
    """Rank r holds r, r + R, …, V in all, and warms up with (V - 1)R + 2(R - 1 - r) forwards.

    Bubble of equal stages: (R - 1)(F + B)/V; live on the first rank: R(1 + (R - 1)/(RV)) micro-batches. Micro-batches go
    in rounds of R; where they do not fill the last round, the order is that of full rounds with what is missing left
    out, which waits for nothing new. `split_backward`: one forward a hop less to warm up, and W follows r I later (the
    interleaved form of ZB-H1, arXiv 2401.10241). Other maps than the loop go through list scheduling.
    """
    c = chain(layout)
    R, V, M = c.num_ranks, c.num_stages // c.num_ranks, c.num_micro_batches
    warmups = [(V - 1) * R + (1 if split_backward else 2) * (R - 1 - r) for r in range(R)]
    if not c.is_loop:
        live = [w + 1 + r * split_backward for r, w in enumerate(warmups)]
        return c.rows(greedy(c, kinds="IFW" if split_backward else "BF", live=live, round=R))
    out = []
    for r, stages in enumerate(c.held):
        rounds = [range(start, start + R) for start in range(0, M, R)]
        forwards = [(s, m) for batch in rounds for s in stages for m in batch]
        backwards = [(s, m) for batch in rounds for s in reversed(stages) for m in batch]
        out.append(alternate(c, forwards, backwards, warmup=warmups[r], delay=r if split_backward else None))
    return c.rows(out)


FAMILY = Family(
    name="interleaved-1f1b",
    source="Narayanan et al., arXiv 2104.04473",
    rows=rows,
    stage_map="loop",
    parameters={"split_backward": False},
)
