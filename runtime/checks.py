"""What is verified before the first message: that plan, module, batch and machine belong together.

Every rank looks at its own part and puts its findings in words; `agree` exchanges them, so that all ranks refuse
together and all say what differs and on which rank.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autopiper.errors import PlanError
from autopiper.ir import TrainingGraph
from autopiper.model.layout import BlockLayout
from autopiper.model.spec import Model
from autopiper.plan import Plan, Program, Training
from autopiper.plan.file import encode
from autopiper.runtime import batches
from autopiper.runtime.stages import LiveStage

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "fp64": torch.float64}
"""What the runtime computes in so far. tf32 keeps its tensors in float32."""
PIECE = 2**22
"""Elements of a parameter that are looked at together when weights are compared."""


def training_dtype(training: Training) -> torch.dtype:
    """Return the dtype of a training's precision. Raises PlanError for one that cannot be trained in yet."""
    precision = training.precision
    if precision not in DTYPES:
        raise PlanError(
            f"the precision is {precision}; the runtime of this version trains in fp32 and fp64 (and tf32): "
            "plan again with Training(precision='fp32')"
        )
    return DTYPES[precision]


def plan_faults(plan: Plan, graph: TrainingGraph, world_size: int) -> list[str]:
    """What of a plan cannot be run here, whichever rank looks."""
    faults = []
    used = len(graph.devices())
    if world_size != used:
        faults.append(f"world size is {world_size}; the plan uses {used} devices, one rank each")
    levels: dict[tuple[int, int], int] = {}
    for block in graph.gradient_blocks:  # what one rank holds alone is not shared out, whatever the level
        for held in block.holders:
            key = held.pipeline, held.stage
            levels[key] = max(levels.get(key, 0), block.zero)
    for stage in graph.stages():
        if stage.tensor_parallel_size > 1:
            faults.append(
                f"stage {stage.tag}: tensor_parallel_size is {stage.tensor_parallel_size}; only 1 can be run yet"
            )
        if "selective" in stage.recompute:
            faults.append(f"stage {stage.tag}: recompute 'selective' cannot be run yet; allowed: none, full")
        level = levels.get((stage.pipeline, stage.index), 0)
        if level:
            faults.append(f"stage {stage.tag}: ZeRO level {level} cannot be run yet; only 0")
        if stage.sharded:
            faults.append(f"stage {stage.tag}: experts shared out over members cannot be run yet")
    return faults


def device_faults(plan: Plan, program: Program, device: torch.device, rank: int) -> list[str]:
    """Whether this rank's device is what the plan was made for."""
    planned = plan.cluster.device(program.devices[program.ranks.index(rank)])
    platform = planned.type.platform
    said = f"device {planned.id} of the plan is a {planned.type.name} ({platform})"
    if platform == "cpu":
        return [] if device.type == "cpu" else [f"{said}, but the rank runs on {device}"]
    if device.type != "cuda":
        return [f"{said}, but the rank runs on {device}"]
    if not torch.cuda.is_available():
        return [f"{said}, but this machine has no such device"]
    found = "rocm" if torch.version.hip else "cuda"
    if found != platform:
        return [f"{said}, but this machine's devices are {found}"]
    properties = torch.cuda.get_device_properties(device)
    if properties.total_memory < 0.9 * planned.type.memory_bytes - planned.type.reserved_bytes:
        return [
            f"{said} with {planned.type.memory_bytes / 2**30:.1f} GiB, but {properties.name} has "
            f"{properties.total_memory / 2**30:.1f} GiB"
        ]
    return []


def module_faults(model: Model, layout: BlockLayout, module: nn.Module) -> list[str]:
    """Whether the module has the blocks of the plan's model, each with as many parameters."""
    faults = []
    if len(layout.blocks) != len(model.blocks):
        names = ", ".join(b.name for b in layout.blocks[:6])
        faults.append(
            f"the module has {len(layout.blocks)} blocks ({names}{', …' if len(layout.blocks) > 6 else ''}); the plan's "
            f"model '{model.name}' has {len(model.blocks)}"
        )
    for index, (built, planned) in enumerate(zip(layout.blocks, model.blocks, strict=False)):
        count = sum(module.get_parameter(n).numel() for n in built.parameters)
        if count != planned.parameters:
            faults.append(
                f"block {index} ('{built.name}') has {count} parameters; block '{planned.name}' of the plan's model "
                f"'{model.name}' has {planned.parameters}"
            )
    return faults


