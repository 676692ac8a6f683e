"""What must hold for every plan found, on random small clusters, models and spaces of odd kinds."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import autopiper as ap
from autopiper.cluster import Cluster, Link, Node, Tier, catalogue
from autopiper.errors import AutoPiperError
from autopiper.plan import Space

TYPES = ("a100-80g", "a100-40g", "v100-16g", "t4", "rtx-2080", "h100", "l4", "cpu")


def random_cluster(rng: random.Random) -> Cluster:
    kinds = rng.sample(TYPES, rng.choice((1, 1, 2, 3)))
    tiers = rng.random() < 0.3
    nodes = []
    for number in range(rng.choice((1, 1, 2, 3))):
        count, alike = rng.choice((1, 1, 2, 3, 4, 5, 7)), rng.random() < 0.6
        one = rng.choice(kinds)
        nodes.append(
            Node(
                name=f"nöd-{number}",
                devices=tuple(one if alike else rng.choice(kinds) for _ in range(count)),
                intra=Link(bytes_per_s=rng.choice((1e8, 1e10, 3e11, float("inf"))), latency_s=rng.choice((0, 1e-3))),
                nic=Link(bytes_per_s=rng.choice((1e7, 1e9, 2.5e10)), latency_s=1e-5),
                nics=rng.choice((1, 2)),
                domains=(rng.choice("ab"),) if tiers else (),
            )
        )
    types = []
    for name in dict.fromkeys(d for n in nodes for d in n.devices):
        device = catalogue.get(name)
        if rng.random() < 0.4:
            device = replace(device, memory_bytes=rng.choice((4e8, 1e9, 2e9, float("inf"))), reserved_bytes=1e8)
        types.append(device)
    tier = Tier(name="hall", link=Link(bytes_per_s=1e9, latency_s=1e-4))
    return Cluster(name="c", device_types=tuple(types), nodes=tuple(nodes), tiers=(tier,) if tiers else ())


def random_model(rng: random.Random) -> tuple[ap.Model, ap.CostTable | None]:
    if rng.random() < 0.25:
        blocks = rng.choice((1, 2, 5, 9))
        forward = [rng.choice((0.0, 0.01, rng.random())) for _ in range(blocks)]
        costs = ap.CostTable.from_layers(
            forward_s=forward, backward_s=[2 * f for f in forward], activation_bytes=[rng.choice((0, 1e8))] * blocks,
            parameter_bytes=[rng.choice((0, 1e6, 1e9))] * blocks, output_bytes=[rng.choice((0, 1e6))] * blocks,
        )  # fmt: skip
        return ap.Model.chain(blocks), costs
    experts: dict[str, Any] = {"num_experts": 4, "experts_per_token": 2} if rng.random() < 0.2 else {}
    model = ap.Model.transformer(
        num_layers=rng.choice((1, 2, 7)), hidden_size=rng.choice((64, 1024)), num_attention_heads=rng.choice((1, 4)),
        sequence_length=rng.choice((1, 17, 1024)), vocab_size=rng.choice((2, 32001)), gated_mlp=rng.random() < 0.5,
        tie_embeddings=rng.random() < 0.4, **experts,
    )  # fmt: skip
    return model, None


def random_space(rng: random.Random, devices: int) -> Space:
    fields: dict[str, tuple[Any, ...]] = {
        "equal_pipelines": (True,), "equal_stages": (True,), "min_pipelines": (1, 2), "max_stages": (1, 2),
        "micro_batch_sizes": ((1,), (3,), (8, 1), (2, 2)), "tensor_parallel_sizes": ((1,), (2,), (1, 2, 4)),
        "schedules": (("gpipe",), ("1f1b",)), "recompute": (("none",), ("full",), ("none", "selective", "full")),
        "devices": (tuple(rng.sample(range(devices), rng.randint(1, devices))),),
    }  # fmt: skip
    return Space(**{name: rng.choice(values) for name, values in fields.items() if rng.random() < 0.2})


@pytest.mark.parametrize("seed", range(60))
def test_every_plan_keeps_its_promises(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    cluster, (model, costs) = random_cluster(rng), random_model(rng)
    batch = rng.choice((1, 2, 7, 32, 257))
    space = random_space(rng, cluster.num_devices) if rng.random() < 0.5 else Space()
    limits: dict[str, Any] = rng.choice(({"n_trials": 1}, {"n_trials": 3}, {"timeout": 0.01}))
    try:
        plan = ap.optimize(model, cluster, global_batch_size=batch, costs=costs, space=space, **limits)
    except AutoPiperError as fault:
        assert len(str(fault)) > 30
        return
    ap.verify(plan)
    timeline = ap.simulate(plan)
    assert (timeline.step_time_s, timeline.makespan_s) == (plan.step_time_s, plan.makespan_s)
    assert timeline.peak_memory_bytes == plan.peak_memory_bytes
    for device, peak in zip(plan.devices, plan.peak_memory_bytes, strict=True):
        assert peak <= cluster.device(device).type.usable_bytes
    assert plan.step_time_s >= plan.lower_bound_s * (1 - 1e-9)
    if plan.uniform is not None and space == Space():
        assert plan.step_time_s <= plan.uniform.step_time_s * (1 + 1e-9)
    idle = set(range(cluster.num_devices)) - set(plan.devices)
    assert not idle or any(note.startswith("idle: ") or "stays idle" in note for note in plan.notes)
    plan.save(tmp_path / "plan.json")
    assert ap.load_plan(tmp_path / "plan.json") == plan
    pipelines = plan.strategy.pipelines
    assert sum(p.share for p in pipelines) == batch
    assert space.equal_pipelines or len(pipelines) >= space.min_pipelines
    assert {s.family for s in plan.strategy.schedules} <= set(space.schedules)
    for pipeline in pipelines:
        assert space.max_stages is None or len(pipeline.stages) <= space.max_stages
        for stage in pipeline.stages:
            assert space.devices is None or set(stage.group.devices) <= set(space.devices)
            assert set(stage.recompute) <= set(space.recompute)
            degree = stage.group.tensor_parallel_size
            assert space.tensor_parallel_sizes is None or degree in space.tensor_parallel_sizes


def test_blocks_that_keep_nothing_can_be_cut_where_memory_is_short() -> None:
    costs = ap.CostTable.from_layers(
        forward_s=[0.01] * 5, backward_s=[0.02] * 5, parameter_bytes=[1e10] * 5, output_bytes=[1e6] * 5
    )
    cluster = ap.Cluster.homogeneous("l4", num_nodes=2, devices_per_node=3)
    plan = ap.optimize(ap.Model.chain(5), cluster, global_batch_size=17, costs=costs, n_trials=1)
    assert all(len(p.stages) == 3 for p in plan.strategy.pipelines)  # two blocks of 9.3 GiB fill a device of 22.5
