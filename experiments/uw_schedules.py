"""Piper's comparison of schedules, simulated: which one is faster on 32 A100, by how much, and what fits into memory.

    python experiments/uw_schedules.py        (what `make uw-schedules` runs)

The setting is that of Piper's evaluation (arXiv 2606.11169): nodes of 8 A100 of 40 GB joined by four interfaces of
100 Gb/s, mixture-of-experts models of 1B and 9B, sequences of 512, micro-batches of 4 samples on each data-parallel
rank, twice as many micro-batches as ranks in a pipeline. Prices are analytic, links are those of the data sheets, and
no constant is fitted. Two settings are not published and decide the outcome for 1B; both were chosen after the
alternatives had been simulated, so the agreement of these figures is no prediction. Every combination is reported:

* gradients are summed in 16 bits (`state_layout="ornl-16"`), not 32. Reason: Piper's code makes a bf16 model and sums its
  `.grad`. Its ZeRO keeps gradients in fp32 buffers, so memory is reported for both;
* every stage has as many layers, the embedding on top of the first, the head on top of the last (`leftover="ends"`).
  Reason: so do launchers that count layers only; how Piper cuts is not known to us.

The slowdown of an all-to-all under an all-reduce, 1.46, is the published one: an input here, no result.

Two layouts of ranks: "replica" (one replica after the other, so that the experts of a stage are divided over nodes;
Piper's default) and "pp_outer" (the members of a stage side by side, so that they share a node).
Results go to stdout and to experiments/results/uw_schedules.json.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import autopiper as ap
from autopiper import ir
from autopiper.costmodel import price, simulate
from autopiper.plan.strategy import Leftover, Strategy
from autopiper.plan.timeline import Lane, Timeline

COMMON = {"vocab_size": 151936, "sequence_length": 512, "gated_mlp": True, "experts_per_token": 2}
MODELS = {
    "1B": ap.Model.transformer(
        name="qwen3-moe-1b", num_layers=16, hidden_size=1024, num_attention_heads=16, num_key_value_heads=8,
        num_experts=4, moe_intermediate_size=3584, **COMMON,
    ),
    "9B": ap.Model.transformer(
        name="qwen3-moe-9b", num_layers=24, hidden_size=2048, num_attention_heads=32, num_key_value_heads=8,
        num_experts=8, moe_intermediate_size=7168, **COMMON,
    ),
}  # fmt: skip
RANKS = {"1B": 8, "9B": 4}
"""Pipeline-parallel size in the comparison of schedules."""
MEMBERS = 4
"""Data-parallel size; with experts divided over all of them."""
MICRO_BATCH = 4
FAMILIES = {"1f1b": 1, "interleaved-1f1b": 2, "dualpipe-v": 2}
"""Schedules compared, with their stages a rank."""
LAYOUTS = ("replica", "pp_outer")
LEFTOVERS: tuple[Leftover, ...] = ("ends", "first")
PIPER_BUCKET_BYTES = 1000 * 10**6
"""Of the artifact's ZeRO runs."""
MICRO_BATCHES = (4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48)
"""Sizes tried under ZeRO."""
PUBLISHED: dict[str, Any] = {
    "gains": {
        "1B interleaved-1f1b / 1f1b": 1.05, "1B dualpipe-v / 1f1b": 1.13, "9B dualpipe-v / interleaved-1f1b": 1.10,
    },
    "all-to-all under an all-reduce": 1.46, "1B tokens per second, PP8 DP4": 390e3, "1B forward of a stage, s": 0.040,
    "largest micro-batch, 9B PP8 DP4": {"1": None, "2": 32, "3": 40},
}  # fmt: skip


def cluster(nodes: int) -> ap.Cluster:
    """Nodes as of AWS p4d: NVSwitch of 300 GB/s a device and direction, four interfaces of 12.5 GB/s."""
    return ap.Cluster.homogeneous(
        "a100-40g", num_nodes=nodes, devices_per_node=8, intra_node_GBps=300, inter_node_GBps=50, nics=4
    )


def devices(layout: str, ranks: int) -> list[int]:
    """Device ids as `Strategy.uniform` takes them, stage by stage."""
    if layout == "replica":
        return [member * ranks + rank for rank in range(ranks) for member in range(MEMBERS)]
    return list(range(ranks * MEMBERS))


