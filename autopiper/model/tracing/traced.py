"""The fallback for modules of no known structure: torch's `pipeline()` traces the whole and cuts it in pieces.

The pieces are the children of the module's largest ModuleList or Sequential, with what runs before the first of them
and after the last. Values that skip pieces, and inputs that later pieces read, show up as edges.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.pipelining import Pipe, pipe_split, pipeline
from torch.utils._pytree import tree_leaves

from autopiper.errors import ModelError
from autopiper.model.annotations import listening
from autopiper.model.layout import BlockLayout
from autopiper.model.tracing.capture import Call
from autopiper.model.tracing.measure import Fakes
from autopiper.model.tracing.scopes import Marking
from autopiper.model.tracing.structure import layer_list, layout_of


def split_points(module: nn.Module) -> tuple[str, tuple[str, ...]]:
    """Return the name of the list of layers ("" = the module itself), and those of its children."""
    container = layer_list(module) or ""
    children = module.get_submodule(container)._modules
    return container, tuple(f"{container}.{name}" if container else name for name, child in children.items() if child)


@contextmanager
def _splits(module: nn.Module, points: tuple[str, ...], marking: Marking | None) -> Iterator[None]:
    """Mark the beginning of each of these sub-modules, and the end of the last, as places to cut."""

    def split(*_: Any) -> None:
        pipe_split()  # type: ignore[no-untyped-call]
        if marking is not None:
            marking.next_piece()

    handles = [module.get_submodule(p).register_forward_pre_hook(split) for p in points]
    if points:
        handles.append(module.get_submodule(points[-1]).register_forward_hook(split))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def trace(
    module: nn.Module,
    points: tuple[str, ...],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    marking: Marking | None = None,
) -> Pipe:
    """Trace `module` on these inputs and cut it at `points` (`BlockLayout.split_points`); one piece per block.

    The pieces hold the module's own parameters. Shapes, the batch size too, are those of the inputs. `marking` is told
    of the cuts.
    Raises ModelError with torch's reason where tracing fails.
    """
    with _splits(module, points, marking), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of its own deprecations while it traces
        try:
            return pipeline(module, args, kwargs)
        except Exception as error:
            cause: BaseException = error
            while cause.__cause__ is not None:  # torch wraps what went wrong in general advice
                cause = cause.__cause__
            if isinstance(cause, ModelError):
                raise cause from error
            reason = str(cause).strip().splitlines()
            raise ModelError(
                f"{type(module).__name__} cannot be cut into blocks. Tried: nn.Sequential (it is none); a Hugging Face "
                f"causal language model (it is none of known structure); tracing with torch.distributed.pipelining."
                f"pipeline(), cut at {', '.join(points[:3]) or 'nothing'}{'…' if len(points) > 3 else ''}: "
                f"{type(cause).__name__}: {reason[0] if reason else 'no reason given'}. "
                "Write the model as an nn.Sequential of its layers, or describe it with Model.transformer"
            ) from error


def cut(
    module: nn.Module, fakes: Fakes, args: tuple[Any, ...], kwargs: dict[str, Any], *, marked: bool = False
) -> tuple[BlockLayout, fx.GraphModule]:
    """Cut a module by tracing a copy of it that has fake parameters; return the layout and the cut graph.

    `marked`: the scopes of `autopiper.annotate` are marked in the graph (`tracing.scopes`).
    """
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    memo: dict[int, Any] = {}
    for name, tensor in tensors:
        fake = fakes.state[name].detach()
        made = nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake
        memo.setdefault(id(tensor), made)
    with fakes.mode:
        # The memo stands in for every tensor: the copy has the module's structure, and none of its memory.
        twin = copy.deepcopy(module, memo)
    container, points = split_points(module)
    marking = Marking()
    with fakes.mode, listening(marking) if marked else nullcontext():
        graph = trace(twin, points, args, kwargs, marking).split_gm
    marking.restore(graph)
    graph.__dict__.pop("forward", None)  # torch puts a refusal there; the pieces are only measured here
    pieces = dict(graph.named_children())
    held = [[n for n, _ in piece.named_parameters(remove_duplicate=False)] for piece in pieces.values()]
    names = _names(module, points, list(pieces), held)
    layout = layout_of(
        module,
        "traced",
        [(name, (name,) if name in points else ()) for name in names],
        parameters=held,
        container=container,
        split_points=points,
    )
    return layout, graph


def _names(module: nn.Module, points: tuple[str, ...], pieces: list[str], held: list[list[str]]) -> list[str]:
    """Name the pieces after the children that they begin with; torch numbers them, and leaves empty ones out."""
    possible = ["before", *points, "after"]
    numbers = [int(piece.rpartition("_")[2]) for piece in pieces]
    if points and max(numbers) < len(possible):
        names = [possible[n] for n in numbers]
        own = {p: {f"{p}.{n}" for n, _ in module.get_submodule(p).named_parameters()} for p in points}
        if all(own[name] <= set(mine) for name, mine in zip(names, held, strict=True) if name in own):
            return names
    # Children that run in another order, or more than once, do not begin one piece each.
    return [f"part{i}" for i in range(len(pieces))]


def edges(graph: fx.GraphModule, calls: Sequence[Call]) -> dict[tuple[int, int], dict[str, torch.Tensor]]:
    """Return which tensors each block reads of which earlier block, by name.

    An input of the model that a later block reads comes from block 0, which gets all of them.
    """
    index = {name: i for i, (name, _) in enumerate(graph.named_children())}
    found: dict[tuple[int, int], dict[str, torch.Tensor]] = {}
    for node in graph.graph.nodes:
        if node.op != "call_module":
            continue
        target = index[str(node.target)]
        call = calls[target]
        for value, tensor in zip(
            tree_leaves((node.args, node.kwargs)), tree_leaves((call.args, call.kwargs)), strict=True
        ):
            if not isinstance(value, fx.Node) or not isinstance(tensor, torch.Tensor):
                continue
            source = value
            while source.op == "call_function":  # picks one of several outputs
                source = source.all_input_nodes[0]
            origin = index[str(source.target)] if source.op == "call_module" else 0
            if origin < target:
                found.setdefault((origin, target), {})[str(value.name)] = tensor
    return found
