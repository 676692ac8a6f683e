"""Schedule families: one file each, a function from a stage's position to the order of its passes.

A new family is one file with `order(stage, num_stages, num_micro_batches)` and one line in `FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Callable

from autopiper.errors import PlanError, nearest
from autopiper.ir.graph import Pass
from autopiper.ir.schedules import gpipe, one_f_one_b

FAMILIES: dict[str, Callable[[int, int, int], list[Pass]]] = {
    "gpipe": gpipe.order,
    "1f1b": one_f_one_b.order,
}


def order(family: str, *, stage: int, num_stages: int, num_micro_batches: int) -> tuple[Pass, ...]:
    """Return the passes of one stage in the order of the named family. Raises PlanError for an unknown family."""
    if family not in FAMILIES:
        raise PlanError(
            f"schedule '{family}' is not one that can be planned yet{nearest(family, FAMILIES)}; "
            f"allowed: {', '.join(FAMILIES)}"
        )
    return tuple(FAMILIES[family](stage, num_stages, num_micro_batches))
