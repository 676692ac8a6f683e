"""Prices laid out for the search: per device type, degree and slice, matrices over all stages [start, stop).

A matrix `m[i, j]` holds the figure of a stage with the blocks [i, j); below the diagonal it means nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from autopiper.cluster.spec import Cluster
from autopiper.costmodel import memory
from autopiper.errors import CostError
from autopiper.model.spec import Model
from autopiper.plan.costs import CostTable
from autopiper.plan.training import Training

Array: TypeAlias = npt.NDArray[np.float64]


def interval_sums(values: Sequence[float] | Array) -> Array:
    """Return m[i, j] = sum of values[i:j]."""
    ends = np.concatenate(([0.0], np.cumsum(np.asarray(values, dtype=np.float64))))
    out: Array = ends[None, :] - ends[:, None]
    return out


def interval_maxima(values: Sequence[float] | Array) -> Array:
    """Return m[i, j] = max of values[i:j]; 0 where empty."""
    row = np.asarray(values, dtype=np.float64)
    out = np.zeros((len(row) + 1, len(row) + 1))
    for i in range(len(row)):
        out[i, i + 1 :] = np.maximum.accumulate(row[i:])
    return out


class MemberCosts:
    """What each block costs one member (one device, or `tensor_parallel_size` of them) for a slice of samples.

    Every figure is of one micro-batch on one device of the member; choices are recompute choices.
    """

    def __init__(
        self, *, name: str, forward_s: Sequence[float], backward_s: Sequence[float],
        extra_s: dict[str, Sequence[float]], kept_bytes: dict[str, Sequence[float]],
        workspace_bytes: dict[str, Sequence[float]], static_bytes: Sequence[float], capacity_bytes: float,
        tied: Sequence[tuple[tuple[int, ...], float]] = (), update_s: Sequence[float] | None = None,
        type_name: str = "", tensor_parallel_size: int = 1, samples: int = 1, pass_s: float = 0.0, message_s: float = 0.0,
    ) -> None:  # fmt: skip
        """`extra_s`, `kept_bytes` and `workspace_bytes` are per choice and block; `tied` = (blocks, bytes of one copy).

        `static_bytes` counts a tied parameter in each block that uses it; a stage that holds several uses has one copy.
        `pass_s` and `message_s`: see `beside_s`.
        """
        self.name, self.capacity_bytes = name, capacity_bytes
        self.type_name, self.tensor_parallel_size, self.samples = type_name, tensor_parallel_size, samples
        self.forward_s, self.backward_s = np.array(forward_s, dtype=float), np.array(backward_s, dtype=float)
        self.update_s = np.zeros(len(forward_s)) if update_s is None else np.array(update_s, dtype=float)
        self.extra_s = {c: np.array(v, dtype=float) for c, v in extra_s.items()}
        self.kept_bytes = {c: np.array(v, dtype=float) for c, v in kept_bytes.items()}
        self.workspace_bytes = {c: np.array(v, dtype=float) for c, v in workspace_bytes.items()}
        self.block_static_bytes = np.array(static_bytes, dtype=float)
        self.tied = tuple(tied)
        self.pass_s, self.message_s = pass_s, message_s
        self._weights: dict[str, float] = {}

    @property
    def choices(self) -> tuple[str, ...]:
        """Recompute choices that are priced."""
        return tuple(self.extra_s)

    def block_s(self, choice: str) -> Array:
        """Forward, backward and what is computed again, per block."""
        out: Array = self.forward_s + self.backward_s + self.extra_s[choice]
        return out

    def beside_s(self, neighbours: int) -> float:
        """Return what the host spends on a micro-batch beside the blocks: F and B, each with a message per neighbour.

        No matter how many blocks the stage holds, so it is no part of `time_s`; `neighbours` = 0 to 2 stages.
        """
        return self.pass_s + 2 * neighbours * self.message_s

    @cached_property
    def fastest_s(self) -> Array:
        """Forward and backward of each block under its fastest choice."""
        out: Array = np.min([self.block_s(c) for c in self.choices], axis=0)
        return out

    def most_weight(self, other: MemberCosts) -> float:
        """Return how many seconds of `other`'s work one second of this member can be worth, block by block at most."""
        found = self._weights.get(other.name)
        if found is None:
            mine, theirs = self.fastest_s, other.fastest_s
            ratio = np.divide(theirs, mine, out=np.full(len(mine), np.inf), where=mine > 0)
            found = self._weights[other.name] = float(ratio.max())
        return found

    @cached_property
    def time_s(self) -> dict[str, Array]:
        """Forward and backward of a stage, per choice made for all its blocks."""
        return {c: interval_sums(self.block_s(c)) for c in self.choices}

    @cached_property
    def stage_kept_bytes(self) -> dict[str, Array]:
        """Kept by a stage from F to B of one micro-batch."""
        return {c: interval_sums(v) for c, v in self.kept_bytes.items()}

    @cached_property
    def stage_workspace_bytes(self) -> dict[str, Array]:
        """Largest short-lived memory of a stage."""
        return {c: interval_maxima(v) for c, v in self.workspace_bytes.items()}

    @cached_property
    def static_bytes(self) -> Array:
        """Resident bytes of a stage's parameters."""
        out = interval_sums(self.block_static_bytes)
        at = np.arange(len(out))
        for blocks, copy_bytes in self.tied:
            inside = sum(((at[:, None] <= b) & (b < at[None, :])).astype(float) for b in set(blocks))
            out = out - copy_bytes * np.maximum(0.0, inside - 1.0)
        return out

    def memory_bytes(self, choice: str, in_flight: int) -> Array:
        """Predicted peak of a stage with `in_flight` micro-batches between their F and B."""
        out: Array = self.static_bytes + in_flight * self.stage_kept_bytes[choice] + self.stage_workspace_bytes[choice]
        return out


