"""What each unit of a module is called with: one run of the whole module, with every unit watched.

A unit is a sub-module that belongs to one block. Units that are alike run once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_map_only

from autopiper.model.annotations import EXPERTS, listening
from autopiper.model.tracing.scopes import MARKER, Scopes, markers


@dataclass(slots=True)
class Call:
    """Arguments that a unit was called with, and what it returned (fake tensors)."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any = None
    expert_depth: int = 0
    """Scopes of experts that were open when it was called."""


@dataclass(frozen=True, slots=True)
class Unit:
    """A sub-module that belongs to one block, its qualified name, and a description of what it costs."""

    block: int
    prefix: str
    module: nn.Module
    signature: str


@contextmanager
def training_mode(module: nn.Module) -> Iterator[None]:
    """Switch the module to training, and every sub-module back to what it was."""
    before = {name: child.training for name, child in module.named_modules()}
    module.train()
    try:
        yield
    finally:
        for name, child in module.named_modules():
            child.training = before[name]


def spec(value: Any) -> Any:
    """Describe arguments so that equal descriptions cost the same: tensors by shape, type and need of a gradient."""
    return repr(tree_map_only(torch.Tensor, lambda t: ("tensor", tuple(t.shape), str(t.dtype), t.requires_grad), value))


def signature(module: nn.Module) -> str:
    """Describe a module so that equal descriptions cost the same on equal inputs; numbers that count layers are left out."""
    parts: list[Any] = []
    if isinstance(module, fx.GraphModule):
        for node in module.graph.nodes:
            if node.target is not MARKER:
                target = str(node.target) if node.op == "call_function" else ""
                parts.append((node.op, target, len(node.all_input_nodes)))
        parts.append([m for m in markers(module) if m[2][0] == EXPERTS])
    for name, child in module.named_modules(remove_duplicate=False):
        plain = {
            key: value
            for key, value in vars(child).items()
            if isinstance(value, int | float | str) and not key.startswith("_") and key not in _POSITIONS
        }
        shapes = [(n, tuple(p.shape), str(p.dtype), p.requires_grad) for n, p in child.named_parameters(recurse=False)]
        parts.append(("" if isinstance(module, fx.GraphModule) else name, type(child).__qualname__, plain, shapes))
    return repr(parts)


_POSITIONS = ("layer_idx", "layer_id", "layer_index", "layer_number", "idx", "index", "training")


def capture(run: Callable[[], Any], units: Sequence[Unit], scopes: Scopes) -> list[Call]:
    """Run the whole module and note each unit's call; `units` in the order in which they run.

    Units of one signature and equal arguments are run once, the others return the first one's output; but those that
    enter scopes are run each, since every scope is a region of its own.
    """
    pending: dict[int, list[int]] = {}
    for index, unit in enumerate(units):
        pending.setdefault(id(unit.module), []).append(index)
    calls: list[Call | None] = [None] * len(units)
    first: dict[tuple[str, str], tuple[Call, int]] = {}

    def instead(module: nn.Module, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            queue = pending[id(module)]
            index = queue.pop(0) if len(queue) > 1 else queue[0]
            unit, call = units[index], Call(args, kwargs, expert_depth=scopes.expert_depth)
            key = (unit.signature, spec((args, kwargs)))
            if key in first and not markers(module):
                twin, operations = first[key]
                call.output = twin.output
                scopes.repeat(unit.block, operations)
            else:
                with scopes.inside(unit.block) as counts:
                    call.output = original(*args, **kwargs)
                if not counts.scopes:
                    first[key] = (call, counts.operations)
            calls[index] = call
            return call.output

        return forward

    with ExitStack() as stack:
        for module in {id(u.module): u.module for u in units}.values():
            own = module.__dict__.get("forward")
            stack.callback(_restore_forward, module, own)
            module.forward = instead(module, module.forward)
        with listening(scopes):
            run()
    return [call or Call((), {}) for call in calls]


def _restore_forward(module: nn.Module, own: Any) -> None:
    if own is None:
        del module.forward
    else:
        module.forward = own
