"""Analytic prices, simulated, against step times that others measured on A100 and H100.

Nothing is fitted: the rows are large models, where kernels and not the host set the pace (small ones are another
matter: their steps are bound by launches of the frameworks of their day, which these prices do not know).
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from autopiper import ir
from autopiper.cluster import Cluster
from autopiper.costmodel import price, simulate
from autopiper.model.spec import Model
from autopiper.plan import Strategy, Training

PUBLISHED = Path(__file__).parents[2].parent / "shared/published"


def rows(name: str) -> list[dict[str, Any]]:
    path = PUBLISHED / name
    if not path.is_file():
        pytest.skip(f"the published measurements ({name}) are not beside this repository")
    found: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    return found


def step_s(row: dict[str, Any], cluster: Cluster) -> float:
    """Simulate a row of Megatron-like runs: fp16, 1F1B, every layer computed again in the backward."""
    model = Model.transformer(
        num_layers=row["layers"], hidden_size=row["hidden"], num_attention_heads=row["heads"],
        sequence_length=row["seq_len"], vocab_size=51200,
    )  # fmt: skip
    training = Training(global_batch_size=row["global_batch_size"], precision="fp16")
    costs = price(model, cluster, training, max_samples=row["micro_batch_size"])
    strategy = Strategy.uniform(
        model, cluster, training, micro_batch_size=row["micro_batch_size"], tensor_parallel_size=row["tp"],
        pipeline_parallel_size=row["pp"], recompute="full", devices=range(row["tp"] * row["pp"] * row["dp"]),
    )  # fmt: skip
    graph = ir.build(strategy, model, cluster)
    return simulate(graph, ir.lower(graph), costs, events=False).step_time_s


def test_single_node_a100() -> None:
    # 2048 wide without tensor parallelism: the widest single-node rows.
    chosen = [r for r in rows("vtrain_single_node.json") if r["hidden"] == 2048 and r["tp"] == 1 and r["pp"] == 1]
    node = Cluster.homogeneous("a100-80g", devices_per_node=8)
    ratios = [step_s(r, node) / (r["measured_iter_ms"] * 1e-3) for r in chosen]
    assert len(ratios) > 30
    assert statistics.median(abs(r - 1) for r in ratios) < 0.15
    assert max(abs(r - 1) for r in ratios) < 0.35


def test_many_nodes_of_a100() -> None:
    chosen = [r for r in rows("vtrain_multi_node.json") if r["hidden"] >= 6144 and r["tp"] == 8 and r["gpus"] <= 256]
    ratios = []
    for r in chosen:
        nodes = Cluster.homogeneous(
            "a100-80g", num_nodes=r["gpus"] // 8, devices_per_node=8, inter_node_GBps=100, nics=4
        )
        ratios.append(step_s(r, nodes) / (r["measured_iter_ms"] * 1e-3))
    assert len(ratios) >= 4  # larger clusters fit as well (0.93 to 1.16 on 512), but take long to simulate
    assert max(abs(r - 1) for r in ratios) < 0.2


def test_tensor_parallel_a100() -> None:
    row = next(r for r in rows("korthikanti2022_iteration.json") if r["recompute"] == "full") | {"dp": 1}
    node = Cluster.homogeneous("a100-80g", devices_per_node=8)
    assert step_s(row, node) == pytest.approx(row["measured_iter_s"], rel=0.2)
