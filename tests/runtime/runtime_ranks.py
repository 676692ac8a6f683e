"""What the ranks that `run_local` starts do in its tests; importable by them."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import runtime_cases as cases
import torch
import torch.distributed as dist

from autopiper.plan import Plan
from autopiper.runtime import Engine


def train(plan: Plan, fail: str | None = None) -> dict[str, Any]:
    """Train three steps; with `fail`, rank 1 does that in the second."""
    rank = int(os.environ["RANK"])
    calls = 0

    def loss(output: Any, batch: Any) -> Any:
        nonlocal calls
        calls += 1
        if fail is not None and rank == 1 and calls > 2:
            misbehave(fail)
        return cases.loss_mean(output, batch)

    engine = Engine(
        plan, cases.make_module("sequential", "fp32"), loss_fn=loss,
        optimizer=lambda p: cases.optimizer_of("sgd", p),
    )  # fmt: skip
    losses = [
        engine.step(cases.example("sequential", plan.training.global_batch_size, "fp32", seed=step), whole=True).loss
        for step in range(3)
    ]
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {"losses": losses, "environment": sorted(set(names) & set(os.environ)), "threads": torch.get_num_threads()}


def misbehave(how: str) -> None:
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exit":
        os._exit(7)
    if how == "hang":
        signal.pause()
    if how == "pending":  # a collective that nobody else joins, which would keep the process at its exit
        dist.all_reduce(torch.zeros(1), async_op=True)
    raise ArithmeticError("the loss went wrong on purpose")


def fail_early(plan: Plan) -> None:
    """All ranks refuse alike."""
    Engine(
        plan, cases.make_module("sequential_tied", "fp32"), loss_fn=cases.loss_mean,
        optimizer=lambda p: cases.optimizer_of("sgd", p),
    )  # fmt: skip


def note_rank(rank: int) -> None:
    """A setup hook, which must run before anything else does."""
    assert "RANK" not in os.environ or os.environ["RANK"] == str(rank)
    Path(os.environ["AUTOPIPER_TEST_DIRECTORY"], f"setup{rank}").touch()
