"""The V: rank r holds stages r and 2R - 1 - r, as zb-v and dualpipe-v demand."""

from __future__ import annotations

from autopiper.errors import PlanError
from autopiper.ir.schedules.chain import Chain


def require_v(c: Chain) -> Chain:
    """Return the chain unchanged. Raises PlanError, naming what each device group holds and should hold, if it is no V."""
    wanted = tuple((r, 2 * c.num_ranks - 1 - r) for r in range(c.num_ranks))
    if c.held != wanted:
        wrong = [
            f"device group {place} holds {', '.join(map(str, held))}" + f" instead of {want[0]}, {want[1]}"
            for place, held, want in zip(c.places, c.held, wanted, strict=True)
            if held != want
        ]
        few = f"; {c.num_ranks} device groups take {2 * c.num_ranks} stages, not {c.num_stages}"
        raise PlanError(
            f"its stages lie in a V, r and 2R - 1 - r on device group r of {c.num_ranks}; but "
            + "; ".join(wrong[:3])
            + ("; …" if len(wrong) > 3 else "")
            + (few if c.num_stages != 2 * c.num_ranks else "")
        )
    return c
