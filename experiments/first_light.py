"""First light: plan a large model on a mixed cluster, then train a small one by a plan, on four unlike ranks here.

    python experiments/first_light.py        (what `make demo` runs)

Results go to stdout and, as JSON, to experiments/results/first_light.json; progress goes to stderr.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "examples")]

import lab  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import transformers  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402
from train import CONFIG, LlamaForCausalLM, loss_fn, read_text  # noqa: E402

import autopiper as ap  # noqa: E402
from autopiper.cluster import Cluster, DeviceType, Link, Node  # noqa: E402
from autopiper.report.table import plan_text  # noqa: E402
from autopiper.runtime.batches import BatchSampler  # noqa: E402
from autopiper.runtime.links import LinkReading, measure_link  # noqa: E402
from autopiper.runtime.profile import profile  # noqa: E402
from autopiper.runtime.stages import build_stage, open_module  # noqa: E402

QUOTAS = {"core-0.84": 0.84, "core-0.48": 0.48, "core-0.30": 0.30, "core-0.18": 0.18}
WITHOUT_QUOTAS = ("core", "core")
BATCH = 18
SIZES = (1, 2)
MEMORY = 0.65
"""Of what the whole model needs on one device: what each rank is given."""
STEPS, FEWER_STEPS, WARM_UP, CHECKED = 40, 14, 3, 5
"""Steps of the chosen plan, of those compared with it; left out of the medians; repeated by one process."""
TOLERANCE = 1e-5
"""Exactness in float32: ‖difference‖ / max(‖reference‖, 1e-6 · global norm)."""


def say(text: str = "") -> None:
    print(text, flush=True)


def progress(text: str) -> None:
    print(f"  … {text}", file=sys.stderr, flush=True)


def heading(text: str) -> None:
    say(f"\n{text}\n{'─' * len(text)}")


def make_model() -> torch.nn.Module:
    return LlamaForCausalLM(CONFIG)


def make_optimizer(parameters: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=2e-3)


# What the ranks do. These run in processes of their own.


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
    """Train some steps; return losses, when each ended, and the gradients of the first."""
    data = read_text()
    engine = ap.runtime.Engine(plan, make_model, loss_fn=loss_fn, optimizer=make_optimizer)
    losses, ends, events, gradients = [], [], [], {}
    loader = DataLoader(data, batch_sampler=engine.batch_sampler(data, shuffle=True))
    for step, batch in zip(range(steps), loader, strict=False):
        result = engine.step(batch)
        ends.append(time.monotonic())
        losses.append(result.loss)
        events.append([(e.action, e.start_s, e.end_s) for e in result.events])
        if step == 0 and check:
            gradients = {n: g.clone() for n, g in engine.full_gradients().items()}
        if engine.rank == 0 and step % 10 == 9:
            progress(f"step {step + 1} of {steps}: loss {result.loss:.3f}")
    return {"losses": losses, "ends": ends, "events": events, "gradients": gradients if engine.rank == 0 else {}}


# What the main process does.


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


def emulated(devices: Iterable[str], links: Sequence[LinkReading], memory_bytes: float) -> Cluster:
    """Describe the emulated cluster: every rank a node of its own, its network what its quota lets gloo do."""
    peak = 60e9
    names = tuple(devices)
    types = tuple(
        DeviceType(
            name=name, memory_bytes=memory_bytes, peak_flops={"fp32": peak * QUOTAS.get(name, 1.0)},
            memory_bytes_per_s=10e9 * QUOTAS.get(name, 1.0), platform="cpu",
            source="a CPU quota of this machine; peak assumed as 60 GFLOP/s per core, times are measured",
        )
        for name in dict.fromkeys(names)
    )  # fmt: skip
    costs = [link.cost("network") for link in links]
    return Cluster(
        name="emulated",
        device_types=types,
        nodes=tuple(
            Node(
                name=f"node{rank}", devices=(name,), intra=Link(bytes_per_s=c.bytes_per_s, latency_s=c.latency_s),
                nic=Link(bytes_per_s=c.bytes_per_s, latency_s=c.latency_s),
            )
            for rank, (name, c) in enumerate(zip(names, costs, strict=True))
        ),
    )  # fmt: skip


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
        "events": [r["events"] for r in ranks],
        "step_time_s": statistics.median(periods),
        "quartiles_s": statistics.quantiles(periods, n=4),
    }


def reference(plan: ap.Plan) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train the same steps in one process: the plain Hugging Face module over the same micro-batches."""
    torch.set_num_threads(1)
    module, layout = open_module(make_model, torch.float32)
    build_stage(module, layout, 0, len(layout.blocks))  # fills the weights as the ranks do
    optimizer = make_optimizer(list(module.parameters()))
    data, losses, gradients = read_text(), [], {}
    loader = DataLoader(data, batch_sampler=BatchSampler(data, BATCH, range(BATCH), shuffle=True))
    for step, batch in zip(range(CHECKED), loader, strict=False):
        optimizer.zero_grad()
        total = weight = at = 0.0
        for size in slices(plan):
            part = {k: v[int(at) : int(at) + size] for k, v in batch.items()}
            loss, count = loss_fn(module(input_ids=part["input_ids"], use_cache=False), part)
            loss.backward()
            total, weight, at = total + loss.item(), weight + count, at + size
        for p in module.parameters():
            assert p.grad is not None
            p.grad /= weight
        if step == 0:
            gradients = {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
        optimizer.step()
        losses.append(total / weight)
        progress(f"one process, step {step + 1} of {CHECKED}")
    return losses, gradients


def slices(plan: ap.Plan) -> list[int]:
    """Sizes of what the last stages take at once, in the order of the global batch."""
    return [n for pipe in plan.strategy.pipelines for row in pipe.stages[-1].group.slices for n in row if n]


def gradient_error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Return the largest error of a tensor, as TOLERANCE counts it."""
    norm = torch.stack([g.norm() for g in expected.values()]).norm()
    assert found.keys() == expected.keys()
    return max(float((found[n] - g).norm() / torch.maximum(g.norm(), 1e-6 * norm)) for n, g in expected.items())


def describe(plan: ap.Plan) -> str:
    """One line per pipeline: share, and cuts with the devices that hold them."""
    lines = []
    for pipe in plan.strategy.pipelines:
        stages = " → ".join(
            f"{s.stop - s.start} blocks on {' + '.join(plan.cluster.device(d).type.name for d in s.group.devices)}"
            for s in pipe.stages
        )
        lines.append(f"{pipe.share:3d} of {BATCH} samples: {stages}")
    return "\n".join(f"      {line}" for line in lines)


def plan_large() -> dict[str, Any]:
    """(a) Plan a model of eight billion parameters on 32 devices of two kinds."""
    heading("1. Plan llama-3-8b on 16 A100 and 16 V100")
    start = time.monotonic()
    progress("searching")
    plan = ap.optimize(
        "llama-3-8b", HERE.parent / "examples/clusters/a100-v100.toml", global_batch_size=512, sequence_length=4096,
        timeout=60,
    )  # fmt: skip
    say(plan_text(plan, ap.simulate(plan)))
    return {
        "step_time_s": plan.step_time_s,
        "lower_bound_s": plan.lower_bound_s,
        "uniform_step_time_s": plan.uniform and plan.uniform.step_time_s,
        "search_s": time.monotonic() - start,
    }


def plan_small(
    devices: tuple[str, ...], model: ap.Model, training: ap.Training, costs: ap.CostTable, links: Sequence[LinkReading]
) -> dict[str, ap.Plan]:
    """Choose plans from measured prices: the one that is trained, the best equal one, the best uniform layout."""
    free = emulated(devices, links, 1e12)
    alone = ap.Strategy.uniform(model, free, replace(training, precision="fp32"), devices=[0])
    need = ap.simulate(alone, model, free, costs).peak_memory_bytes[0]
    limit = MEMORY * need
    parameters = model.parameters * training.bytes_per_parameter
    say(
        f"The whole model on one device needs {need / 1e6:.1f} MB: {parameters / 1e6:.1f} MB for {model.parameters:,} parameters\n"
        f"with gradients and Adam, the rest for one micro-batch of one sample. Each rank is given {MEMORY} of it: {limit / 1e6:.1f} MB."
    )
    cluster = emulated(devices, links, limit)

    def best(**limits: Any) -> ap.Plan:
        progress(f"searching {limits or ''}")
        space = ap.Space(micro_batch_sizes=SIZES, **limits)
        return ap.optimize(model, cluster, training=training, costs=costs, space=space, n_trials=32)

    plans = {"chosen": best()}
    if len(devices) > 2 and len(plans["chosen"].strategy.pipelines) < 2:
        say("The search prefers a single pipeline; it is shown here, and the space is now restricted to two or more.")
        say(f"    {plans['chosen'].step_time_s:.3f} s\n{describe(plans['chosen'])}")
        plans = {"chosen": best(min_pipelines=2), "preferred": plans["chosen"]}
    plans["equal"] = best(equal_pipelines=True)
    plans["uniform"] = best(equal_pipelines=True, equal_stages=True)
    return plans


def train_small() -> dict[str, Any]:
    """(b) Train by the plan that the search chooses, and see whether it does what was said."""
    heading("2. Train a small Llama on unlike ranks of this machine")
    reason = lab.why_not()
    devices = tuple(QUOTAS) if reason is None else WITHOUT_QUOTAS
    if reason is None:
        say(f"Four ranks with {', '.join(f'{q:.2f}' for q in QUOTAS.values())} of a core each, by CPU quota.")
    else:
        say(f"Two equal ranks: {reason}.")
    sample = read_text()[0]["input_ids"][None]
    model = ap.Model.from_module(make_model(), {"input_ids": sample}, name="small-llama")
    training = ap.Training(global_batch_size=BATCH, precision="fp32", optimizer="adamw")
    say(f"Text: the sources of Python's standard library, {len(read_text()):,} samples of {sample.numel()} bytes.")
    quotas = lab.Quotas(QUOTAS) if reason is None else None
    try:
        progress("measuring blocks and links on all ranks at once")
        costs, links = measure(devices, model, training, quotas)
        plans = plan_small(devices, model, training, costs, links)
        chosen = plans["chosen"]
        say(f"\n{plan_text(chosen, ap.simulate(chosen))}")
        say("Training by it: real ranks, gloo between them.")
        measured = {"chosen": run(chosen, quotas, STEPS, check=True)}
        for name in ("equal", "uniform"):
            if plans[name].strategy == chosen.strategy:
                measured[name] = measured["chosen"]
            else:
                progress(f"training by the best {name} plan")
                measured[name] = run(plans[name], quotas, FEWER_STEPS)
    finally:
        if quotas is not None:
            quotas.close()
    return {
        "quotas": QUOTAS if reason is None else reason,
        "memory_limit_bytes": chosen.cluster.device(0).type.memory_bytes,
        **report(plans, measured),
        "links": [
            {"send_latency_s": r.send_latency_s, "send_bytes_per_s": r.send_bytes_per_s,
             "reduce_latency_s": r.reduce_latency_s, "reduce_bytes_per_s": r.reduce_bytes_per_s}
            for r in links
        ],
    }  # fmt: skip


def report(plans: dict[str, ap.Plan], measured: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Say what came out: losses, exactness, predicted beside measured."""
    heading("3. What came out")
    losses = measured["chosen"]["losses"]
    marks = [0, *range(4, len(losses), 5)]
    say("Loss, nats per byte, by step:  " + "  ".join(f"{i + 1}: {losses[i]:.2f}" for i in marks))
    again, gradients = reference(plans["chosen"])
    loss_error = max(abs(a - b) / abs(b) for a, b in zip(losses, again, strict=False))
    error = gradient_error(measured["chosen"]["gradients"], gradients)
    say(
        f"Against one process over the same micro-batches: losses of {CHECKED} steps differ by {loss_error:.1e} at most,\n"
        f"gradients of step 1 by {error:.1e} (relative, the worst of {len(gradients)} tensors); tolerance {TOLERANCE:.0e}: "
        f"{'equal' if max(loss_error, error) <= TOLERANCE else 'NOT EQUAL'}."
    )
    say(
        "\nSeconds per step             predicted   measured   measured / predicted   against the chosen: predicted, measured"
    )
    rows = {}
    base = plans["chosen"].step_time_s, measured["chosen"]["step_time_s"]
    for name, title in (
        ("chosen", "the chosen plan"),
        ("equal", "best equal pipelines"),
        ("uniform", "best uniform layout"),
    ):
        predicted, found = plans[name].step_time_s, measured[name]["step_time_s"]
        say(
            f"  {title:24s} {predicted:10.3f} {found:10.3f} {found / predicted:16.3f} "
            f"{predicted / base[0]:24.2f} x {found / base[1]:10.2f} x"
        )
        rows[name] = {
            "predicted_s": predicted,
            "measured_s": found,
            "measured_quartiles_s": measured[name]["quartiles_s"],
            "error": predicted / found - 1,
            "lower_bound_s": plans[name].lower_bound_s,
            "pipelines": [
                {"share": p.share, "cuts": [s.stop - s.start for s in p.stages],
                 "devices": [list(s.group.devices) for s in p.stages], "micro_batches": list(p.micro_batch_sizes)}
                for p in plans[name].strategy.pipelines
            ],
        }  # fmt: skip
    for name, title in (("chosen", "chosen"), ("equal", "equal"), ("uniform", "uniform")):
        say(f"  {title}:\n{describe(plans[name])}")
    return {
        "step_times": rows,
        "losses": losses,
        "loss_error": loss_error,
        "gradient_error": error,
        "tolerance": TOLERANCE,
        "equal_to_one_process": max(loss_error, error) <= TOLERANCE,
    }


def main() -> int:
    start = time.monotonic()
    large = plan_large()
    small = train_small()
    seconds = time.monotonic() - start
    usage = [resource.getrusage(who).ru_maxrss / 2**20 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    say(
        f"\nDone in {seconds:.0f} s; this process took {usage[0]:.2f} GiB at most, the largest rank {usage[1]:.2f} GiB."
    )
    results = {
        "versions": {
            "autopiper": ap.__version__, "python": platform.python_version(), "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "cores": os.cpu_count(), "seconds": seconds, "large": large, "small": small,
    }  # fmt: skip
    path = HERE / "results/first_light.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")
    return 0 if small["equal_to_one_process"] else 1


if __name__ == "__main__":
    sys.exit(main())
