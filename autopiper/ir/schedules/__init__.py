"""Schedule families: one file each, a function from a layout to the rows of its device groups.

A new family is one file with a `FAMILY` and its name in the list below; the tests that all families inherit then cover
it. The orders of a schedule called "searched" are written out in the strategy, so it has no generator here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autopiper._data import require
from autopiper.errors import PlanError, nearest
from autopiper.ir.schedules import dual_pipe, dual_pipe_v, eager, gpipe, interleaved, one_f_one_b, zb_h1, zb_h2, zb_v
from autopiper.ir.schedules.layout import Family, Layout, Rows

__all__ = ["FAMILIES", "Family", "Layout", "Rows", "rows"]

FAMILIES: dict[str, Family] = {
    each.FAMILY.name: each.FAMILY
    for each in (gpipe, one_f_one_b, interleaved, eager, zb_h1, zb_h2, zb_v, dual_pipe, dual_pipe_v)
}


def rows(family: str, layout: Layout, parameters: Mapping[str, Any]) -> Rows:
    """Return the orders of a named family, one row per device group of the layout, in the layout's order.

    Raises PlanError for an unknown family, for parameters that it does not take, and where it does not allow the
    layout; the message names the family.
    """
    if family == "searched":
        raise PlanError(
            "schedule 'searched' has no generator: its orders are written out, one row of passes per device group, "
            "order(filters=[...])"
        )
    if family not in FAMILIES:
        raise PlanError(
            f"schedule '{family}' is unknown{nearest(family, FAMILIES)}; allowed: {', '.join(FAMILIES)}; orders "
            "written out by hand or by a search ('searched') need no family: order(filters=[...])"
        )
    found = FAMILIES[family]
    takes = ", ".join(f"{name} (default {value})" for name, value in found.parameters.items()) or "none"
    for name, value in parameters.items():
        if name not in found.parameters:
            raise PlanError(
                f"schedule '{family}' has no parameter '{name}'{nearest(name, found.parameters)}; it takes: {takes}"
            )
        require(PlanError, f"parameter {name} of schedule '{family}'", value, type(found.parameters[name]))
    try:
        if len(layout.num_stages) != found.num_pipelines:
            one = "one pipeline" if found.num_pipelines == 1 else f"{found.num_pipelines} pipelines"
            raise PlanError(f"it orders {one} at a time, got {len(layout.num_stages)}")
        return found.rows(layout, **parameters)
    except PlanError as error:
        raise PlanError(f"schedule '{family}': {error}") from None
