"""What several ranks do together: collectives over all their ranks and on one stream, channels in one order."""

from __future__ import annotations

from collections.abc import Sequence

from autopiper.ir.joint import Joint
from autopiper.ir.proofs.view import View
from autopiper.plan.actions import COLLECTIVE_KINDS, EXCHANGE_KINDS


def collectives(views: Sequence[View], joint: Joint) -> list[str]:
    """Check that all that must take part in a collective do, and nobody else; `views` = one for each Program, in order."""
    if not views:
        return []
    faults = []
    blocks = views[0].graph.gradient_blocks
    holders = [{n for n, view in enumerate(views) if view.holds(block)} for block in blocks]
    everybody = set(range(len(views)))
    groups: dict[tuple[object, int, int], set[int]] = {}
    for n, view in enumerate(views):
        for size in {s.expert_parallel_size for s in view.stages}:
            groups.setdefault((view.row.members, size, view.member // size), set()).add(n)
    for node in joint.nodes:
        if node.kind not in COLLECTIVE_KINDS:
            continue
        action, first = node.actions[0], views[node.programs[0]]
        if node.kind in EXCHANGE_KINDS:
            stages = [s for s in first.stages if (s.pipeline, s.index) == (action.pipeline, action.stage)]
            size = stages[0].expert_parallel_size if stages else 1
            wanted = groups.get((first.row.members, size, first.member // size), set())
        elif action.gradient_block is None:
            wanted = everybody
        else:
            wanted = holders[action.gradient_block] if 0 <= action.gradient_block < len(holders) else set()
        found = set(node.programs)
        if found != wanted:
            lacks = [views[n].name for n in sorted(wanted - found)]
            more = [views[n].name for n in sorted(found - wanted)]
            words = [f"{', '.join(who[:4])}{'…' if len(who) > 4 else ''} {why}" for who, why in
                     ((lacks, "must take part too"), (more, "has no part in it")) if who]  # fmt: skip
            faults.append(f"{first.name}: {node.text}: {'; '.join(words)}")
        streams = {a.stream for a in node.actions}
        if len(streams) > 1:
            faults.append(
                f"{node.text} lies on several streams: {', '.join(sorted(streams))}; it must be one for all its ranks"
            )
    return faults


def channels(views: Sequence[View], joint: Joint) -> list[str]:
    """Check that both ends of a channel have its messages in the same order: messages carry no names on the wire."""
    ends: dict[tuple[str, int, int], dict[int, list[int]]] = {}
    for (program, stream), nodes in joint.streams.items():
        for n in nodes:
            node = joint.nodes[n]
            if node.kind == "TRANSFER" and len(node.programs) == 2:
                ends.setdefault((stream, *node.programs[:2]), {}).setdefault(program, []).append(n)  # type: ignore[arg-type]
    faults = []
    for (stream, sender, receiver), rows in ends.items():
        sent, received = rows.get(sender, []), rows.get(receiver, [])
        for a, b in zip(sent, received, strict=False):
            if a != b:
                texts = [joint.nodes[n].action_of(receiver).text for n in (a, b)]
                faults.append(
                    f"channel {stream}: {views[sender].name} sends {joint.nodes[a].action_of(sender).text} where "
                    f"{views[receiver].name} receives {texts[1]}; {texts[0]} must come before it"
                )
                break
    return faults
