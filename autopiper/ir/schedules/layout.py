"""What a schedule family is given (Layout) and what it says of itself (Family)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any

from autopiper._data import data
from autopiper.plan.passes import PassGroup

Rows = list[list[PassGroup]]
"""One row per device group of the layout: its groups of passes in order."""


@data
class Layout:
    """What is to be ordered: which device group holds which stages, and how many micro-batches come."""

    holds: tuple[tuple[tuple[int, int], ...], ...]
    """For each device group the (pipeline, stage) pairs that it holds, rising."""
    num_stages: Mapping[int, int]
    """Stages of each pipeline that is to be ordered, by its index."""
    num_micro_batches: Mapping[int, int]
    """Micro-batches of each pipeline, by its index."""


@data
class Family:
    """A named generator of orders."""

    name: str
    source: str
    """The paper."""
    rows: Callable[..., Rows]
    """`rows(layout, **parameters)`: one row per device group, in the layout's order. Raises PlanError where the family
    does not allow the layout, with the sum worked out."""
    stage_map: str
    """The map for which it is known; `rows` decides which others it allows. Which stage goes where: "one" stage per device group, "loop" (r, r+R, …), "v" (r and 2R-1-r), "opposite" (two
    pipelines in opposite directions), "any"."""
    num_pipelines: int = 1
    """Pipelines that one call orders together (dualpipe: 2)."""
    splits_backward: bool = False
    """Whether it uses I and W."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """Names and defaults of its parameters."""
