"""Two faults that torch's pipelining runs without a word, live on two gloo processes, and what AutoPiper says of each.

    python experiments/torch_faults.py

1. Two receives of one rank swapped in a schedule with communication written out: each micro-batch gets the activations
   of the other.
2. The last stage takes its forwards in the order 1, 0, 3, 2, all before the backwards: each backward starts from the
   loss of another micro-batch.

Printed and written to experiments/results/torch_faults.json: the error of the gradients of stage 0 against one process
that loops over the same micro-batches. That AutoPiper refuses the first and runs the second rightly is tested in
tests/ir/test_torch_faults.py.
"""

from __future__ import annotations

import json
import socket
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

WIDTH, MICRO_BATCHES = 8, 4
RESULT = Path(__file__).parent / "results" / "torch_faults.json"
FIRST = ["0F0", "0SEND_F0", "0F1", "0SEND_F1", "0F2", "0SEND_F2", "0F3", "0SEND_F3",
         "0RECV_B0", "0B0", "0RECV_B1", "0B1", "0RECV_B2", "0B2", "0RECV_B3", "0B3"]  # fmt: skip
LAST = ["1B0", "1SEND_B0", "1B1", "1SEND_B1", "1B2", "1SEND_B2", "1B3", "1SEND_B3"]
SCHEDULES: dict[str, tuple[str, list[list[str]]]] = {
    "as it should be": (
        "compute_comms",
        [FIRST, [each for m in range(4) for each in (f"1RECV_F{m}", f"1F{m}")] + LAST],
    ),
    "two receives swapped": (
        "compute_comms",
        [FIRST, ["1RECV_F1", "1RECV_F0", "1F0", "1F1", "1RECV_F2", "1F2", "1RECV_F3", "1F3", *LAST]],
    ),
    "last stage forward in the order 1, 0, 3, 2": (
        "compute_only",
        [["0F0", "0F1", "0F2", "0F3", "0B0", "0B1", "0B2", "0B3"], ["1F1", "1F0", "1F3", "1F2", "1B0", "1B1", "1B2", "1B3"]],
    ),
}  # fmt: skip


def halves() -> list[nn.Module]:
    """Return the two stages, with the same weights in every process."""
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)]


def batch() -> tuple[Tensor, Tensor]:
    """Return inputs and targets of all micro-batches, one sample each."""
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(MICRO_BATCHES, WIDTH, generator=generator) for _ in range(2))
    return x, y


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Sum over the samples of a micro-batch."""
    return ((output - target) ** 2).sum()


def work(rank: int, port: int, results: Any) -> None:
    """One of the two processes: run each schedule once."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    x, y = batch()
    for name, (form, rows) in SCHEDULES.items():
        module = halves()[rank]
        stage = PipelineStage(module, rank, 2, torch.device("cpu"))
        runtime = _PipelineScheduleRuntime([stage], MICRO_BATCHES, loss_fn=loss, scale_grads=False)
        with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
            file.write("\n".join(",".join(row) for row in rows) + "\n")
            file.flush()
            runtime._load_csv(file.name, format=form)
        try:
            runtime.step(x) if rank == 0 else runtime.step(target=y)
            results[name, rank] = [p.grad.clone() for p in module.parameters() if p.grad is not None]
        except Exception as error:
            results[name, rank] = f"{type(error).__name__}: {error}"
        dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Run, compare with one process, print and write."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with mp.Manager() as manager:
        shared = manager.dict()
        mp.spawn(work, args=(port, shared), nprocs=2)
        results = dict(shared)
    first, last = halves()
    x, y = batch()
    for m in range(MICRO_BATCHES):
        loss(last(first(x[m : m + 1])), y[m : m + 1]).backward()
    right = torch.cat([p.grad.flatten() for p in first.parameters() if p.grad is not None])
    found: dict[str, object] = {}
    for name in SCHEDULES:
        got = results[name, 0]
        if isinstance(got, str):
            found[name] = got
        else:
            error = float((torch.cat([g.flatten() for g in got]) - right).norm() / right.norm())
            found[name] = error
        print(
            f"{name}: {found[name] if isinstance(found[name], str) else f'gradients of stage 0 off by {found[name]:.1%}'}"
        )
    RESULT.write_text(json.dumps({"torch": torch.__version__, "relative_error_of_gradients": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
