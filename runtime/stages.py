"""Live stages: the part of a module that one rank runs, built from the blocks that `model.tracing` finds.

A stage shares its sub-modules with the module it was built from (nothing is copied) and refers to no other block.
Every form runs the module's own forward code: an nn.Sequential child by child; a Hugging Face causal model through a
clone of its model objects in which blocks of other stages are missing. In that clone the first held sub-module is
*fed*: whatever the model's prelude computes (scaled or position-shifted embeddings), it receives what the stage
before sent instead. So no architecture needs rules of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autopiper.errors import PlanError
from autopiper.model.layout import BlockLayout
from autopiper.model.tracing import find_blocks
from autopiper.runtime.materialise import materialise
from autopiper.runtime.traced_stage import Piecewise, adopt, owners

ModuleOrFactory = nn.Module | Callable[[], nn.Module]


class Feed:
    """What the stage before sent, until the first sub-module that runs takes it."""

    value: Tensor | None = None


class Held(nn.Module):
    """A sub-module as a stage runs it: computed again in the backward if asked, fed by the stage before if first."""

    def __init__(self, inner: nn.Module, recompute: bool, feed: Feed | None = None) -> None:
        super().__init__()
        self.inner = inner
        self.recompute = recompute
        self.feed = feed

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the sub-module, on what the stage before sent where there is such a thing."""
        if self.feed is not None and self.feed.value is not None:
            fed, self.feed.value = self.feed.value, None
            if args:
                args = (fed, *args[1:])
            else:
                kwargs["hidden_states"] = fed
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self.inner, *args, use_reentrant=False, **kwargs)
        return self.inner(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        # The model's forward may read attributes of its layers (the kind of attention, say).
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


class Nothing(nn.Module):
    """Stands where another stage's embedding was: its result adds nothing, and a fed stage does not use it."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return a scalar zero."""
        return torch.zeros(())


class LiveStage(nn.Module):
    """Blocks [start, stop) of a module, ready to run.

    Call it with the module's own inputs where it is the first stage, else with what the stage before returned. It
    returns what the whole module returns where it is the last stage, else a tensor, or a tuple, list or dict of tensors.
    """

    def __init__(
        self, layout: BlockLayout, start: int, stop: int, body: nn.Module, parameters: Mapping[str, nn.Parameter]
    ) -> None:
        super().__init__()
        self.layout, self.start, self.stop = layout, start, stop
        self.first, self.last = start == 0, stop == len(layout.blocks)
        self.body = body
        self.recomputes = any(isinstance(m, Held) and m.recompute for m in body.modules())
        """Whether any of its blocks is computed again in the backward."""
        self.held = dict(parameters)
        """Parameters by their names in the whole module, each once, in registration order."""

    def block_parameters(self, block: int) -> tuple[tuple[str, nn.Parameter], ...]:
        """Return (name, parameter) of one block in registration order; a tied one under its first name here."""
        named = {id(p): (n, p) for n, p in self.held.items()}
        return tuple(named[id(self._find(n))] for n in self.layout.blocks[block].parameters)

    def _find(self, name: str) -> nn.Parameter:
        if name in self.held:
            return self.held[name]
        group = next(g for g in self.layout.tied if name in g)
        return next(self.held[n] for n in group if n in self.held)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the blocks in order."""
        return self.body(*args, **kwargs)


def held_by(stages: Iterable[LiveStage]) -> dict[str, nn.Parameter]:
    """Return the parameters of several stages of one module by name; what several of them use, once."""
    seen: dict[int, str] = {}
    for stage in stages:
        for name, parameter in stage.held.items():
            seen.setdefault(id(parameter), name)
    return {n: p for stage in stages for n, p in stage.held.items() if seen[id(p)] == n}


class _Sequential(nn.Module):
    """Children of an nn.Sequential, one after another."""

    def __init__(self, parts: Iterable[Held]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, input: Any) -> Any:  # named as nn.Sequential's own argument
        for part in self.parts:
            input = part(input)
        return input


class _CausalLM(nn.Module):
    """A Hugging Face causal language model without the blocks of other stages."""

    def __init__(self, root: nn.Module, base: nn.Module, feed: Feed | None, last: bool) -> None:
        super().__init__()
        self.model = root if last else base
        self.feed, self.last = feed, last

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.feed is not None:
            (hidden,) = args
            self.feed.value = hidden
            args, kwargs = (), {"inputs_embeds": hidden.detach()}
        output = self.model(*args, use_cache=False, **kwargs)
        return output if self.last else output.last_hidden_state


def open_module(
    given: ModuleOrFactory, dtype: torch.dtype, example_inputs: Any = None
) -> tuple[nn.Module, BlockLayout]:
    """Return the module and its blocks. A factory is called on the meta device, so nothing is allocated yet."""
    if isinstance(given, nn.Module):
        return given, find_blocks(given, example_inputs)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            module = given()
    finally:
        torch.set_default_dtype(before)
    if not isinstance(module, nn.Module):
        raise PlanError(f"the module factory returned a {type(module).__name__}; it must return an nn.Module")
    return module, find_blocks(module, example_inputs)


def build_stage(
    module: nn.Module,
    layout: BlockLayout,
    start: int,
    stop: int,
    *,
    recompute: tuple[str, ...] | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
    state: Mapping[str, Tensor] | None = None,
    example_inputs: Mapping[str, Tensor] | None = None,
    samples: Iterable[int] = (1,),
) -> LiveStage:
    """Build the stage that holds blocks [start, stop) of `module`, on `device`.

    Blocks on the meta device are allocated, and filled from `state` (by parameter names of the whole module) or by
    their own initialisation, seeded per sub-module so that initial weights do not depend on the cut; blocks with
    weights are used as they are. `example_inputs` (the module's inputs by name) and `samples` (every number of samples
    that it will be run on) are needed only by modules that have to be traced. Raises PlanError for recompute "selective" and for what cannot be initialised.
    """
    recompute = recompute or ("none",) * (stop - start)
    for block, choice in zip(layout.blocks[start:stop], recompute, strict=True):
        if choice not in ("none", "full"):
            raise PlanError(f"block '{block.name}': recompute '{choice}' cannot be run yet; allowed: none, full")
    choices = dict(zip(range(start, stop), recompute, strict=True))
    fill = partial(materialise, module, layout, device=torch.device(device), seed=seed, state=state)
    if layout.form == "traced":
        body: nn.Module = _traced(module, layout, choices, fill, example_inputs or {}, samples)
        return LiveStage(layout, start, stop, body, _parameters(module, layout, start, stop))
    fill([n for block in layout.blocks[start:stop] for n in block.modules] + list(layout.shared))
    if layout.form == "sequential":
        parts = [Held(module.get_submodule(layout.blocks[b].modules[0]), c == "full") for b, c in choices.items()]
        body = _Sequential(parts)
    else:
        body = _causal_lm(module, layout, choices)
    return LiveStage(layout, start, stop, body, _parameters(module, layout, start, stop))


def _traced(
    module: nn.Module,
    layout: BlockLayout,
    choices: Mapping[int, str],
    fill: Callable[..., None],
    example: Mapping[str, Tensor],
    samples: Iterable[int],
) -> nn.Module:
    """Trace the module for every number of samples, and give the held pieces their real parameters."""
    body = Piecewise(module, example, min(choices), max(choices) + 1)

    def wrap(piece: nn.Module, block: int) -> Held:
        names = [n for n, _ in [*piece.named_parameters(remove_duplicate=False), *piece.named_buffers()]]
        fill(owners([*names, *layout.blocks[block].parameters]), recurse=False)
        adopt(piece, module)
        return Held(piece, choices[block] == "full")

    for count in sorted(set(samples)):
        body.trace(count, wrap)
    body.forget()
    return body


def _parameters(module: nn.Module, layout: BlockLayout, start: int, stop: int) -> dict[str, nn.Parameter]:
    out: dict[str, nn.Parameter] = {}
    seen: set[int] = set()
    for block in layout.blocks[start:stop]:
        for name in block.parameters:
            parameter = module.get_parameter(name)
            if id(parameter) not in seen:
                seen.add(id(parameter))
                out[name] = parameter
    return out


def _causal_lm(module: nn.Module, layout: BlockLayout, choices: Mapping[int, str]) -> nn.Module:
    """Clone the model objects down to the layer list, and put in only what the stage holds."""
    first, last = 0 in choices, len(layout.blocks) - 1 in choices
    replaced: dict[str, nn.Module] = {}
    layers: list[nn.Module] = []
    feed = None if first else Feed()
    for index, block in enumerate(layout.blocks):
        for name in block.modules:
            if index in choices:
                entry = feed if index == min(choices) else None
                held = Held(module.get_submodule(name), choices[index] == "full", entry)
                if 0 < index < len(layout.blocks) - 1:
                    layers.append(held)
                else:
                    replaced[name] = held
            elif index == 0 and isinstance(module.get_submodule(name), nn.Embedding):
                replaced[name] = Nothing()
            elif index in (0, len(layout.blocks) - 1):
                replaced[name] = nn.Identity()
    replaced[layout.container] = nn.ModuleList(layers)
    clones = {"": copy.copy(module)}
    for name in [layout.owner, *replaced]:
        _clone_path(clones, name if name == layout.owner else name.rpartition(".")[0])
    for name, new in replaced.items():
        parent, _, child = name.rpartition(".")
        clones[parent]._modules[child] = new
    _slice_layer_types(clones[layout.owner], min(choices) - 1, len(layers))
    base = clones.get(str(getattr(module, "base_model_prefix", "")), clones[layout.owner])
    return _CausalLM(clones[""], base, feed, last)


def _clone_path(clones: dict[str, nn.Module], name: str) -> None:
    """Clone every object from the root to `name`, each once; children stay shared until they are replaced."""
    parts = name.split(".") if name else []
    for depth in range(len(parts) + 1):
        path = ".".join(parts[:depth])
        if path not in clones:
            parent = clones[".".join(parts[: depth - 1])]
            clone = copy.copy(parent._modules[parts[depth - 1]])
            assert clone is not None
            parent._modules[parts[depth - 1]] = clones[path] = clone
        if not clones[path].__dict__.get("_autopiper_clone"):
            clones[path].__dict__["_modules"] = dict(clones[path]._modules)
            clones[path].__dict__["_autopiper_clone"] = True


def _slice_layer_types(owner: nn.Module, first_layer: int, count: int) -> None:
    """Forwards look up the kind of attention by position in the layer list: give them the list of the held layers."""
    config = getattr(owner, "config", None)
    kinds = getattr(config, "layer_types", None)
    if config is not None and kinds is not None:
        config = copy.deepcopy(config)
        begin = max(0, first_layer)
        config.layer_types = list(kinds)[begin : begin + count]
        owner.__dict__["config"] = config
