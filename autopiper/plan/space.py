"""Space: what a search may choose, as data. Exporters publish what they can carry as a Space."""

from __future__ import annotations

from autopiper._data import data, require_fields
from autopiper.errors import PlanError, nearest
from autopiper.model.spec import RECOMPUTE_CHOICES
from autopiper.plan.strategy import DEFAULT_BUCKET_BYTES

SCHEDULES = ("gpipe", "1f1b")
"""Families that the search of this version chooses from; a strategy by hand may use any of `ir.schedules`."""


@data
class Space:
    """Limits of a search; the defaults allow everything that this version can plan."""

    schedules: tuple[str, ...] = SCHEDULES
    micro_batch_sizes: tuple[int, ...] = (1, 2, 4, 8)
    """Samples of one micro-batch per data-parallel member."""
    tensor_parallel_sizes: tuple[int, ...] | None = None
    """None = every power of two that fits a node and divides the model."""
    recompute: tuple[str, ...] = ("none", "full")
    min_pipelines: int = 1
    max_pipelines: int | None = None
    """Different pipelines that train together; replicas with equal cuts count once."""
    max_stages: int | None = None
    """Stages of one pipeline."""
    equal_pipelines: bool = False
    """All replicas alike in cuts, degrees and share: the classic data parallelism."""
    equal_stages: bool = False
    """Blocks divided as evenly as contiguous stages allow, as a uniform 3D layout does."""
    devices: tuple[int, ...] | None = None
    """Device ids that may be used; None = all."""
    bucket_bytes: int = DEFAULT_BUCKET_BYTES

    def __post_init__(self) -> None:
        require_fields(self, PlanError, "space.")
        for field, allowed in (("schedules", SCHEDULES), ("recompute", RECOMPUTE_CHOICES)):
            values = getattr(self, field)
            if not values:
                raise PlanError(f"space.{field} is empty; allowed: {', '.join(allowed)}")
            for value in values:
                if value not in allowed:
                    raise PlanError(
                        f"space.{field} names '{value}'{nearest(value, allowed)}; allowed: {', '.join(allowed)}"
                    )
        for field in ("micro_batch_sizes", "tensor_parallel_sizes"):
            sizes = getattr(self, field)
            if sizes is not None and (not sizes or min(sizes) < 1):
                raise PlanError(f"space.{field} is {sizes}; give sizes of 1 or more")
        if self.min_pipelines < 1 or (self.max_pipelines is not None and self.max_pipelines < self.min_pipelines):
            raise PlanError(f"space allows {self.min_pipelines}..{self.max_pipelines} pipelines; the range is empty")
        if self.max_stages is not None and self.max_stages < 1:
            raise PlanError(f"space.max_stages is {self.max_stages}; it must be 1 or more")
        if self.bucket_bytes < 1:
            raise PlanError(f"space.bucket_bytes is {self.bucket_bytes}; it must be 1 or more")
