"""The verbs take what the constructors take, agree with each other, and refuse what cannot be in words."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import autopiper as ap
from autopiper.errors import ClusterError, CostError, ModelError, PlanError
from autopiper.inputs import as_cluster, as_model, as_training, usable
from autopiper.plan import Plan, Provenance

GIB = 2**30


def tiny(**more: Any) -> ap.Model:
    sizes: dict[str, Any] = {
        "num_layers": 4,
        "hidden_size": 256,
        "num_attention_heads": 4,
        "sequence_length": 128,
        "vocab_size": 512,
    }
    return ap.Model.transformer(**sizes | more)


def pair(device: str = "a100-80g", devices: int = 2) -> ap.Cluster:
    return ap.Cluster.homogeneous(device, devices_per_node=devices)


def by_hand(strategy: ap.Strategy, model: ap.Model, cluster: ap.Cluster, costs: ap.CostTable | None = None) -> Plan:
    """Make a plan of a strategy without a search."""
    from autopiper import costmodel, ir

    graph = ir.build(strategy, model, cluster)
    programs = tuple(ir.lower(graph))
    costs = costs or ap.price(model, cluster, graph.training)
    timeline = costmodel.simulate(graph, programs, costs)
    return Plan(
        model=model, cluster=cluster, costs=costs, strategy=replace(strategy, training=graph.training), programs=programs,
        step_time_s=timeline.step_time_s, makespan_s=timeline.makespan_s, relative_error=timeline.relative_error,
        peak_memory_bytes=timeline.peak_memory_bytes, lower_bound_s=timeline.step_time_s / 2, binding="compute",
        provenance=Provenance(autopiper_version="0"),
    )  # fmt: skip


def two_stages(batch: int = 4, **more: Any) -> tuple[ap.Strategy, ap.Model, ap.Cluster]:
    model, cluster = tiny(), pair()
    return (
        ap.Strategy.uniform(model, cluster, ap.Training(global_batch_size=batch), pipeline_parallel_size=2, **more),
        model,
        cluster,
    )


def test_simulate_agrees_with_the_closed_form_of_1f1b() -> None:
    model = ap.Model.chain(2)
    cluster = ap.Cluster.local(2, ideal=True)
    costs = ap.CostTable.from_layers(forward_s=[1, 1], backward_s=[2, 2])
    for micro_batches in (1, 2, 5):
        strategy = ap.Strategy.uniform(
            model, cluster, ap.Training(global_batch_size=micro_batches), pipeline_parallel_size=2
        )
        timeline = ap.simulate(strategy, model, cluster, costs)
        assert timeline.makespan_s == pytest.approx((micro_batches + 2 - 1) * 3)  # (m + p - 1)(F + B)


def test_simulate_prices_by_itself_whatever_the_slices() -> None:
    strategy, model, cluster = two_stages(batch=256, micro_batch_size=128)
    costs = ap.price(model, cluster, ap.Training(global_batch_size=256))
    assert max(b.samples for b in costs.blocks) < 128  # so that simulate must price the larger slice itself
    timeline = ap.simulate(strategy, model, cluster)
    assert timeline.step_time_s > 0
    assert timeline.tokens == 256 * 128


def test_a_plan_simulates_to_its_own_prediction() -> None:
    plan = by_hand(*two_stages())
    assert ap.simulate(plan).step_time_s == plan.step_time_s
    with pytest.raises(PlanError, match="a plan brings its own model and cluster; give only costs beside it"):
        ap.simulate(plan, plan.model)


def test_a_strategy_needs_its_model_and_cluster() -> None:
    strategy, model, _ = two_stages()
    with pytest.raises(PlanError, match="a strategy does not name its cluster; give cluster beside it"):
        ap.simulate(strategy, model)
    with pytest.raises(PlanError, match="does not name its model and cluster"):
        ap.verify(strategy)
    with pytest.raises(PlanError, match="expected a Strategy or a Plan, got a str"):
        ap.verify("plan.json")  # type: ignore[arg-type]


def test_costs_for_another_precision_are_refused() -> None:
    strategy, model, cluster = two_stages()
    costs = ap.price(model, cluster, ap.Training(global_batch_size=4, precision="fp32"))
    with pytest.raises(
        CostError, match="the costs hold for precision 'fp32', the strategy trains with 'bf16'; price it again"
    ):
        ap.simulate(strategy, model, cluster, costs)


def test_verify_says_what_it_proved() -> None:
    strategy, model, cluster = two_stages()
    of_strategy = ap.verify(strategy, model, cluster)
    of_plan = ap.verify(by_hand(strategy, model, cluster))
    assert set(of_strategy) < set(of_plan)
    assert "the stored programs are what the strategy lowers to" in of_plan
    assert any(line.startswith("memory fits by the costs given: the fullest device") for line in of_strategy)


def test_verify_finds_every_fault_of_a_doctored_plan() -> None:
    plan = by_hand(*two_stages())
    first = plan.programs[0]
    compute = first.streams["compute"]
    doctored = replace(first, streams={**first.streams, "compute": (compute[1], compute[0], *compute[2:])})
    plan = replace(
        plan, programs=(doctored, *plan.programs[1:]), step_time_s=plan.step_time_s * 0.9,
        peak_memory_bytes=(plan.peak_memory_bytes[0] + 1e6, *plan.peak_memory_bytes[1:]),
    )  # fmt: skip
    with pytest.raises(PlanError, match="the plan does not hold") as fault:
        ap.verify(plan)
    faults = fault.value.faults
    assert len(faults) == 3
    assert faults[0] == (
        f"the program of p0.s0.m0 differs from what the strategy lowers to, in 'compute': it stores {compute[1].text}, "
        f"expected {compute[0].text}"
    )
    assert faults[1].startswith("step_time_s is stored as ")
    assert faults[2].startswith("peak_memory_bytes of rank 0 is stored as ")
    with pytest.raises(PlanError, match="the plan stores 1 programs, its strategy lowers to 2"):
        ap.verify(replace(plan, programs=plan.programs[:1]))


def test_verify_sums_up_memory_that_does_not_fit() -> None:
    model = ap.Model.from_preset("llama-2-7b", sequence_length=2048)
    cluster = pair("v100-16g", 1)
    strategy = ap.Strategy.uniform(model, cluster, ap.Training(global_batch_size=1))
    timeline = ap.simulate(strategy, model, cluster)
    limit = cluster.device(0).type.usable_bytes
    with pytest.raises(PlanError) as fault:
        ap.verify(strategy, model, cluster)
    (line,) = fault.value.faults
    over = (timeline.peak_memory_bytes[0] - limit) / GIB
    assert line.startswith("device 0 (v100-16g) needs ")
    assert line.endswith(f"it has {limit / GIB:.2f} GiB: {over:.2f} GiB too much")
    assert timeline.peak_memory_bytes[0] > model.parameters * 18


def test_models_in_every_form() -> None:
    model = tiny()
    assert as_model(model) is model
    assert as_model("llama-3-8b", sequence_length=512).sequence_length == 512
    with pytest.raises(ModelError, match=r"'llama3-8b' \(did you mean 'llama-3-8b'\?\)"):
        as_model("llama3-8b")
    with pytest.raises(ModelError, match="sequence_length 256 was asked"):
        as_model(model, sequence_length=256)
    with pytest.raises(ModelError, match=r"example_inputs belongs to an nn\.Module; the model given is a str"):
        as_model("llama-3-8b", example_inputs=())
    with pytest.raises(ModelError, match=r"model is a int; allowed: a Model, an nn\.Module, a preset's name"):
        as_model(3)  # type: ignore[arg-type]


def test_clusters_in_every_form(tmp_path: Path) -> None:
    cluster = pair()
    assert as_cluster(cluster) is cluster
    assert as_cluster("local").num_devices >= 1
    (tmp_path / "lab.toml").write_text("")
    with pytest.raises(
        ClusterError,
        match=r"lbb.toml' does not exist \(did you mean 'lab'\?\); give the path of a TOML file, or 'local'",
    ):
        as_cluster(tmp_path / "lbb.toml")
    with pytest.raises(
        ClusterError, match="cluster is a NoneType; allowed: a Cluster, the path of a TOML file, or 'local'"
    ):
        as_cluster(None)  # type: ignore[arg-type]


def test_what_is_assumed_is_noted() -> None:
    training, notes = as_training(None, None, tiny(), pair())
    assert training.global_batch_size == 32
    assert training.precision is None
    assert notes == (
        "global_batch_size was not given and model 'transformer' has no published one: assumed 16 samples x 2 devices = 32",
    )
    training, notes = as_training(None, None, replace(tiny(), global_batch_size=77, source="a preset"), pair())
    assert training.global_batch_size == 77
    assert notes == ("global_batch_size was not given: 77, the published one of a preset",)
    assert as_training(None, 8, tiny(), pair())[1] == ()


def test_two_answers_are_refused() -> None:
    with pytest.raises(PlanError, match="global_batch_size is 8, but training says 4; give it once"):
        as_training(ap.Training(global_batch_size=4), 8, tiny(), pair())
    costs = ap.CostTable(blocks=(), precision="fp32", source="a profile")
    assert as_training(None, 8, tiny(), pair(), costs)[0].precision == "fp32"
    with pytest.raises(PlanError, match="training asks for precision 'bf16', but the costs hold for 'fp32'"):
        as_training(ap.Training(global_batch_size=8, precision="bf16"), None, tiny(), pair(), costs)


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ({"objective": "price_per_token"}, "objective is 'price_per_token'; this version allows 'step_time'"),
        ({"objective": ("step_time", "peak_memory")}, r"objective is \('step_time', 'peak_memory'\)"),
        (
            {"storage": "sqlite:///x"},
            "storage is 'sqlite:///x'; this version allows None: a search runs in one process",
        ),
        ({"study_name": "s"}, "study_name is 's'; this version allows None"),
        ({"load_if_exists": True}, "load_if_exists is True; this version allows False"),
        ({"num_workers": 2}, "num_workers is 2; this version allows 1"),
        ({"callbacks": [print]}, r"callbacks is \(<built-in function print>,\); this version allows \(\)"),
        ({"timeout": 0}, "timeout is 0; it must be seconds above zero, or None"),
        ({"n_trials": 0}, "n_trials is 0; it must be 1 or more, or None"),
    ],
)
def test_what_this_version_cannot_do_is_refused(argument: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        ap.optimize(tiny(), pair(), **argument)


def test_only_devices_that_may_be_used_are_priced() -> None:
    cluster = mixed()
    open_ = ap.Training(global_batch_size=8)
    assert usable(cluster, open_, ap.Space()) == (cluster, ())
    part, notes = usable(cluster, replace(open_, precision="bf16"), ap.Space())
    assert part.counts() == {"a100-80g": 2}
    assert notes == ("v100-32g stays idle: it does not support bf16, which was asked for",)
    assert usable(cluster, open_, ap.Space(devices=(2,)))[0].counts() == {"v100-32g": 2}
    with pytest.raises(
        PlanError, match="precision 'bf16' is not supported by v100-32g; all used devices support: fp16"
    ):
        usable(cluster, replace(open_, precision="bf16"), ap.Space(devices=(2, 3)))
    with pytest.raises(PlanError, match=r"space\.devices is empty"):
        usable(cluster, open_, ap.Space(devices=()))


def mixed() -> ap.Cluster:
    fast, slow = pair(), pair("v100-32g")
    nodes = (replace(fast.nodes[0], name="fast"), replace(slow.nodes[0], name="slow"))
    return ap.Cluster(name="mixed", device_types=fast.device_types + slow.device_types, nodes=nodes)


def test_optimize_finds_its_precision_and_says_what_it_assumed() -> None:
    plan = ap.optimize(tiny(), mixed(), n_trials=2)
    assert plan.training.global_batch_size == 16 * 4
    assert plan.notes[0].startswith("global_batch_size was not given and model 'transformer' has no published one")
    assert plan.step_time_s >= plan.lower_bound_s > 0
    assert ap.verify(plan)
    asked = ap.optimize(tiny(), mixed(), training=ap.Training(global_batch_size=16, precision="bf16"), n_trials=2)
    assert asked.training.precision == "bf16"
    assert set(asked.devices) <= {0, 1}
    assert "v100-32g stays idle: it does not support bf16, which was asked for" in asked.notes


def test_optimize_is_reproducible_and_never_worse_than_the_baseline() -> None:
    model, cluster = tiny(), mixed()
    baseline = ap.Strategy.uniform(model, cluster, ap.Training(global_batch_size=16), pipeline_parallel_size=2)
    plans = [ap.optimize(model, cluster, global_batch_size=16, n_trials=3, seed=5, baseline=baseline) for _ in range(2)]
    assert plans[0].strategy == plans[1].strategy
    assert plans[0].step_time_s <= ap.simulate(baseline, model, cluster).step_time_s


def test_a_module_is_profiled_planned_and_verified() -> None:
    torch = pytest.importorskip("torch")
    module = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(4)))
    cluster = ap.Cluster.local(2)
    example = (torch.zeros(1, 32),)
    costs = ap.profile(
        module, cluster, example_inputs=example, micro_batch_sizes=(1, 2, 4, 8), repeats=1, window_s=0.01
    )
    assert costs.precision == "fp32"
    assert {b.evidence for b in costs.blocks} == {"measured"}
    assert {b.samples for b in costs.blocks} == {1, 2, 4, 8}
    plan = ap.optimize(module, cluster, example_inputs=example, global_batch_size=16, costs=costs, n_trials=2)
    assert plan.costs == costs
    assert ap.verify(plan)
    with pytest.raises(
        ClusterError, match="device_type is None, but the cluster has a100-80g, v100-32g; name the one measured"
    ):
        ap.profile(module, mixed(), example_inputs=example)
    with pytest.raises(ModelError, match=r"an nn\.Module needs example_inputs"):
        ap.optimize(module, cluster)
