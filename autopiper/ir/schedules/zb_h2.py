"""ZB-H2 (Qi et al., "Zero Bubble Pipeline Parallelism", arXiv 2401.10241): more forwards first, no bubble of span."""

from __future__ import annotations

from autopiper.ir.schedules.alternate import one_stage
from autopiper.ir.schedules.chain import chain
from autopiper.ir.schedules.greedy import ahead, greedy
from autopiper.ir.schedules.layout import Family, Layout, Rows


def rows(layout: Layout) -> Rows:
    """Rank r warms up with 2(R - 1 - r) forwards, W follows 2r I later: 2R - 1 micro-batches are live on each rank.

    Bubble of equal stages, own first to own last pass: (R - 1)(F + I - 2W), none at F = I = W. The makespan of one
    isolated step is ZB-H1's there: what is gained needs steps that overlap. Where ranks hold several stages,
    list scheduling decides the order.
    """
    c = chain(layout)
    if not c.is_one:
        return c.rows(greedy(c, kinds="IFW", live=ahead(c, 4)))
    return c.rows([one_stage(c, r, warmup=2 * (c.num_ranks - 1 - r), delay=2 * r) for r in range(c.num_ranks)])


FAMILY = Family(name="zb-h2", source="Qi et al., arXiv 2401.10241", rows=rows, stage_map="any", splits_backward=True)
