"""What a CostTable holds: prices of blocks, links and hosts, and how kinds of work slow each other down."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal, get_args

from autopiper._data import data
from autopiper.errors import CostError, nearest

Evidence = Literal["analytic", "measured", "interpolated", "given"]
WorkKind = Literal["compute", "send_recv", "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "other"]

EXPERT_PARTS = (
    ("expert_forward_s", "forward_s"),
    ("expert_backward_s", "backward_s"),
    ("expert_backward_input_s", "backward_input_s"),
    ("expert_backward_weight_s", "backward_weight_s"),
)
"""Fields of a BlockCost that say which part of another one is the routed experts'."""

ROUNDING = 1e-9
"""By how much, relatively, a part may exceed its whole: sums of floats differ by their order."""


@data
class BlockCost:
    """Prices of one block kind on one device type at one tensor-parallel size, for a slice of `samples` samples.

    Times include tensor-parallel collectives; `*_collective_s` says how much of them that is.
    """

    kind: str
    device_type: str
    samples: int
    tensor_parallel_size: int = 1
    forward_s: float
    backward_s: float
    """Fused backward (B)."""
    backward_input_s: float
    """Backward for the input (I)."""
    backward_weight_s: float
    """Backward for the weights (W)."""
    forward_collective_s: float = 0.0
    backward_collective_s: float = 0.0
    update_s: float = 0.0
    """Optimizer step of the whole block (of one tensor-parallel shard); does not depend on samples."""
    kept_bytes: float = 0.0
    """Kept from F until B without recompute."""
    kept_bytes_selective: float = 0.0
    kept_bytes_full: float = 0.0
    """Kept under full recompute: the block's input."""
    selective_forward_s: float = 0.0
    """What selective recompute runs again in the backward."""
    workspace_bytes: float = 0.0
    """Short-lived memory of F or B on top of what is kept."""
    evidence: Evidence = "given"
    relative_error: float = 0.0
    """Half-width of the error bar, relative."""
    expert_forward_s: float = 0.0
    """Of `forward_s`, the routed experts' part; so the three below. It is the same for every expert-parallel degree:
    sharing out the experts of a group leaves each rank as many tokens under balanced routing, of fewer experts. (Where
    few tokens make reading the weights the bound, a rank with fewer experts is faster than that.)"""
    expert_backward_s: float = 0.0
    expert_backward_input_s: float = 0.0
    expert_backward_weight_s: float = 0.0

    def __post_init__(self) -> None:
        for name in (
            *(part for part, _ in EXPERT_PARTS), "forward_s", "backward_s", "backward_input_s", "backward_weight_s", "update_s", "kept_bytes",
            "kept_bytes_selective", "kept_bytes_full", "workspace_bytes", "forward_collective_s",
            "backward_collective_s", "selective_forward_s", "relative_error",
        ):  # fmt: skip
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise CostError(f"{name} of block kind '{self.kind}' is {value}; it must be zero or more and finite")
        for part, whole in EXPERT_PARTS:
            if getattr(self, part) > getattr(self, whole) * (1 + ROUNDING):
                raise CostError(
                    f"{part} of block kind '{self.kind}' is {getattr(self, part)}, but {whole}, of which it is a part, is "
                    f"{getattr(self, whole)}"
                )
        if self.samples < 1 or self.tensor_parallel_size < 1:
            raise CostError(f"block kind '{self.kind}': samples and tensor_parallel_size must be 1 or more")


@data
class LinkCost:
    """Measured or given price of a tier ("node", "network" or a tier's name); it wins over the cluster's figures."""

    tier: str
    latency_s: float
    bytes_per_s: float
    evidence: Evidence = "measured"
    relative_error: float = 0.0


@data
class HostCost:
    """What a rank of a device type spends beside its blocks, where it keeps the device from computing."""

    device_type: str
    forward_s: float = 0.0
    """Of each forward of a stage: the call of the model, masks, position tables."""
    backward_s: float = 0.0
    message_s: float = 0.0
    """Of each message sent or received: the backend's work, where it runs on the device itself (CPU ranks)."""
    evidence: Evidence = "measured"

    def __post_init__(self) -> None:
        for name in ("forward_s", "backward_s", "message_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise CostError(f"{name} of host '{self.device_type}' is {value}; it must be zero or more and finite")


@data
class OverlapCost:
    """Work of `kind` takes `slowdown` times as long while work of kind `under` runs on the same rank."""

    kind: WorkKind
    under: WorkKind
    slowdown: float
    evidence: Evidence = "given"
    source: str = ""

    def __post_init__(self) -> None:
        kinds = get_args(WorkKind)
        for name in ("kind", "under"):
            value = getattr(self, name)
            if value not in kinds:
                raise CostError(
                    f"{name} of an overlap is {value!r}{nearest(str(value), kinds)}; allowed: {', '.join(kinds)}"
                )
        if not (math.isfinite(self.slowdown) and self.slowdown >= 1):
            raise CostError(
                f"slowdown of {self.kind} under {self.under} is {self.slowdown}; it must be a finite factor of 1 or more"
            )


DEFAULT_OVERLAPS = (
    OverlapCost(
        kind="all_to_all",
        under="all_reduce",
        slowdown=1.46,
        source="arXiv 2606.11169: an expert all-to-all under a data-parallel all-reduce, A100 nodes with EFA",
    ),
)
"""What holds where nothing was measured."""


def blend(a: BlockCost, b: BlockCost, samples: int) -> BlockCost:
    """Interpolate linearly in samples between two entries."""
    weight = (samples - a.samples) / (b.samples - a.samples)
    numbers = {
        name: getattr(a, name) + weight * (getattr(b, name) - getattr(a, name))
        for name in (
            "forward_s", "backward_s", "backward_input_s", "backward_weight_s", "forward_collective_s",
            "backward_collective_s", "update_s", "kept_bytes", "kept_bytes_selective", "kept_bytes_full",
            "selective_forward_s", "workspace_bytes", *(part for part, _ in EXPERT_PARTS),
        )
    }  # fmt: skip
    error = max(a.relative_error, b.relative_error)
    evidence: Evidence = "given" if a.evidence == b.evidence == "given" else "interpolated"
    return replace(a, samples=samples, evidence=evidence, relative_error=error, **numbers)


def scaled(unit: BlockCost, samples: int) -> BlockCost:
    """Return the price of `samples` samples where each costs the same (`CostTable.proportional`)."""
    scale = samples / unit.samples
    names = (
        "forward_s", "backward_s", "backward_input_s", "backward_weight_s", "kept_bytes", "kept_bytes_selective",
        "kept_bytes_full", *(part for part, _ in EXPERT_PARTS),
    )  # fmt: skip
    numbers = {name: getattr(unit, name) * scale for name in names}
    return replace(unit, samples=samples, **numbers)
