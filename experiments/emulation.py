"""Ranks under CPU quotas: measured, described as a cluster, trained on, and checked against one process.

What runs in the ranks is here, and not in the script, so that spawned processes can import it.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from datetime import timedelta
from functools import cache
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "examples")]

import lab  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402
from train import CONFIG, LlamaForCausalLM, loss_fn, read_text  # noqa: E402

import autopiper as ap  # noqa: E402
from autopiper.cluster import Cluster, DeviceType, Link, Node  # noqa: E402
from autopiper.runtime.batches import BatchSampler  # noqa: E402
from autopiper.runtime.links import LinkReading, measure_link  # noqa: E402
from autopiper.runtime.profile import profile  # noqa: E402
from autopiper.runtime.stages import build_stage, open_module  # noqa: E402

SIZES = (1, 2)
"""Micro-batch sizes that are measured."""
WARM_UP = 3
"""Steps left out of the medians."""


def progress(text: str) -> None:
    print(f"  … {text}", file=sys.stderr, flush=True)


def make_model() -> torch.nn.Module:
    return LlamaForCausalLM(CONFIG)


def make_optimizer(parameters: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=2e-3)


def profile_rank(
    rank: int, devices: tuple[str, ...], model: ap.Model, training: ap.Training, port: int, setup: lab.JoinGroup | None
) -> tuple[ap.CostTable, LinkReading]:
    """Measure blocks on all ranks at once, as they will run; then the links between neighbours."""
    if setup is not None:
        setup(rank)
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=120))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=len(devices))
    sample = {k: v[None] for k, v in read_text()[0].items()}
    dist.barrier()
    costs = profile(
        make_model, model, training, device_type=devices[rank], example_inputs=sample, loss_fn=loss_fn,
        optimizer=make_optimizer, micro_batch_sizes=SIZES, repeats=5, window_s=0.3,
        progress=(lambda text: progress(f"profile: {text}")) if rank == 0 else None,
    )  # fmt: skip
    pairs = [(first, min(first + 1, len(devices) - 1)) for first in range(0, len(devices), 2)]
    groups = [dist.new_group(list(pair)) for pair in pairs]
    dist.barrier()
    mine = rank // 2  # all pairs at once, as they will run
    crossing = int(sum(t.bytes(training.activation_bytes) for t in model.crossing(len(model.blocks) // 2)))
    link = measure_link(pairs[mine][rank == pairs[mine][0]], groups[mine], message_bytes=crossing)
    dist.barrier()
    dist.destroy_process_group()
    return replace(costs, hosts=tuple(replace(h, message_s=link.message_s) for h in costs.hosts)), link


def train_rank(plan: ap.Plan, steps: int, check: bool) -> dict[str, Any]:
    """Train some steps; return losses, when each ended, and, with `check`, the gradients of the first."""
    data = read_text()
    engine = ap.runtime.Engine(plan, make_model, loss_fn=loss_fn, optimizer=make_optimizer)
    losses, ends, gradients = [], [], {}
    loader = DataLoader(data, batch_sampler=engine.batch_sampler(data, shuffle=True))
    for step, batch in zip(range(steps), loader, strict=False):
        result = engine.step(batch)
        ends.append(time.monotonic())
        losses.append(result.loss)
        if step == 0 and check:
            gradients = engine.full_gradients()
        if engine.rank == 0 and step % 10 == 9:
            progress(f"step {step + 1} of {steps}: loss {result.loss:.3f}")
    return {"losses": losses, "ends": ends, "gradients": gradients if engine.rank == 0 else {}}


def measure(
    devices: tuple[str, ...], model: ap.Model, training: ap.Training, quotas: lab.Quotas | None
) -> tuple[ap.CostTable, list[LinkReading]]:
    """Profile every device type in a process of its own; return the joined prices, and the link of each rank."""
    setup = None if quotas is None else quotas.setup(devices)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with ProcessPoolExecutor(len(devices), mp_context=get_context("spawn")) as pool:
        jobs = [pool.submit(profile_rank, r, devices, model, training, store.port, setup) for r in range(len(devices))]
        tables, links = zip(*(job.result() for job in jobs), strict=True)
    costs = tables[0]
    for table in tables[1:]:
        costs = costs.merge(table)
    return costs, list(links)


def emulated(
    devices: Sequence[str], quotas: Mapping[str, float], links: Sequence[LinkReading], memory_bytes: float
) -> Cluster:
    """Describe the emulated cluster: every rank a node of its own, its network what its quota lets gloo do."""
    peak = core_flops()
    types = tuple(
        DeviceType(
            name=name, memory_bytes=memory_bytes, peak_flops={"fp32": peak * quotas.get(name, 1.0)},
            memory_bytes_per_s=10e9 * quotas.get(name, 1.0), platform="cpu",
            source="a CPU quota of this machine; peak measured with a matrix product",
        )
        for name in dict.fromkeys(devices)
    )  # fmt: skip
    bandwidths = [float(f"{link.cost('network').bytes_per_s:.3g}") for link in links]
    return Cluster(
        name="emulated",
        device_types=types,
        nodes=tuple(
            Node(
                name=f"node{rank}", devices=(name,), intra=Link(bytes_per_s=bandwidth, latency_s=link.send_latency_s),
                nic=Link(bytes_per_s=bandwidth, latency_s=link.send_latency_s),
            )
            for rank, (name, link, bandwidth) in enumerate(zip(devices, links, bandwidths, strict=True))
        ),
    )  # fmt: skip


@cache
def core_flops() -> float:
    """Return what one core reaches in a large float32 matrix product, FLOP/s."""
    torch.set_num_threads(1)
    a = torch.randn(1024, 1024)
    times = []
    for _ in range(8):
        start = time.perf_counter()
        a @ a
        times.append(time.perf_counter() - start)
    return 2 * 1024**3 / min(times)


def run(plan: ap.Plan, quotas: lab.Quotas | None, steps: int, *, check: bool = False) -> dict[str, Any]:
    """Train by a plan on ranks under their quotas; return losses, the median step time and rank 0's gradients."""
    names = tuple(plan.cluster.device(d).type.name for d in plan.devices)
    setup = None if quotas is None else quotas.setup(names)
    ranks = ap.runtime.run_local(plan, train_rank, steps, check, setup=setup, timeout=240)
    ends = [max(times) for times in zip(*(r["ends"] for r in ranks), strict=True)]
    periods = [b - a for a, b in pairwise(ends)][WARM_UP - 1 :]
    return {
        "losses": ranks[0]["losses"],
        "gradients": ranks[0]["gradients"],
        "step_time_s": statistics.median(periods),
        "quartiles_s": statistics.quantiles(periods, n=4),
    }


