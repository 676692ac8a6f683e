"""How fast the simulator is: 1F1B with 16 stages, in actions per second on one core.

    python experiments/simulator.py        (what `make bench-simulator` runs)

The same schedule goes through the compiled kernel, through its plain reference, and through the simulator inside
torch's pipeline schedules, which steps through the actions that torch's own lowering makes and knows no durations.
An action is what a rank has in its Program: F, B, and both ends of each transfer. Every figure is the fastest of
several runs, warm; those that are compared take turns. Results go to stdout and to experiments/results/simulator.json.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
from torch.distributed.pipelining import schedules

import autopiper as ap
from autopiper.costmodel.kernel import KINDS, Work, no_slowdown, ragged, successors, walk
from autopiper.costmodel.reference import walk_plainly

STAGES, MICRO_BATCHES = 16, 512
SIZES = (64, 128, 256, 512, 1024, 2048)
REPEATS = 7
FORWARD_S, BACKWARD_S, TRANSFER_S = 1e-3, 2e-3, 2e-4
NIC_BYTES_PER_S = 25e9
SLOWER = 1.05
"""Factor between compute and transfers in the case in which everything contends; only its presence costs time."""
COMPUTE, SEND_RECV = KINDS.index("compute"), KINDS.index("send_recv")
ALTERED = 1e-14
"""Relative change of all durations, to see how much of a difference between two walks is rounding that has grown."""
TARGET = 1e6
"""Actions per second that the kernel is to reach at least."""


def order(stage: int, micro_batches: int) -> list[tuple[str, int]]:
    """1F1B of one stage: as many F ahead as there are stages behind it, then one F and one B in turn."""
    ahead = min(STAGES - 1 - stage, micro_batches)
    row = [("F", m) for m in range(ahead)]
    for m in range(micro_batches):
        if m + ahead < micro_batches:
            row.append(("F", m + ahead))
        row.append(("B", m))
    return row


def one_f_one_b(micro_batches: int, contention: bool) -> tuple[Work, int]:
    """The arrays of the schedule, a transfer being one node, and the number of actions that they stand for.

    With contention each transfer needs the sender's and the receiver's NIC, which those of the other direction need
    as well, and compute and transfers slow each other down; without it no node can meet another one.
    """
    nodes: dict[tuple[str, int, int], int] = {}
    edges, lanes, kinds, seconds = [], [], [], []

    def node(kind: str, stage: int, micro_batch: int, on: tuple[int, ...], seconds_s: float) -> int:
        nodes[kind, stage, micro_batch] = len(kinds)
        kinds.append(COMPUTE if len(on) == 1 else SEND_RECV)
        seconds.append(seconds_s)
        lanes.append(on)
        return len(kinds) - 1

    for stage in range(STAGES):
        before = None
        for kind, m in order(stage, micro_batches):
            at = node(kind, stage, m, (stage,), FORWARD_S if kind == "F" else BACKWARD_S)
            if before is not None:
                edges.append((before, at))
            before = at
    for stage in range(STAGES - 1):
        for kind, source, target in (("F", stage, stage + 1), ("B", stage + 1, stage)):
            for m in range(micro_batches):
                at = node(f"SEND_{kind}", source, m, (source, target), TRANSFER_S)
                edges += [(nodes[kind, source, m], at), (at, nodes[kind, target, m])]
                if m:
                    edges.append((at - 1, at))
    for m in range(micro_batches):
        edges.append((nodes["F", STAGES - 1, m], nodes["B", STAGES - 1, m]))

    pairs = np.array(edges)
    after_start, after, missing = successors(len(kinds), pairs[:, 0], pairs[:, 1])
    rows = np.repeat(np.arange(len(kinds)), [len(on) for on in lanes])
    member_start, member = ragged(len(kinds), rows, np.array([lane for on in lanes for lane in on]))
    sends = [n for n, kind in enumerate(kinds) if kind == SEND_RECV] if contention else []
    lanes_used = np.array([lane for n in sends for lane in lanes[n]], dtype=np.int64)
    use_start, use = ragged(len(kinds), np.repeat(np.array(sends, dtype=np.int64), 2), lanes_used)
    slowdown = no_slowdown()
    if contention:
        slowdown[COMPUTE, SEND_RECV] = slowdown[SEND_RECV, COMPUTE] = SLOWER
    work = Work(
        seconds=np.array(seconds),
        kind=np.array(kinds),
        after_start=after_start,
        after=after,
        missing=missing,
        earliest=np.zeros(len(kinds)),
        member_start=member_start,
        member=member,
        use_start=use_start,
        use=use,
        demand=np.full(len(use), NIC_BYTES_PER_S),
        capacity=np.full(STAGES, NIC_BYTES_PER_S),
        slowdown=slowdown,
    )
    return work, int(sum(len(on) for on in lanes))


def torch_actions(micro_batches: int) -> dict[int, list[Any]]:
    """The same rows with the sends and receives that torch's own lowering puts between them."""
    kinds = {"F": schedules.FORWARD, "B": schedules.FULL_BACKWARD}
    rows = {
        stage: [schedules._Action(stage, kinds[kind], m) for kind, m in order(stage, micro_batches)]
        for stage in range(STAGES)
    }
    return schedules._add_send_recv(rows, stage_to_rank=lambda stage: stage, num_stages=STAGES)


