"""`price`: the analytic cost table of a model on a cluster, for every choice that a search may look up."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from autopiper.cluster.spec import Cluster, DeviceType, Link
from autopiper.costmodel.blocks import Boundary, price_block
from autopiper.errors import CostError
from autopiper.model.spec import Block, Model
from autopiper.plan.costs import BlockCost, CostTable
from autopiper.plan.training import Training

MAX_SAMPLES = 64
"""Largest slice priced unless asked for more; no micro-batch of a model worth planning is larger."""


def price(
    model: Model,
    cluster: Cluster,
    training: Training,
    *,
    tensor_parallel_sizes: Sequence[int] | None = None,
    max_samples: int | None = None,
) -> CostTable:
    """Price every kind of block x device type x tensor-parallel size x slice of 1, 2, 4, … samples.

    Sizes default to the powers of two up to the devices of one type in a node; a block whose heads (or the like) a size
    does not divide has no price there. Slices go up to `max_samples` (default: the global batch, at most 64), rounded
    up to a power of two. An open precision is resolved over all device types of the cluster.

    Raises CostError for a model without work (`Model.chain`), sizes below 1, or a size that no node or block can have;
    PlanError where the precision is not supported everywhere.
    """
    counts = _largest_counts(cluster)
    training = training.resolve(cluster.device_type(name) for name in counts)
    blocks = _distinct(model)
    if not any(b.forward_flops or b.forward_moved_elements for b in blocks):
        raise CostError(
            f"model '{model.name}' says nothing about the work of its blocks, so it cannot be priced; give prices by "
            f"CostTable.from_layers(forward_s=[...], ...) or describe its dimensions (Model.transformer)"
        )
    slices = _slices(training, max_samples)
    _check_sizes(tensor_parallel_sizes, counts, blocks)
    entries: list[BlockCost] = []
    for name, count in counts.items():
        device, link = cluster.device_type(name), _inner_link(cluster, name)
        for block in blocks:
            boundary = _boundary(model, block, training)
            for tp in _sizes(tensor_parallel_sizes, count, block):
                entries.extend(
                    price_block(block, boundary, device, link, training, tensor_parallel_size=tp, samples=samples)
                    for samples in slices
                )
    return CostTable(
        blocks=tuple(entries),
        precision=training.precision,
        optimizer=training.optimizer,
        source=f"analytic, {training.precision}, {_sources(cluster.device_type(name) for name in counts)}",
    )


def _largest_counts(cluster: Cluster) -> dict[str, int]:
    """Return for each device type present how many of them the fullest node has."""
    counts: dict[str, int] = {}
    for node in cluster.nodes:
        for name in dict.fromkeys(node.devices):
            counts[name] = max(counts.get(name, 0), node.devices.count(name))
    return counts


def _inner_link(cluster: Cluster, device: str) -> Link:
    """Return the slowest link inside a node that has this type: a price holds wherever the plan puts the block."""
    links = [node.intra for node in cluster.nodes if device in node.devices]
    return Link(bytes_per_s=min(x.bytes_per_s for x in links), latency_s=max(x.latency_s for x in links))


def _distinct(model: Model) -> list[Block]:
    """Return one block of each kind, in order of appearance."""
    return list({b.kind: b for b in reversed(model.blocks)}.values())[::-1]


def _boundary(model: Model, block: Block, training: Training) -> Boundary:
    """Return the largest input and output over all blocks of the kind; what enters the model is the first's input."""
    each = training.activation_bytes
    into: dict[int, float] = dict.fromkeys(range(len(model.blocks)), 0.0)
    out: dict[int, dict[str, float]] = {}
    into[0] = sum(t.bytes(each) for t in model.inputs)
    for edge in model.edges:
        into[edge.target] += sum(t.bytes(each) for t in edge.tensors)
        out.setdefault(edge.source, {}).update({t.name: t.bytes(each) for t in edge.tensors})
    alike = [i for i, b in enumerate(model.blocks) if b.kind == block.kind]
    return Boundary(
        input_bytes=max(into[i] for i in alike),
        output_bytes=max(sum(out.get(i, {}).values()) for i in alike),
    )


def _slices(training: Training, max_samples: int | None) -> list[int]:
    if max_samples is not None and max_samples < 1:
        raise CostError(f"max_samples is {max_samples}; it must be 1 or more")
    largest = min(training.global_batch_size, MAX_SAMPLES) if max_samples is None else max_samples
    return [2**k for k in range(math.ceil(math.log2(largest)) + 1)]


def _misfit(block: Block, size: int) -> str | None:
    """Say what of a block a tensor-parallel size does not divide."""
    for name, count in block.tensor_divisors:
        if count % size:
            return f"{name} = {count} of block '{block.name}' ({count} mod {size} = {count % size})"
    return None


def _sizes(asked: Sequence[int] | None, count: int, block: Block) -> Iterator[int]:
    allowed = (2**k for k in range(count.bit_length())) if asked is None else dict.fromkeys(asked)
    return (size for size in allowed if size <= count and not _misfit(block, size))


def _check_sizes(asked: Sequence[int] | None, counts: dict[str, int], blocks: list[Block]) -> None:
    if asked is not None and not asked:
        raise CostError("tensor_parallel_sizes is empty; give at least one size, or None for all that fit")
    for size in asked or ():
        if size < 1:
            raise CostError(f"tensor-parallel size {size} must be 1 or more")
        if size > max(counts.values()):
            raise CostError(
                f"tensor-parallel size {size} exceeds the devices of one type in any node: "
                f"{', '.join(f'{count} x {name}' for name, count in counts.items())}"
            )
        for block in blocks:
            misfit = _misfit(block, size)
            if misfit:
                raise CostError(f"tensor-parallel size {size} does not divide {misfit}")


def _sources(types: Iterable[DeviceType]) -> str:
    return "; ".join(f"{t.name}: {t.source}" for t in types)
