"""Directives: the sentences in which a strategy is written, by a person or by the search.

`place`, `replicate`, `shard`, `split` and `order` have Piper's meaning (arXiv 2606.11169; FACTS part A); `pipeline`,
`cut`, `degrees`, `slices`, `recompute` and `buckets` say what Piper cannot. A filter is a mapping tag -> index or "*":
`PIPE` names a pipeline (absent = every pipeline), `PP` a stage, `MB` a micro-batch, `PASS` one of F, B, BI, BW.
What a directive does to the graph is `ir.transform`'s business.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Literal

from autopiper._data import data
from autopiper.plan import settle as to

Filter = Mapping[str, int | str]


@data
class PipelineDirective:
    """Pipeline `index` processes micro-batches of these sizes, in samples over all members."""

    op: Literal["pipeline"] = "pipeline"
    index: int
    micro_batch_sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        to.settle(self, index=to.whole, micro_batch_sizes=to.wholes)


@data
class CutDirective:
    """Stage `stage` of pipeline `pipeline` holds the blocks [start, stop)."""

    op: Literal["cut"] = "cut"
    pipeline: int
    stage: int
    blocks: tuple[int, int]

    def __post_init__(self) -> None:
        to.settle(self, pipeline=to.whole, stage=to.whole, blocks=to.pair)


@data
class PlaceDirective:
    """The matched stage is held by these devices, tensor-parallel ranks fastest."""

    op: Literal["place"] = "place"
    filter: Filter
    devices: tuple[int, ...]
    stream: str | None = None

    def __post_init__(self) -> None:
        to.settle(self, filter=to.filter, devices=to.devices, stream=to.optional(to.text))


@data
class ReplicateDirective:
    """How the gradients of the matched stage are kept equal over its holders."""

    op: Literal["replicate"] = "replicate"
    filter: Filter
    devices: tuple[int, ...] | None = None
    reduce_stream: str | None = None
    gather_stream: str | None = None
    bucket_size: float | None = None
    """Bucket size in MB of 2**20 bytes, as Piper's."""
    shard_grads: bool = False
    """ZeRO 2: gradients and optimizer states divided over the members."""
    shard_params: bool = False
    """ZeRO 3: parameters too."""
    shard_optimizer: bool = False
    """ZeRO 1: optimizer states alone; Piper has no word for it."""

    def __post_init__(self) -> None:
        to.settle(
            self, filter=to.filter, devices=to.optional(to.devices), reduce_stream=to.optional(to.text),
            gather_stream=to.optional(to.text), bucket_size=to.optional(to.number), shard_grads=to.flag,
            shard_params=to.flag, shard_optimizer=to.flag,
        )  # fmt: skip


@data
class ShardDirective:
    """Expert parallelism over these devices."""

    op: Literal["shard"] = "shard"
    filter: Filter
    devices: tuple[int, ...]
    stream: str | None = None

    def __post_init__(self) -> None:
        to.settle(self, filter=to.filter, devices=to.devices, stream=to.optional(to.text))


@data
class SplitDirective:
    """Cut the batch of the matched region into equal micro-batches, tagged `dim_name`."""

    op: Literal["split"] = "split"
    filter: Filter
    dim_name: str = "MB"
    num_microbatches: int

    def __post_init__(self) -> None:
        to.settle(self, filter=to.filter, dim_name=to.text, num_microbatches=to.whole)


@data
class OrderDirective:
    """The order of actions: a schedule family for whole pipelines, or explicit groups of filters."""

    op: Literal["order"] = "order"
    schedule: str | None = None
    pipelines: tuple[int, ...] | None = None
    parameters: Mapping[str, int | float | str | bool] = field(default_factory=dict)
    filters: tuple[tuple[Filter, ...], ...] | None = None

    def __post_init__(self) -> None:
        to.settle(
            self, schedule=to.optional(to.text), pipelines=to.optional(to.wholes), parameters=to.parameters,
            filters=to.groups,
        )  # fmt: skip


@data
class DegreesDirective:
    """Parallel degrees of the matched stages; data parallel = devices / (the product of the others)."""

    op: Literal["degrees"] = "degrees"
    filter: Filter
    tensor_parallel_size: int = 1
    context_parallel_size: int = 1
    expert_parallel_size: int = 1
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        to.settle(
            self, filter=to.filter, tensor_parallel_size=to.whole, context_parallel_size=to.whole,
            expert_parallel_size=to.whole, sequence_parallel=to.flag,
        )  # fmt: skip


@data
class SlicesDirective:
    """Samples of each micro-batch that each data-parallel member of the matched stages takes."""

    op: Literal["slices"] = "slices"
    filter: Filter
    slices: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        to.settle(self, filter=to.filter, slices=to.rows)


@data
class RecomputeDirective:
    """What the matched stages compute again in the backward, per block or one word for all blocks."""

    op: Literal["recompute"] = "recompute"
    filter: Filter
    blocks: tuple[str, ...] | str

    def __post_init__(self) -> None:
        to.settle(self, filter=to.filter, blocks=to.words)


@data
class BucketsDirective:
    """Gradient buckets hold at most this many bytes."""

    op: Literal["buckets"] = "buckets"
    filter: Filter
    bucket_bytes: int

    def __post_init__(self) -> None:
        to.settle(self, filter=to.filter, bucket_bytes=to.whole)


