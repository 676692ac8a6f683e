"""Verification: what is proved about a strategy's Programs before anything runs.

Complete (every micro-batch passes every block forward and backward once, every gradient is reduced over all its
holders once, every holder updates once), consistent (both ends of every channel agree), and free of deadlock (one
acyclic graph over all ranks in which a collective is one node and the order of streams and channels is edges).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from autopiper.errors import PlanError
from autopiper.ir.graph import TrainingGraph
from autopiper.ir.joint import Joint, join
from autopiper.plan.actions import COLLECTIVE_KINDS, COMPUTE_KINDS, COMPUTE_STREAM, Action, Place, Program


def verify(graph: TrainingGraph, programs: Sequence[Program], joint: Joint | None = None) -> list[str]:
    """Prove the Programs of a graph right; return what was proved, in words. Raises PlanError with every fault.

    `joint` = these Programs joined, where that has been done already.
    """
    joint = joint or join(programs)
    order, stuck = joint.topological
    faults = list(joint.faults)
    if stuck:
        shown = ", ".join(joint.nodes[n].text for n in stuck[:6])
        faults.append(f"deadlock: {len(stuck)} actions wait for each other in a circle, among them {shown}")
    faults += _places(graph, programs)
    faults += _work(graph, programs)
    for program in programs:
        if _known(graph, program.places[0]):
            by_text = {action.text: action for action in program.actions()}
            faults += _messages(graph, program, by_text)
            faults += _gradients(graph, program, by_text)
    if faults:
        raise PlanError("the Programs are wrong", faults)
    transfers = sum(n.kind == "TRANSFER" for n in joint.nodes)
    reductions = sum(n.kind == "REDUCE_GRAD" for n in joint.nodes)
    return [
        f"complete: {len(graph.pipelines)} pipelines process {graph.training.global_batch_size} samples; every "
        f"micro-batch passes all {len(graph.model.blocks)} blocks forward and backward once",
        f"no deadlock: {len(order)} actions over {len(programs)} Programs form one acyclic graph",
        f"both ends agree on all {transfers} messages, in the same order on every channel",
        f"every gradient is summed over all its holders once: {len(graph.gradient_blocks)} gradient blocks, "
        f"{reductions} bucket reductions; every holder updates its parameters once",
    ]


def _places(graph: TrainingGraph, programs: Sequence[Program]) -> list[str]:
    faults = []
    wanted = {p: s.members[p.member] for s in graph.stages() for p in s.places()}
    seen = Counter(place for program in programs for place in program.places)
    seen.update(replace(p, member=copy.member) for program in programs for copy in program.copies for p in program.places)
    for place, devices in wanted.items():
        if seen[place] != 1:
            faults.append(f"{place.text} has {seen[place]} Programs; it must have one")
        for program in programs:
            if place in program.places and program.devices != devices:
                faults.append(
                    f"{place.text} runs on devices {program.devices}, but the strategy places it on {devices}"
                )
    faults += [f"Program of {p.text}, which the strategy does not have" for p in seen if p not in wanted]
    used = graph.devices()
    for program in programs:
        for rank, device in zip(program.ranks, program.devices, strict=True):
            if rank >= len(used) or used[rank] != device:
                faults.append(
                    f"{program.places[0].text}: rank {rank} is not the position of device {device} among those used"
                )
    return faults


def _work(graph: TrainingGraph, programs: Sequence[Program]) -> list[str]:
    """Check the compute streams: each micro-batch of each member once forward, then once backward."""
    faults = []
    for program in programs:
        place = program.places[0]
        if not _known(graph, place):
            continue
        stage = graph.stage(place.pipeline, place.stage)
        at: dict[tuple[str, int], list[int]] = {}
        for position, action in enumerate(program.streams.get(COMPUTE_STREAM, ())):
            if action.kind == "UPDATE":
                continue
            if (action.pipeline, action.stage) != (place.pipeline, place.stage) or action.micro_batch is None:
                faults.append(f"{place.text}: {action.text} is of another stage")
            else:
                at.setdefault((action.kind, action.micro_batch), []).append(position)
        for mb, row in enumerate(stage.slices):
            expected = 1 if row[place.member] else 0
            found = {kind: at.pop((kind, mb), []) for kind in "FBIW"}
            fused, split = len(found["B"]), len(found["I"])
            if len(found["F"]) != expected or fused + split != expected or split != len(found["W"]):
                have = ", ".join(f"{len(found[k])} {k}" for k in "FBIW")
                faults.append(
                    f"{place.text}: micro-batch {mb} has {have}; expected {expected} F and {expected} B (or I and W)"
                )
            elif expected:
                steps = [found[k][0] for k in ("FB" if fused else "FIW")]
                if steps != sorted(steps):
                    faults.append(f"{place.text}: micro-batch {mb} goes backward before forward, or W before I")
        faults += [f"{place.text}: {mb} is not one of its micro-batches ({kind})" for kind, mb in at]
    return faults


def _known(graph: TrainingGraph, place: Place) -> bool:
    return place.pipeline < len(graph.pipelines) and place.stage < len(graph.pipelines[place.pipeline].stages)


def _messages(graph: TrainingGraph, program: Program, by_text: Mapping[str, Action]) -> list[str]:
    """Check that what each pass needs from a neighbour arrives whole before it, and is sent only once it is made."""
    faults = []
    place = program.places[0]
    stage = graph.stage(place.pipeline, place.stage)
    last = len(graph.pipelines[place.pipeline].stages) - 1
    ranges: dict[tuple[int, ...], tuple[int, int]] = {}
    for action in by_text.values():
        mb = action.micro_batch
        if mb is None or mb >= len(stage.slices):
            continue
        if action.kind in ("SEND_F", "SEND_B"):
            made = [by_text.get(w.action) for w in action.waits if w.block is None]
            kinds = ("F",) if action.kind == "SEND_F" else ("B", "I")
            if not any(m is not None and m.kind in kinds and m.micro_batch == mb for m in made):
                faults.append(f"{place.text}: {action.text} does not wait for the pass that makes what it sends")
        if action.kind not in ("F", "B", "I") or place.stage == (0 if action.kind == "F" else last):
            continue
        wanted = "RECV_F" if action.kind == "F" else "RECV_B"
        got = [by_text[w.action] for w in action.waits if w.action in by_text]
        regions = [r.samples for r in got if r.kind == wanted and r.micro_batch == mb and r.samples]
        row = stage.slices[mb]
        if row not in ranges:
            ranges[row] = stage.ranges(mb)[place.member]
        start, stop = ranges[row]
        if regions == [(start, stop)]:
            continue
        regions.sort()
        joined = [start, *(edge for region in regions for edge in region), stop]
        if any(joined[i] != joined[i + 1] for i in range(0, len(joined), 2)):
            faults.append(f"{place.text}: {action.text} needs samples [{start}, {stop}) but waits for {regions}")
    return faults


def _gradients(graph: TrainingGraph, program: Program, by_text: Mapping[str, Action]) -> list[str]:
    """Check reductions, updates, loss and norm of a Program against the gradient blocks of the graph."""
    faults = []
    place = program.places[0]
    stage = graph.stage(place.pipeline, place.stage)
    computes = [a for a in program.streams.get(COMPUTE_STREAM, ()) if a.kind in COMPUTE_KINDS]
    last = next((a.text for a in reversed(computes) if a.kind in ("B", "W")), None)
    expected = {"LOSS"} | ({"NORM"} if graph.training.needs_norm else set())
    for block in graph.gradient_blocks:
        if place not in block.holders:
            continue
        update, reduces = f"g{block.index}UPDATE", []
        if len(block.holders) > 1:
            reduces = [f"g{block.index}.{n}REDUCE_GRAD" for n in range(len(block.buckets))]
        expected |= {update, *reduces}
        for text, bucket in zip(reduces, block.buckets, strict=False):
            lowest = bucket.lowest_block
            if block.kind == "tied":
                lowest = min(b for b in block.blocks if stage.start <= b < stage.stop)
            waits = {w.action: w.block for w in by_text[text].waits} if text in by_text else {}
            if last and (last not in waits or (waits[last] is not None and waits[last] > lowest)):  # type: ignore[operator]
                faults.append(f"{place.text}: {text} may start before {last} has passed block {lowest}")
        if update in by_text:
            before = {w.action for w in by_text[update].waits}
            needed = {"LOSS", *reduces[-1:]} | ({"NORM"} if graph.training.needs_norm else set())
            faults += [f"{place.text}: {update} does not wait for {text}" for text in sorted(needed - before)]
    if graph.training.needs_norm and "NORM" in by_text:
        before = {w.action for w in by_text["NORM"].waits}
        needed = {
            f"g{b.index}.{len(b.buckets) - 1}REDUCE_GRAD"
            for b in graph.gradient_blocks
            if place in b.holders and len(b.holders) > 1
        }
        needed |= {last} if last else set()
        faults += [f"{place.text}: NORM does not wait for {text}" for text in sorted(needed - before)]
    forwards = [a.text for a in computes if a.kind == "F"]
    is_last = place.stage == len(graph.pipelines[place.pipeline].stages) - 1
    loss_waits = {w.action for w in by_text["LOSS"].waits} if "LOSS" in by_text else set(forwards)
    if is_last and forwards and forwards[-1] not in loss_waits:
        faults.append(f"{place.text}: LOSS does not wait for the last forward, {forwards[-1]}")
    found = {t for t, a in by_text.items() if a.kind in (*COLLECTIVE_KINDS, "UPDATE")}
    faults += [f"{place.text}: {text} is missing" for text in sorted(expected - found)]
    faults += [f"{place.text}: {text} is not its business" for text in sorted(found - expected)]
    for stream, actions in program.streams.items():
        numbers = [(a.gradient_block, a.bucket) for a in actions if a.kind == "REDUCE_GRAD"]
        if numbers != sorted(numbers):
            faults.append(f"{place.text}: the reductions on stream {stream} are out of order")
    return faults
