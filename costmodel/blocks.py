"""The analytic price of one block on one device: roofline times, tensor-parallel collectives, kept bytes.

    F = launches + max(matrix work, reading the weights) + memory-bound work + collectives
    I = the same of the backward for the input, with twice the memory-bound work
    W = launches + max(matrix work, reading and writing the gradient);   B = I + W

The routed experts' part of F, I and W is their share of each term: of the launches by kernels, of the matrix term by
FLOPs where work is the bound and by parameters where memory is, of the memory-bound work by moved elements, and nothing
of the collectives. It holds for every expert-parallel degree: under balanced routing a rank works on as many tokens.

Sources: what tensor parallelism divides and which all-reduces it costs, Narayanan et al., arXiv 2104.04473, section 2.3,
and Korthikanti et al., arXiv 2205.05198, section 4; a layer as a sum of matrix and vector work, each at an efficiency
by size, Isaev et al. (Calculon, SC 2023), section 3; the roofline, Williams et al., CACM 2009.
"""

from __future__ import annotations

from autopiper._data import data
from autopiper.cluster.spec import DeviceType, Link
from autopiper.costmodel.collectives import ring_all_reduce_s
from autopiper.costmodel.efficiency import matmul_s, moved_s
from autopiper.costmodel.memory import shard_parameters
from autopiper.model.spec import Block
from autopiper.plan.costs import BlockCost
from autopiper.plan.training import Training

RELATIVE_ERROR = 0.15
"""Error bar of an analytic price: an assumption, not validated by a fit to measured runs."""

MATRIX_KERNELS = 0.4
"""Of a block's kernels, the share that is matrix work: about 8 of the 20 of a transformer layer (assumption)."""

BACKWARD_MOVED = 2.0
"""Memory-bound traffic of a backward over its forward: it reads the gradient and the kept input, and writes a gradient."""

WIDEST_KEPT = 0.25
"""Of what a block keeps, its widest tensor, whose gradient lives for a moment: the 4h of an MLP among the 17h that a
layer without attention scores keeps (Korthikanti et al., equation 1, 34 bytes per element of the hidden state)."""


UNKEPT_WIDE = 2.0
"""Copies of the fp32 logits beside the one kept: the logits themselves while the loss is computed, and their gradient."""


@data
class Boundary:
    """Bytes of one sample at the edges of a block, not divided by tensor parallelism."""

    input_bytes: float
    output_bytes: float


