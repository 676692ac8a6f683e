"""Strategy: the decision that AutoPiper searches for, as data. `directives()` writes it in directives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Literal

from autopiper._data import data, require
from autopiper.cluster.spec import Cluster
from autopiper.errors import PlanError, nearest
from autopiper.model.spec import RECOMPUTE_CHOICES, Model
from autopiper.plan import directives as d
from autopiper.plan.directives import Directive
from autopiper.plan.training import Training

SCHEDULES = ("gpipe", "1f1b")
"""Families that this version expands; a further one is a file in ir/schedules."""
DEFAULT_BUCKET_BYTES = 25 * 2**20


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
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        if not self.members or len({len(m) for m in self.members}) != 1 or not self.members[0]:
            raise PlanError(f"group members {self.members} must be one or more, of equal tensor-parallel size")
        for name in ("context_parallel_size", "expert_parallel_size"):
            if getattr(self, name) != 1:
                raise PlanError(f"{name} is {getattr(self, name)}; only 1 can be planned yet")

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

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise PlanError(f"stage [{self.start}, {self.stop}) is empty or negative; a stage holds at least one block")
        if len(self.recompute) != self.stop - self.start:
            raise PlanError(
                f"stage [{self.start}, {self.stop}) has {self.stop - self.start} blocks but {len(self.recompute)} recompute choices"
            )
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
    """A named family for the pipelines that it lists."""

    family: str = "1f1b"
    pipelines: tuple[int, ...] = (0,)
    parameters: Mapping[str, int | float | str | bool] = field(default_factory=dict)


@data
class Strategy:
    """Training, pipelines, schedules and sync options; or, written by hand, the directives as given."""

    training: Training
    pipelines: tuple[Pipeline, ...] = ()
    schedules: tuple[Schedule, ...] = ()
    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    zero: int = 0
    """ZeRO level; 0 is the only one that can be planned yet."""
    given: tuple[Directive, ...] = ()
    """Directives written by hand; then `pipelines` and `schedules` are empty."""

    def __post_init__(self) -> None:
        if self.zero != 0:
            raise PlanError(f"zero is {self.zero}; only level 0 can be planned yet")
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
                out.append(d.place(here, stage.group.devices))
                if stage.group.tensor_parallel_size > 1 or stage.group.sequence_parallel:
                    out.append(
                        d.degrees(
                            here,
                            tensor_parallel_size=stage.group.tensor_parallel_size,
                            sequence_parallel=stage.group.sequence_parallel,
                        )
                    )
                if len(stage.group.members) > 1:
                    out.append(d.slices(here, stage.group.slices))
                if set(stage.recompute) != {"none"}:
                    same = set(stage.recompute) == {stage.recompute[0]}
                    out.append(d.recompute(here, stage.recompute[0] if same else stage.recompute))
        out.append(d.replicate({}))
        out.append(d.buckets({}, bucket_bytes=self.bucket_bytes))
        out.extend(
            d.OrderDirective(schedule=s.family, pipelines=s.pipelines, parameters=s.parameters) for s in self.schedules
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
        evenly as contiguous stages allow; `leftover` says who takes the rest (`even_sizes`). `devices` restricts the
        layout to these ids, in this order (default: all). Raises PlanError with the sum worked out where sizes do not divide.
        """
        require(PlanError, "model", model, Model)
        require(PlanError, "cluster", cluster, Cluster)
        require(PlanError, "training", training, Training)
        require(PlanError, "devices", devices, tuple[int, ...] | range | None)
        ids = tuple(range(cluster.num_devices)) if devices is None else tuple(devices)
        if not ids:
            raise PlanError("devices is empty; name at least one, or None for all")
        tp, pp = tensor_parallel_size, pipeline_parallel_size
        for name, value in (
            ("micro_batch_size", micro_batch_size), ("tensor_parallel_size", tp), ("pipeline_parallel_size", pp),
        ):  # fmt: skip
            require(PlanError, name, value, int)
            if value < 1:
                raise PlanError(f"{name} is {value}; it must be 1 or more")
        for name, value in (
            ("virtual_pipeline_parallel_size", virtual_pipeline_parallel_size),
            ("context_parallel_size", context_parallel_size), ("expert_parallel_size", expert_parallel_size),
        ):  # fmt: skip
            if value != 1:
                raise PlanError(f"{name} is {value}; only 1 can be planned yet")
        if len(ids) % (tp * pp):
            raise PlanError(
                f"{len(ids)} devices do not divide by tensor_parallel_size {tp} x pipeline_parallel_size {pp} = {tp * pp}; "
                f"{len(ids)} mod {tp * pp} = {len(ids) % (tp * pp)}"
            )
        if pp > len(model.blocks):
            raise PlanError(
                f"pipeline_parallel_size {pp} exceeds the {len(model.blocks)} blocks of model '{model.name}'"
            )
        dp = len(ids) // (tp * pp)
        per_micro_batch = micro_batch_size * dp
        if training.global_batch_size % per_micro_batch:
            raise PlanError(
                f"global_batch_size {training.global_batch_size} does not divide by micro_batch_size {micro_batch_size} x "
                f"data_parallel_size {dp} = {per_micro_batch}; nearest: "
                f"{max(per_micro_batch, round(training.global_batch_size / per_micro_batch) * per_micro_batch)}"
            )
        count = training.global_batch_size // per_micro_batch
        stages, start = [], 0
        for s, size in enumerate(even_sizes(len(model.blocks), pp, leftover)):
            stop = start + size
            first = s * dp * tp
            members = tuple(tuple(ids[first + m * tp : first + (m + 1) * tp]) for m in range(dp))
            group = Group(
                members=members,
                slices=((micro_batch_size,) * dp,) * count,
                sequence_parallel=sequence_parallel and tp > 1,
            )
            stages.append(Stage(start=start, stop=stop, group=group, recompute=(recompute,) * (stop - start)))
            start = stop
        return Strategy(
            training=training,
            pipelines=(Pipeline(micro_batch_sizes=(per_micro_batch,) * count, stages=tuple(stages)),),
            schedules=(Schedule(family=schedule, pipelines=(0,)),),
            zero=zero,
        )
