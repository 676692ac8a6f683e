"""ZB-V (Qi et al., "Pipeline Parallelism with Controllable Memory", arXiv 2405.15362): a V of stages, no bubble."""

from __future__ import annotations

from autopiper.ir.schedules.chain import chain
from autopiper.ir.schedules.layout import Family, Layout, Rows
from autopiper.ir.schedules.vee import require_v
from autopiper.ir.schedules.writer import RowWriter


def rows(layout: Layout) -> Rows:
    """No bubble of span at F = I = W; 2R half-size passes are live on a rank, as much as on 1F1B's first.

    The order is that of at least 2R - 1 micro-batches, with those that are too many left out. Raises PlanError for
    other maps than the V.
    """
    c = require_v(chain(layout))
    R, many = c.num_ranks, max(2 * c.num_ranks - 1, c.num_micro_batches)
    out = []
    for r in range(R):
        first, second, w = (c.pipeline, r), (c.pipeline, 2 * R - 1 - r), RowWriter()
        for _ in range(2 * (R - r) - 1):  # fill the way down, until the way up comes back
            w.add("F", first)
        for _ in range(r):
            w.add("F", second)
            w.add("F", first)
        for _ in range(R - r):
            for kind in "FI":
                w.add(kind, second)
            w.add_weight()
        for n in range(many - R):  # steady: all three passes of each stage
            if n < many - (2 * R - 1 - r):
                w.add("F", first)
            w.add("I", first)
            w.add_weight()
            for kind in "FI":
                w.add(kind, second)
            w.add_weight()
        for _ in range(r):  # drain: I as soon as they can, W where there is time
            w.add("I", first)
            w.add("I", second)
        for _ in range(R - r):
            w.add("I", first)
            w.add_weight(first)
        for _ in range(r):
            w.add_weight(second)
        for _ in range(r):
            w.add_weight(first)
        out.append([(p,) for (p,) in w.row if p.micro_batch < c.num_micro_batches])
    return c.rows(out)


FAMILY = Family(name="zb-v", source="Qi et al., arXiv 2405.15362", rows=rows, stage_map="v", splits_backward=True)
