"""DualPipe (DeepSeek-AI, DeepSeek-V3 technical report, arXiv 2412.19437, section 3.2.1): two pipelines that meet."""

from __future__ import annotations

from autopiper.errors import PlanError
from autopiper.ir.schedules.chain import chains
from autopiper.ir.schedules.dual_pipe_v import row
from autopiper.ir.schedules.layout import Family, Layout, Rows


def rows(layout: Layout) -> Rows:
    """Device group r of S holds stage r of the first pipeline and stage S - 1 - r of the second.

    Each half of the device groups works as DualPipeV does (its stage r of the one direction and stage S - 1 - r of the
    other), so bubble and live passes are the same, (S/2 - 1)(F&B + B - 3W) and S + 1; parameters are held twice.
    Raises PlanError for other maps, an odd S, unequal pipelines, and fewer than S micro-batches in each.
    """
    one, two = chains(layout)
    S, M = one.num_stages, one.num_micro_batches
    if (two.num_stages, two.num_micro_batches) != (S, M):
        raise PlanError(
            f"its two pipelines are alike; pipeline {one.pipeline} has {S} stages and {M} micro-batches, "
            f"pipeline {two.pipeline} {two.num_stages} and {two.num_micro_batches}"
        )
    if S % 2:
        raise PlanError(f"its pipelines meet in the middle of an even number of stages, got {S}; nearest: {S + 1}")
    for stage in range(S):
        (place,) = (i for i, held in enumerate(layout.holds) if (one.pipeline, stage) in held)
        wanted = ((one.pipeline, stage), (two.pipeline, S - 1 - stage))
        if tuple(sorted(layout.holds[place])) != tuple(sorted(wanted)):
            names = ["{} of pipeline {}".format(*reversed(each)) for each in layout.holds[place]]
            raise PlanError(
                f"its two pipelines run in opposite directions over the same device groups: the one that holds stage "
                f"{stage} of pipeline {one.pipeline} must hold stage {S - 1 - stage} of pipeline {two.pipeline} too, and "
                f"nothing else; device group {place} holds stage {', '.join(names)}"
            )
    if S > M:
        raise PlanError(f"{M} micro-batches in each direction are fewer than the {S} stages; it takes at least {S}")
    out: Rows = [[] for _ in layout.holds]
    for down, up in ((one, two), (two, one)):
        for r in range(S // 2):
            out[down.places[r]] = row(r, S // 2, M, (down.pipeline, r), (up.pipeline, S - 1 - r))
    return out


FAMILY = Family(
    name="dualpipe",
    source="DeepSeek-AI, arXiv 2412.19437",
    rows=rows,
    stage_map="opposite",
    num_pipelines=2,
    splits_backward=True,
)