def fastest(runs: Sequence[Callable[[], Any]], repeats: int) -> list[float]:
    """Seconds of each run at its fastest; they take turns, so that a noisy moment does not fall on one alone."""
    best = [float("inf")] * len(runs)
    for _ in range(repeats):
        for at, run in enumerate(runs):
            gc.collect()
            begin = time.perf_counter()
            run()
            best[at] = min(best[at], time.perf_counter() - begin)
    return best


def measure_kernel() -> list[dict[str, Any]]:
    """Rows of figures, one for each number of micro-batches."""
    rows = []
    for micro_batches in SIZES:
        quiet, actions = one_f_one_b(micro_batches, contention=False)
        busy, _ = one_f_one_b(micro_batches, contention=True)
        runs = (lambda w=quiet: walk(w), lambda w=busy: walk(w), lambda w=busy: replace(w))
        quiet_s, busy_s, check_s = fastest(runs, REPEATS)
        rows.append(
            {
                "micro_batches": micro_batches, "actions": actions, "nodes": len(busy.seconds),
                "nothing_contends_s": quiet_s, "nothing_contends_actions_per_s": actions / quiet_s,
                "all_contends_s": busy_s, "all_contends_actions_per_s": actions / busy_s,
                "checks_of_the_arrays_s": check_s,
            }
        )  # fmt: skip
    return rows


def compare() -> dict[str, Any]:
    """Kernel, reference and torch on the very same schedule, in turns."""
    quiet, actions = one_f_one_b(MICRO_BATCHES, contention=False)
    busy, _ = one_f_one_b(MICRO_BATCHES, contention=True)
    lowered = torch_actions(MICRO_BATCHES)
    if (theirs := sum(map(len, lowered.values()))) != actions:
        raise RuntimeError(f"torch lowers the schedule to {theirs} actions, the arrays stand for {actions}")
    found: dict[str, Any] = {}

    def reference() -> None:
        found["reference"] = walk_plainly(busy)

    def stepped() -> None:
        found["steps"] = schedules._simulate_comms_compute(lowered, lambda stage: stage, STAGES)

    quiet_s, busy_s, torch_s = fastest((lambda: walk(quiet), lambda: walk(busy), stepped), REPEATS)
    (reference_s,) = fastest((reference,), 1)
    _, end = walk(busy)
    noise = np.random.default_rng(0).standard_normal(len(busy.seconds))
    _, altered = walk(replace(busy, seconds=busy.seconds * (1 + ALTERED * noise)))
    short, _ = one_f_one_b(SIZES[0], contention=True)

    def difference(a: Any, b: Any) -> float:
        return float(np.abs(np.array(a) - np.array(b)).max() / np.max(b))

    return {
        "micro_batches": MICRO_BATCHES,
        "actions": actions,
        "kernel_nothing_contends_actions_per_s": actions / quiet_s,
        "kernel_all_contends_actions_per_s": actions / busy_s,
        "reference_all_contends_actions_per_s": actions / reference_s,
        "torch_actions_per_s": actions / torch_s,
        "kernel_over_reference": reference_s / busy_s,
        "kernel_nothing_contends_over_torch": torch_s / quiet_s,
        "kernel_all_contends_over_torch": torch_s / busy_s,
        f"difference_to_reference_{SIZES[0]}_micro_batches": difference(walk(short)[1], walk_plainly(short)[1]),
        "difference_to_reference": difference(end, found["reference"][1]),
        "difference_to_itself_with_durations_altered_by_1e-14": difference(end, altered),
    }


