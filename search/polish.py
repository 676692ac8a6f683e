"""Polishing: small changes of a draft that estimates cannot judge, left to the simulator."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np

from autopiper.search.drafts import Draft, Piece, Workshop
from autopiper.search.layers import evaluate
from autopiper.search.proposals import HABITS
from autopiper.search.shapes import Shape


def neighbours(shop: Workshop, draft: Draft) -> list[Draft]:
    """Return drafts that differ from `draft` in one thing.

    One block moved over a border between stages; one micro-batch moved between pipelines; another micro-batch size or
    the reverse order of devices in one pipeline; another schedule; the other placement.
    """
    found = list(_moved_blocks(shop, draft)) + list(_moved_shares(shop, draft))
    shapes = [p.shape for p in draft.pieces]
    for p, shape in enumerate(shapes):
        for other in _other_shapes(shop, shape):
            changed = [*shapes[:p], other, *shapes[p + 1 :]]
            found += [d for d in [shop.draft(changed, draft.family, draft.choices, draft.habit)] if d]
    for family in shop.space.schedules:
        for habit in HABITS:
            if (family, habit) != (draft.family, draft.habit):
                found += [d for d in [shop.draft(shapes, family, draft.choices, habit)] if d]
    return found


def _moved_blocks(shop: Workshop, draft: Draft) -> Iterator[Draft]:
    if shop.space.equal_stages:
        return
    for p, piece in enumerate(draft.pieces):
        tables = [shop.tables.table(slot, draft.choices) for slot in piece.problem.stages]
        for border in range(1, len(piece.layers.cuts) - 1):
            for step in (-1, 1):
                cuts = list(piece.layers.cuts)
                cuts[border] += step
                spans = list(pairwise(cuts))
                if any(a >= b for a, b in spans):
                    continue
                if not all(np.isfinite(t.time_s[a, b]) for t, (a, b) in zip(tables, spans, strict=True)):
                    continue
                again = [t.recompute(a, b) for t, (a, b) in zip(tables, spans, strict=True)]
                layers = evaluate(piece.problem, cuts, again)
                yield _with(shop, draft, p, replace(piece, layers=layers))


def _moved_shares(shop: Workshop, draft: Draft) -> Iterator[Draft]:
    for p, giver in enumerate(draft.pieces):
        for q, taker in enumerate(draft.pieces):
            amount = max(giver.shape.quantum, taker.shape.quantum)
            live = taker.problem.stages[0].in_flight
            if p == q or giver.share <= amount or (draft.family == "gpipe" and live <= taker.micro_batches):
                continue
            pieces = list(draft.pieces)
            pieces[p] = replace(giver, share=giver.share - amount)
            pieces[q] = replace(taker, share=taker.share + amount)
            yield shop.finish(tuple(pieces), draft.family, draft.choices, draft.habit)


def _other_shapes(shop: Workshop, shape: Shape) -> Iterator[Shape]:
    if len(shape.types) > 1:
        yield Shape(
            types=shape.types[::-1],
            tensor_parallel_sizes=shape.tensor_parallel_sizes[::-1],
            slices=shape.slices[::-1],
        )
    alike = {n for row in shape.slices for n in row}
    if len(alike) == 1:
        now = alike.pop()
        sizes = sorted(set(shop.space.micro_batch_sizes))
        at = sizes.index(now) if now in sizes else -1
        for other in sizes[max(0, at - 1) : at + 2] if at >= 0 else []:
            if other != now and other * shape.replicas <= shop.batch:
                yield replace(shape, slices=tuple((other,) * len(row) for row in shape.slices))


def _with(shop: Workshop, draft: Draft, p: int, piece: Piece) -> Draft:
    pieces = (*draft.pieces[:p], piece, *draft.pieces[p + 1 :])
    return shop.finish(pieces, draft.family, draft.choices, draft.habit)
