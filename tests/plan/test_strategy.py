"""The uniform 3D layout is Megatron-LM's rank order, and every size that does not divide is refused with the sum."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopiper.cluster import Cluster, DeviceType, Link, Node
from autopiper.errors import PlanError
from autopiper.model import Model
from autopiper.plan import Group, Pipeline, Schedule, Space, Stage, Strategy, Training
from autopiper.plan import directives as d


def cluster(nodes: int, devices: int) -> Cluster:
    kind = DeviceType(name="x", memory_bytes=1e9, memory_bytes_per_s=1e9, peak_flops={"fp32": 1e12})
    link = Link(bytes_per_s=1e9)
    return Cluster(
        name="c", device_types=(kind,),
        nodes=tuple(Node(name=f"n{i}", devices=("x",) * devices, intra=link, nic=link) for i in range(nodes)),
    )  # fmt: skip


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(0, 9))
def test_uniform_is_megatrons_layout(tp: int, dp: int, pp: int, mbs: int, count: int, more: int) -> None:
    blocks = pp + more
    strategy = Strategy.uniform(
        Model.chain(blocks), cluster(1, tp * dp * pp), Training(global_batch_size=mbs * dp * count),
        micro_batch_size=mbs, tensor_parallel_size=tp, pipeline_parallel_size=pp,
    )  # fmt: skip
    (pipe,) = strategy.pipelines
    assert pipe.micro_batch_sizes == (mbs * dp,) * count
    assert pipe.share == mbs * dp * count
    for p, stage in enumerate(pipe.stages):
        for d_, member in enumerate(stage.group.members):
            # Megatron-LM's order "tp-dp-pp": rank = tp_rank + dp_rank * tp + pp_rank * tp * dp.
            assert member == tuple(t + d_ * tp + p * tp * dp for t in range(tp))
        assert stage.group.slices == ((mbs,) * dp,) * count
    covered = [b for stage in pipe.stages for b in range(stage.start, stage.stop)]
    assert covered == list(range(blocks))
    sizes = [stage.stop - stage.start for stage in pipe.stages]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"tensor_parallel_size": 3}, "8 devices do not divide by tensor_parallel_size 3 x pipeline_parallel_size 1 = 3; 8 mod 3 = 2"),
        ({"pipeline_parallel_size": 8, "blocks": 4}, "pipeline_parallel_size 8 exceeds the 4 blocks of model 'chain'"),
        (
            {"micro_batch_size": 3},
            "global_batch_size 16 does not divide by micro_batch_size 3 x data_parallel_size 8 = 24; nearest: 24",
        ),
        ({"micro_batch_size": 0}, "micro_batch_size is 0; it must be 1 or more"),
        ({"tensor_parallel_size": -1}, "tensor_parallel_size is -1; it must be 1 or more"),
        ({"context_parallel_size": 2}, "context_parallel_size is 2; only 1 can be planned yet"),
        (
            {"expert_parallel_size": 3},
            "data_parallel_size 8 does not divide by expert_parallel_size 3; 8 mod 3 = 2",
        ),
        (
            {"pipeline_parallel_size": 8, "virtual_pipeline_parallel_size": 3},
            "pipeline_parallel_size 8 x 3 stages a rank = 24 exceeds the 16 blocks of model 'chain'",
        ),
        (
            {"virtual_pipeline_parallel_size": 3, "schedule": "zb-v"},
            "virtual_pipeline_parallel_size is 3; schedule 'zb-v' has 2 stages a rank",
        ),
        (
            {"virtual_pipeline_parallel_size": 2, "schedule": "dualpipe"},
            "virtual_pipeline_parallel_size is 2; in 'dualpipe' a rank has one stage of each of two pipelines: 1",
        ),
        (
            {"pipeline_parallel_size": 4, "schedule": "dualpipe", "micro_batch_size": 3},
            "micro_batch_size 3 x data_parallel_size 2 x 2 pipelines = 12; nearest: 12",
        ),
        ({"zero": 4}, "zero is 4; it must be 0, 1, 2 or 3"),
        ({"recompute": "ful"}, r"recompute 'ful' is unknown \(did you mean 'full'\?\); allowed: none, selective, full"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_fit_are_refused_with_the_sum(sizes: dict[str, int], words: str) -> None:
    model = Model.chain(sizes.pop("blocks", 16))
    with pytest.raises(PlanError, match=words):
        Strategy.uniform(model, cluster(1, 8), Training(global_batch_size=16), **sizes)  # type: ignore[arg-type]


def test_directives_say_everything_once() -> None:
    strategy = Strategy.uniform(
        Model.chain(5),
        cluster(1, 4),
        Training(global_batch_size=8),
        pipeline_parallel_size=2,
        schedule="gpipe",
        recompute="full",
    )
    assert strategy.directives() == (
        d.pipeline(0, [2, 2, 2, 2]),
        d.cut(0, 0, blocks=(0, 3)),
        d.place({"PIPE": 0, "PP": 0}, [0, 1]),
        d.slices({"PIPE": 0, "PP": 0}, [[1, 1]] * 4),
        d.recompute({"PIPE": 0, "PP": 0}, "full"),
        d.cut(0, 1, blocks=(3, 5)),
        d.place({"PIPE": 0, "PP": 1}, [2, 3]),
        d.slices({"PIPE": 0, "PP": 1}, [[1, 1]] * 4),
        d.recompute({"PIPE": 0, "PP": 1}, "full"),
        d.replicate({}),
        d.buckets({}, bucket_bytes=strategy.bucket_bytes),
        d.order(schedule="gpipe", pipelines=[0]),
    )


def test_directives_by_hand_are_kept_as_given() -> None:
    given_: list[d.Directive] = [d.pipeline(0, [1]), d.place({"PP": 0}, [3])]
    assert Strategy.from_directives(given_, Training(global_batch_size=1)).directives() == tuple(given_)


def test_stages_and_groups_check_themselves() -> None:
    group = Group(members=((0,),), slices=((1,),))
    with pytest.raises(PlanError, match=r"stage \[2, 2\) is empty or negative; a stage holds at least one block"):
        Stage(start=2, stop=2, group=group, recompute=())
    with pytest.raises(PlanError, match=r"stage \[0, 2\) has 2 blocks but 1 recompute choices"):
        Stage(start=0, stop=2, group=group, recompute=("none",))
    with pytest.raises(PlanError, match="must be one or more, of equal tensor-parallel size"):
        Group(members=((0, 1), (2,)), slices=((1, 1),))
    with pytest.raises(PlanError, match="a strategy has either pipelines or directives given by hand, and not both"):
        Strategy(training=Training(global_batch_size=1))
    stage = Stage(start=0, stop=1, group=group, recompute=("none",))
    with pytest.raises(PlanError, match="and not both"):
        Strategy(
            training=Training(global_batch_size=1), pipelines=(Pipeline(micro_batch_sizes=(1,), stages=(stage,)),),
            given=(d.pipeline(0, [1]),),
        )  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"schedules": ("1f1",)}, r"space.schedules names '1f1' \(did you mean '1f1b'\?\); allowed: gpipe, 1f1b"),
        ({"recompute": ()}, "space.recompute is empty; allowed: none, selective, full"),
        ({"micro_batch_sizes": (0, 1)}, r"space.micro_batch_sizes is \(0, 1\); give sizes of 1 or more"),
        ({"min_pipelines": 3, "max_pipelines": 2}, r"space allows 3\.\.2 pipelines; the range is empty"),
        ({"max_stages": 0}, "space.max_stages is 0; it must be 1 or more"),
    ],
)
def test_space_checks_itself(fields: dict[str, object], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        Space(**fields)  # type: ignore[arg-type]


def test_virtual_stages_go_round_and_v_families_come_back() -> None:
    training = Training(global_batch_size=8)
    loop = Strategy.uniform(
        Model.chain(9), cluster(1, 2), training, pipeline_parallel_size=2, virtual_pipeline_parallel_size=2,
        schedule="interleaved-1f1b",
    )  # fmt: skip
    assert [s.group.devices for s in loop.pipelines[0].stages] == [(0,), (1,), (0,), (1,)]
    assert [(s.start, s.stop) for s in loop.pipelines[0].stages] == [(0, 3), (3, 5), (5, 7), (7, 9)]
    vee = Strategy.uniform(Model.chain(8), cluster(1, 2), training, pipeline_parallel_size=2, schedule="dualpipe-v")
    assert [s.group.devices for s in vee.pipelines[0].stages] == [(0,), (1,), (1,), (0,)]
    two = Strategy.uniform(Model.chain(8), cluster(1, 4), training, pipeline_parallel_size=2, schedule="dualpipe")
    assert [[s.group.devices for s in p.stages] for p in two.pipelines] == [[(0, 1), (2, 3)], [(2, 3), (0, 1)]]
    assert [p.share for p in two.pipelines] == [4, 4]
    assert two.schedules == (Schedule(family="dualpipe", pipelines=(0, 1)),)


def test_zero_and_experts_are_written_as_replicate_and_shard() -> None:
    moe = Model.transformer(
        num_layers=2, hidden_size=8, num_attention_heads=2, sequence_length=4, vocab_size=16, num_experts=4,
        experts_per_token=2,
    )  # fmt: skip
    strategy = Strategy.uniform(
        moe, cluster(1, 4), Training(global_batch_size=4), expert_parallel_size=2, zero=3, micro_batch_size=1
    )
    said = strategy.directives()
    assert d.replicate({}, shard_grads=True, shard_params=True) in said
    assert d.shard({"PIPE": 0, "PP": 0, "EP": "*"}, [0, 1, 2, 3]) in said
    assert d.degrees({"PIPE": 0, "PP": 0}, expert_parallel_size=2) in said


def test_searched_orders_are_rows_of_passes() -> None:
    schedule = Schedule(family="searched", rows=(("0F0", "(0F1;0B0)OVERLAP_F_B", "0B1"),))
    strategy = Strategy.uniform(Model.chain(2), cluster(1, 1), Training(global_batch_size=2))
    *_, last = replace(strategy, schedules=(schedule,)).directives()

    def one(kind: str, mb: int) -> d.Filter:
        return {"PIPE": 0, "PP": 0, "MB": mb, "PASS": kind}

    assert last == d.order([[one("F", 0)], [one("F", 1), one("B", 0)], [one("B", 1)]])
    with pytest.raises(PlanError, match="schedule '1f1b' has 1 rows; 'searched' lists its orders, and only that does"):
        Schedule(rows=(("0F0",),))
    with pytest.raises(PlanError, match=r"'0F' is not a pass or group; expected e.g. 2F5"):
        replace(strategy, schedules=(replace(schedule, rows=(("0F",),)),)).directives()
