"""`from_module`: a live torch module as a Model.

It measures each block by itself under fake tensors, equal blocks once, so a module of any size costs seconds and no
memory for weights. What it counts is what the module really does: attention without a fused kernel
keeps its scores, norms written out as five operations move their elements five times. FLOPs are those of matrix
products; the recomputed product in a fused attention backward is not counted, being no work of the model.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from autopiper.errors import ModelError
from autopiper.model.layout import BlockLayout
from autopiper.model.spec import Edge, Model, TensorSpec, TiedParameter
from autopiper.model.tracing import traced
from autopiper.model.tracing.assemble import appended_experts, assemble
from autopiper.model.tracing.blocks import fake_inputs
from autopiper.model.tracing.capture import Call, Unit, capture, signature, spec, training_mode
from autopiper.model.tracing.measure import Fakes, Measure, measure
from autopiper.model.tracing.scopes import Scopes
from autopiper.model.tracing.structure import known_structure


def from_module(module: nn.Module, example_inputs: Any, *, batch_dim: int = 0, name: str | None = None) -> Model:
    """Describe an nn.Module: its blocks, what each costs per sample, and what flows between them.

    `module` may have real weights, be on the meta device, or be built under a FakeTensorMode; it is not changed.
    `example_inputs` = args tuple or kwargs dict of a batch; only shapes and types matter. The head of a causal
    language model includes the cross-entropy over fp32 logits; no other module includes its loss.

    Scopes of `autopiper.annotate` that the forward enters become the model's annotations; what runs in scopes "EP" is
    the experts' part of their blocks, its parameters those that only operations within read. Where there is no such
    scope, sub-modules called "experts" count as such.
    Raises ModelError where the module cannot be cut into blocks or does not run on the inputs, and for scopes that are
    no runs of blocks.
    """
    fakes = Fakes(module)
    args, kwargs = fake_inputs(fakes, example_inputs, batch_dim)
    inputs = _input_specs(module, args, kwargs, batch_dim)
    graph = None
    parts: list[tuple[str, ...]]
    with training_mode(module):
        layout = known_structure(module)
        if layout is None:
            layout, graph = traced.cut(module, fakes, args, kwargs, marked=True)
    root: nn.Module = module if graph is None else graph
    if graph is not None:
        fakes = Fakes(graph)
        parts = [(piece,) for piece, _ in graph.named_children()]
    else:
        parts = [block.modules for block in layout.blocks]
        if layout.form == "causal_lm" and _accepts(module, "use_cache"):
            kwargs.setdefault("use_cache", False)  # the cache of generation is of no use in training
    units = [
        Unit(block, name, unit, signature(unit))
        for block, part in enumerate(parts)
        for name, unit in ((name, root.get_submodule(name)) for name in part)
    ]
    scopes = Scopes(traced=graph is not None)
    with training_mode(root), fakes.active():
        calls = _captured(root, fakes, args, kwargs, units, scopes)
        if layout.form == "causal_lm" and "attention_mask" not in kwargs and not _windowed(module, args, kwargs):
            for call in calls:
                if "attention_mask" in call.kwargs:
                    call.kwargs["attention_mask"] = None
        regions = scopes.regions([block.name for block in layout.blocks])
        known: dict[tuple[str, str, bool, bool], Measure] = {}
        measures = []
        for unit, call in zip(units, calls, strict=True):
            first, by_name = unit.block == 0, not scopes.uses_experts
            key = (unit.signature, spec((call.args, call.kwargs)), first, call.expert_depth > 0)
            if key not in known:
                known[key] = measure(fakes, unit.module, unit.prefix, call, first=first, by_name=by_name)
            measures.append(known[key])
    blocks = assemble(module, layout, units, measures, _logits(layout, calls[-1]))
    if not scopes.uses_experts:
        regions = appended_experts(regions, blocks)
    if graph is None:
        starts = [next(i for i, u in enumerate(units) if u.block == block) for block in range(len(blocks))]
        links = {(i - 1, i): _carried(calls[starts[i]]) for i in range(1, len(blocks))}
    else:
        links = traced.edges(graph, calls)
    named = dict(module.named_parameters(remove_duplicate=False))
    return Model(
        name=name or type(module).__name__,
        blocks=blocks,
        edges=tuple(
            Edge(source=a, target=b, tensors=tuple(_tensor_spec(n, t, batch_dim) for n, t in sorted(tensors.items())))
            for (a, b), tensors in sorted(links.items())
        ),
        tied=tuple(
            TiedParameter(
                name=names[0],
                blocks=tuple(i for i, b in enumerate(layout.blocks) if set(names) & set(b.parameters)),
                parameters=named[names[0]].numel(),
            )
            for names in layout.tied
        ),
        sequence_length=next((t.shape[0] for t in inputs if len(t.shape) == 1 and t.dtype in ("int64", "int32")), 1),
        inputs=inputs,
        annotations=regions,
        source=f"module {type(module).__name__}",
    )


def _captured(
    root: nn.Module, fakes: Fakes, args: Any, kwargs: Any, units: Sequence[Unit], scopes: Scopes
) -> list[Call]:
    """Run the whole module once on fake tensors. Raises ModelError where it does not run."""
    quiet = logging.getLogger("torch._subclasses.fake_tensor")
    before = quiet.level
    quiet.setLevel(logging.CRITICAL)  # it logs a traceback of every shape error; ours says it in one line
    try:
        return capture(lambda: fakes.call(root, "", args, kwargs), units, scopes)
    except ModelError:
        raise
    except Exception as error:
        shapes = [tuple(t.shape) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        raise ModelError(
            f"{type(root).__name__} does not run on example_inputs of the shapes {shapes} (one sample, fake tensors): "
            f"{type(error).__name__}: {error}"
        ) from error
    finally:
        quiet.setLevel(before)


def _logits(layout: BlockLayout, last: Call) -> int:
    """Elements of a causal language model's logits per sample; 0 for any other module."""
    if layout.form != "causal_lm" or not isinstance(last.output, torch.Tensor):
        return 0
    return last.output.numel()


