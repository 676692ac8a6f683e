"""DualPipeV: DualPipe cut in half (DeepSeek-AI, arXiv 2412.19437, section 3.2.1; the cut: Sea AI Lab).

Rank r holds stage r of the way down and stage 2R - 1 - r of the way up, and works on both at once.
"""

from __future__ import annotations

from autopiper.errors import PlanError
from autopiper.ir.schedules.chain import chain
from autopiper.ir.schedules.layout import Family, Layout, Rows
from autopiper.ir.schedules.vee import require_v
from autopiper.ir.schedules.writer import Place, RowWriter
from autopiper.plan.passes import PassGroup


def row(rank: int, num_ranks: int, num_micro_batches: int, first: Place, second: Place) -> list[PassGroup]:
    """Return the row of a rank whose stages are `first` (0 in what follows) and `second` (1), in eight phases."""
    ahead, w = num_ranks - 1 - rank, RowWriter()
    for _ in range(2 * ahead):  # 1: F0
        w.add("F", first)
    for _ in range(rank + 1):  # 2: F0 F1
        w.add("F", first)
        w.add("F", second)
    for _ in range(ahead):  # 3: I1 W1 F1
        w.add("I", second)
        w.add_weight()
        w.add("F", second)
    for n in range(num_micro_batches - 2 * num_ranks + rank + 1):  # 4: F0 over B1, F1 over B0
        if n == 0 and rank == num_ranks - 1:  # apart: its neighbour waits for this F
            w.add("F", first)
            w.add("B", second)
        else:
            w.overlap(first, second)
        w.overlap(second, first)
    for _ in range(ahead):  # 5: B1, F1 over B0
        w.add("B", second)
        w.overlap(second, first)
    for n in range(2 * (rank + 1)):  # 6: B1 B0, the later half of them split
        w.add("B" if n <= rank else "I", first if n % 2 else second)
    for _ in range(ahead):  # 7: W I0
        w.add_weight()
        w.add("I", first)
    for _ in range(rank + 1):  # 8: W
        w.add_weight()
    return w.row


def rows(layout: Layout) -> Rows:
    """Bubble (S/2 - 1)(F&B + B - 3W) for S = 2R equal stages, F&B an overlapped pair; S + 1 passes are live on a rank.

    Raises PlanError for other maps than the V, and for fewer than 2R micro-batches.
    """
    c = require_v(chain(layout))
    R, M = c.num_ranks, c.num_micro_batches
    if 2 * R > M:
        raise PlanError(
            f"{M} micro-batches are fewer than the {2 * R} stages = 2 x {R} device groups; it takes at least {2 * R} "
            "(zb-v takes fewer)"
        )
    return c.rows([row(r, R, M, (c.pipeline, r), (c.pipeline, 2 * R - 1 - r)) for r in range(R)])


FAMILY = Family(
    name="dualpipe-v", source="DeepSeek-AI, arXiv 2412.19437", rows=rows, stage_map="v", splits_backward=True
)
