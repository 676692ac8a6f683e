"""Who listens to `autopiper.annotate` while a module's forward runs, and the regions of blocks that come of it.

Units that are live modules are heard directly. A traced module runs as graphs, where no scope is entered; there the
tracer writes a marker into the graph at the beginning and the end of each scope, and a marker that runs is heard like
the scope itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from autopiper.errors import ModelError
from autopiper.model.annotations import EXPERTS, Annotation, check_name, tell

torch.library.define("autopiper::scope", "(str name, bool begins) -> ()")
torch.library.impl("autopiper::scope", "BackendSelect")(tell)
torch.library.register_fake("autopiper::scope")(tell)
MARKER = torch.ops.autopiper.scope.default
fx.node.has_side_effect(MARKER)  # it has no result: else it would be dropped from the graph as of no use


class Marking:
    """Listens while a module is traced, and writes each scope into the graph."""

    def __init__(self) -> None:
        self._writing = False
        self._piece = 0
        self._written: list[tuple[int, str, bool]] = []

    def next_piece(self) -> None:
        """Hear that the tracer cuts here."""
        self._piece += 1

    def enter(self, name: str) -> None:
        """Mark the beginning of a scope."""
        self._write(name, True)

    def exit(self, name: str) -> None:
        """Mark its end."""
        self._write(name, False)

    def _write(self, name: str, begins: bool) -> None:
        if self._writing:  # the marker runs while it is traced: that is this very scope
            return
        check_name(name)
        self._writing = True
        self._written.append((self._piece, name, begins))
        try:
            MARKER(name, begins)
        finally:
            self._writing = False

    def restore(self, graph: fx.GraphModule) -> None:
        """Write the markers of pieces that held nothing else into the piece after, or else the last.

        Tracing drops such pieces, which is right: blocks are the same whether anyone listens or not.
        """
        pieces: dict[int, Any] = {int(name.rpartition("_")[2]): piece for name, piece in graph.named_children()}
        lost = [marker for marker in self._written if marker[0] not in pieces]
        for number, piece in pieces.items():
            earlier = [m for m in lost if m[0] < number and not any(m[0] < n < number for n in pieces)]
            later = [m for m in lost if m[0] > number and number == max(pieces)]
            nodes = list(piece.graph.nodes)
            _write_before(piece, next(n for n in nodes if n.op != "placeholder"), earlier)
            _write_before(piece, nodes[-1], later)


def markers(module: nn.Module) -> list[tuple[int, int, tuple[Any, ...]]]:
    """Return the markers in a traced piece and its sub-graphs: which graph, after how many operations, what they say."""
    found: list[tuple[int, int, tuple[Any, ...]]] = []
    for number, (_, part) in enumerate(module.named_modules()):
        graph, place = getattr(part, "graph", None), 0
        for node in graph.nodes if isinstance(graph, fx.Graph) else ():
            if node.target is MARKER:
                found.append((number, place, node.args))
            else:
                place += 1
    return found


def _write_before(piece: Any, place: fx.Node, markers: Sequence[tuple[int, str, bool]]) -> None:
    if markers:
        with piece.graph.inserting_before(place):
            for _, name, begins in markers:
                piece.graph.call_function(MARKER, (name, begins))
        piece.recompile()


@dataclass(slots=True)
class Counts:
    """What one run of a unit did: operations (and one for itself), and scopes that it entered."""

    operations: int = 0
    scopes: int = 0


class _Scope:
    """One entry of a scope: how much work of each block ran within it."""

    def __init__(self, name: str, *, within: bool) -> None:
        self.name = name
        self.within = within
        """Whether it begins within a block, and may then be a part of that block."""
        self.work: Counter[int] = Counter()


class Scopes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Listens while the whole forward runs, and notes which blocks' work ran in which scopes."""

    def __init__(self, *, traced: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._traced = traced
        self._scopes: list[_Scope] = []
        self._open: list[_Scope] = []
        self._work: Counter[int] = Counter()
        self._block: int | None = None

    def enter(self, name: str) -> None:
        """Begin the next region of this name."""
        check_name(name)
        # Between the pieces of a graph there is nothing: a scope around a piece begins in the one before.
        scope = _Scope(name, within=self._block is not None or self._traced)
        self._scopes.append(scope)
        self._open.append(scope)

    def exit(self, name: str) -> None:
        """End the innermost region."""
        self._open.pop()

    @property
    def expert_depth(self) -> int:
        """How many scopes of experts are open."""
        return sum(s.name == EXPERTS for s in self._open)

    @property
    def uses_experts(self) -> bool:
        """Whether there was any scope of experts."""
        return any(s.name == EXPERTS for s in self._scopes)

    @contextmanager
    def inside(self, block: int) -> Iterator[Counts]:
        """While a unit of this block runs; the counts are there when it has run."""
        before, scopes, counts = self._work[block], len(self._scopes), Counts()
        self._block = block
        if not self._traced:
            self.repeat(block, 1)  # a module that does nothing is of the block, too
        try:
            with self:
                yield counts
        finally:
            self._block = None
            counts.operations, counts.scopes = self._work[block] - before, len(self._scopes) - scopes

    def repeat(self, block: int, count: int) -> None:
        """Note that many operations of the block, all within the scopes that are open now."""
        self._work[block] += count
        for scope in self._open:
            scope.work[block] += count

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._block is not None and func is not MARKER:
            self.repeat(self._block, 1)
        return func(*args, **(kwargs or {}))

    def regions(self, names: Sequence[str]) -> tuple[Annotation, ...]:
        """Return the regions of blocks (called `names`) that the scopes cover, in the order in which they began.

        Raises ModelError for a scope that covers no block, blocks with others between them, or half of a block.
        """
        found: list[Annotation] = []
        for scope in self._scopes:
            index = sum(r.name == scope.name for r in found)
            label = f"scope {index} of annotate('{scope.name}')"
            covered = sorted(scope.work)
            if not covered:
                raise ModelError(f"{label} covers no block: none of {_listed(names)} runs within it")
            first, last = covered[0], covered[-1]
            missing = [b for b in range(first, last + 1) if b not in scope.work]
            if missing:
                raise ModelError(
                    f"{label} covers blocks '{names[first]}' to '{names[last]}', but '{names[missing[0]]}' between them "
                    "runs outside it; a region is a run of consecutive blocks: take it in, or make two scopes of it"
                )
            half = [b for b in covered if scope.work[b] < self._work[b]]
            if half and not (scope.within and len(covered) == 1):
                raise ModelError(
                    f"{label} covers half of block '{names[half[0]]}'"
                    f"{f' (and {len(covered) - 1} more)' if len(covered) > 1 else ''}: part of it runs outside; let it "
                    "cover the whole block, or begin and end inside it"
                )
            clash = next((r for r in found if r.name == scope.name and r.stop > first), None)
            if clash is not None:
                raise ModelError(
                    f"{label} covers block '{names[first]}', which is in (or before) scope {clash.index} of "
                    f"annotate('{scope.name}'); regions of one name follow each other, at most one in each block"
                )
            found.append(Annotation(name=scope.name, index=index, start=first, stop=last + 1))
        return tuple(found)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f", … ({len(names)} blocks)" if len(names) > 4 else "")
