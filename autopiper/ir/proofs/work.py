"""Compute streams: each pass of each stage once, in the order of the row; and how many passes are alive at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from autopiper.ir.proofs.view import View
from autopiper.plan.actions import (
    COMPUTE_KINDS,
    COMPUTE_STREAM,
    GATHER_KINDS,
    LOCAL_KINDS,
    RELEASE_KINDS,
    TRANSFER_KINDS,
    Action,
)


def shapes(view: View) -> list[str]:
    """Check each action by itself: it says what its kind needs and no more, and its stream is one for its kind."""
    faults = []
    several = len({s.pipeline for s in view.stages}) > 1
    for stream, actions in view.program.streams.items():
        channels: set[tuple[object, ...]] = set()
        messages = any(action.kind in TRANSFER_KINDS for action in actions)
        for action in actions:
            if action.stream != stream:
                faults.append(f"{view.name}: {action.text} says stream '{action.stream}', but lies on '{stream}'")
            if (action.kind in COMPUTE_KINDS or action.kind in LOCAL_KINDS) != (stream == COMPUTE_STREAM):
                faults.append(f"{view.name}: {action.text} cannot be on stream '{stream}'")
            if messages:
                channels.add((action.kind, action.pipeline, action.stage, action.peer))
            faults += [f"{view.name}: {action.text} {why}" for why in _shape(view, action, several)]
        if len(channels) > 1:
            faults.append(f"{view.name}: stream '{stream}' is no channel: it carries {len(channels)} kinds of messages")
    return faults or [f"{view.name}: {a.text} {why}" for a in view.actions for why in _waits(view, a)]


def _shape(view: View, action: Action, several: bool) -> Iterable[str]:
    kind = action.kind
    passing = kind not in ("LOSS", "NORM", "UPDATE", "REDUCE_GRAD", *GATHER_KINDS, *RELEASE_KINDS)
    if passing:
        if (action.pipeline, action.stage) not in {(s.pipeline, s.index) for s in view.stages}:
            yield "is of a stage that this Program does not hold"
        elif action.micro_batch is None or not 0 <= action.micro_batch < len(
            view.graph.stage(action.pipeline, action.stage or 0).slices
        ):
            yield "is of a micro-batch that its pipeline does not have"
        elif not 0 <= action.segment < view.graph.stage(action.pipeline, action.stage or 0).num_segments:
            yield "is of a segment that its stage does not have"
        if action.prefix != (f"p{action.pipeline}:" if several else ""):
            yield f"has the prefix '{action.prefix}'"
        if action.gradient_block is not None or action.bucket is not None:
            yield "names a gradient block"
    else:
        blocks = view.graph.gradient_blocks
        if (action.stage, action.pipeline, action.prefix) != (None, 0, ""):
            yield "names a stage"
        whole = kind in ("LOSS", "NORM")
        if whole != (action.gradient_block is None) or (whole or kind == "UPDATE") != (action.bucket is None):
            yield "does not name its gradient block and bucket as it must"
        elif not whole and not (0 <= (action.gradient_block or 0) < len(blocks)):
            yield "is of a gradient block that does not exist"
        elif not 0 <= (action.bucket or 0) < (1 if whole else len(blocks[action.gradient_block or 0].buckets)):
            yield "is of a bucket that does not exist"
        if kind in ("LOSS", "NORM", "UPDATE", "UNSHARD") and action.micro_batch is not None:
            yield "names a micro-batch"
        elif action.micro_batch is None and (kind in RELEASE_KINDS or kind.startswith("UNSHARD_")):
            yield "names no micro-batch"
    transfer = kind in TRANSFER_KINDS
    if transfer != (action.peer is not None) or transfer != (action.samples is not None):
        yield "does not name peer and samples as it must"
    if action.segment and (not passing or transfer):
        yield "names a segment"


def _waits(view: View, action: Action) -> Iterable[str]:
    """A wait for a block is for a backward that passes it."""
    for wait in action.waits:
        source = view.at.get(wait.action)
        if wait.block is not None and source is not None and view.actions[source].kind in COMPUTE_KINDS:
            low, high = view.halves(view.actions[source])
            if (
                view.actions[source].kind not in ("B", "W")
                or not low <= 2 * wait.block + 1
                or not 2 * wait.block < high
            ):
                yield f"waits for {wait.text}, and {wait.action} does not pass block {wait.block} backward"
        elif wait.block is not None and source is not None:
            yield f"waits for {wait.text}, and {wait.action} is no backward"


def work(view: View) -> list[str]:
    """Check a compute stream: what the row of the device group says, in its order, for the samples of this member."""
    faults: list[str] = []
    found = {key: dict(segments) for key, segments in view.compute.items()}
    kinds: dict[tuple[int, int, int], list[str]] = {}
    latest = -1
    for group in view.row.groups:
        earlier = latest
        for it in group:
            kinds.setdefault((it.pipeline, it.stage, it.micro_batch), []).append(it.kind)
            key = (it.pipeline, it.stage, it.kind, it.micro_batch)
            stage = view.graph.stage(it.pipeline, it.stage)
            if not view.samples(stage, it.micro_batch):
                continue
            segments = found.pop(key, {})
            wanted = list(range(stage.num_segments)) if it.kind != "W" else [0]
            order = sorted(segments, key=lambda k: segments[k])
            if order != (wanted if it.kind == "F" else wanted[::-1]) and segments:
                faults.append(
                    f"{view.name}: segments of {it.text} come as {order}; F goes up through {wanted}, the rest down"
                )
            steps = [view.position[n] for n in segments.values()]
            if steps and min(steps) < earlier:
                faults.append(f"{view.name}: {it.text} comes earlier than the order of its device group says")
            latest = max([latest, *steps])
    for stage in view.stages:
        for mb in range(len(stage.slices)):
            row = kinds.pop((stage.pipeline, stage.index, mb), [])
            faults += _micro_batch(view, stage.pipeline, stage.index, mb, row)
    for key in found:
        for number in found[key].values():
            faults.append(f"{view.name}: {view.actions[number].text} is not in the order of its device group")
    return faults


def _micro_batch(view: View, pipeline: int, stage: int, mb: int, row: Sequence[str]) -> list[str]:
    """Check that a micro-batch goes forward, then backward, once, where this member has samples of it."""
    name = f"{view.name}: micro-batch {mb}" + (f" of p{pipeline}.s{stage}" if len(view.stages) > 1 else "")
    expected = 1 if view.samples(view.graph.stage(pipeline, stage), mb) else 0
    of = {kind: view.compute.get((pipeline, stage, kind, mb), {}) for kind in COMPUTE_KINDS}
    count = {kind: int(bool(found)) for kind, found in of.items()}
    if count["F"] != expected or count["B"] + count["I"] != expected or count["I"] != count["W"]:
        have = ", ".join(f"{count[k]} {k}" for k in "FBIW")
        return [f"{name} has {have}; expected {expected} F and {expected} B (or I and W)"]
    steps = [[view.position[n] for n in of[kind].values()] for kind in row if of.get(kind)]
    if sorted(row) not in (["B", "F"], ["F", "I", "W"]):
        return [f"{name} has {', '.join(row) or 'nothing'} in the order of its device group"]
    order = [[view.position[n] for n in of[kind].values()] for kind in ("F", "I", "B", "W") if of[kind]]
    if any(max(a) > min(b) for a, b in pairwise(order)) or len(steps) != len(order):
        return [f"{name} goes backward before forward, or W before I"]
    wanted = set(range(view.graph.stage(pipeline, stage).num_segments))
    for kind, found in of.items():
        if found and set(found) != (wanted if kind != "W" else {0}):
            return [f"{name} has segments {sorted(found)} of {kind}; expected {sorted(wanted)}"]
    return []


def alive(view: View) -> int:
    """Return the most passes that are alive at once: forward begun, B (or W) not over."""
    first = {n: 1 for key, found in view.compute.items() if key[2] == "F" for n in [min(found.values())]}
    last = {n: -1 for key, found in view.compute.items() if key[2] in ("B", "W") for n in [max(found.values())]}
    most = now = 0
    for _, change in sorted((first | last).items()):
        now += change
        most = max(most, now)
    return most