Directive = (
    PipelineDirective
    | CutDirective
    | PlaceDirective
    | ReplicateDirective
    | ShardDirective
    | SplitDirective
    | OrderDirective
    | DegreesDirective
    | SlicesDirective
    | RecomputeDirective
    | BucketsDirective
)


def pipeline(index: int, micro_batch_sizes: Sequence[int]) -> PipelineDirective:
    """Declare pipeline `index` with its micro-batches; its share of the global batch is their sum."""
    return PipelineDirective(index=index, micro_batch_sizes=to.wholes("pipeline: micro_batch_sizes", micro_batch_sizes))


def cut(pipeline: int, stage: int, *, blocks: tuple[int, int]) -> CutDirective:
    """Give blocks [start, stop) to stage `stage` of pipeline `pipeline`."""
    return CutDirective(pipeline=pipeline, stage=stage, blocks=to.pair("cut: blocks", blocks))


def place(filter: Filter, devices: Sequence[int], *, stream: str | None = None) -> PlaceDirective:
    """Put the matched stages on these device ids, tensor-parallel ranks fastest: `place({"PIPE": 0, "PP": 1}, [4, 5])`.

    A filter is {tag: index or "*"}: `PIPE` is the pipeline, `PP` the stage in it; {} matches every stage. Several
    devices are data-parallel members, unless `degrees` says otherwise.
    """
    return PlaceDirective(filter=filter, devices=to.devices("place: devices", devices), stream=stream)


def replicate(
    filter: Filter,
    devices: Sequence[int] | None = None,
    *,
    reduce_stream: str | None = None,
    gather_stream: str | None = None,
    bucket_size: float | None = None,
    shard_grads: bool = False,
    shard_params: bool = False,
    shard_optimizer: bool = False,
) -> ReplicateDirective:
    """Say how gradients of the matched blocks are reduced; the reduction itself the compiler inserts.

    Without more all holders keep everything and sum gradients (all-reduce); `shard_optimizer`, `shard_grads` and
    `shard_params` are ZeRO 1, 2 and 3. `bucket_size` is in MB (2**20 bytes). Streams are names; equal names keep one order.
    """
    return ReplicateDirective(
        filter=filter,
        devices=None if devices is None else to.devices("replicate: devices", devices),
        reduce_stream=reduce_stream,
        gather_stream=gather_stream,
        bucket_size=bucket_size,
        shard_grads=shard_grads,
        shard_params=shard_params,
        shard_optimizer=shard_optimizer,
    )


def shard(filter: Filter, devices: Sequence[int], *, stream: str | None = None) -> ShardDirective:
    """Divide the experts of the matched blocks over the members of their stage, with an all-to-all before and after.

    `devices` are those of the stage. All members form one group, unless `degrees(expert_parallel_size=)` says otherwise.
    """
    return ShardDirective(filter=filter, devices=to.devices("shard: devices", devices), stream=stream)


def split(filter: Filter, *, num_microbatches: int, dim_name: str = "MB") -> SplitDirective:
    """Cut the global batch of the matched pipelines into equal micro-batches."""
    return SplitDirective(filter=filter, dim_name=dim_name, num_microbatches=num_microbatches)


def order(
    filters: Sequence[Sequence[Filter]] | None = None,
    *,
    schedule: str | None = None,
    pipelines: Sequence[int] | None = None,
    **parameters: int | float | str | bool,
) -> OrderDirective:
    """Order passes: by a schedule family over pipelines (None = all), or by groups of filters, one row a device group.

    `order(schedule="1f1b")`, or `order([[{"PP": 0, "MB": 0, "PASS": "F"}], [{…}, {…}], …])`: the groups of a row come one
    after the other; passes of one group may overlap. `parameters` are the family's own.
    """
    return OrderDirective(
        schedule=schedule,
        pipelines=None if pipelines is None else to.wholes("order: pipelines", pipelines),
        parameters=parameters,
        filters=to.groups("order: filters", filters),
    )


def degrees(
    filter: Filter,
    *,
    tensor_parallel_size: int = 1,
    context_parallel_size: int = 1,
    expert_parallel_size: int = 1,
    sequence_parallel: bool = False,
) -> DegreesDirective:
    """Set the parallel degrees inside the matched stages."""
    return DegreesDirective(
        filter=filter,
        tensor_parallel_size=tensor_parallel_size,
        context_parallel_size=context_parallel_size,
        expert_parallel_size=expert_parallel_size,
        sequence_parallel=sequence_parallel,
    )


def slices(filter: Filter, slices: Sequence[Sequence[int]]) -> SlicesDirective:
    """Share each micro-batch of the matched stages among their members, in samples."""
    return SlicesDirective(filter=filter, slices=to.rows("slices: slices", slices))


def recompute(filter: Filter, blocks: Sequence[str] | str) -> RecomputeDirective:
    """Choose "none", "selective" or "full" for every block of the matched stages, or one word for all."""
    return RecomputeDirective(filter=filter, blocks=to.words("recompute: blocks", blocks))


def buckets(filter: Filter, *, bucket_bytes: int) -> BucketsDirective:
    """Cut gradient blocks of the matched stages into buckets of at most `bucket_bytes`."""
    return BucketsDirective(filter=filter, bucket_bytes=bucket_bytes)
