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

from autopiper.plan import Plan, load_plan
from autopiper.runtime import Engine


def run(plan: Plan, case: cases.Case, rank: int) -> dict[str, Any]:
    """Train by the plan and return what the tests compare."""
    precision = plan.training.precision or ""
    made = (lambda: cases.MODULES[case.module]()) if case.factory else cases.make_module(case.module, precision)
    engine = Engine(
        plan,
        made,
        loss_fn=cases.loss_of(case.module),
        optimizer=lambda parameters: cases.optimizer_of(case.optimizer, parameters),
        inputs=cases.sequential_inputs if case.module == "sequential_tied" else None,
    )
    out: dict[str, Any] = {"initial": engine.full_state_dict(), "losses": [], "norms": []}
    for step in range(case.steps):
        batch = cases.example(case.module, plan.training.global_batch_size, precision, seed=step)
        if not case.whole:
            index = torch.tensor(engine.samples or (0,))
            batch = (
                {k: v[index] for k, v in batch.items()} if isinstance(batch, dict) else tuple(v[index] for v in batch)
            )
        result = engine.step(batch, whole=case.whole)
        out["losses"].append(result.loss)
        if result.grad_norm is not None:
            out["norms"].append(result.grad_norm)
        if step == 0:
            out["gradients"] = engine.full_gradients()
            out["own"] = {n: g.clone() for n, g in engine.gradients().items()}
    out["parameters"] = engine.full_state_dict()
    out["own_parameters"] = {n: p.detach() for n, p in engine.stage.held.items()}
    out["actions"] = [e.action for e in result.events]
    engine.close()
    return out


def main() -> None:
    rank = int(sys.argv[1])
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import transformers

    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    for line in sys.stdin:
        job = json.loads(line)
        try:
            if rank < job["world_size"]:
                dist.init_process_group(
                    "gloo", init_method=f"file://{job['store']}", rank=rank, world_size=job["world_size"]
                )
                torch.save(run(load_plan(job["plan"]), cases.Case(**job["case"]), rank), f"{job['out']}.{rank}")
                dist.destroy_process_group()
        except Exception:
            print(json.dumps({"fault": traceback.format_exc()}), flush=True)
            os._exit(1)
        print(json.dumps({"fault": None}), flush=True)


if __name__ == "__main__":
    main()
