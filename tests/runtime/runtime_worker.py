"""One of a few processes that stay alive between tests: runs the plans that it is told to, rank by rank."""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any

import runtime_cases as cases
import torch
import torch.distributed as dist

from autopiper.errors import PlanError
from autopiper.plan import Plan, load_plan
from autopiper.runtime import Engine

messages = 0


def count_messages() -> None:
    """Count what goes from rank to rank, but for what the ranks tell each other of their findings."""
    for name in ("isend", "irecv", "all_reduce", "all_gather", "new_group"):
        original = getattr(dist, name)

        def counted(*args: Any, original: Any = original, **kwargs: Any) -> Any:
            global messages
            messages += 1
            return original(*args, **kwargs)

        setattr(dist, name, counted)


def make_engine(plan: Plan, case: cases.Case, rank: int) -> Engine:
    """Build the engine as the case says, this rank oddly if it is the odd one."""
    precision = case.module_precision or plan.training.precision or ""
    odd = rank == case.odd_rank
    name = case.odd_module if odd and case.odd_module else case.module
    seed = 8 if odd and not case.odd_module else 7
    made = (lambda: cases.MODULES[name]()) if case.factory else cases.make_module(name, precision, seed)
    return Engine(
        plan,
        made,
        loss_fn=cases.loss_of(case.module),
        optimizer=lambda parameters: cases.optimizer_of(case.optimizer, parameters),
        inputs=cases.sequential_inputs if case.module == "sequential_tied" else None,
    )


def run(plan: Plan, case: cases.Case, rank: int) -> dict[str, Any]:
    """Train by the plan and return what the tests compare."""
    precision = plan.training.precision or ""
    begun = messages
    engine = make_engine(plan, case, rank)
    out: dict[str, Any] = {"initial": engine.full_state_dict(), "losses": [], "norms": []}
    for step in range(case.steps):
        size = case.samples or plan.training.global_batch_size
        batch = cases.example(case.module, size, precision, seed=step, sequence=case.sequence)
        if not case.whole:
            index = torch.tensor(engine.samples or (0,))
            batch = (
                {k: v[index] for k, v in batch.items()} if isinstance(batch, dict) else tuple(v[index] for v in batch)
            )
        if step == 0:
            out["before"] = messages - begun
        result = engine.step(batch, whole=case.whole)
        out["losses"].append(result.loss)
        if result.grad_norm is not None:
            out["norms"].append(result.grad_norm)
        if step == 0:
            out["gradients"] = engine.full_gradients()
    out["parameters"] = engine.full_state_dict()
    out["own_parameters"] = {n: p.detach() for n, p in engine.held.items()}
    engine.close()
    out["events"] = [(e.action, e.start_s, e.end_s) for e in result.events]
    return out


def attempt(plan: Plan, case: cases.Case, rank: int) -> dict[str, Any]:
    """Run the plan, or say how it was refused and how many messages had gone out by then."""
    before = messages
    try:
        return run(plan, case, rank)
    except PlanError as refusal:
        return {"refused": str(refusal), "messages": messages - before}


def main() -> None:
    rank = int(sys.argv[1])
    torch.set_num_threads(1)
    count_messages()
    for line in sys.stdin:
        job = json.loads(line)
        try:
            if rank < job["world_size"]:
                dist.init_process_group(
                    "gloo", init_method=f"file://{job['store']}", rank=rank, world_size=job["world_size"]
                )
                dist.barrier()  # a rank that refuses at once must not leave while others still connect
                torch.save(attempt(load_plan(job["plan"]), cases.Case(**job["case"]), rank), f"{job['out']}.{rank}")
                dist.destroy_process_group()
        except Exception:
            print(json.dumps({"fault": traceback.format_exc()}), flush=True)
            os._exit(1)
        print(json.dumps({"fault": None}), flush=True)


if __name__ == "__main__":
    main()
