"""Damage done to Programs at random: in one action, in a wait, or alike on all ranks that share a message or collective."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from autopiper.ir.graph import TrainingGraph
from autopiper.plan.actions import KINDS, Action, Program, Wait

Rows = list[dict[str, list[Action]]]
"""Per Program: stream -> its actions."""
Spot = tuple[int, str, int]
"""(Program, stream, position)"""
Mutation = Callable[[random.Random, TrainingGraph, Rows], str | None]
"""Changes the rows; says what it did, or None where there was nothing to do."""


def _spots(rows: Rows, wanted: Callable[[Action], object] = lambda _: True) -> list[Spot]:
    return [
        (n, s, i)
        for n, streams in enumerate(rows)
        for s, row in streams.items()
        for i, a in enumerate(row)
        if wanted(a)
    ]


def _pick(rng: random.Random, rows: Rows, wanted: Callable[[Action], object] = lambda _: True) -> Spot | None:
    spots = _spots(rows, wanted)
    if not spots:
        return None
    if rng.random() < 0.5:  # by kind, as most actions are of few kinds
        kind = rng.choice(sorted({rows[n][s][i].kind for n, s, i in spots}))
        spots = [(n, s, i) for n, s, i in spots if rows[n][s][i].kind == kind]
    return rng.choice(spots)


def drop(rng: random.Random, graph: TrainingGraph, rows: Rows) -> str | None:
    n, s, i = _pick(rng, rows) or (0, "", 0)
    return f"drop {rows[n][s].pop(i).text} of {n}"


def forget(rng: random.Random, graph: TrainingGraph, rows: Rows) -> str | None:
    """Drop an action and every wait for it: what is left hangs together."""
    n, s, i = _pick(rng, rows) or (0, "", 0)
    text = rows[n][s].pop(i).text
    _without_waits(rows[n], text)
    return f"forget {text} of {n}"


def _without_waits(streams: dict[str, list[Action]], text: str) -> None:
    for row in streams.values():
        row[:] = [replace(a, waits=tuple(w for w in a.waits if w.action != text)) for a in row]


def duplicate(rng: random.Random, graph: TrainingGraph, rows: Rows) -> str | None:
    n, s, i = _pick(rng, rows) or (0, "", 0)
    action = rows[n][s][i]
    rows[n][s].insert(rng.randint(0, len(rows[n][s])), action)
    return f"duplicate {action.text} of {n}"


def swap(rng: random.Random, graph: TrainingGraph, rows: Rows) -> str | None:
    n, s, i = _pick(rng, rows) or (0, "", 0)
    row = rows[n][s]
    if len(row) < 2:
        return None
    j = rng.choice([k for k in (i - 1, i + 1, rng.randrange(len(row))) if 0 <= k < len(row)])
    row[i], row[j] = row[j], row[i]
    return f"swap {row[i].text} and {row[j].text} of {n}"


def swap_without_waits(rng: random.Random, graph: TrainingGraph, rows: Rows) -> str | None:
    """Swap two actions but not what they wait for: two names in a row of a schedule are exchanged."""
    n, s, i = _pick(rng, rows) or (0, "", 0)
    row = rows[n][s]
    j = rng.randrange(len(row))
    row[i], row[j] = replace(row[j], waits=row[i].waits), replace(row[i], waits=row[j].waits)
    return f"exchange {row[i].text} and {row[j].text} of {n}"


def redirect(rng: random.Random, graph: TrainingGraph, rows: Rows) -> str | None:
    """Change one field of an action, and in half of the cases what waits for it along with it."""
    n, s, i = _pick(rng, rows) or (0, "", 0)
    action = rows[n][s][i]
    near = rng.choice((-1, 1, rng.randrange(4)))
    low, high = action.samples or (0, 1)
    changed = rng.choice((
        {"micro_batch": max(0, (action.micro_batch or 0) + near)}, {"stage": max(0, (action.stage or 0) + near)},
        {"peer": max(0, (action.peer or 0) + near)}, {"segment": max(0, action.segment + near)},
        {"samples": (max(0, low + near), high)}, {"samples": (low, max(low, high + near))}, {"samples": (low + 1, high + 1)},
        {"gradient_block": max(0, (action.gradient_block or 0) + near)}, {"bucket": max(0, (action.bucket or 0) + near)},
        {"pipeline": 1 - action.pipeline}, {"prefix": rng.choice(("", "p0:", "p1:"))}, {"kind": rng.choice(KINDS)},
        {"micro_batch": None},
    ))  # fmt: skip
    new = replace(action, **changed)
    rows[n][s][i] = new
    if rng.random() < 0.5:
        _rename(rows[n], action.text, new.text)
    return f"redirect {action.text} of {n}: {changed}"


def _rename(streams: dict[str, list[Action]], old: str, new: str) -> None:
    for row in streams.values():
        row[:] = [
            replace(a, waits=tuple(replace(w, action=new) if w.action == old else w for w in a.waits)) for a in row
        ]


def move(rng: random.Random, graph: TrainingGraph, rows: Rows) -> str | None:
    """Put an action on another stream, old or new, or at another place of its own."""
    n, s, i = _pick(rng, rows) or (0, "", 0)
    action = rows[n][s].pop(i)
    to = rng.choice([*rows[n], s, "elsewhere"])
    row = rows[n].setdefault(to, [])
    row.insert(rng.randint(0, len(row)), replace(action, stream=to))
    return f"move {action.text} of {n} to {to}"


def drop_wait(rng: random.Random, graph: TrainingGraph, rows: Rows) -> str | None:
    spot = _pick(rng, rows, lambda a: a.waits)
    if spot is None:
        return None
    n, s, i = spot
    action = rows[n][s][i]
    k = rng.randrange(len(action.waits))
    rows[n][s][i] = replace(action, waits=action.waits[:k] + action.waits[k + 1 :])
    return f"{action.text} of {n} does not wait for {action.waits[k].text}"


def change_wait(rng: random.Random, graph: TrainingGraph, rows: Rows) -> str | None:
    spot = _pick(rng, rows, lambda a: a.waits)
    if spot is None:
        return None
    n, s, i = spot
    action = rows[n][s][i]
    k = rng.randrange(len(action.waits))
    wait = action.waits[k]
    others = [a.text for row in rows[n].values() for a in row]
    if rng.random() < 0.5:
        near = [w for w in others if w[:2] == wait.action[:2]] or others
        new = replace(wait, action=rng.choice(near))
    else:
        new = Wait(action=wait.action, block=rng.choice((None, *range(len(graph.model.blocks)))))
    rows[n][s][i] = replace(action, waits=(*action.waits[:k], new, *action.waits[k + 1 :]))
    return f"{action.text} of {n} waits for {new.text} in place of {wait.text}"


def add_wait(rng: random.Random, graph: TrainingGraph, rows: Rows) -> str | None:
    n, s, i = _pick(rng, rows) or (0, "", 0)
    action = rows[n][s][i]
    other = rng.choice([a.text for row in rows[n].values() for a in row])
    rows[n][s][i] = replace(action, waits=(*action.waits, Wait(action=other)))
    return f"{action.text} of {n} waits for {other} too"


def _same(rng: random.Random, rows: Rows) -> tuple[Action, list[Spot]] | None:
    """An action of a channel or communicator, and all that its name and stream are shared with."""
    spot = _pick(rng, rows, lambda a: a.kind not in ("F", "B", "I", "W", "UPDATE") and not a.kind.startswith("RESHARD"))
    if spot is None:
        return None
    n, s, i = spot
    action = rows[n][s][i]
    if action.peer is None:
        return action, _spots(rows, lambda a: a.text == action.text and a.stream == s)
    far = "RECV" if action.kind.startswith("SEND") else "SEND"
    here = sum(a.kind == action.kind for a in rows[n][s][:i])
    ends = _spots(rows, lambda a: a.stream == s and a.kind.startswith(far))
    return action, [spot, *(e for k, e in enumerate(ends) if k == here)]


def forget_everywhere(rng: random.Random, graph: TrainingGraph, rows: Rows) -> str | None:
    """Drop both ends of a message, or a collective of all its ranks, and every wait for them."""
    found = _same(rng, rows)
    if found is None:
        return None
    for n, s, i in sorted(found[1], reverse=True):
        _without_waits(rows[n], rows[n][s].pop(i).text)
    return f"forget {found[0].text} everywhere"


def swap_everywhere(rng: random.Random, graph: TrainingGraph, rows: Rows) -> str | None:
    """Swap neighbours on a stream, alike on all ranks."""
    found = _same(rng, rows)
    if found is None:
        return None
    for n, s, i in found[1]:
        row = rows[n][s]
        if i + 1 < len(row):
            row[i], row[i + 1] = row[i + 1], row[i]
    return f"swap {found[0].text} with the next one everywhere"


def move_everywhere(rng: random.Random, graph: TrainingGraph, rows: Rows) -> str | None:
    """Give a message or collective another stream, alike on all ranks."""
    found = _same(rng, rows)
    if found is None:
        return None
    to = rng.choice(("elsewhere", *rows[found[1][0][0]]))
    for n, s, i in sorted(found[1], reverse=True):
        action = rows[n][s].pop(i)
        row = rows[n].setdefault(to, [])
        row.insert(min(i, len(row)), replace(action, stream=to))
    return f"move {found[0].text} to {to} everywhere"


def patient_everywhere(rng: random.Random, graph: TrainingGraph, rows: Rows) -> str | None:
    """All ends of a message or collective lose all their waits."""
    found = _same(rng, rows)
    if found is None:
        return None
    for n, s, i in found[1]:
        rows[n][s][i] = replace(rows[n][s][i], waits=())
    return f"{found[0].text} waits for nothing everywhere"


def redirect_everywhere(rng: random.Random, graph: TrainingGraph, rows: Rows) -> str | None:
    """A collective changes its micro-batch or bucket, alike on all ranks, with what waits for it."""
    found = _same(rng, rows)
    if found is None or found[0].peer is not None:
        return None
    action = found[0]
    field = rng.choice(("micro_batch", "bucket", "segment", "kind"))
    value: object = (
        max(0, (getattr(action, field) or 0) + rng.choice((-1, 1))) if field != "kind" else rng.choice(KINDS)
    )
    for n, s, i in found[1]:
        new = replace(rows[n][s][i], **{field: value})  # type: ignore[arg-type]
        _rename(rows[n], rows[n][s][i].text, new.text)
        rows[n][s][i] = new
    return f"{action.text} has {field} {value} everywhere"


MUTATIONS: tuple[Mutation, ...] = (
    drop, forget, duplicate, swap, swap_without_waits, redirect, redirect, move, drop_wait, drop_wait, change_wait,
    change_wait, add_wait, forget_everywhere, swap_everywhere, move_everywhere, patient_everywhere, redirect_everywhere,
)  # fmt: skip


def mutate(rng: random.Random, graph: TrainingGraph, programs: Sequence[Program]) -> tuple[str, list[Program]]:
    """Damage Programs once, or twice; return what was done and the Programs."""
    rows = [{s: list(row) for s, row in p.streams.items()} for p in programs]
    done: list[str] = []
    while not done or (len(done) < 3 and rng.random() < 0.1):
        said = rng.choice(MUTATIONS)(rng, graph, rows)
        done += [said] if said is not None else []
    new = [
        replace(p, streams={s: tuple(row) for s, row in streams.items() if row})
        for p, streams in zip(programs, rows, strict=True)
    ]
    return "; ".join(done), new
