"""Data: what each pass needs is there when it starts, and what is sent is made; between stages and inside of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autopiper.ir.graph import GraphStage
from autopiper.ir.proofs.view import BACKWARD, View
from autopiper.ir.regions import RECEIVE_DEPTH
from autopiper.plan.actions import TRANSFER_KINDS

Region = tuple[int, int]


def messages(view: View) -> list[str]:
    """Check that what each pass needs of a neighbour arrives whole before it, and is sent only once it is made."""
    faults: list[str] = []
    arriving: dict[tuple[int, int, str, int], list[int]] = {}
    for number, action in enumerate(view.actions):
        if action.kind in TRANSFER_KINDS:
            key = (action.pipeline, action.stage or 0, action.kind, action.micro_batch or 0)
            arriving.setdefault(key, []).append(number)
    users: dict[int, int] = {}
    """Receive -> the action that reads it"""
    ranges: dict[tuple[int, ...], list[Region]] = {}
    for stage in view.stages:
        pipe = view.graph.pipelines[stage.pipeline]
        for kind in "FB":
            at = stage.index - (1 if kind == "F" else -1)
            other = pipe.stages[at] if 0 <= at < len(pipe.stages) else None
            for mb, row in enumerate(stage.slices):
                key = (stage.pipeline, stage.index, f"SEND_{kind}", mb)
                start, stop = _ranges(ranges, stage, mb)[view.member]
                faults += _sends(view, stage, kind, mb, (start, stop), arriving.get(key, ()))
                received = arriving.get((stage.pipeline, stage.index, f"RECV_{kind}", mb), [])
                if other is None or not row[view.member]:
                    faults += [f"{view.name}: {view.actions[n].text} is needed by no pass" for n in received]
                    continue
                user = _end(view, stage, kind, mb, first=True)
                if user is None:
                    continue  # said already
                sources = [(view.actions[n].samples or (0, 0), n) for n in received]
                there = _ranges(ranges, other, mb)
                for (low, high), n in sources:
                    peer = view.actions[n].peer or 0
                    here = other.members == stage.members and peer == view.member
                    if here or not 0 <= peer < len(there) or not there[peer][0] <= low < high <= there[peer][1]:
                        faults.append(
                            f"{view.name}: {view.actions[n].text} asks for what member {peer} does not have to send"
                        )
                    users[n] = user
                if other.members == stage.members:
                    low, high = max(start, there[view.member][0]), min(stop, there[view.member][1])
                    maker = _end(view, other, kind, mb, first=False) if low < high else None
                    sources += [] if maker is None else [((low, high), maker)]
                waited = sorted(region for region, n in sources if view.over(n, user))
                edges = [start, *(edge for region in waited for edge in region), stop]
                if any(edges[i] != edges[i + 1] for i in range(0, len(edges), 2)):
                    faults.append(
                        f"{view.name}: {view.actions[user].text} needs samples [{start}, {stop}) but waits for {waited}"
                    )
                elif len(waited) != len(sources):
                    faults.append(f"{view.name}: {view.actions[user].text} is sent samples twice")
    return [*faults, *_buffers(view, users)]


def _ranges(known: dict[tuple[int, ...], list[Region]], stage: GraphStage, mb: int) -> list[Region]:
    row = stage.slices[mb]
    if row not in known:
        known[row] = stage.ranges(mb)
    return known[row]


def _end(view: View, stage: GraphStage, kind: str, mb: int, *, first: bool) -> int | None:
    """Return the first or last action of a pass: F upwards, B or I downwards."""
    for each in ("F",) if kind == "F" else BACKWARD:
        segments = view.compute.get((stage.pipeline, stage.index, each, mb))
        if segments:
            return segments.get(0 if (kind == "F") == first else stage.num_segments - 1)
    return None


def _sends(view: View, stage: GraphStage, kind: str, mb: int, own: Region, sent: Sequence[int]) -> Iterator[str]:
    maker = _end(view, stage, kind, mb, first=False)
    for n in sent:
        low, high = view.actions[n].samples or (0, 0)
        if maker is None or not view.over(maker, n):
            yield f"{view.name}: {view.actions[n].text} does not wait for the pass that makes what it sends"
        if not own[0] <= low < high <= own[1]:
            yield f"{view.name}: {view.actions[n].text} sends what it does not have; it has samples [{own[0]}, {own[1]})"


def _buffers(view: View, users: dict[int, int]) -> Iterator[str]:
    """Check that a message is not received into a buffer whose message is still to be read.

    A channel has `RECEIVE_DEPTH` buffers in turn; a message gets one of its own where the one in turn is read only
    after this or a later message.
    """
    rows: dict[int, list[int]] = {}
    for n in users:
        rows.setdefault(view.stream[n], []).append(n)
    for row in rows.values():
        row.sort()
        soonest = [view.position[users[n]] for n in row]
        for at in range(len(row) - 2, -1, -1):
            soonest[at] = min(soonest[at], soonest[at + 1])
        for at in range(RECEIVE_DEPTH, len(row)):
            reader = users[row[at - RECEIVE_DEPTH]]
            if view.position[reader] < soonest[at] and not view.over(reader, row[at]):
                yield (
                    f"{view.name}: {view.actions[row[at]].text} may overwrite {view.actions[row[at - RECEIVE_DEPTH]].text} "
                    f"before {view.actions[reader].text} has read it"
                )


def exchanges(view: View) -> list[str]:
    """Check the all-to-alls of sharded experts: each between its two segments, and every member of the group in each."""
    faults = []
    left = {text: n for text, n in view.at.items() if view.actions[n].kind in ("A2A_F", "A2A_B")}
    for stage in view.stages:
        size = stage.expert_parallel_size
        group = view.member // size * size
        borders = [k + 1 for k, border in enumerate(stage.borders) if border.exchange is not None]
        for mb, row in enumerate(stage.slices) if borders else ():
            if not any(row[group : group + size]):
                continue
            if not row[view.member]:
                faults.append(
                    f"{view.name}: member {view.member} has no samples of micro-batch {mb}, but holds experts of {stage.tag} "
                    f"for members {group}..{group + size - 1}; give each of them at least one sample"
                )
            for kind in ("F", *BACKWARD):
                segments = view.compute.get((stage.pipeline, stage.index, kind, mb), {})
                if kind != "F" and not segments and (kind == "I" or row[view.member]):
                    continue
                for border in borders:
                    way = "A2A_F" if kind == "F" else "A2A_B"
                    n = _exchange(view, left, stage, way, mb, border)
                    if n is None:
                        faults.append(
                            f"{view.name}: {way} of micro-batch {mb} between segments {border - 1} and {border} of {stage.tag} is missing"
                        )
                        continue
                    below, above = segments.get(border - 1), segments.get(border)
                    before, after = (below, above) if kind == "F" else (above, below)
                    if before is not None and not view.over(before, n):
                        faults.append(
                            f"{view.name}: {view.actions[n].text} does not wait for {view.actions[before].text}"
                        )
                    if after is not None and not view.over(n, after):
                        faults.append(
                            f"{view.name}: {view.actions[after].text} does not wait for {view.actions[n].text}"
                        )
    return faults + [f"{view.name}: {text} is not its business" for text in left]


def _exchange(view: View, left: dict[str, int], stage: GraphStage, way: str, mb: int, border: int) -> int | None:
    prefix = f"p{stage.pipeline}:" if len({s.pipeline for s in view.stages}) > 1 else ""
    return left.pop(f"{prefix}{stage.index}.{border}{way}{mb}", None)