def end_to_end() -> dict[str, Any]:
    """The whole way, from a Strategy to a Timeline, as `autopiper.simulate` goes it; `walk` is one part of that."""
    model = ap.Model.chain(STAGES)
    cluster = ap.Cluster.homogeneous("a100-80g", num_nodes=STAGES // 8, devices_per_node=8)
    training = ap.Training(global_batch_size=MICRO_BATCHES)
    costs = ap.CostTable.from_layers(
        forward_s=[FORWARD_S] * STAGES,
        backward_input_s=[BACKWARD_S / 2] * STAGES,
        backward_weight_s=[BACKWARD_S / 2] * STAGES,
    )
    strategy = ap.Strategy.uniform(model, cluster, training, pipeline_parallel_size=STAGES)
    timelines = []
    (seconds,) = fastest((lambda: timelines.append(ap.simulate(strategy, model, cluster, costs)),), 3)
    actions = sum(len(lane.events) for lane in timelines[-1].lanes)
    return {"seconds": seconds, "actions": actions, "actions_per_s": actions / seconds}


LARGE = """
import json, resource, sys, time
import autopiper as ap
model = ap.Model.from_preset("llama-3.1-405b", sequence_length=8192)
found = []
for nodes in (2 * 16, 2048):
    cluster = ap.Cluster.homogeneous(
        "h100", num_nodes=nodes, devices_per_node=8, intra_node_GBps=450, inter_node_GBps=400, nics=8
    )
    batch = ap.Training(global_batch_size=nodes, precision="bf16")
    costs = ap.price(model, cluster, batch)
    best_s = float("inf")
    for _ in range(4):
        begin = time.perf_counter()
        strategy = ap.Strategy.uniform(
            model, cluster, batch, tensor_parallel_size=8, pipeline_parallel_size=16, sequence_parallel=True
        )
        timeline = ap.simulate(strategy, model, cluster, costs)
        best_s = min(best_s, time.perf_counter() - begin)
    assert timeline.num_ranks == 8 * nodes
    found.append({"devices": timeline.num_ranks, "replicas": nodes // 16, "seconds": best_s,
                  "actions": sum(len(lane.events) for lane in timeline.lanes), "step_time_s": timeline.step_time_s})
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"cases": found, "peak_memory_bytes": peak}))
"""
"""llama-3.1-405b, tensor 8 x pipeline 16 x data 2 and 128: from the Strategy to the Timeline, in a process of its own."""


def large() -> dict[str, Any]:
    """Many devices: equal replicas are written and walked once, so 128 of them should take about as long as two."""
    done = subprocess.run([sys.executable, "-c", LARGE], check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> int:
    begin = time.perf_counter()
    walk(one_f_one_b(1, contention=True)[0])
    first_s = time.perf_counter() - begin
    rows, compared, whole = measure_kernel(), compare(), end_to_end()
    for row in rows:
        print(
            f"{row['micro_batches']:5d} micro-batches  {row['actions']:7d} actions"
            f"  {row['nothing_contends_actions_per_s'] / 1e6:6.2f} M/s where nothing contends"
            f"  {row['all_contends_actions_per_s'] / 1e6:6.2f} M/s where everything does"
        )
    print(json.dumps(compared, indent=1))
    print("end to end:", json.dumps(whole))
    many = large()
    print("large:", json.dumps(many, indent=1))
    reached = compared["kernel_all_contends_actions_per_s"] >= TARGET
    results = {
        "versions": {
            "autopiper": ap.__version__, "python": platform.python_version(), "numpy": np.__version__,
            "numba": numba.__version__, "torch": torch.__version__,
        },
        "cores": os.cpu_count(), "stages": STAGES, "first_walk_s": first_s,
        "kernel": rows, "compared": compared, "end_to_end": whole, "large": many, "target_reached": reached,
    }  # fmt: skip
    path = Path(__file__).resolve().parent / "results/simulator.json"
    path.write_text(json.dumps(results, indent=1) + "\n")
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
