"""Strategy: the decision that AutoPiper searches for, as data. `directives()` writes it in directives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from typing import Literal

from autopiper._data import data, require
from autopiper.cluster.spec import Cluster
from autopiper.errors import PlanError, nearest
from autopiper.model.spec import RECOMPUTE_CHOICES, Model
from autopiper.plan import directives as d
from autopiper.plan.directives import Directive
from autopiper.plan.passes import parse_group
from autopiper.plan.training import Training

DEFAULT_BUCKET_BYTES = 25 * 2**20
V_FAMILIES = ("zb-v", "dualpipe-v")
"""Families that imply two virtual stages a rank, laid out as a V: rank r holds stages r and 2R-1-r."""

Leftover = Literal["first", "ends"]
"""Which of equal stages take the blocks left over."""


def even_sizes(num_blocks: int, num_stages: int, leftover: Leftover = "first") -> tuple[int, ...]:
    """Divide blocks into stages as evenly as can be; sizes in order of the stages.

    "first": the first stages take one block more each, the embedding and the head counting as layers do. "ends": the
    first and the last stage, then the second and the last but one: where the stages divide the layers, each has as many
    of them, the embedding comes on top of the first and the head on top of the last, as in Megatron-LM.
    """
    base, extra = divmod(num_blocks, num_stages)
    order = sorted(range(num_stages), key=lambda s: s if leftover == "first" else min(2 * s, 2 * (num_stages - s) - 1))
    more = set(order[:extra])
    return tuple(base + (s in more) for s in range(num_stages))


@data
class Group:
    """The devices that hold one stage of one pipeline."""

    members: tuple[tuple[int, ...], ...]
    """Data-parallel members; each lists its device ids, tensor-parallel ranks fastest. Types may differ."""
    slices: tuple[tuple[int, ...], ...]
    """`slices[micro_batch][member]`, in samples; each row sums to the micro-batch."""
    context_parallel_size: int = 1
    expert_parallel_size: int = 1
    """Consecutive members over which the experts of the stage are divided."""
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        if not self.members or len({len(m) for m in self.members}) != 1 or not self.members[0]:
            raise PlanError(f"group members {self.members} must be one or more, of equal tensor-parallel size")
        if self.context_parallel_size != 1:
            raise PlanError(f"context_parallel_size is {self.context_parallel_size}; only 1 can be planned yet")
        if self.expert_parallel_size < 1 or len(self.members) % self.expert_parallel_size:
            raise PlanError(
                f"expert_parallel_size is {self.expert_parallel_size}; it must divide the {len(self.members)} members"
            )

    @property
    def tensor_parallel_size(self) -> int:
        """Devices of one member."""
        return len(self.members[0])

    @property
    def devices(self) -> tuple[int, ...]:
        """All device ids, member by member."""
        return tuple(device for member in self.members for device in member)


@data
class Stage:
    """Consecutive blocks [start, stop) held by one device group."""

    start: int
    stop: int
    group: Group
    recompute: tuple[str, ...]
    """"none", "selective" or "full" for each block."""
    zero: tuple[int, ...] = ()
    """ZeRO level, 0 to 3, of each block; empty = 0 for all."""

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise PlanError(f"stage [{self.start}, {self.stop}) is empty or negative; a stage holds at least one block")
        if len(self.recompute) != self.stop - self.start:
            raise PlanError(
                f"stage [{self.start}, {self.stop}) has {self.stop - self.start} blocks but {len(self.recompute)} recompute choices"
            )
        if self.zero and len(self.zero) != self.stop - self.start:
            raise PlanError(
                f"stage [{self.start}, {self.stop}) has {self.stop - self.start} blocks but {len(self.zero)} ZeRO levels"
            )
        if not set(self.zero) <= {0, 1, 2, 3}:
            raise PlanError(f"stage [{self.start}, {self.stop}): ZeRO levels {self.zero} must be of 0, 1, 2, 3")
        for choice in self.recompute:
            if choice not in RECOMPUTE_CHOICES:
                raise PlanError(
                    f"recompute '{choice}' is unknown{nearest(choice, RECOMPUTE_CHOICES)}; allowed: {', '.join(RECOMPUTE_CHOICES)}"
                )


@data
class Pipeline:
    """One flow of micro-batches through stages that together hold the whole model."""

    micro_batch_sizes: tuple[int, ...]
    stages: tuple[Stage, ...]

    @property
    def share(self) -> int:
        """Samples of the global batch that this pipeline processes."""
        return sum(self.micro_batch_sizes)


@data
class Schedule:
    """A named family for the pipelines that it lists, or ("searched") the orders themselves."""

    family: str = "1f1b"
    pipelines: tuple[int, ...] = (0,)
    parameters: Mapping[str, int | float | str | bool] = field(default_factory=dict)
    rows: tuple[tuple[str, ...], ...] = ()
    """Of "searched": one row per device group, of passes and groups as `plan.passes` writes them."""

    def __post_init__(self) -> None:
        if bool(self.rows) != (self.family == "searched"):
            raise PlanError(
                f"schedule '{self.family}' has {len(self.rows)} rows; 'searched' lists its orders, and only that does"
            )


@data
class Strategy:
    """Training, pipelines, schedules and sync options; or, written by hand, the directives as given."""

    training: Training
    pipelines: tuple[Pipeline, ...] = ()
    schedules: tuple[Schedule, ...] = ()
    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    given: tuple[Directive, ...] = ()
    """Directives written by hand; then `pipelines` and `schedules` are empty."""

    def __post_init__(self) -> None:
        require(PlanError, "training", self.training, Training)
        require(PlanError, "bucket_bytes", self.bucket_bytes, int)
        if self.bucket_bytes < 1:
            raise PlanError(f"bucket_bytes is {self.bucket_bytes}; it must be 1 or more")
        if bool(self.given) == bool(self.pipelines):
            raise PlanError("a strategy has either pipelines or directives given by hand, and not both")

    def directives(self) -> tuple[Directive, ...]:
        """Write the strategy as directives; building the training graph starts only from these."""
        if self.given:
            return self.given
        out: list[Directive] = []
        for p, pipe in enumerate(self.pipelines):
            out.append(d.pipeline(p, pipe.micro_batch_sizes))
            for s, stage in enumerate(pipe.stages):
                here = {"PIPE": p, "PP": s}
                out.append(d.cut(p, s, blocks=(stage.start, stage.stop)))
                out += _of_stage(here, stage)
        levels = {s.zero[0] if s.zero else 0 for p in self.pipelines for s in p.stages}
        if len(levels) == 1 and not any(len(set(s.zero)) > 1 for p in self.pipelines for s in p.stages):
            out.append(_replicate({}, levels.pop()))
        else:
            for p, pipe in enumerate(self.pipelines):
                out += [_replicate({"PIPE": p, "PP": s}, _one_level(p, s, x)) for s, x in enumerate(pipe.stages)]
        out.append(d.buckets({}, bucket_bytes=self.bucket_bytes))
        for schedule in self.schedules:
            if schedule.rows:
                out += [d.order([_filters(text) for text in row]) for row in schedule.rows]
            else:
                out.append(
                    d.OrderDirective(
                        schedule=schedule.family, pipelines=schedule.pipelines, parameters=schedule.parameters
                    )
                )
        return tuple(out)

    @staticmethod
    def from_directives(given: Sequence[Directive], training: Training) -> Strategy:
        """Keep directives written by hand exactly as given.

        Two stages of a model of 7 blocks, 4 micro-batches of 8 samples:

            Strategy.from_directives([
                pipeline(0, [8, 8, 8, 8]),
                cut(0, 0, blocks=(0, 3)), place({"PIPE": 0, "PP": 0}, [0]),
                cut(0, 1, blocks=(3, 7)), place({"PIPE": 0, "PP": 1}, [1]),
                order(schedule="1f1b"),
            ], Training(global_batch_size=32))

        What `api.verify` names as missing or wrong is all that must be added.
        """
        require(PlanError, "directives", given, tuple[Directive, ...])
        return Strategy(training=training, given=tuple(given))

    @staticmethod
    def uniform(
        model: Model,
        cluster: Cluster,
        training: Training,
        *,
        micro_batch_size: int = 1,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        virtual_pipeline_parallel_size: int = 1,
        context_parallel_size: int = 1,
        expert_parallel_size: int = 1,
        schedule: str = "1f1b",
        recompute: str = "none",
        sequence_parallel: bool = False,
        zero: int = 0,
        devices: Sequence[int] | None = None,
        leftover: Leftover = "first",
    ) -> Strategy:
        """Write the classic 3D layout: equal stages, equal members; data parallel = the rest.

        Ranks are laid out as Megatron-LM does: tensor fastest, then data, then pipeline. The blocks are divided as
        evenly as contiguous stages allow; `leftover` says who takes the rest (`even_sizes`). Stage s of
        `virtual_pipeline_parallel_size` v stages a rank is on rank s mod p; zb-v and dualpipe-v imply v = 2, laid out as
        a V; dualpipe makes two pipelines in opposite directions, with half of the micro-batches each. `devices`
        restricts the layout to these ids, in this order (default: all). Raises PlanError with the sum worked out where
        sizes do not divide.
        """
        require(PlanError, "model", model, Model)
        require(PlanError, "cluster", cluster, Cluster)
        require(PlanError, "training", training, Training)
        require(PlanError, "devices", devices, tuple[int, ...] | range | None)
        from autopiper.plan.uniform import uniform

        return uniform(
            model, cluster, training, micro_batch_size=micro_batch_size, tensor_parallel_size=tensor_parallel_size,
            pipeline_parallel_size=pipeline_parallel_size,
            virtual_pipeline_parallel_size=virtual_pipeline_parallel_size,
            context_parallel_size=context_parallel_size, expert_parallel_size=expert_parallel_size, schedule=schedule,
            recompute=recompute, sequence_parallel=sequence_parallel, zero=zero,
            devices=tuple(range(cluster.num_devices)) if devices is None else tuple(devices), leftover=leftover,
        )  # fmt: skip


def _of_stage(here: d.Filter, stage: Stage) -> Iterator[Directive]:
    """Yield what places a stage and divides its work."""
    group = stage.group
    yield d.place(here, group.devices)
    if group.tensor_parallel_size > 1 or group.sequence_parallel or group.expert_parallel_size > 1:
        yield d.degrees(
            here, tensor_parallel_size=group.tensor_parallel_size, sequence_parallel=group.sequence_parallel,
            expert_parallel_size=group.expert_parallel_size,
        )  # fmt: skip
    if group.expert_parallel_size > 1:
        yield d.shard({**here, "EP": "*"}, group.devices)
    if len(group.members) > 1:
        yield d.slices(here, group.slices)
    if set(stage.recompute) != {"none"}:
        same = set(stage.recompute) == {stage.recompute[0]}
        yield d.recompute(here, stage.recompute[0] if same else stage.recompute)


def _replicate(filter: d.Filter, level: int) -> Directive:
    return d.replicate(filter, shard_optimizer=level == 1, shard_grads=level >= 2, shard_params=level == 3)


def _one_level(pipeline: int, number: int, stage: Stage) -> int:
    if len(set(stage.zero)) > 1:
        raise PlanError(
            f"pipeline {pipeline}, stage {number}: ZeRO levels {stage.zero} differ inside the stage; directives name blocks "
            "by the model's regions: annotate them and use replicate"
        )
    return stage.zero[0] if stage.zero else 0


def _filters(text: str) -> list[d.Filter]:
    words = {"F": "F", "B": "B", "I": "BI", "W": "BW"}
    return [
        {"PIPE": it.pipeline, "PP": it.stage, "MB": it.micro_batch, "PASS": words[it.kind]} for it in parse_group(text)
    ]
