"""Eager 1F1B (Zhuang et al., "On Optimizing the Communication of Model Parallelism", arXiv 2211.05322)."""

from __future__ import annotations

from autopiper.errors import PlanError
from autopiper.ir.schedules.alternate import one_stage
from autopiper.ir.schedules.chain import chain
from autopiper.ir.schedules.greedy import ahead, greedy
from autopiper.ir.schedules.layout import Family, Layout, Rows


def rows(layout: Layout, forwards_per_hop: int = 2) -> Rows:
    """Rank r warms up with forwards_per_hop * (R - 1 - r) forwards, then alternates: 1 is 1F1B, 2 the paper's.

    With 2, transfers between neighbours hide in the steady state as long as one takes no more than (F + B)/2: makespan
    (M + R - 1)(F + B) + 2(R - 1) link times. About twice as many micro-batches are live, 2(R - r) - 1. Where ranks hold several stages, list scheduling decides the order, with the
    limit of 1F1B raised likewise.
    """
    if forwards_per_hop < 1:
        raise PlanError(f"forwards_per_hop is {forwards_per_hop}; it must be 1 (as 1f1b) or more; the paper's is 2")
    c = chain(layout)
    if not c.is_one:
        return c.rows(greedy(c, live=ahead(c, 2 * forwards_per_hop)))
    return c.rows([one_stage(c, r, warmup=forwards_per_hop * (c.num_ranks - 1 - r)) for r in range(c.num_ranks)])


FAMILY = Family(
    name="eager-1f1b",
    source="Zhuang et al., arXiv 2211.05322",
    rows=rows,
    stage_map="any",
    parameters={"forwards_per_hop": 2},
)
