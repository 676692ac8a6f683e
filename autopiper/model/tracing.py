"""Models from live torch modules: the blocks of a module, and what each of them costs.

`find_blocks` is the one notion of how a module is cut into blocks; the runtime builds its stages from the same layout.
Blocks of live modules are the default, because whole-program tracing fails on many architectures; torch's own
`pipeline()` is the fallback for modules of no known structure.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from autopiper.errors import ModelError
from autopiper.model.layout import BlockLayout, BlockPart, parameter_names

__all__ = ["BlockLayout", "BlockPart", "find_blocks", "parameter_names"]

Unit = tuple[str, tuple[str, ...]]
"""A block's name and the names of its sub-modules."""


def find_blocks(module: nn.Module, example_inputs: Any = None, *, batch_dim: int = 0) -> BlockLayout:
    """Cut `module` into blocks by its structure.

    `example_inputs` (args tuple or kwargs dict) is only needed for modules of no known structure, which have to be
    traced. Raises ModelError where the module cannot be cut, saying what was tried.
    """
    if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward and len(module):
        units: list[Unit] = [(name, (name,)) for name in module._modules]
        return _layout(module, "sequential", units)
    found = _causal_lm(module)
    if found is not None:
        return found
    raise ModelError(
        f"{type(module).__name__} is neither an nn.Sequential nor a causal language model of known structure"
    )


def _layout(module: nn.Module, form: Any, units: list[Unit], **fields: Any) -> BlockLayout:
    """Give each block the parameters of its modules, and find the parameters that several blocks share."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    blocks = []
    names_of: dict[int, list[tuple[int, str]]] = {}
    for index, (name, modules) in enumerate(units):
        own: dict[int, str] = {}
        for parameter, tensor in parameters.items():
            if any(parameter.startswith(f"{m}.") for m in modules):
                own.setdefault(id(tensor), parameter)
        for key, parameter in own.items():
            names_of.setdefault(key, []).append((index, parameter))
        blocks.append(BlockPart(name=name, modules=modules, parameters=tuple(own.values())))
    tied = tuple(tuple(n for _, n in names) for names in names_of.values() if len(names) > 1)
    loose = [n for n, p in parameters.items() if id(p) not in names_of]
    if loose:
        raise ModelError(
            f"parameters {', '.join(loose[:5])} of {type(module).__name__} belong to none of its {len(units)} blocks; "
            "move each into the sub-module that uses it"
        )
    return BlockLayout(form=form, blocks=tuple(blocks), tied=tied, **fields)


def layer_list(module: nn.Module) -> str | None:
    """Return the name of the ModuleList or Sequential that holds most parameters; None where there is none."""
    sizes = {
        name: sum(p.numel() for p in child.parameters())
        for name, child in module.named_modules()
        if name and isinstance(child, nn.ModuleList | nn.Sequential) and len(child)
    }
    return max(sizes, key=lambda name: (sizes[name], -name.count("."))) if sizes else None


def _causal_lm(module: nn.Module) -> BlockLayout | None:
    """Recognise a Hugging Face causal language model by its structure, or return None.

    Recognised: one list of decoder layers; its owner has embeddings before and norms after it; beside the base model
    there is only the output head. The names come from the configuration's `base_model_pp_plan` where it has one, else
    from what the modules are.
    """
    config = getattr(module, "config", None)
    prefix = getattr(module, "base_model_prefix", "")
    container = layer_list(module)
    if config is None or container is None or not prefix or not container.startswith(f"{prefix}."):
        return None
    if not isinstance(module.get_submodule(container), nn.ModuleList):
        return None
    owner, _, layers = container.rpartition(".")
    plan = list(getattr(config, "base_model_pp_plan", None) or {})
    embedding: list[str] = []
    head: list[str] = []
    shared: list[str] = []
    for name, child in module.get_submodule(owner).named_children():
        full = f"{owner}.{name}"
        if name == layers:
            continue
        holds = any(True for _ in child.parameters())
        if layers in plan and name in plan:
            (embedding if plan.index(name) < plan.index(layers) else head).append(full)
        elif isinstance(child, nn.Embedding | nn.Dropout) or name == "project_in" or ("embed" in name and holds):
            embedding.append(full)
        elif "norm" in f"{name} {type(child).__name__}".lower() or name == "project_out":
            head.append(full)
        elif not holds:
            shared.append(full)
        else:
            return None
    outside = [name for name, _ in module.named_children() if name != prefix]
    beside = {f"{owner}."} | {f"{name}." for name in outside}
    if not embedding or len(outside) != 1:
        return None
    if any(not n.startswith(tuple(beside)) for n, _ in module.named_parameters(remove_duplicate=False)):
        return None
    units: list[Unit] = [("embedding", tuple(embedding))]
    units += [(f"{container}.{i}", (f"{container}.{i}",)) for i in module.get_submodule(container)._modules]
    units.append(("head", (*head, *outside)))
    return _layout(module, "causal_lm", units, container=container, owner=owner, shared=tuple(shared))
