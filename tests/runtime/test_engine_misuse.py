"""An engine given odd losses, optimizers and batches says what is wrong, once, and does not train on after a fault."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from runtime_cases import WIDTH, cpu_cluster, describe, example, loss_mean, make_module, make_plan

from autopiper.errors import PlanError, RuntimeFault
from autopiper.plan import Plan, Strategy, Training
from autopiper.runtime import Engine, checks, engine, launch
from autopiper.runtime.bench import Bench
from autopiper.runtime.stages import build_stage, open_module


@pytest.fixture
def plan() -> Iterator[Plan]:
    """One rank: this process."""
    model, cluster = describe("sequential", "fp32"), cpu_cluster(1)
    training = Training(global_batch_size=2, precision="fp32", optimizer="sgd-momentum")
    yield make_plan(model, cluster, Strategy.uniform(model, cluster, training))
    atexit.unregister(engine._leave)  # a fault would end this process with exit code 1
    if dist.is_initialized():
        dist.destroy_process_group()


def make(plan: Plan, loss: Callable[..., Any] = loss_mean, optimizer: Any = torch.optim.SGD) -> Engine:
    return Engine(plan, make_module("sequential", "fp32"), loss_fn=loss, optimizer=optimizer)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda loss: None, "returned a loss of NoneType; it must be one number"),
        (lambda loss: loss.expand(2), r"returned a loss of shape \(2,\); it must be one number"),
        (lambda loss: loss.detach(), "returned a loss that carries no gradient"),
        (lambda loss: (loss, torch.ones(3)), r"returned a weight of shape \(3,\); it must be one number"),
        (lambda loss: (loss, "2"), "returned a weight of str; it must be one number"),
        (lambda loss: (loss * 0, 0), "the weight of the whole global batch is 0"),
    ],
)
def test_odd_losses_and_no_step_after_a_fault(plan: Plan, change: Callable[..., Any], words: str) -> None:
    made, batch = make(plan, lambda output, batch: change(loss_mean(output, batch))), example("sequential", 2, "fp32")
    with pytest.raises(RuntimeFault, match=rf"rank 0.*{words}"):
        made.step(batch)
    with pytest.raises(RuntimeFault, match="cannot train on: an earlier step failed"):
        made.step(batch)


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.float16, torch.float64])
def test_weights_of_any_number_type(plan: Plan, dtype: torch.dtype) -> None:
    found = make(plan, lambda o, b: (loss_mean(o, b).double(), torch.ones((1,), dtype=dtype)))
    assert found.step(example("sequential", 2, "fp32")).loss > 0


def test_a_loss_that_is_no_number_is_told_as_such(plan: Plan) -> None:
    result = make(plan, lambda o, b: (loss_mean(o, b) * float("nan"), 1)).step(example("sequential", 2, "fp32"))
    assert result.loss != result.loss


@pytest.mark.parametrize("factory", [torch.optim.AdamW, partial(torch.optim.SGD, lr=0.1), lambda p: torch.optim.SGD(p)])
def test_optimizer_factories_and_learning_rate_schedules(plan: Plan, factory: Any) -> None:
    made = make(plan, optimizer=factory)
    schedulers = [torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.0) for o in made.optimizers]
    before = {n: t.clone() for n, t in made.full_state_dict().items()}
    made.step(example("sequential", 2, "fp32"))
    assert all(torch.equal(t, before[n]) for n, t in made.full_state_dict().items())  # the rate is 0
    assert len(schedulers) == len(made.optimizers) > 0


def test_optimizers_that_are_none_are_refused_on_all_ranks(plan: Plan) -> None:
    with pytest.raises(
        PlanError, match=r"optimizer\(parameters\) returned a NoneType; it must return a torch optimizer"
    ):
        make(plan, optimizer=lambda parameters: None)
    with pytest.raises(PlanError, match="module or optimizer cannot be built: ZeroDivisionError: division by zero"):
        make(plan, optimizer=lambda parameters: 1 / 0)


def test_a_closed_engine_is_closed_and_another_one_can_follow(plan: Plan) -> None:
    batch = example("sequential", 2, "fp32")
    with make(plan) as first:
        loss = first.step(batch).loss
    with pytest.raises(RuntimeFault, match="cannot train on: it was closed"):
        first.step(batch)
    first.close()
    # Under torchrun nobody can leave the job and join it again: its store still has the first time's addresses.
    assert dist.is_initialized()
    assert make(plan).step(batch).loss == loss


def test_a_batch_without_an_input_of_the_model() -> None:
    batch, model = example("traced", 2, "fp32"), describe("traced", "fp32")
    layout: Any = type("Layout", (), {"form": "traced"})
    del batch["shift"]
    assert checks.batch_faults(model, layout, batch, 2, custom_inputs=False) == [
        "the batch lacks the model's input 'shift'"
    ]


def test_digests_see_every_value_and_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "PIECE", 5)
    values = torch.randn(13)
    swapped = values.clone()
    swapped[[2, 11]] = values[[11, 2]]
    layout: Any = type("Layout", (), {"tied": ()})

    def digest(tensor: torch.Tensor) -> int:
        return checks.weights_digest({"w": torch.nn.Parameter(tensor)}, layout)["w"]

    assert digest(values) == digest(values.clone()) != digest(swapped)
    monkeypatch.setattr(checks, "PIECE", 100)
    whole = digest(values)
    monkeypatch.setattr(checks, "PIECE", 5)
    assert digest(values) == whole


def test_nothing_grows_over_many_steps(plan: Plan) -> None:
    import gc
    import threading

    made, batch = make(plan), example("sequential", 2, "fp32")
    seen = []
    for step in range(201):
        made.step(batch)
        if step % 100 == 0:
            gc.collect()
            tensors = sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())
            seen.append((tensors, threading.active_count(), atexit._ncallbacks()))
    assert len(set(seen)) == 1


def test_who_left_before_others_failed_is_named() -> None:
    fault = launch.Fault(rank=0, at_s=0.0, kind="RuntimeFault", text="rank 0: connection closed", trace="")
    with pytest.raises(RuntimeFault, match=r"connection closed \(rank 1, 2 had ended before, without a fault\)"):
        launch._raise(fault, [2, 1])
    with pytest.raises(RuntimeFault, match="connection closed"):
        launch._raise(launch.Fault(rank=0, at_s=0.0, kind="Own", text=fault.text, trace=""), [])


def test_a_stage_that_begins_in_place_is_timed() -> None:
    module, layout = open_module(make_module("in_place", "fp32"), torch.float32)
    received = torch.randn(2, WIDTH, requires_grad=True)
    bench = Bench(
        build_stage(module, layout, 1, 3), None, received, lambda batch: ((), {}), loss_mean, torch.device("cpu")
    )
    bench.prepare(1e-4)
    bench.window()
    assert [len(times) for times in bench.windows[:2]] == [1, 1]