def reference(plan: ap.Plan, steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train the same steps in one process: the plain Hugging Face module over the same micro-batches."""
    torch.set_num_threads(1)
    module, layout = open_module(make_model, torch.float32)
    build_stage(module, layout, 0, len(layout.blocks))  # fills the weights as the ranks do
    optimizer = make_optimizer(list(module.parameters()))
    data, losses, gradients = read_text(), [], {}
    size = plan.training.global_batch_size
    loader = DataLoader(data, batch_sampler=BatchSampler(data, size, range(size), shuffle=True))
    for step, batch in zip(range(steps), loader, strict=False):
        optimizer.zero_grad()
        total = weight = 0.0
        for part in zip(*(batch[k].split(slices(plan)) for k in ("input_ids", "labels")), strict=True):
            loss, count = loss_fn(module(input_ids=part[0], use_cache=False), {"labels": part[1]})
            loss.backward()
            total, weight = total + loss.item(), weight + count
        for p in module.parameters():
            assert p.grad is not None
            p.grad /= weight
        if step == 0:
            gradients = {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
        optimizer.step()
        losses.append(total / weight)
        progress(f"one process, step {step + 1} of {steps}")
    return losses, gradients


def slices(plan: ap.Plan) -> list[int]:
    """Sizes of what the last stages take at once, in the order of the global batch."""
    return [n for pipe in plan.strategy.pipelines for row in pipe.stages[-1].group.slices for n in row if n]


def gradient_error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Return the largest error of a tensor: ‖difference‖ / max(‖reference‖, 1e-6 · global norm)."""
    norm = torch.stack([g.norm() for g in expected.values()]).norm()
    assert found.keys() == expected.keys()
    return max(float((found[n] - g).norm() / torch.maximum(g.norm(), 1e-6 * norm)) for n, g in expected.items())