def price_block(
    block: Block, boundary: Boundary, device: DeviceType, link: Link, training: Training, *,
    tensor_parallel_size: int, samples: int,
) -> BlockCost:  # fmt: skip
    """Price a slice of `samples` of `block` on one of `tensor_parallel_size` devices joined by `link`.

    `training.precision` must be resolved. Raises CostError where the device does not support it.
    """
    precision, tp = training.precision or "", tensor_parallel_size
    per_element = training.activation_bytes
    parameters = shard_parameters(block, tp)
    launch_s = block.kernels * device.kernel_launch_s
    matrix_kernels = max(1.0, MATRIX_KERNELS * block.kernels)
    whole = block.kept_replicated_elements / block.kept_elements if block.kept_elements else 0.0
    undivided = whole + (1 - whole) / tp
    memory_bound_s = moved_s(device, block.forward_moved_elements * per_element * samples * undivided)

    def matrix(flops: float, expert_flops: float, least_bytes: float) -> tuple[float, float]:
        """Seconds of matrix work of so many FLOPs per sample, at least those of the bytes; and the experts' of them."""
        work_s = matmul_s(device, precision, flops * samples / tp, matrix_kernels)
        least_s = moved_s(device, least_bytes)
        if work_s >= least_s:
            return work_s, work_s * (expert_flops / flops if flops else 0.0)
        return least_s, least_s * (block.expert_parameters / tp / parameters if block.num_experts else 0.0)

    weights_bytes = parameters * training.weight_bytes
    # A gradient is accumulated: read and written once per slice, by lookups (embeddings) as well.
    gradient_bytes = 2 * parameters * training.gradient_bytes
    collective_s = _collectives_s(block, link, tp, block.tensor_collective_elements * per_element * samples)

    expert_launch_s = block.expert_kernels * device.kernel_launch_s
    expert_moved_s = moved_s(device, block.expert_moved_elements * per_element * samples * undivided)

    work_s, experts_s = matrix(
        block.forward_flops, block.expert_forward_flops, weights_bytes if block.forward_flops else 0.0
    )
    forward_s = launch_s + work_s + memory_bound_s + collective_s
    expert_forward_s = expert_launch_s + experts_s + expert_moved_s
    work_s, experts_s = matrix(
        block.backward_input_flops,
        block.expert_backward_input_flops,
        weights_bytes if block.backward_input_flops else 0.0,
    )
    input_s = launch_s + work_s + BACKWARD_MOVED * memory_bound_s + collective_s
    expert_input_s = expert_launch_s + experts_s + BACKWARD_MOVED * expert_moved_s
    work_s, experts_s = matrix(block.backward_weight_flops, block.expert_backward_weight_flops, gradient_bytes)
    weight_s = launch_s + work_s if parameters else 0.0
    expert_weight_s = expert_launch_s + experts_s if parameters else 0.0

    wide_bytes = max(4, per_element) * block.kept_fp32_elements * samples / tp

    def kept(elements: float) -> float:
        replicated = min(elements, block.kept_replicated_elements)
        return (replicated + (elements - replicated) / tp) * per_element * samples + wide_bytes

    kept_bytes, selective_bytes = kept(block.kept_elements), kept(block.kept_elements_selective)
    return BlockCost(
        kind=block.kind,
        device_type=device.name,
        samples=samples,
        tensor_parallel_size=tp,
        forward_s=forward_s,
        backward_s=input_s + weight_s,
        backward_input_s=input_s,
        backward_weight_s=weight_s,
        forward_collective_s=collective_s,
        backward_collective_s=collective_s,
        update_s=update_s(device, training, parameters),
        kept_bytes=kept_bytes,
        kept_bytes_selective=min(selective_bytes, kept_bytes),
        kept_bytes_full=min(boundary.input_bytes * samples, kept_bytes),
        selective_forward_s=_selective_forward_s(block, device, training, tp, samples, kept_bytes - selective_bytes),
        workspace_bytes=(boundary.input_bytes + boundary.output_bytes) * samples
        + WIDEST_KEPT * (kept_bytes - wide_bytes)
        + UNKEPT_WIDE * wide_bytes,
        expert_forward_s=expert_forward_s,
        expert_backward_s=expert_input_s + expert_weight_s,
        expert_backward_input_s=expert_input_s,
        expert_backward_weight_s=expert_weight_s,
        evidence="analytic",
        relative_error=RELATIVE_ERROR,
    )


def _collectives_s(block: Block, link: Link, tensor_parallel_size: int, num_bytes: float) -> float:
    count = block.tensor_collectives
    if count == 0 or tensor_parallel_size == 1:
        return 0.0
    return count * ring_all_reduce_s(link, tensor_parallel_size, num_bytes / count)


def _selective_forward_s(
    block: Block, device: DeviceType, training: Training, tp: int, samples: int, saved_bytes: float
) -> float:
    """Price the attention core computed again: the matrix work without weights, whose W is nothing (F - W)."""
    if saved_bytes <= 0:
        return 0.0
    flops = max(0.0, block.forward_flops - block.backward_weight_flops) * samples / tp
    # Two products (scores, weighted values) and the vector work between them, which writes and reads what was not kept.
    return (
        2 * device.kernel_launch_s
        + matmul_s(device, training.precision or "", flops, 2)
        + moved_s(device, 2 * saved_bytes)
    )


def update_s(device: DeviceType, training: Training, parameters: float) -> float:
    """Return the seconds of the optimizer step of `parameters` on one device: it is all memory traffic.

    Read: gradient, optimizer states, master weights (or weights). Written: the states, the master weights, the
    weights, and the gradient set to zero.
    """
    weights = 2 * training.master_bytes + training.weight_bytes if training.master_bytes else 2 * training.weight_bytes
    return moved_s(device, parameters * (2 * training.gradient_bytes + 2 * training.optimizer_bytes + weights))
