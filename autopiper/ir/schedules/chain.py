"""Chain: the layout of one pipeline as a family reads it, its device groups in the order of their first stages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autopiper._data import data
from autopiper.errors import PlanError
from autopiper.ir.schedules.layout import Layout, Rows
from autopiper.plan.passes import Pass, PassGroup


@data
class Chain:
    """One pipeline: which rank holds which stages. A rank here is a device group's place by its first stage."""

    pipeline: int
    num_stages: int
    num_micro_batches: int
    held: tuple[tuple[int, ...], ...]
    """`held[rank]`: its stages, rising."""
    places: tuple[int, ...]
    """`places[rank]`: where that device group stands in the layout."""

    @property
    def num_ranks(self) -> int:
        """Device groups."""
        return len(self.held)

    @property
    def is_one(self) -> bool:
        """Whether each rank holds one stage."""
        return self.num_ranks == self.num_stages

    @property
    def is_loop(self) -> bool:
        """Whether rank r holds r, r + R, r + 2R, …, the same number for each."""
        return self.num_stages % self.num_ranks == 0 and all(
            stages == tuple(range(r, self.num_stages, self.num_ranks)) for r, stages in enumerate(self.held)
        )

    def make(self, kind: str, stage: int, micro_batch: int) -> Pass:
        """Return a pass of this pipeline."""
        return Pass(kind=kind, stage=stage, micro_batch=micro_batch, pipeline=self.pipeline)

    def rows(self, ranks: Sequence[Iterable[PassGroup]]) -> Rows:
        """Put one row per rank into the layout's order."""
        out: Rows = [[] for _ in ranks]
        for place, row in zip(self.places, ranks, strict=True):
            out[place] = list(row)
        return out


def chains(layout: Layout) -> list[Chain]:
    """Read a layout: one Chain per pipeline, in the order of their indices.

    Raises PlanError where a stage is held by no device group or by several, a device group holds none, or a count is
    not 1 or more.
    """
    holders: dict[tuple[int, int], list[int]] = {}
    for place, stages in enumerate(layout.holds):
        if not stages:
            raise PlanError(f"device group {place} of the layout holds no stage")
        for key in stages:
            holders.setdefault(key, []).append(place)
    out = []
    for pipeline, num_stages in sorted(layout.num_stages.items()):
        count = layout.num_micro_batches.get(pipeline, 0)
        if num_stages < 1 or count < 1:
            raise PlanError(
                f"pipeline {pipeline} has {num_stages} stages and {count} micro-batches; each must be 1 or more"
            )
        places: dict[int, list[int]] = {}
        for stage in range(num_stages):
            found = holders.pop((pipeline, stage), [])
            if len(found) != 1:
                where = f"{len(found)} device groups ({', '.join(map(str, found))})" if found else "no device group"
                raise PlanError(f"stage {stage} of pipeline {pipeline} is held by {where}; it must be exactly one")
            places.setdefault(found[0], []).append(stage)  # places come in the order of their first stages
        out.append(
            Chain(
                pipeline=pipeline,
                num_stages=num_stages,
                num_micro_batches=count,
                held=tuple(tuple(stages) for stages in places.values()),
                places=tuple(places),
            )
        )
    if holders:
        pipeline, stage = min(holders)
        raise PlanError(
            f"device group {holders[pipeline, stage][0]} holds stage {stage} of pipeline {pipeline}, which is not ordered here; "
            f"ordered: {', '.join(f'pipeline {c.pipeline} with stages 0..{c.num_stages - 1}' for c in out)}"
        )
    return out


def chain(layout: Layout) -> Chain:
    """Read the layout of a single pipeline. Raises PlanError as `chains` does, and where there are several."""
    found = chains(layout)
    if len(found) != 1:
        raise PlanError(f"the layout has {len(found)} pipelines; this family orders one at a time")
    return found[0]
