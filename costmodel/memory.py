"""Bytes that a stage needs on one device: its parameters, what it keeps per micro-batch, and what comes and goes.

Formulas follow Korthikanti et al. (arXiv 2205.05198, sections 4 and 5): what tensor parallelism divides, and what it does not.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopiper._data import data
from autopiper.errors import CostError, nearest
from autopiper.ir.graph import GraphStage, TrainingGraph
from autopiper.model.spec import RECOMPUTE_CHOICES, Block, Model
from autopiper.plan.costs import BlockCost, CostTable, PriceIndex
from autopiper.plan.training import Training


def shard_parameters(block: Block, tensor_parallel_size: int) -> float:
    """Return the parameters of a block that one tensor-parallel rank holds; replicated ones stay whole."""
    divided = block.parameters - block.replicated_parameters
    return block.replicated_parameters + divided / tensor_parallel_size


def stage_parameters(model: Model, start: int, stop: int, tensor_parallel_size: int) -> float:
    """Return the parameters that one device of a stage [start, stop) holds; a tied one used twice there is one copy."""
    total = sum(shard_parameters(b, tensor_parallel_size) for b in model.blocks[start:stop])
    for tied in model.tied:
        inside = sum(start <= b < stop for b in tied.blocks)
        total -= tied.parameters * max(0, inside - 1) / tensor_parallel_size
    return total


def static_bytes(
    model: Model, training: Training, costs: CostTable, start: int, stop: int, tensor_parallel_size: int
) -> float:
    """Return the resident bytes of a stage's parameters on one device: weights, gradients, master copy, optimizer.

    Where the costs give the bytes of each block, those count, divided as the block's parameters are.
    Raises CostError where they are not one per block, PlanError while the precision is open.
    """
    if costs.parameter_bytes is None:
        return stage_parameters(model, start, stop, tensor_parallel_size) * training.bytes_per_parameter
    _check_per_block("parameter_bytes", costs.parameter_bytes, model)
    total = 0.0
    for block, given in zip(model.blocks[start:stop], costs.parameter_bytes[start:stop], strict=True):
        share = shard_parameters(block, tensor_parallel_size) / block.parameters if block.parameters else None
        total += given * (1 / tensor_parallel_size if share is None else share)
    return total


@data
class States:
    """Resident bytes of a stage on one device, by what they are."""

    parameters: float
    gradients: float
    optimizer: float
    """Master weights and optimizer states."""


def stage_static_bytes(graph: TrainingGraph, costs: CostTable, stage: GraphStage) -> States:
    """Return the resident bytes of a stage on one device: what experts' and ZeRO's sharding leave of each block.

    ZeRO 1 divides optimizer states by the number of holders, 2 gradients too, 3 parameters too (Rajbhandari et al., arXiv
    1910.02054, section 5). A tied parameter that the same device uses in an earlier stage counts there.
    """
    training, model, tp = graph.training, graph.model, stage.tensor_parallel_size
    if costs.parameter_bytes is not None:
        _check_per_block("parameter_bytes", costs.parameter_bytes, model)
    each = (training.weight_bytes, training.gradient_bytes, training.master_bytes + training.optimizer_bytes)
    holders = _holders(graph, stage)
    earlier = [s for s in graph.groups()[stage.members] if (s.pipeline, s.index) < (stage.pipeline, stage.index)]
    found = [0.0, 0.0, 0.0]
    for b in range(stage.start, stage.stop):
        block = model.blocks[b]
        whole = shard_parameters(block, tp)
        experts = block.expert_parameters / tp if b in stage.sharded else 0.0
        count = whole - experts
        alike = 0.0  # tied parameters are a gradient block of their own, of level 0: whole on every holder
        for tied in (t for t in model.tied if b in t.blocks):
            held_before = any(s.start <= u < s.stop for s in earlier for u in tied.blocks)
            count -= tied.parameters / tp
            if not held_before and not any(stage.start <= u < b for u in tied.blocks):
                alike += tied.parameters / tp
        # Where the costs give the bytes of a block, those count, divided as its parameters are.
        scale = 1.0
        if costs.parameter_bytes is not None:
            given = costs.parameter_bytes[b] / sum(each)
            if block.parameters:
                scale = given / block.parameters
            else:
                count = given / tp
        for n, bytes_ in enumerate(each):
            divided = holders.get(b, 1) if stage.zero[b - stage.start] >= (3, 2, 1)[n] else 1
            found[n] += (count / divided + alike + experts / stage.expert_parallel_size) * bytes_ * scale
    return States(parameters=found[0], gradients=found[1], optimizer=found[2])


def _holders(graph: TrainingGraph, stage: GraphStage) -> dict[int, int]:
    """Return over how many ranks ZeRO divides each block of a stage."""
    return {
        b: len(block.holders)
        for block in graph.gradient_blocks
        if block.kind == "dense" and block.zero
        for b in block.blocks
        if stage.start <= b < stage.stop
    }


def boundary_bytes(model: Model, training: Training, costs: CostTable, cut: int) -> float:
    """Return the bytes of one sample that cross a cut before block `cut` in one direction, all edges together."""
    if costs.output_bytes is None:
        return sum(t.bytes(training.activation_bytes) for t in model.crossing(cut))
    _check_per_block("output_bytes", costs.output_bytes, model)
    return sum(costs.output_bytes[source] for source in {e.source for e in model.edges if e.source < cut <= e.target})


def kept_bytes(price: BlockCost, recompute: str) -> float:
    """Return what a block keeps from F to B for the slice that `price` holds for. Raises CostError for another word."""
    kept = {"none": price.kept_bytes, "selective": price.kept_bytes_selective, "full": price.kept_bytes_full}
    if recompute not in kept:
        raise CostError(
            f"recompute '{recompute}' is unknown{nearest(recompute, RECOMPUTE_CHOICES)}; "
            f"allowed: {', '.join(RECOMPUTE_CHOICES)}"
        )
    return kept[recompute]


def stage_kept_bytes(
    index: PriceIndex, model: Model, device_type: str, tensor_parallel_size: int, start: int, stop: int,
    recompute: Sequence[str], samples: int,
) -> float:  # fmt: skip
    """Return the bytes that one device of a stage keeps from F to B for a slice of `samples`; 0 for an empty slice.

    `recompute` has one word per block of the stage.
    """
    prices = _stage_prices(index, model, device_type, tensor_parallel_size, start, stop, samples)
    return sum(kept_bytes(price, choice) for price, choice in zip(prices, recompute, strict=bool(prices)))


def stage_workspace_bytes(
    index: PriceIndex, model: Model, device_type: str, tensor_parallel_size: int, start: int, stop: int,
    recompute: Sequence[str], samples: int,
) -> float:  # fmt: skip
    """Return the short-lived bytes on top of what is kept while F or B of a slice runs; 0 for an empty slice.

    Blocks run one after the other, so the largest counts; a block computed again first refills what it did not keep.
    """
    prices = _stage_prices(index, model, device_type, tensor_parallel_size, start, stop, samples)
    return max(
        (
            price.workspace_bytes + price.kept_bytes - min(price.kept_bytes, kept_bytes(price, choice))
            for price, choice in zip(prices, recompute, strict=bool(prices))
        ),
        default=0.0,
    )


def _stage_prices(
    index: PriceIndex, model: Model, device_type: str, tensor_parallel_size: int, start: int, stop: int, samples: int
) -> list[BlockCost]:
    if samples == 0:
        return []
    return [index.block(b.kind, device_type, tensor_parallel_size, samples) for b in model.blocks[start:stop]]


def _check_per_block(name: str, values: Sequence[float], model: Model) -> None:
    if len(values) != len(model.blocks):
        raise CostError(
            f"{name} of the costs has {len(values)} values for the {len(model.blocks)} blocks of model '{model.name}'; "
            f"these prices belong to another model"
        )
