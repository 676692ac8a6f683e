"""One forward, one backward: the core that 1F1B, eager, interleaved and the ZB-H families share."""

from __future__ import annotations

from collections.abc import Sequence

from autopiper.ir.schedules.chain import Chain
from autopiper.plan.passes import PassGroup


def alternate(
    c: Chain,
    forwards: Sequence[tuple[int, int]],
    backwards: Sequence[tuple[int, int]],
    *,
    warmup: int,
    delay: int | None = None,
) -> list[PassGroup]:
    """Return one rank's row: `warmup` forwards, then a forward and a backward in turn, then the backwards left over.

    `forwards` and `backwards` are its (stage, micro-batch) in order. `delay`: split the backwards, each W after the
    I that comes `delay` I after its own, the last ones at the end; None = fused.
    """
    warmup = min(warmup, len(forwards))
    back = "B" if delay is None else "I"
    out = [("F", *f) for f in forwards[:warmup]]
    for n, b in enumerate(backwards):
        out += [("F", *f) for f in forwards[warmup + n : warmup + n + 1]]
        out.append((back, *b))
        if delay is not None and n >= delay:
            out.append(("W", *backwards[n - delay]))
    if delay is not None:
        out += [("W", *b) for b in backwards[max(0, len(backwards) - delay) :]]
    return [(c.make(*each),) for each in out]


def one_stage(c: Chain, rank: int, *, warmup: int, delay: int | None = None) -> list[PassGroup]:
    """Return the row of a rank that holds one stage."""
    todo = [(rank, m) for m in range(c.num_micro_batches)]
    return alternate(c, todo, todo, warmup=warmup, delay=delay)