def _carried(call: Call) -> dict[str, torch.Tensor]:
    """Return what a block of a chain reads of the block before it: the first tensor that needs a gradient."""
    tensors = [t for t in tree_leaves((call.args, call.kwargs)) if isinstance(t, torch.Tensor)]
    flowing = [t for t in tensors if t.requires_grad] or tensors
    return {"hidden_states": flowing[0]} if flowing else {}


def _windowed(module: nn.Module, args: Any, kwargs: Any) -> bool:
    """Whether the attention really needs a mask of its own, beyond being causal.

    Under fake tensors transformers always makes one, since it cannot look whether sequences are packed. With real
    ones, fused attention gets none and then does not repeat the key-value heads, which would count as kept.
    """
    config: Any = module.config
    if getattr(config, "_attn_implementation", None) != "sdpa":
        return True
    length = max(t.shape[1] for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.dim() > 1)
    window = getattr(config, "sliding_window", None)
    sliding = any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or ["sliding_attention"])
    return bool(window and sliding and length >= window)


def _accepts(module: nn.Module, argument: str) -> bool:
    parameters = inspect.signature(module.forward).parameters
    return argument in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _input_specs(module: nn.Module, args: Any, kwargs: Any, batch_dim: int) -> tuple[TensorSpec, ...]:
    names = [n for n, p in inspect.signature(module.forward).parameters.items() if p.kind is not p.VAR_KEYWORD]
    positional = {names[i] if i < len(names) else f"input{i}": value for i, value in enumerate(args)}
    tensors = {n: v for n, v in {**positional, **kwargs}.items() if isinstance(v, torch.Tensor)}
    return tuple(_tensor_spec(n, t, batch_dim) for n, t in tensors.items())


def _tensor_spec(name: str, tensor: torch.Tensor, batch_dim: int) -> TensorSpec:
    """Describe one sample's part of a tensor; a tensor without a batch dimension of one is taken whole."""
    shape = list(tensor.shape)
    if len(shape) > batch_dim and shape[batch_dim] == 1:
        del shape[batch_dim]
    dtype = "activation" if tensor.is_floating_point() else str(tensor.dtype).removeprefix("torch.")
    return TensorSpec(name=name, shape=tuple(int(n) for n in shape), dtype=dtype)
