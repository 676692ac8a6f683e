"""The backward of one micro-batch through one stage: whole, or split into I (for the inputs) and W (for the weights).

The split: I asks autograd for the gradients of what was received alone, and keeps the graph. An operation that has both
a way to what was received and one to parameters only (a matrix product: activation and weight) is a *joint*; the
gradient that reaches it in I is noted, and W starts from there, down the ways to the parameters. So nothing is
computed twice but what a joint's backward shares between its inputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from autopiper._data import data


@data
class Start:
    """Where W begins for some parameters."""

    node: Node
    parameters: tuple[nn.Parameter, ...]
    """Those that only this start leads to."""


class Flow:
    """A micro-batch between its F and the end of its backward: what that starts from and what it ends in."""

    def __init__(self, received: Sequence[Tensor], roots: Sequence[Any], *, recomputes: bool = False) -> None:
        self._wanted = [t for t in received if t.requires_grad]
        self._roots = list(roots)
        """The loss, or where the graphs of what was put out end."""
        self._gradients: list[Tensor | None] = [None] * len(self._roots)
        self._recomputes = recomputes
        self._starts: list[Start] | None = None
        self._reached: dict[Node, tuple[Tensor | None, ...]] = {}

    def arrive(self, gradients: Sequence[Tensor]) -> None:
        """Take what the next stage gives back, one gradient for each root; a loss needs none."""
        self._gradients = list(gradients)

    def whole(self) -> list[Tensor]:
        """B: add to the gradients of all parameters, and return those of what was received."""
        if self._roots:
            torch.autograd.backward(self._roots, self._gradients)
        return [torch.zeros_like(t) if t.grad is None else t.grad for t in self._wanted]

    def for_inputs(self) -> list[Tensor]:
        """I: return the gradients of what was received; parameters get none, and the graph is kept for W.

        Nothing to do where nothing was received that wants one: the first stage's I costs nothing, and W is all of it.
        """
        if not self._roots or not self._wanted:
            return [torch.zeros_like(t) for t in self._wanted]
        hooks = []
        if not self._recomputes:
            self._starts = _starts([_node(r) for r in self._roots], [_node(t) for t in self._wanted])
            hooks = [start.node.register_prehook(self._note(start.node)) for start in self._starts]
        try:
            found = torch.autograd.grad(
                self._roots, self._wanted, self._gradients, retain_graph=True, allow_unused=True, materialize_grads=True
            )
        finally:
            for hook in hooks:
                hook.remove()
        return list(found)

    def _note(self, node: Node) -> Callable[[tuple[Tensor | None, ...]], None]:
        def note(gradients: tuple[Tensor | None, ...]) -> None:
            self._reached[node] = gradients

        return note

    def for_weights(self, parameters: Sequence[nn.Parameter]) -> None:
        """W: add to the gradients of the parameters, and let the graph go.

        Parameters that several joints lead to (used twice in the stage) are found by walking the whole graph once more.
        So are all of them in a stage with blocks under full recompute: each walk of its own would run those blocks
        again, so they run twice, once in I and once in W, which there costs as much as a whole B.
        A `torch.autograd.Function` of the module's own computes the gradients of all its inputs both times. A hook on an activation (`Tensor.register_hook`) that changes gradients acts in I and again in W.
        """
        left = {id(p): p for p in parameters}
        starts = [(s, [p for p in s.parameters if id(p) in left]) for s in self._starts or ()]
        starts = [(s, own) for s, own in starts if own]
        for _, own in starts:
            for p in own:
                del left[id(p)]
        if self._roots and left:
            torch.autograd.backward(self._roots, self._gradients, inputs=list(left.values()), retain_graph=bool(starts))
        for start, own in starts:  # in the order of the backward, so that gradients are final from the last block on
            reached = [(n, g) for n, g in enumerate(self._reached.get(start.node, ())) if g is not None]
            if reached:
                edges = [GradientEdge(start.node, n) for n, _ in reached]
                torch.autograd.backward(edges, [g for _, g in reached], inputs=own)


def _node(of: Any) -> Node:
    return of.node if isinstance(of, GradientEdge) else torch.autograd.graph.get_gradient_edge(of).node


def _starts(roots: Sequence[Node], wanted: Iterable[Node]) -> list[Start]:
    """Return the joints below `roots` that parameters belong to alone, in the order of the backward."""
    ends = set(wanted)
    through: dict[Node, bool] = {}
    """Whether a node leads to what is wanted."""
    below: dict[Node, dict[int, nn.Parameter]] = {}
    """Of those that do not: the leaves that they lead to."""
    stack = [(root, False) for root in roots]
    while stack:
        node, ready = stack.pop()
        if node in through:
            continue
        children = [child for child, _ in node.next_functions if child is not None]
        if not ready:
            stack.append((node, True))
            stack += [(child, False) for child in children if child not in through]
            continue
        through[node] = node in ends or any(through[child] for child in children)
        if not through[node]:
            leaf = getattr(node, "variable", None)
            below[node] = {} if leaf is None else {id(leaf): leaf}
            for child in children:
                below[node].update(below[child])
    found: list[tuple[Node, dict[int, nn.Parameter]]] = []
    for node, passes in through.items():
        if passes:
            aside = [below[c] for c, _ in node.next_functions if c is not None and not through[c]]
            leaves = {key: leaf for side in aside for key, leaf in side.items()}
            if leaves:
                found.append((node, leaves))
    uses = Counter(key for _, leaves in found for key in leaves)
    for root in set(roots):  # a root beside the way to what is wanted is no joint: what it leads to takes the long way
        uses.update(dict.fromkeys(below.get(root, {}), 2))
    ordered = sorted(found, key=lambda pair: pair[0]._sequence_nr(), reverse=True)
    return [
        Start(node=node, parameters=tuple(leaf for key, leaf in leaves.items() if uses[key] == 1))
        for node, leaves in ordered
    ]
