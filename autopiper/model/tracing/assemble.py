"""What the units of a block cost, added up to Blocks; equal blocks get one kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx, nn

from autopiper.model.annotations import EXPERTS, Annotation, appended
from autopiper.model.layout import BlockLayout, BlockPart
from autopiper.model.parts import EXPERT_SEGMENTS, Block
from autopiper.model.tracing.capture import Unit
from autopiper.model.tracing.experts import ExpertPart
from autopiper.model.tracing.measure import Measure

UNCUT = (("tensor shards of a live module", 1),)
"""Live modules are not cut by tensors yet: their only tensor-parallel size is 1."""


def assemble(
    module: nn.Module,
    layout: BlockLayout,
    units: Sequence[Unit],
    measures: Sequence[Measure],
    logits: int,
) -> tuple[Block, ...]:
    """Add up the units of each block, and give equal blocks one kind."""
    named = dict(module.named_parameters(remove_duplicate=False))
    tied = {name for names in layout.tied for name in names}
    blocks: list[Block] = []
    kinds: dict[Any, str] = {}
    for index, part in enumerate(layout.blocks):
        mine = [i for i, unit in enumerate(units) if unit.block == index]
        # A unit's output that the next one keeps as its input is one tensor: count it there.
        kept = sum(
            m.kept_inside
            + m.kept_input
            + (0 if i + 1 < len(measures) and measures[i + 1].kept_input else m.kept_output)
            for i, m in ((i, measures[i]) for i in mine)
        )
        sizes = {p: named[p].numel() for p in part.parameters}
        work = _experts([(units[i], measures[i].experts) for i in mine])
        experts = sum(n for p, n in sizes.items() if (p in work.parameters or ".experts." in p) and p not in tied)
        head = logits if index == len(layout.blocks) - 1 else 0
        block = Block(
            name=part.name,
            kind="",
            dense_parameters=sum(sizes.values()) - experts,
            expert_parameters=experts,
            forward_flops=sum(measures[i].forward_flops for i in mine),
            backward_input_flops=sum(measures[i].backward_input_flops for i in mine),
            backward_weight_flops=sum(measures[i].backward_weight_flops for i in mine),
            # The loss writes the logits as fp32 and reads them back, in three kernels.
            forward_moved_elements=sum(measures[i].moved_elements for i in mine) + 4 * head,
            kernels=max(1, sum(measures[i].kernels for i in mine)) + (3 if head else 0),
            kept_elements=kept,
            kept_elements_selective=kept,
            kept_fp32_elements=head,
            tensor_divisors=UNCUT,
            **work.fields,
        )
        key = (replace(block, name=""), tuple(units[i].signature for i in mine))
        if key not in kinds:
            label = part.name if part.name in ("embedding", "head", "before", "after") else ""
            label = label or type(_named_module(module, part)).__name__
            twins = sum(kind.partition("#")[0] == label for kind in kinds.values())
            kinds[key] = f"{label}#{twins + 1}" if twins else label
        blocks.append(replace(block, kind=kinds[key]))
    return tuple(blocks)


@dataclass(frozen=True, slots=True)
class _Experts:
    """The experts of one block: fields of the Block, and the qualified names of their parameters."""

    fields: dict[str, Any]
    parameters: frozenset[str]


def _experts(parts: Sequence[tuple[Unit, ExpertPart | None]]) -> _Experts:
    found = [(unit, part) for unit, part in parts if part is not None]
    if not found:
        return _Experts({}, frozenset())
    names: set[str] = set()
    for unit, part in found:
        dot = "" if isinstance(unit.module, fx.GraphModule) else f"{unit.prefix}."
        own = [dot + name for name, _ in unit.module.named_parameters(remove_duplicate=False)]
        names.update(own[i] for i in part.parameters)
    fields = {
        "num_experts": min(part.num_experts for _, part in found),
        "expert_forward_flops": sum(part.forward_flops for _, part in found),
        "expert_backward_input_flops": sum(part.backward_input_flops for _, part in found),
        "expert_backward_weight_flops": sum(part.backward_weight_flops for _, part in found),
        "expert_moved_elements": sum(part.moved_elements for _, part in found),
        "expert_kernels": sum(part.kernels for _, part in found),
        "all_to_all_elements": max(part.all_to_all_elements for _, part in found),
        "segments": EXPERT_SEGMENTS,
    }
    return _Experts(fields, frozenset(names))


def appended_experts(regions: tuple[Annotation, ...], blocks: Sequence[Block]) -> tuple[Annotation, ...]:
    """Return the regions with one of experts added for each block that has some."""
    ranges = [(i, i + 1) for i, block in enumerate(blocks) if block.num_experts]
    return appended(regions, EXPERTS, ranges) if ranges else regions


def _named_module(module: nn.Module, part: BlockPart) -> nn.Module:
    return module.get_submodule(part.modules[0]) if part.modules else module
