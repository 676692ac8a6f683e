"""ZB-H1 (Qi et al., "Zero Bubble Pipeline Parallelism", arXiv 2401.10241): 1F1B whose W fill the bubbles."""

from __future__ import annotations

from autopiper.ir.schedules.alternate import one_stage
from autopiper.ir.schedules.chain import chain
from autopiper.ir.schedules.greedy import ahead, greedy
from autopiper.ir.schedules.layout import Family, Layout, Rows


def rows(layout: Layout) -> Rows:
    """As 1F1B with I for B; W follows r I later on rank r, so that no rank holds more than 1F1B's first, R.

    Bubble of equal stages with W <= I: (R - 1)(F + I - W). Where ranks hold several stages, list scheduling decides the order.
    """
    c = chain(layout)
    if not c.is_one:
        return c.rows(greedy(c, kinds="IFW", live=ahead(c)))
    return c.rows([one_stage(c, r, warmup=c.num_ranks - 1 - r, delay=r) for r in range(c.num_ranks)])


FAMILY = Family(name="zb-h1", source="Qi et al., arXiv 2401.10241", rows=rows, stage_map="any", splits_backward=True)