class Prices:
    """The cost table of one model, cluster and training, seen as `MemberCosts`."""

    def __init__(
        self, model: Model, cluster: Cluster, training: Training, costs: CostTable, recompute: Sequence[str]
    ) -> None:
        self.model, self.cluster, self.training, self.costs = model, cluster, training, costs
        self.choices = tuple(recompute)
        self.index = costs.index()
        self.hosts = {host.device_type: host for host in costs.hosts}
        self._members: dict[tuple[str, int, int], MemberCosts | None] = {}
        cuts = range(1, len(model.blocks))
        self.cut_bytes: Array = np.array(
            [0.0, *(memory.boundary_bytes(model, training, costs, c) for c in cuts), 0.0], dtype=float
        )
        """Bytes of one sample over a cut before each block; 0 at both ends."""

    def member(self, type_name: str, tensor_parallel_size: int, samples: int) -> MemberCosts | None:
        """Return the costs of a member for a slice, or None where the table does not price it."""
        key = (type_name, tensor_parallel_size, samples)
        if key not in self._members:
            self._members[key] = self._make(*key)
        return self._members[key]

    def _make(self, type_name: str, tp: int, samples: int) -> MemberCosts | None:
        model = self.model
        try:
            blocks = [self.index.block(b.kind, type_name, tp, samples) for b in model.blocks]
        except CostError:
            return None
        extra = {"none": [0.0 for _ in blocks], "full": [b.forward_s for b in blocks],
                 "selective": [b.selective_forward_s for b in blocks]}  # fmt: skip
        given = self.costs.parameter_bytes is not None
        copies = (
            [] if given else [(t.blocks, t.parameters * self.training.bytes_per_parameter / tp) for t in model.tied]
        )
        host = self.hosts.get(type_name)
        return MemberCosts(
            name=f"{type_name} tp{tp} x{samples}",
            forward_s=[b.forward_s for b in blocks],
            backward_s=[b.backward_s for b in blocks],
            extra_s={c: extra[c] for c in self.choices},
            kept_bytes={c: [memory.kept_bytes(b, c) for b in blocks] for c in self.choices},
            workspace_bytes={
                c: [b.workspace_bytes + b.kept_bytes - min(b.kept_bytes, memory.kept_bytes(b, c)) for b in blocks]
                for c in self.choices
            },
            static_bytes=[
                memory.static_bytes(model, self.training, self.costs, i, i + 1, tp) for i in range(len(blocks))
            ],
            capacity_bytes=self.cluster.device_type(type_name).usable_bytes,
            tied=copies,
            update_s=[b.update_s for b in blocks],
            type_name=type_name,
            tensor_parallel_size=tp,
            samples=samples,
            pass_s=host.forward_s + host.backward_s if host else 0.0,
            message_s=host.message_s if host else 0.0,
        )

    def tensor_parallel_sizes(self, type_name: str, allowed: Sequence[int] | None) -> tuple[int, ...]:
        """Return the degrees that are priced for every block and fit into a node with this type."""
        most = max((n.devices.count(type_name) for n in self.cluster.nodes), default=0)
        sizes = [2**k for k in range(most.bit_length())] if allowed is None else sorted(set(allowed))
        kinds = {b.kind for b in self.model.blocks}
        return tuple(t for t in sizes if t <= most and all(self.index.has(k, type_name, t) for k in kinds))
