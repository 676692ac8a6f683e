"""A plan is refused on anything that it was not made for: by all ranks alike, in words, before the first message."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from runtime_cases import Case, cpu_cluster, describe, make_plan

from autopiper.plan import Plan, Strategy, Training

TWO_STAGES = 2


def plan_of(name: str = "sequential", precision: str = "fp32", platform: str = "cpu", **uniform: Any) -> Plan:
    model = describe(name, "fp32" if precision == "bf16" else precision)
    cluster = cpu_cluster(uniform.pop("num_devices", 2), platform)
    training = Training(global_batch_size=4, precision=precision)
    uniform.setdefault("pipeline_parallel_size", TWO_STAGES)
    return make_plan(model, cluster, Strategy.uniform(model, cluster, training, **uniform))


def test_another_model_names_the_blocks_that_differ(pool: Any) -> None:
    text = pool.refusal(plan_of("sequential_tied"), Case(module="sequential"))
    assert "the module has 7 blocks (0, 1, 2, 3, 4, 5, …); the plan's model 'sequential_tied' has 5" in text
    assert "block 0 ('0') has 0 parameters; block '0' of the plan's model 'sequential_tied' has 640" in text
    assert pool.messages == 0


def test_another_model_on_one_rank_is_refused_by_all(pool: Any) -> None:
    text = pool.refusal(plan_of(), Case(module="sequential", odd_rank=1, odd_module="sequential_tied"))
    assert "rank 1: the module has 5 blocks" in text and "rank 0" not in text
    assert pool.messages == 0


def test_untied_module_for_a_tied_plan(pool: Any) -> None:
    plan = plan_of("sequential_tied")
    untied = replace(plan, model=replace(plan.model, tied=()))
    retied = make_plan(untied.model, plan.cluster, plan.strategy)
    text = pool.refusal(retied, Case(module="sequential_tied"))
    assert "the module ties 0.weight, 4.weight; the plan's model does not" in text
    assert pool.messages == 0


def test_another_sequence_length_names_both(pool: Any) -> None:
    text = pool.refusal(plan_of("llama"), Case(module="llama", sequence=5))
    assert "'input_ids' has sequence length 5; the plan was made for sequence_length 6" in text


def test_refused_at_the_first_step_sends_nothing_more(pool: Any) -> None:
    ran = pool.run(plan_of("traced"), Case(module="traced", steps=1))
    pool.refusal(plan_of("traced"), Case(module="traced", sequence=7))
    assert pool.messages == ran[0]["before"]  # what setting up costs, and no message of a step


def test_another_world_size_names_both(pool: Any) -> None:
    text = pool.refusal(plan_of(), Case(module="sequential", world_size=3))
    assert "world size is 3; the plan uses 2 devices, one rank each" in text
    assert pool.messages == 0


def test_other_device_types(pool: Any) -> None:
    text = pool.refusal(plan_of(platform="cuda"), Case(module="sequential"))
    assert "device 0 of the plan is a core (cuda), but the rank runs on cpu" in text
    assert "rank 1: device 1" in text
    assert pool.messages == 0


def test_precision_that_cannot_be_trained_in_yet(pool: Any) -> None:
    text = pool.refusal(plan_of(precision="bf16"), Case(module="sequential", module_precision="fp32"))
    assert "the precision is bf16; the runtime of this version trains in fp32 and fp64" in text
    assert pool.messages == 0


def test_module_of_another_precision(pool: Any) -> None:
    text = pool.refusal(plan_of(precision="fp64"), Case(module="sequential", module_precision="fp32"))
    assert "is float32 (4 such); the plan's precision needs float64" in text
    assert pool.messages == 0


def test_unlike_initial_weights_of_replicas(pool: Any) -> None:
    plan = plan_of(pipeline_parallel_size=1)
    text = pool.refusal(plan, Case(module="sequential", odd_rank=1))
    assert "the initial value of '1.weight' differs between rank 0 and rank 1" in text
    assert pool.messages == 0


def test_tensor_parallel_plans(pool: Any) -> None:
    model = replace(describe("llama", "fp32"), blocks=tuple(
        replace(b, tensor_divisors=()) for b in describe("llama", "fp32").blocks
    ))  # fmt: skip
    cluster = cpu_cluster(2)
    strategy = Strategy.uniform(model, cluster, Training(global_batch_size=4, precision="fp32"), tensor_parallel_size=2)
    text = pool.refusal(make_plan(model, cluster, strategy), Case(module="llama"))
    assert "stage p0.s0: tensor_parallel_size is 2; only 1 can be run yet" in text


def test_selective_recompute(pool: Any) -> None:
    text = pool.refusal(plan_of(recompute="selective"), Case(module="sequential"))
    assert "stage p0.s0: recompute 'selective' cannot be run yet; allowed: none, full" in text


def test_a_batch_of_another_size(pool: Any) -> None:
    plan = plan_of()
    small = replace(plan, strategy=replace(plan.strategy, training=replace(plan.training, global_batch_size=4)))
    text = pool.refusal(small, Case(module="sequential", samples=3))
    assert "the batch has 3 samples; this rank's Program takes 4" in text


@pytest.mark.parametrize("key", ["attention_mask", "position_ids"])
def test_batch_entries_that_would_be_ignored(key: str) -> None:
    import torch
    from runtime_cases import make_module

    from autopiper.model.tracing import find_blocks
    from autopiper.runtime.checks import batch_faults

    ids = torch.zeros((2, 6), dtype=torch.int64)
    layout = find_blocks(make_module("llama", "fp32"))
    faults = batch_faults(describe("llama", "fp32"), layout, {"input_ids": ids, key: ids}, 2, custom_inputs=False)
    assert faults == [
        f"the batch has '{key}', which the plan's model does not take: leave it out, or plan with a model that has it"
    ]
