"""GPipe (Huang et al., arXiv 1811.06965): all forwards, then all backwards, last micro-batch first."""

from __future__ import annotations

from autopiper.ir.schedules.chain import chain
from autopiper.ir.schedules.greedy import greedy
from autopiper.ir.schedules.layout import Family, Layout, Rows


def rows(layout: Layout) -> Rows:
    """Bubble of equal stages: (R - 1)(F + B); every micro-batch is live at once.

    Any map: the forwards in rounds of R micro-batches, the backwards in their mirror image, for what suits the one
    suits the other.
    """
    c = chain(layout)
    forwards = greedy(c, kinds="F", live=[c.num_micro_batches] * c.num_stages, round=c.num_ranks)
    return c.rows([row + [(c.make("B", p.stage, p.micro_batch),) for (p,) in reversed(row)] for row in forwards])


FAMILY = Family(name="gpipe", source="GPipe, Huang et al., arXiv 1811.06965", rows=rows, stage_map="any")
