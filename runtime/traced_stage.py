"""Stages of modules of no known structure: pieces of the graph that torch traced, one graph per number of samples.

Traces fix every shape, the number of samples too, so a stage is traced once for each number that its slices have. All
values that a later piece still needs cross a cut, by name: skip connections are routed through, and so are the
model's inputs.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from autopiper.errors import PlanError
from autopiper.model.tracing import Fakes, traced


class Piecewise(nn.Module):
    """Runs pieces [start, stop) of the graph that was traced for as many samples as it is given."""

    def __init__(self, module: nn.Module, example: Mapping[str, Tensor], start: int, stop: int) -> None:
        super().__init__()
        self._module: nn.Module | None = module
        self._example = dict(example)
        self._signature = inspect.signature(module.forward)
        self._start, self._stop = start, stop
        self._graphs: dict[int, tuple[fx.GraphModule, TreeSpec]] = {}
        self.parts = nn.ModuleDict()

    def trace(self, samples: int, wrap: Any) -> None:
        """Trace the module for this number of samples; `wrap(piece, block)` makes a block of a piece of it."""
        assert self._module is not None
        module, fakes = self._module, Fakes(self._module)
        inputs = {n: fakes.like(t, shape=(samples, *t.shape[1:])) for n, t in self._example.items()}
        _, graph = traced.cut(module, fakes, (), inputs)
        with fakes.active():
            structure = tree_flatten(fakes.call(module, "", (), inputs))[1]
        for block, (name, piece) in enumerate(list(graph.named_children())):
            if self._start <= block < self._stop:
                self.parts[f"{samples}_{block}"] = wrap(piece, block)
            setattr(graph, name, nn.Identity())  # nothing of other stages stays
        self._graphs[samples] = (graph, structure)

    def forget(self) -> None:
        """Let go of the whole module."""
        self._module = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the pieces on the model's inputs, or on the values that cross the cut before them."""
        if self._start == 0:
            bound = self._signature.bind(*args, **kwargs).arguments
            given: dict[str, Any] = {n: bound[n] for n in self._example}
        else:
            (given,) = args
        samples = next(iter(given.values())).shape[0]
        if samples not in self._graphs:
            raise PlanError(f"the stage was traced for {', '.join(map(str, self._graphs))} samples, not for {samples}")
        graph, structure = self._graphs[samples]
        nodes = list(graph.graph.nodes)
        homes = _homes(nodes)
        values: dict[fx.Node, Any] = {}
        if self._start == 0:
            values = dict(zip((n for n in nodes if n.op == "placeholder"), tree_leaves(given), strict=True))
        else:
            values = {n: given[n.name] for n in nodes if n.name in given}
        for node in nodes:
            if node.op in ("call_module", "call_function") and self._start <= homes[node] < self._stop:
                call_args, call_kwargs = fx.map_arg((node.args, node.kwargs), lambda n: values[n])
                run = self.parts[f"{samples}_{homes[node]}"] if node.op == "call_module" else node.target
                values[node] = run(*call_args, **call_kwargs)
        output = nodes[-1]
        if homes[output] == self._stop:
            return tree_unflatten(tree_leaves(fx.map_arg(output.args[0], lambda n: values[n])), structure)
        return {node.name: values[node] for node in _crossing(nodes, homes, self._stop)}


def _homes(nodes: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """Return the block that each value comes from; -1 for the model's inputs, the number of blocks for the output."""
    homes: dict[fx.Node, int] = {}
    count = 0
    for node in nodes:
        if node.op == "call_module":
            homes[node] = count
            count += 1
        elif node.op == "output":
            homes[node] = count
        else:
            homes[node] = max((homes[n] for n in node.all_input_nodes), default=-1)
    return homes


def _crossing(nodes: Iterable[fx.Node], homes: Mapping[fx.Node, int], cut: int) -> list[fx.Node]:
    """Return the values made before block `cut` that it or a later one reads."""
    return [n for n in nodes if homes[n] < cut and any(homes[user] >= cut for user in n.users)]


def owners(layout_parameters: Iterable[str]) -> list[str]:
    """Return the sub-modules that own these parameters or buffers themselves."""
    return list(dict.fromkeys(name.rpartition(".")[0] for name in layout_parameters))


def adopt(piece: nn.Module, module: nn.Module) -> None:
    """Give a traced piece the real parameters and buffers of the module. Raises PlanError for constants it cannot get."""
    for kind in ("parameters", "buffers"):
        for name, _ in list(getattr(piece, f"named_{kind}")(remove_duplicate=False)):
            path, _, leaf = name.rpartition(".")
            owner, real = module.get_submodule(path), piece.get_submodule(path)
            getattr(real, f"_{kind}")[leaf] = getattr(owner, f"_{kind}")[leaf]
    for sub in piece.modules():
        for name, value in [*vars(sub).items(), *sub._buffers.items(), *sub._parameters.items()]:
            if isinstance(value, FakeTensor):
                raise PlanError(
                    f"the forward of {type(module).__name__} makes a constant tensor ('{name}') that its trace cannot "
                    "carry; register it as a buffer in __init__"
                )
