"""What somebody meets in the first hour: a strategy by hand, a wrong word, a plan printed."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

import autopiper as ap
from autopiper.errors import CostError, ModelError, PlanError
from autopiper.plan.directives import Directive
from autopiper.report.table import plan_text

CONFIG = {
    "model_type": "qwen2", "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 512, "vocab_size": 1000, "max_position_embeddings": 32768,
}  # fmt: skip


def by_hand() -> tuple[ap.Strategy, ap.Model, ap.Cluster]:
    """The two unequal pipelines that nothing but a person would choose: two stages beside one."""
    model, cluster = ap.Model.from_config(CONFIG, sequence_length=64), ap.Cluster.local(4)
    given: list[Directive] = [
        ap.pipeline(0, [4, 4]), ap.pipeline(1, [8]),
        ap.cut(0, 0, blocks=(0, 3)), ap.place({"PIPE": 0, "PP": 0}, [0]),
        ap.cut(0, 1, blocks=(3, 6)), ap.place({"PIPE": 0, "PP": 1}, [1]),
        ap.cut(1, 0, blocks=(0, 6)), ap.place({"PIPE": 1, "PP": 0}, [2, 3]),
        ap.order(schedule="1f1b"),
    ]  # fmt: skip
    return ap.Strategy.from_directives(given, ap.Training(global_batch_size=16, precision="fp32")), model, cluster


def test_a_strategy_by_hand_becomes_a_plan(tmp_path: Path) -> None:
    strategy, model, cluster = by_hand()
    plan = ap.make_plan(strategy, model, cluster)
    assert plan.step_time_s == ap.simulate(strategy, model, cluster).step_time_s
    assert plan.devices == (0, 1, 2, 3)
    plan.save(tmp_path / "plan.json")
    again = ap.load_plan(tmp_path / "plan.json")
    assert again == plan
    assert any(line.endswith("are what the simulator finds") for line in ap.verify(again))
    assert "Lower bound    none known" in plan_text(plan, ap.simulate(plan))


def test_a_wrong_strategy_becomes_no_plan() -> None:
    strategy, model, cluster = by_hand()
    with pytest.raises(PlanError, match="has no order; add order"):
        ap.make_plan(ap.Strategy(training=strategy.training, given=strategy.given[:-1]), model, cluster)
    with pytest.raises(PlanError, match=r"strategy is .* it must be a Strategy"):
        ap.make_plan("1f1b", model, cluster)  # type: ignore[arg-type]
    costs = ap.price(model, cluster, ap.Training(global_batch_size=16, precision="fp64"))
    with pytest.raises(CostError, match="the costs hold for precision 'fp64'"):
        ap.make_plan(strategy, model, cluster, costs)


def test_a_plan_is_printed_in_one_line() -> None:
    plan = ap.make_plan(*by_hand())
    assert repr(plan) == f"<Plan of qwen2 on local: {plan.step_time_s:.4g} s a step, {len(plan.programs)} programs>"


def test_verify_names_the_fullest_device() -> None:
    strategy, model, cluster = by_hand()
    line = next(line for line in ap.verify(strategy, model, cluster) if line.startswith("memory fits"))
    used = ap.simulate(strategy, model, cluster).peak_memory_bytes
    fullest = max(used)
    limit = cluster.device(0).type.usable_bytes
    assert line.endswith(f" (cpu on node0), {fullest / limit:.1%} full")
    assert any(f"is {d} (" in line for d, b in enumerate(used) if b == fullest)


def test_precision_and_assumed_length_of_a_search(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    plan = ap.optimize(path, ap.Cluster.homogeneous("a100-80g"), global_batch_size=4, precision="fp32", n_trials=1)
    assert plan.training.precision == "fp32"
    assert plan.model.sequence_length == 8192
    assert any(n.startswith("sequence_length was not given: assumed 8192") for n in plan.notes)
    given = ap.optimize(path, "local", global_batch_size=4, sequence_length=128, n_trials=1)
    assert not any("sequence_length" in n for n in given.notes)
    training = ap.Training(global_batch_size=4, precision="fp64")
    with pytest.raises(PlanError, match="precision is 'fp32', but training says 'fp64'; give it once"):
        ap.optimize(path, "local", training=training, precision="fp32", sequence_length=128)


@pytest.mark.parametrize(("came", "meant"), [("float32", "fp32"), ("bfloat16", "bf16"), ("float16", "fp16")])
def test_precisions_by_their_long_names(came: str, meant: str) -> None:
    with pytest.raises(PlanError, match=rf"precision '{came}' cannot be trained in \(did you mean '{meant}'\?\)"):
        ap.Training(global_batch_size=1, precision=came)


def test_other_wrong_words(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"place: devices is 3; give a list of device ids, such as \[3\]"):
        ap.place({"PP": 0}, 3)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"cannot read plan file '.*nothere\.json': there is no such file"):
        ap.load_plan(tmp_path / "nothere.json")
    config = {**CONFIG, "num_layers": 4}
    del config["num_hidden_layers"]
    with pytest.raises(ModelError, match=r"lacks 'num_hidden_layers' \(it has 'num_layers'\)"):
        ap.Model.from_config(config)


def test_the_table_of_a_small_model_without_tokens() -> None:
    model, cluster = ap.Model.chain(num_blocks=2, name="rows"), ap.Cluster.local(2)
    training = ap.Training(global_batch_size=4).resolve(d.type for d in cluster.devices())
    costs = ap.CostTable.from_layers(
        forward_s=[1.0, 1.0], backward_s=[1.0, 1.0], activation_bytes=[2.0**21] * 2, parameter_bytes=[0.0] * 2
    )
    strategy = ap.Strategy.uniform(model, cluster, training, pipeline_parallel_size=2)
    plan = ap.make_plan(strategy, model, cluster, costs)
    plan = replace(plan, notes=(f"precision fp32: {training.precision_reason}", "kept"))
    timeline = ap.simulate(plan)
    table = plan_text(plan, timeline)
    assert re.search(r"^Model       rows: \d+ parameters$", table, flags=re.MULTILINE)
    assert f"{timeline.tokens_per_s:,.0f} samples/s" in table
    assert "Compared    with nothing: it was not searched" in table
    assert f"{timeline.peak_memory_bytes[0] / 2**20:.1f} MiB / " in table
    assert re.search(r"^Notes +kept$", table, flags=re.MULTILINE)


def test_only_the_device_types_that_a_strategy_uses_are_priced() -> None:
    mixed = ap.Cluster.from_file(Path(__file__).parents[2] / "examples/clusters/a100-v100.toml")
    model = ap.Model.transformer(
        num_layers=4, hidden_size=64, num_attention_heads=4, sequence_length=64, vocab_size=128
    )  # fmt: skip
    ids = [d.id for d in mixed.devices() if d.type.name == "a100-80g"][:2]
    strategy = ap.Strategy.uniform(
        model, mixed, ap.Training(global_batch_size=4), pipeline_parallel_size=2, devices=ids
    )
    plan = ap.make_plan(strategy, model, mixed)
    assert plan.training.precision == "bf16", "the V100s, which lack it, are not used"
    assert {b.device_type for b in plan.costs.blocks} == {"a100-80g"}
