"""The facts of a plan, gathered once: the table draws them, `--json` prints them.

Times in seconds, memory in bytes, shares and fractions of 1.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from autopiper import ir
from autopiper.cluster.spec import Cluster
from autopiper.ir import GraphStage, TrainingGraph
from autopiper.model.spec import Model
from autopiper.plan.directives import OrderDirective
from autopiper.plan.plan import Plan
from autopiper.plan.timeline import Lane, Timeline


def summarize(plan: Plan, timeline: Timeline) -> dict[str, Any]:
    """Return what there is to say about a plan, as JSON types. `timeline` is the plan's own, by `api.simulate`."""
    graph = ir.build(plan.strategy, plan.model, plan.cluster)
    training = plan.training
    return {
        "model": {
            "name": plan.model.name, "parameters": plan.model.parameters, "blocks": len(plan.model.blocks),
            "sequence_length": plan.model.sequence_length,
        },
        "cluster": _cluster(plan.cluster),
        "training": {
            "global_batch_size": training.global_batch_size, "precision": training.precision,
            "precision_reason": training.precision_reason, "optimizer": training.optimizer,
            "bytes_per_parameter": training.bytes_per_parameter,
        },
        "costs": {"source": plan.costs.source, "relative_error": timeline.relative_error},
        "step_time_s": timeline.step_time_s,
        "relative_error": timeline.relative_error,
        "makespan_s": timeline.makespan_s,
        "tokens_per_s": timeline.tokens_per_s,
        "tflops_per_device": timeline.tflops_per_device,
        "mfu": timeline.mfu,
        "bubble_fraction": timeline.bubble_fraction,
        "exposed_fraction": timeline.exposed_fraction,
        "breakdown_s": timeline.breakdown,
        "lower_bound_s": plan.lower_bound_s,
        "gap": plan.gap if plan.lower_bound_s else None,
        "binding": plan.binding,
        "uniform": None if plan.uniform is None else {
            "layout": plan.uniform.label, "step_time_s": plan.uniform.step_time_s, "note": plan.uniform.note,
            "speedup": plan.uniform.step_time_s / timeline.step_time_s,
        },
        "pipelines": [_pipeline(plan, graph, timeline, p) for p in range(len(graph.pipelines))],
        "idle": _idle(plan.cluster, graph.devices()),
        "notes": list(plan.notes),
    }  # fmt: skip


def _cluster(cluster: Cluster) -> dict[str, Any]:
    alike = Counter((n.devices, n.intra.bytes_per_s, n.network.bytes_per_s) for n in cluster.nodes)
    return {
        "name": cluster.name,
        "devices": cluster.counts(),
        "nodes": [
            {"count": count, "devices": dict(Counter(devices)), "intra_bytes_per_s": intra, "network_bytes_per_s": network}
            for (devices, intra, network), count in alike.items()
        ],
    }  # fmt: skip


def _pipeline(plan: Plan, graph: TrainingGraph, timeline: Timeline, index: int) -> dict[str, Any]:
    pipe = graph.pipelines[index]
    share = sum(pipe.micro_batch_sizes)
    orders = [d for d in plan.strategy.directives() if isinstance(d, OrderDirective)]
    family = next(
        (d.schedule for d in orders if d.schedule and (d.pipelines is None or index in d.pipelines)), "written out"
    )
    return {
        "index": index,
        "samples": share,
        "share": share / plan.training.global_batch_size,
        "micro_batches": [{"samples": size, "count": count} for size, count in Counter(pipe.micro_batch_sizes).items()],
        "schedule": family,
        "stages": [_stage(plan, stage, timeline) for stage in pipe.stages],
    }


def _stage(plan: Plan, stage: GraphStage, timeline: Timeline) -> dict[str, Any]:
    lanes = {device: lane for lane in timeline.lanes for device in lane.devices}
    kept = Counter(stage.recompute)
    return {
        "index": stage.index,
        "start": stage.start,
        "stop": stage.stop,
        "blocks": block_names(plan.model, stage.start, stage.stop),
        "tensor_parallel_size": stage.tensor_parallel_size,
        "data_parallel_size": len(stage.members),
        "expert_parallel_size": stage.expert_parallel_size,
        "zero": max(stage.zero, default=0),
        "recompute": {choice: count for choice, count in kept.items() if choice != "none"},
        "groups": [
            _group(plan.cluster, name, [(i, m) for i, m in enumerate(stage.members) if _type(plan, m) == name], lanes, stage)
            for name in dict.fromkeys(_type(plan, m) for m in stage.members)
        ],
    }  # fmt: skip


def _type(plan: Plan, member: Sequence[int]) -> str:
    """Name the device types of one member; more than one only where tensor parallelism mixes them."""
    return " + ".join(dict.fromkeys(plan.cluster.device(d).type.name for d in member))


def _group(
    cluster: Cluster, name: str, members: list[tuple[int, tuple[int, ...]]], lanes: dict[int, Lane], stage: GraphStage
) -> dict[str, Any]:
    """Members of one device type: the fullest device of them speaks for all."""
    devices = [d for _, member in members for d in member]
    fullest = max(devices, key=lambda d: lanes[d].peak_memory_bytes / cluster.device(d).type.usable_bytes)
    time = [lanes[d].time for d in devices]
    whole = sum(t.total_s for t in time)
    rows = {tuple(row[i] for i, _ in members) for row in stage.slices}
    return {
        "type": name,
        "devices": devices,
        "nodes": list(dict.fromkeys(cluster.nodes[cluster.device(d).node].name for d in devices)),
        "samples": [list(row) for row in sorted(rows, reverse=True)],
        "peak_memory_bytes": lanes[fullest].peak_memory_bytes,
        "static_memory_bytes": lanes[fullest].static_memory_bytes,
        "limit_bytes": cluster.device(fullest).type.usable_bytes,
        "live_micro_batches": lanes[fullest].peak_live_activations,
        "busy_fraction": sum(t.compute_s + t.recompute_s for t in time) / whole if whole else 0.0,
    }


def _idle(cluster: Cluster, used: Iterable[int]) -> list[dict[str, Any]]:
    rest = [d for d in cluster.devices() if d.id not in set(used)]
    return [
        {
            "type": name,
            "devices": [d.id for d in rest if d.type.name == name],
            "nodes": list(dict.fromkeys(cluster.nodes[d.node].name for d in rest if d.type.name == name)),
        }
        for name in dict.fromkeys(d.type.name for d in rest)
    ]


_NUMBERED = re.compile(r"(.*?)[ ._]?(\d+)")


def block_names(model: Model, start: int, stop: int) -> str:
    """Name blocks [start, stop) briefly: "embedding, layers 0-9, head"."""
    runs: list[tuple[str, int, int] | str] = []
    for block in model.blocks[start:stop]:
        match = _NUMBERED.fullmatch(block.name)
        if match is None:
            runs.append(block.name)
            continue
        name, number = match[1].removesuffix("s") or "block", int(match[2])
        last = runs[-1] if runs else ""
        if isinstance(last, tuple) and last[0] == name and last[2] == number - 1:
            runs[-1] = (name, last[1], number)
        else:
            runs.append((name, number, number))
    return ", ".join(r if isinstance(r, str) else _run(*r) for r in runs)


def _run(name: str, first: int, last: int) -> str:
    if first == last:
        return f"{name} {first}"
    # Words take a plural; letters, as in "h.0", do not.
    return f"{name}{'s' * (len(name) > 2)} {first}-{last}"
