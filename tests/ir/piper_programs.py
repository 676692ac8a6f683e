"""Programs as Piper's own generators write them: a base of place, replicate and shard, then split and order; and models."""

from __future__ import annotations

import re
from typing import Any

from autopiper.model.spec import Model

SMALL: dict[str, Any] = {"hidden_size": 256, "num_attention_heads": 4, "sequence_length": 8, "vocab_size": 96}
DENSE = Model.transformer(num_layers=6, **SMALL)
TIED = Model.transformer(num_layers=6, tie_embeddings=True, **SMALL)
EXPERTS = Model.transformer(
    num_layers=6, num_experts=4, experts_per_token=2, moe_intermediate_size=32, intermediate_size=64, **SMALL
)

RANKS, COPIES = 2, 2


def base(where: list[int], *, zero: int = 0, experts: bool = False) -> list[dict[str, Any]]:
    """`where[stage]` is its rank; rank r has the devices r, r + R, r + 2R, …"""
    devices = [[r + copy * RANKS for copy in range(COPIES)] for r in where]
    place = [{"op": "place", "filter": {"PP": s}, "devices": on, "stream": "pp_stream"} for s, on in enumerate(devices)]
    levels: dict[str, Any] = {2: {"shard_grads": True}}.get(zero, {})
    if zero == 3:
        levels = {"gather_stream": "gather_stream", "shard_grads": True, "shard_params": True, "bucket_size": 1000}
    replicate = [
        {"op": "replicate", "filter": {"PP": s}, "devices": on, "reduce_stream": "reduce_stream", **levels}
        for s, on in enumerate(devices)
    ]
    shard = [
        {"op": "shard", "filter": {"PP": s, "EP": "*"}, "devices": on, "stream": "ep_stream"}
        for s, on in enumerate(devices) if experts
    ]  # fmt: skip
    return [*place, *replicate, *shard]


def ordered(rows: list[str], count: int = 4) -> list[dict[str, Any]]:
    """Rows such as "0F0 1F0+0B1": groups of stage, pass and micro-batch."""

    def filter_of(text: str) -> dict[str, Any]:
        stage, kind, mb = re.fullmatch(r"(\d+)(F|BI|BW|B)(\d+)", text).groups()  # type: ignore[union-attr]
        return {"PP": int(stage), "MB": int(mb), "PASS": kind}

    split = {"op": "split", "filter": {}, "dim_name": "MB", "num_microbatches": count}
    return [
        split,
        *({"op": "order", "filters": [[filter_of(t) for t in g.split("+")] for g in row.split()]} for row in rows),
    ]


GPIPE = ["0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3", "1F0 1F1 1F2 1F3 1B0 1B1 1B2 1B3"]
MIRRORED = ["0F0 0F1 0F2 0F3 0B3 0B2 0B1 0B0", "1F0 1F1 1F2 1F3 1B3 1B2 1B1 1B0"]
ONE_F_ONE_B = ["0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3", "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3"]
INTERLEAVED = [
    "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
    "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
]
ZERO_BUBBLE = [
    "0F0 0F1 0BI0 0BW0 0F2 0BI1 0BW1 0F3 0BI2 0BW2 0BI3 0BW3",
    "1F0 1BI0 1F1 1BI1 1BW0 1F2 1BI2 1BW1 1F3 1BI3 1BW2 1BW3",
]
DUAL_PIPE_V = [
    "0F0 0F1 0F2 3F0 3BI0 3BW0 3F1 0F3+3B1 3F2+0B0 3B2 3F3+0B1 3B3 0BI2 0BW2 0BI3 0BW3",
    "1F0 2F0 1F1 2F1 1F2 2B0 2F2+1B0 1F3+2B1 2F3+1B1 2B2 1B2 2BI3 1BI3 2BW3 1BW3",
]
