"""The classic layout in one call: equal stages, equal members (`Strategy.uniform`)."""

from __future__ import annotations

from typing import get_args

from autopiper._data import require
from autopiper.cluster.spec import Cluster
from autopiper.errors import PlanError, nearest
from autopiper.model.spec import Model
from autopiper.plan.settle import whole
from autopiper.plan.strategy import V_FAMILIES, Group, Leftover, Pipeline, Schedule, Stage, Strategy, even_sizes
from autopiper.plan.training import Training


def uniform(
    model: Model,
    cluster: Cluster,
    training: Training,
    *,
    micro_batch_size: int,
    tensor_parallel_size: int,
    pipeline_parallel_size: int,
    virtual_pipeline_parallel_size: int,
    context_parallel_size: int,
    expert_parallel_size: int,
    schedule: str,
    recompute: str,
    sequence_parallel: bool,
    zero: int,
    devices: tuple[int, ...],
    leftover: Leftover,
) -> Strategy:
    """Write what `Strategy.uniform` promises; that says what the arguments mean."""
    sizes = {
        "micro_batch_size": micro_batch_size, "tensor_parallel_size": tensor_parallel_size,
        "pipeline_parallel_size": pipeline_parallel_size, "expert_parallel_size": expert_parallel_size,
        "virtual_pipeline_parallel_size": virtual_pipeline_parallel_size, "context_parallel_size": context_parallel_size,
    }  # fmt: skip
    for name, value in sizes.items():
        whole(name, value)
        if value < 1:
            raise PlanError(f"{name} is {value}; it must be 1 or more")
    for name, word in (("schedule", schedule), ("recompute", recompute), ("leftover", leftover)):
        require(PlanError, name, word, str)
    require(PlanError, "sequence_parallel", sequence_parallel, bool)
    whole("zero", zero)
    if leftover not in get_args(Leftover):
        raise PlanError(f"leftover is {leftover!r}{nearest(leftover, get_args(Leftover))}; allowed: 'first', 'ends'")
    if context_parallel_size != 1:
        raise PlanError(f"context_parallel_size is {context_parallel_size}; only 1 can be planned yet")
    if zero not in (0, 1, 2, 3):
        raise PlanError(f"zero is {zero}; it must be 0, 1, 2 or 3")
    if not devices:
        raise PlanError("devices is empty; name at least one, or None for all")
    # Numbers of numpy would not go into a file.
    tp, pp, micro_batch_size, zero = (
        int(n) for n in (tensor_parallel_size, pipeline_parallel_size, micro_batch_size, zero)
    )
    expert_parallel_size, devices = int(expert_parallel_size), tuple(map(int, devices))
    per_rank = _stages_per_rank(schedule, virtual_pipeline_parallel_size)
    if len(devices) % (tp * pp):
        raise PlanError(
            f"{len(devices)} devices do not divide by tensor_parallel_size {tp} x pipeline_parallel_size {pp} = {tp * pp}; "
            f"{len(devices)} mod {tp * pp} = {len(devices) % (tp * pp)}"
        )
    num_stages = pp * per_rank
    if num_stages > len(model.blocks):
        product = f" x {per_rank} stages a rank = {num_stages}" if per_rank > 1 else ""
        raise PlanError(
            f"pipeline_parallel_size {pp}{product} exceeds the {len(model.blocks)} blocks of model '{model.name}'"
        )
    dp = len(devices) // (tp * pp)
    if dp % expert_parallel_size:
        raise PlanError(
            f"data_parallel_size {dp} does not divide by expert_parallel_size {expert_parallel_size}; "
            f"{dp} mod {expert_parallel_size} = {dp % expert_parallel_size}"
        )
    if expert_parallel_size > 1 and not any(block.num_experts for block in model.blocks):
        raise PlanError(
            f"expert_parallel_size is {expert_parallel_size}, but model '{model.name}' has no experts to divide; "
            "allowed: 1"
        )
    count = _count(training, micro_batch_size, dp, pipelines=2 if schedule == "dualpipe" else 1)
    starts = [0]
    for size in even_sizes(len(model.blocks), num_stages, leftover):
        starts.append(starts[-1] + size)

    def stage(s: int, rank: int) -> Stage:
        first = rank * dp * tp
        blocks = model.blocks[starts[s] : starts[s + 1]]
        group = Group(
            members=tuple(tuple(devices[first + m * tp : first + (m + 1) * tp]) for m in range(dp)),
            slices=((micro_batch_size,) * dp,) * count,
            sequence_parallel=sequence_parallel and tp > 1,
            expert_parallel_size=expert_parallel_size if any(b.num_experts for b in blocks) else 1,
        )
        return Stage(
            start=starts[s], stop=starts[s + 1], group=group, recompute=(recompute,) * len(blocks),
            zero=(zero,) * len(blocks) if zero else (),
        )  # fmt: skip

    if schedule in V_FAMILIES:
        ranks = [[min(s, num_stages - 1 - s) for s in range(num_stages)]]
    elif schedule == "dualpipe":
        ranks = [list(range(pp)), list(reversed(range(pp)))]
    else:
        ranks = [[s % pp for s in range(num_stages)]]
    pipelines = tuple(
        Pipeline(
            micro_batch_sizes=(micro_batch_size * dp,) * count,
            stages=tuple(stage(s, rank) for s, rank in enumerate(where)),
        )
        for where in ranks
    )
    return Strategy(
        training=training,
        pipelines=pipelines,
        schedules=(Schedule(family=schedule, pipelines=tuple(range(len(pipelines)))),),
    )


def _stages_per_rank(schedule: str, virtual: int) -> int:
    if schedule in V_FAMILIES:
        if virtual not in (1, 2):
            raise PlanError(f"virtual_pipeline_parallel_size is {virtual}; schedule '{schedule}' has 2 stages a rank")
        return 2
    if schedule == "dualpipe" and virtual != 1:
        raise PlanError(
            f"virtual_pipeline_parallel_size is {virtual}; in 'dualpipe' a rank has one stage of each of two pipelines: 1"
        )
    return virtual


def _count(training: Training, micro_batch_size: int, dp: int, pipelines: int) -> int:
    """Return the micro-batches of each pipeline."""
    at_once = micro_batch_size * dp * pipelines
    if training.global_batch_size % at_once:
        two = " x 2 pipelines" if pipelines > 1 else ""
        raise PlanError(
            f"global_batch_size {training.global_batch_size} does not divide by micro_batch_size {micro_batch_size} x "
            f"data_parallel_size {dp}{two} = {at_once}; nearest: "
            f"{max(at_once, round(training.global_batch_size / at_once) * at_once)}"
        )
    return training.global_batch_size // at_once