def stage_faults(stage: LiveStage, dtype: torch.dtype) -> list[str]:
    """Whether what this rank holds can be trained as planned."""
    faults = []
    odd = {n: p for n, p in stage.held.items() if p.dtype != dtype}
    if odd:
        name, parameter = next(iter(odd.items()))
        faults.append(
            f"parameter '{name}' is {str(parameter.dtype).removeprefix('torch.')} ({len(odd)} such); the plan's "
            f"precision needs {str(dtype).removeprefix('torch.')}: module.to({dtype})"
        )
    frozen = [n for n, p in stage.held.items() if not p.requires_grad]
    if frozen:
        faults.append(
            f"parameter '{frozen[0]}' is frozen ({len(frozen)} such); frozen parameters cannot be planned yet"
        )
    for name, sub in stage.named_modules():
        if isinstance(sub, nn.modules.batchnorm._BatchNorm) and sub.training:
            faults.append(
                f"'{name.partition('inner.')[2] or name}' is a {type(sub).__name__}: its statistics would depend on how "
                "the plan cuts the batch; use a norm within the sample (LayerNorm, GroupNorm)"
            )
    return faults


def batch_faults(model: Model, layout: BlockLayout, batch: Any, expected: int, custom_inputs: bool) -> list[str]:
    """Whether a batch has the samples, the sequence length and the types that the plan was made for.

    A rank that reads no samples (`expected` 0) may be given anything.
    """
    if not expected:
        return []
    names = tuple(i.name for i in model.inputs)
    try:
        size = batches.count(batch)
        args, kwargs = ((), {}) if custom_inputs else batches.module_inputs(batch, names)
    except PlanError as fault:
        return [str(fault)]
    faults = []
    if size != expected:
        faults.append(f"the batch has {size} samples; this rank's Program takes {expected}")
    if layout.form == "causal_lm" and isinstance(batch, Mapping) and not custom_inputs:
        faults += [
            f"the batch has '{key}', which the plan's model does not take: leave it out, or plan with a model that has it"
            for key in ("attention_mask", "position_ids", "token_type_ids", "inputs_embeds")
            if key in batch and key not in names
        ]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    for spec in model.inputs:
        tensor = given.get(spec.name)
        if spec.name not in given and not custom_inputs:
            faults.append(f"the batch lacks the model's input '{spec.name}'")
        if not isinstance(tensor, torch.Tensor):
            continue
        shape = tuple(tensor.shape[1:])
        dtype = str(tensor.dtype).removeprefix("torch.")
        if shape != spec.shape and len(shape) == len(spec.shape) == 1 and spec.shape[0] == model.sequence_length:
            faults.append(
                f"'{spec.name}' has sequence length {shape[0]}; the plan was made for sequence_length "
                f"{model.sequence_length}"
            )
        elif shape != spec.shape:
            faults.append(f"'{spec.name}' has shape {shape} per sample; the plan was made for {spec.shape}")
        if spec.dtype == "activation" and not tensor.is_floating_point():
            faults.append(f"'{spec.name}' is {dtype}; the plan was made for a floating type")
        elif spec.dtype != "activation" and dtype != spec.dtype and tensor.is_floating_point():
            faults.append(f"'{spec.name}' is {dtype}; the plan was made for {spec.dtype}")
    return faults


def plan_digest(plan: Plan) -> str:
    """16 hex digits of what must be equal on all ranks."""
    content = encode("plan", plan)
    text = json.dumps([content[k] for k in ("model", "cluster", "strategy", "programs")], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def weights_digest(held: Mapping[str, nn.Parameter], layout: BlockLayout) -> dict[str, int]:
    """One number per held parameter, equal exactly where every bit of the parameter is."""
    out = {}
    for name, parameter in held.items():
        group = next((g for g in layout.tied if name in g), (name,))
        raw = parameter.detach().contiguous().reshape(-1).view(torch.int32)
        # Positions weigh in, so that swapped values do not cancel; arithmetic wraps. Piecewise, for memory's sake.
        total, at = torch.zeros((), dtype=torch.int64, device=raw.device), 0
        for piece in raw.split(PIECE):  # type: ignore[no-untyped-call]
            odd = torch.arange(2 * at + 1, 2 * (at + piece.numel()), 2, device=raw.device)
            total, at = total + (piece.to(torch.int64) * odd).sum(), at + piece.numel()
        out[group[0]] = int(total)
    return out


def agree(faults: Sequence[str], facts: Mapping[str, Mapping[str, Any]], cause: BaseException | None = None) -> None:
    """Exchange what each rank found, and raise PlanError on every rank where any found a fault.

    `facts` maps a title to named values, which must be equal on all ranks that have them.
    """
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (list(faults), {k: dict(v) for k, v in facts.items()}))
    refused: dict[str, list[int]] = {}
    for rank, (texts, _) in enumerate(found):
        for text in texts:
            refused.setdefault(text, []).append(rank)
    lines = [
        text if len(ranks) == len(found) else f"rank {', '.join(map(str, ranks))}: {text}"
        for text, ranks in refused.items()
    ]
    known: dict[tuple[str, str], tuple[int, Any]] = {}
    for rank, (_, theirs) in enumerate(found):
        for title, values in theirs.items():
            for name, value in values.items():
                owner, first = known.setdefault((title, name), (rank, value))
                if first != value:
                    lines.append(f"{title} '{name}' differs between rank {owner} and rank {rank}")
    if lines:
        raise PlanError("this plan cannot be run here", lines[:20]) from cause