def setting(
    name: str, family: str, layout: str, *, ranks: int, experts: int = MEMBERS, micro_batch: int = MICRO_BATCH,
    zero: int = 0, recompute: str = "none", state_layout: str = "ornl-16", leftover: Leftover = "ends",
) -> tuple[Strategy, ap.Model, ap.Cluster, ap.CostTable]:  # fmt: skip
    """One run: the strategy, and what it is priced with."""
    model, machines = MODELS[name], cluster(ranks * MEMBERS // 8)
    training = ap.Training(
        global_batch_size=2 * ranks * MEMBERS * micro_batch, precision="bf16", optimizer="adam",
        state_layout=state_layout,
    )  # fmt: skip
    strategy = Strategy.uniform(
        model, machines, training, micro_batch_size=micro_batch, pipeline_parallel_size=ranks,
        virtual_pipeline_parallel_size=FAMILIES[family], expert_parallel_size=experts, schedule=family, zero=zero,
        recompute=recompute, devices=devices(layout, ranks), leftover=leftover,
    )  # fmt: skip
    costs = price(model, machines, training, tensor_parallel_sizes=[1], max_samples=micro_batch)
    return strategy, model, machines, costs


def run(
    strategy: Strategy, model: ap.Model, machines: ap.Cluster, costs: ap.CostTable, *, events: bool = True
) -> Timeline:
    """Simulate one setting."""
    graph = ir.build(strategy, model, machines)
    return simulate(graph, ir.lower(graph), costs, events=events)


def hidden_share(lane: Lane) -> float:
    """Share of the seconds of a rank's all-to-alls in which it computes."""
    computing = [(e.start_s, e.end_s) for e in lane.events if e.stream == "compute"]
    exchanging = [(e.start_s, e.end_s) for e in lane.events if e.kind.startswith("A2A")]
    both = sum(max(0.0, min(b, d) - max(a, c)) for a, b in exchanging for c, d in computing)
    total = sum(b - a for a, b in exchanging)
    return both / total if total else 0.0


def schedules(state_layout: str = "ornl-16", leftover: Leftover = "ends") -> list[dict[str, Any]]:
    """Every model, layout and schedule."""
    rows = []
    for name, ranks in RANKS.items():
        for layout in LAYOUTS:
            for family in FAMILIES:
                case = setting(name, family, layout, ranks=ranks, state_layout=state_layout, leftover=leftover)
                timeline = run(*case)
                shares = [hidden_share(lane) for lane in timeline.lanes]
                rows.append(
                    {
                        "model": name, "layout": layout, "schedule": family, "step_time_s": timeline.step_time_s,
                        "tokens_per_s": timeline.tokens_per_s, "breakdown_s": timeline.breakdown,
                        "all_to_all_under_compute": sum(shares) / len(shares),
                        "peak_memory_bytes": max(timeline.peak_memory_bytes),
                    }
                )  # fmt: skip
    return rows


def gains(rows: list[dict[str, Any]], layout: str) -> dict[str, float]:
    """Speed of one schedule over that of another, as published."""
    speed = {(r["model"], r["schedule"]): r["tokens_per_s"] for r in rows if r["layout"] == layout}
    found = {}
    for text in PUBLISHED["gains"]:
        name, above, _, below = text.split()
        found[text] = speed[name, above] / speed[name, below]
    return found


def interference() -> dict[str, float]:
    """All-to-alls of 1B in one stage, one device on each of four nodes: alone, and while gradients are summed."""
    strategy, model, _, costs = setting("1B", "1f1b", "replica", ranks=8)
    machines = cluster(4)
    training = replace(strategy.training, global_batch_size=2 * MEMBERS * MICRO_BATCH)
    strategy = Strategy.uniform(
        model, machines, training, micro_batch_size=MICRO_BATCH, expert_parallel_size=MEMBERS, devices=[0, 8, 16, 24]
    )
    lane = run(strategy, model, machines, costs).lanes[0]
    sums = [(e.start_s, e.end_s) for e in lane.events if e.kind == "REDUCE_GRAD"]
    took = [(e.start_s, e.end_s) for e in lane.events if e.kind.startswith("A2A")]
    alone = min(b - a for a, b in took)
    under = [b - a for a, b in took if any(c <= a and b <= d for c, d in sums)]
    step_s, free_s = (
        run(*setting("1B", "1f1b", "replica", ranks=8)[:3], replace(costs, overlaps=table)).step_time_s
        for table in (costs.overlaps, ())
    )
    return {
        "all_to_all_alone_s": alone, "under_an_all_reduce": sum(under) / len(under) / alone, "counted": len(under),
        "of_the_step_of_1B_1f1b": step_s / free_s - 1,
    }  # fmt: skip


def memory() -> list[dict[str, Any]]:
    """Largest micro-batch of the 9B model, PP8 x DP4, experts replicated, by ZeRO level and recompute."""
    device = cluster(4).device_type("a100-40g")
    limit = device.memory_bytes - device.reserved_bytes
    rows = []
    for recompute, state_layout in product(("none", "full"), ("ornl-16", "mixed")):
        for level in range(4):
            largest, peaks = 0, {}
            for size in MICRO_BATCHES:
                case = setting(
                    "9B", "1f1b", "replica", ranks=8, experts=1, micro_batch=size, zero=level, recompute=recompute,
                    state_layout=state_layout,
                )  # fmt: skip
                strategy = replace(case[0], bucket_bytes=PIPER_BUCKET_BYTES)
                timeline = run(strategy, *case[1:], events=False)
                peaks[size] = max(timeline.peak_memory_bytes)
                if peaks[size] > limit:
                    break
                largest = size
            fullest = max(timeline.lanes, key=lambda lane: lane.peak_memory_bytes)
            rows.append(
                {
                    "recompute": recompute, "state_layout": state_layout, "zero": level, "largest_micro_batch": largest, "peak_bytes": peaks,
                    "fullest_rank": min(fullest.ranks), "static_bytes": fullest.static_memory_bytes,
                }
            )  # fmt: skip
    return rows


def checks() -> dict[str, Any]:
    """What was published beside the comparison: speed without divided experts, seconds of a stage's forward."""
    speed = {
        layout: run(*setting("1B", "1f1b", layout, ranks=8, experts=1), events=False).tokens_per_s for layout in LAYOUTS
    }
    lane = run(*setting("1B", "1f1b", "replica", ranks=8)).lanes[1]
    first = [e for e in lane.events if e.kind in ("F", "A2A_F") and e.micro_batch == 0]
    return {
        "tokens_per_s_PP8_DP4": speed,
        "forward_of_a_stage_s": max(e.end_s for e in first) - min(e.start_s for e in first),
    }


def main() -> int:
    rows = schedules()
    variants = []
    for state_layout, leftover in product(("ornl-16", "mixed"), LEFTOVERS):
        found_rows = schedules(state_layout, leftover)
        variants += [
            {"state_layout": state_layout, "leftover": leftover, "layout": x, "gains": gains(found_rows, x)}
            for x in LAYOUTS
        ]
    found = {
        "published": PUBLISHED, "schedules": rows, "variants": variants, "interference": interference(),
        "checks": checks(), "memory": memory(),
    }  # fmt: skip
    for row in rows:
        print(
            f"{row['model']}  {row['layout']:8s}  {row['schedule']:16s}  {row['step_time_s'] * 1e3:6.1f} ms"
            f"  {row['tokens_per_s'] / 1e3:6.1f}k tokens/s  {row['all_to_all_under_compute']:4.0%} of all-to-alls hidden"
        )
    for variant in variants:
        said = ", ".join(f"{text} {gain - 1:+.1%}" for text, gain in variant["gains"].items())
        print(f"{variant['state_layout']:8s} {variant['leftover']:6s} {variant['layout']:9s} {said}")
    for key in ("interference", "checks"):
        print(key, json.dumps(found[key], indent=1))
    for limit in found["memory"]:
        print(
            f"ZeRO {limit['zero']}, recompute {limit['recompute']}, {limit['state_layout']}: "
            f"micro-batch {limit['largest_micro_batch']}"
        )
    path = Path(__file__).resolve().parent / "results/uw_schedules.json"
    path.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
