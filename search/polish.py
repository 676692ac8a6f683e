"""Polishing: small changes of a draft that estimates cannot judge, left to the simulator."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np

from autopiper.search.drafts import Draft, Piece, Workshop
from autopiper.search.layers import evaluate, solve_ilp
from autopiper.search.proposals import HABITS
from autopiper.search.shapes import Shape

LARGEST_ILP = 1500
"""Variables up to which the layer ILP is asked: about a second."""
NODES = 500
"""Branch-and-bound nodes after which it gives what it has; a count, so that results are reproducible."""


def neighbours(shop: Workshop, draft: Draft) -> Iterator[Draft]:
    """Yield drafts that differ from `draft` in one thing.

    One block moved over a border between stages; one micro-batch moved between pipelines; another micro-batch size or
    the reverse order of devices in one pipeline; another schedule; the other placement.
    """
    yield from _moved_blocks(shop, draft)
    yield from _moved_shares(shop, draft)
    shapes = [p.shape for p in draft.pieces]
    for p, shape in enumerate(shapes):
        for other in _other_shapes(shop, shape):
            changed = [*shapes[:p], other, *shapes[p + 1 :]]
            yield from (d for d in [shop.draft(changed, draft.family, draft.choices, draft.habit)] if d)
    for family in shop.space.schedules:
        for habit in HABITS:
            if (family, habit) != (draft.family, draft.habit):
                yield from (d for d in [shop.draft(shapes, family, draft.choices, habit)] if d)


def exact_cuts(shop: Workshop, draft: Draft) -> Draft | None:
    """Solve the layer problem of each pipeline by ILP; return the draft with those cuts, or None where none is better.

    The fast method is exact except where stages mix recompute choices, so only these are asked again.
    """
    if len(draft.choices) == 1 or shop.space.equal_stages:
        return None
    pieces = []
    for piece in draft.pieces:
        size = len(piece.problem.stages) * piece.problem.num_blocks * len(draft.choices)
        found = solve_ilp(piece.problem, gap=1e-3, node_limit=NODES) if size <= LARGEST_ILP else None
        count = piece.micro_batches
        better = found is not None and found.step_s(count) < piece.layers.step_s(count) * (1 - 1e-6)
        pieces.append(replace(piece, layers=found) if found is not None and better else piece)
    if all(new is old for new, old in zip(pieces, draft.pieces, strict=True)):
        return None
    return shop.finish(tuple(pieces), draft.family, draft.choices, draft.habit)


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
