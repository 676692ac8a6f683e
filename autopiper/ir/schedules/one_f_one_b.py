"""1F1B (PipeDream-flush; Narayanan et al., arXiv 2104.04473, section 2.2.1)."""

from __future__ import annotations

from autopiper.ir.schedules.alternate import one_stage
from autopiper.ir.schedules.chain import chain
from autopiper.ir.schedules.greedy import ahead, greedy
from autopiper.ir.schedules.layout import Family, Layout, Rows


def rows(layout: Layout) -> Rows:
    """Rank r warms up with R - 1 - r forwards, then alternates; at most R - r micro-batches are live on it.

    Bubble of equal stages: (R - 1)(F + B), as GPipe's. Where ranks hold several stages, list scheduling decides the
    order: backward first, and no more live than `ahead` says.
    """
    c = chain(layout)
    if not c.is_one:
        return c.rows(greedy(c, live=ahead(c)))
    return c.rows([one_stage(c, rank, warmup=c.num_ranks - 1 - rank) for rank in range(c.num_ranks)])


FAMILY = Family(name="1f1b", source="Narayanan et al., arXiv 2104.04473", rows=rows, stage_map="any")
