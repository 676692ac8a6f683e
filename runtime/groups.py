"""Communicators: one per (stream, rank set), made and warmed in one global order.

A stream may be named by the strategy, so that it carries gradient blocks of several holder sets: each set has a
communicator of its own on it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from autopiper.errors import PlanError
from autopiper.ir import TrainingGraph
from autopiper.plan import Action, Program
from autopiper.plan.actions import COMPUTE_STREAM, TRANSFER_KINDS

Key = tuple[str, tuple[int, ...]]
"""Stream and sorted ranks."""


def holder_ranks(graph: TrainingGraph) -> dict[int, tuple[int, ...]]:
    """Return for each gradient block the ranks that hold it, sorted."""
    ranks = {device: rank for rank, device in enumerate(graph.devices())}
    return {
        block.index: tuple(
            sorted({ranks[graph.stage(h.pipeline, h.stage).members[h.member][0]] for h in block.holders})
        )
        for block in graph.gradient_blocks
    }


def identities(actions: Sequence[Action]) -> list[str]:
    """Name the messages of a channel so that both ends say the same: "p0 F0 5[0:3]" for sender's stage 0."""
    out = []
    for a in actions:
        step = 1 if a.kind.endswith("F") else -1
        sender = a.stage if a.kind.startswith("SEND") else (a.stage or 0) - step
        start, stop = a.samples or (0, 0)
        out.append(f"p{a.pipeline} {a.kind[-1]}{sender} {a.micro_batch}[{start}:{stop}]")
    return out


class Groups:
    """The communicators of one rank.

    Every rank works through all of them in the order of streams and ranks (torch numbers communicators by that order,
    on non-members too), so any two ranks meet in the same order. The first value on each is a hash of the actions to
    come; on channels, of the messages. Raises PlanError where ranks disagree.
    """

    def __init__(self, graph: TrainingGraph, programs: Sequence[Program], rank: int, device: torch.device) -> None:
        self._holders = holder_ranks(graph)
        self._everyone = tuple(sorted(rank for program in programs for rank in program.ranks))
        self._ends: dict[str, set[int]] = {}
        for program in programs:
            for stream, actions in program.streams.items():
                if actions and actions[0].kind in TRANSFER_KINDS:
                    self._ends.setdefault(stream, set()).update(program.ranks)
        wanted: set[Key] = set()
        mine: dict[Key, list[Action]] = {}
        for program in programs:
            for key, action in self._keys(program):
                wanted.add(key)
                if rank in program.ranks:
                    mine.setdefault(key, []).append(action)
        self._made: dict[Key, dist.ProcessGroup] = {}
        backend = "nccl" if device.type == "cuda" else "gloo"
        for key in sorted(wanted):
            group = dist.new_group(list(key[1]), backend=backend)
            if rank in key[1]:
                self._made[key] = group
                _agree(group, key, mine[key], rank, device)
        self.channels: dict[str, tuple[dist.ProcessGroup, int]] = {
            stream: (group, next(r for r in ranks if r != rank))
            for (stream, ranks), group in self._made.items()
            if stream in self._ends
        }
        """Stream -> its communicator and the rank at the other end."""

    def _keys(self, program: Program) -> Iterator[tuple[Key, Action]]:
        for stream, actions in program.streams.items():
            for action in actions if stream != COMPUTE_STREAM else ():
                ranks = self._ranks(action)
                if len(ranks) > 1:
                    yield (stream, ranks), action

    def _ranks(self, action: Action) -> tuple[int, ...]:
        if action.kind in TRANSFER_KINDS:
            return tuple(sorted(self._ends[action.stream]))
        return self._everyone if action.gradient_block is None else self._holders[action.gradient_block]

    def of(self, action: Action) -> dist.ProcessGroup | None:
        """Return the communicator of a collective, None where this rank is alone in it."""
        return self._made.get((action.stream, self._ranks(action)))

    def close(self) -> None:
        """Give all communicators back."""
        for group in self._made.values():
            dist.destroy_process_group(group)


def _agree(group: dist.ProcessGroup, key: Key, actions: Sequence[Action], rank: int, device: torch.device) -> None:
    names = identities(actions) if actions[0].kind in TRANSFER_KINDS else [a.text for a in actions]
    digest = hashlib.sha256("\n".join(names).encode()).digest()
    value = torch.tensor([int.from_bytes(digest[:7], "little")], dtype=torch.int64, device=device)
    found = [torch.zeros_like(value) for _ in key[1]]
    dist.all_gather(found, value, group=group)
    if any(int(v) != int(value) for v in found):
        raise PlanError(
            f"stream '{key[0]}': ranks {', '.join(map(str, key[1]))} do not agree on its {len(names)} actions, of "
            f"which rank {rank} has first {names[0]}"
        )
