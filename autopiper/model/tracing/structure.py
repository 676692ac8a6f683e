"""Modules whose structure tells their blocks: nn.Sequential, and causal language models of Hugging Face's form."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from autopiper.errors import ModelError
from autopiper.model.layout import BlockLayout, BlockPart, Form

Unit = tuple[str, tuple[str, ...]]
"""A block's name and the names of its sub-modules."""


def known_structure(module: nn.Module) -> BlockLayout | None:
    """Cut a module whose structure tells the order of its blocks, or return None."""
    if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward and len(module):
        return layout_of(module, "sequential", [(name, (name,)) for name in module._modules])
    return causal_lm(module)


def layout_of(
    module: nn.Module,
    form: Form,
    units: Sequence[Unit],
    *,
    parameters: Sequence[Sequence[str]] | None = None,
    container: str = "",
    owner: str = "",
    shared: tuple[str, ...] = (),
    split_points: tuple[str, ...] = (),
) -> BlockLayout:
    """Give each block its parameters, and find those that several blocks share.

    `parameters` = names per block; None = all that the block's sub-modules hold. Raises ModelError where a parameter
    belongs to no block.
    """
    named = dict(module.named_parameters(remove_duplicate=False))
    blocks = []
    names_of: dict[int, list[str]] = {}
    for index, (name, modules) in enumerate(units):
        prefixes = tuple(f"{m}." for m in modules)
        given = None if parameters is None else set(parameters[index])
        own: dict[int, str] = {}
        for parameter, tensor in named.items():
            if parameter.startswith(prefixes) if given is None else parameter in given:
                own.setdefault(id(tensor), parameter)
        for key, parameter in own.items():
            names_of.setdefault(key, []).append(parameter)
        blocks.append(BlockPart(name=name, modules=modules, parameters=tuple(own.values())))
    loose = [n for n, p in named.items() if id(p) not in names_of]
    if loose:
        raise ModelError(
            f"parameters {', '.join(loose[:5])} of {type(module).__name__} belong to none of its {len(units)} blocks; "
            "move each into the sub-module that uses it, or drop what is not used"
        )
    return BlockLayout(
        form=form,
        blocks=tuple(blocks),
        container=container,
        owner=owner,
        shared=shared,
        split_points=split_points,
        tied=tuple(tuple(names) for names in names_of.values() if len(names) > 1),
    )


def layer_list(module: nn.Module) -> str | None:
    """Return the name of the ModuleList or Sequential that holds most parameters; None where there is none."""
    sizes = {
        name: sum(p.numel() for p in child.parameters())
        for name, child in module.named_modules()
        if name and isinstance(child, nn.ModuleList | nn.Sequential) and len(child)
    }
    return max(sizes, key=lambda name: (sizes[name], -name.count("."))) if sizes else None


def causal_lm(module: nn.Module) -> BlockLayout | None:
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
    return layout_of(module, "causal_lm", units, container=container, owner=owner, shared=tuple(shared))
