"""CostTable: the prices that search, simulator and report share. Data and look-up only; prices are made elsewhere."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from autopiper._data import data, require
from autopiper.errors import CostError, nearest
from autopiper.plan.prices import (
    DEFAULT_OVERLAPS,
    BlockCost,
    Evidence,
    HostCost,
    LinkCost,
    OverlapCost,
    blend,
    scaled,
)

__all__ = [
    "ANY",
    "DEFAULT_OVERLAPS",
    "BlockCost",
    "CostTable",
    "Evidence",
    "HostCost",
    "LinkCost",
    "OverlapCost",
    "PriceIndex",
]

ANY = "*"
"""A device type of this name stands for every type."""


@data
class CostTable:
    """Prices of blocks and links."""

    blocks: tuple[BlockCost, ...]
    links: tuple[LinkCost, ...] = ()
    hosts: tuple[HostCost, ...] = ()
    """Per device type, where measured; else ranks spend nothing beside their blocks."""
    overlaps: tuple[OverlapCost, ...] = DEFAULT_OVERLAPS
    """Kinds of work that slow each other down; pairs that are not listed do not."""
    precision: str | None = None
    """Precision that the prices hold for; None = not stated."""
    optimizer: str | None = None
    """Optimizer that `update_s` holds for; None = not stated."""
    proportional: bool = False
    """Prices per sample: any number of samples costs that many times the one-sample entry (`from_layers`)."""
    parameter_bytes: tuple[float, ...] | None = None
    """Resident bytes of each block, where given (`from_layers`); else Training x parameters decide."""
    output_bytes: tuple[float, ...] | None = None
    """Bytes of each block's output per sample, where given; else the model's edges decide."""
    source: str = "given"

    def __post_init__(self) -> None:
        keys = [(b.kind, b.device_type, b.tensor_parallel_size, b.samples) for b in self.blocks]
        if len(set(keys)) != len(keys):
            twice = next(k for k in keys if keys.count(k) > 1)
            raise CostError(f"two prices for (kind, device type, tensor-parallel size, samples) = {twice}; keep one")
        pairs = [(o.kind, o.under) for o in self.overlaps]
        if len(set(pairs)) != len(pairs):
            raise CostError(
                f"two slowdowns for (kind, under) = {next(p for p in pairs if pairs.count(p) > 1)}; keep one"
            )

    def index(self) -> PriceIndex:
        """Return the look-up over these prices; make it once and keep it, it caches."""
        return PriceIndex(self)

    def merge(self, other: CostTable) -> CostTable:
        """Join two tables (profiles of different device types come from different machines); `other` wins.

        Only where `other` has the default slowdown of a pair, that of this table stays.
        Raises CostError where they hold for different precisions or optimizers.
        """
        for name in ("precision", "optimizer", "proportional"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine is not None and theirs is not None and mine != theirs:
                raise CostError(f"cannot merge prices for {name} {mine!r} with prices for {theirs!r}")
        blocks = {(b.kind, b.device_type, b.tensor_parallel_size, b.samples): b for b in (*self.blocks, *other.blocks)}
        links = {link.tier: link for link in (*self.links, *other.links)}
        hosts = {host.device_type: host for host in (*self.hosts, *other.hosts)}
        own = {(o.kind, o.under): o for o in self.overlaps}
        overlaps = own | {
            p: o for o in other.overlaps if (p := (o.kind, o.under)) not in own or o not in DEFAULT_OVERLAPS
        }
        return replace(
            self,
            blocks=tuple(blocks.values()),
            links=tuple(links.values()),
            hosts=tuple(hosts.values()),
            overlaps=tuple(overlaps.values()),
            precision=self.precision or other.precision,
            optimizer=self.optimizer or other.optimizer,
            parameter_bytes=other.parameter_bytes or self.parameter_bytes,
            output_bytes=other.output_bytes or self.output_bytes,
            source=self.source if self.source == other.source else f"{self.source} + {other.source}",
        )

    def save(self, path: str | Path) -> None:
        """Write the table as JSON, whole or not at all."""
        from autopiper.plan import file

        require(CostError, "path", path, str | Path)
        file.write(path, "costs", self)

    @staticmethod
    def load(path: str | Path) -> CostTable:
        """Read a table that `save` wrote. Raises CostError naming the field."""
        from autopiper.plan import file

        return file.read(path, "costs", CostTable, CostError)

    @staticmethod
    def from_layers(
        *,
        forward_s: Sequence[float],
        backward_input_s: Sequence[float] | None = None,
        backward_weight_s: Sequence[float] | None = None,
        backward_s: Sequence[float] | None = None,
        activation_bytes: Sequence[float] | None = None,
        parameter_bytes: Sequence[float] | None = None,
        output_bytes: Sequence[float] | None = None,
        update_s: Sequence[float] | None = None,
        device_type: str | None = None,
    ) -> CostTable:
        """Make a table from given layer times, per sample and block, for `Model.chain`.

        `activation_bytes` = kept from F to B; `backward_s` (fused) defaults to I + W, or I and W to its halves.
        `device_type=None`: the prices hold for every type. Raises CostError where lengths differ.
        """
        n = len(forward_s)
        given = {
            "backward_input_s": backward_input_s, "backward_weight_s": backward_weight_s, "backward_s": backward_s,
            "activation_bytes": activation_bytes, "parameter_bytes": parameter_bytes, "output_bytes": output_bytes,
            "update_s": update_s,
        }  # fmt: skip
        for name, values in given.items():
            if values is not None and len(values) != n:
                raise CostError(f"{name} has {len(values)} values for {n} blocks (forward_s has {n}); give one each")
        if backward_s is None and (backward_input_s is None or backward_weight_s is None):
            raise CostError("give backward_s, or both backward_input_s and backward_weight_s")
        zero = [0.0] * n
        fused = backward_s or [i + w for i, w in zip(backward_input_s or zero, backward_weight_s or zero, strict=True)]
        inputs = backward_input_s or [b / 2 for b in fused]
        weights = backward_weight_s or [b - i for b, i in zip(fused, inputs, strict=True)]
        return CostTable(
            blocks=tuple(
                BlockCost(
                    kind=f"layer{i}", device_type=device_type or ANY, samples=1, forward_s=forward_s[i],
                    backward_s=fused[i], backward_input_s=inputs[i], backward_weight_s=weights[i],
                    kept_bytes=(activation_bytes or zero)[i], kept_bytes_selective=(activation_bytes or zero)[i],
                    update_s=(update_s or zero)[i],
                )
                for i in range(n)
            ),
            proportional=True,
            parameter_bytes=None if parameter_bytes is None else tuple(parameter_bytes),
            output_bytes=None if output_bytes is None else tuple(output_bytes),
            source="given layer times",
        )  # fmt: skip


class PriceIndex:
    """Look-up of block prices by (kind, device type, tensor-parallel size, samples), with a cache."""

    def __init__(self, costs: CostTable) -> None:
        self.costs = costs
        self._curves: dict[tuple[str, str, int], list[BlockCost]] = {}
        for entry in costs.blocks:
            self._curves.setdefault((entry.kind, entry.device_type, entry.tensor_parallel_size), []).append(entry)
        for curve in self._curves.values():
            curve.sort(key=lambda e: e.samples)
        self._cache: dict[tuple[str, str, int, int], BlockCost] = {}

    def curve(self, kind: str, device_type: str, tensor_parallel_size: int = 1) -> list[BlockCost]:
        """Return the entries of one block kind by rising samples. Raises CostError naming what is priced instead."""
        found = self._curves.get((kind, device_type, tensor_parallel_size)) or self._curves.get(
            (kind, ANY, tensor_parallel_size)
        )
        if found:
            return found
        kinds = {k for k, _, _ in self._curves}
        if kind not in kinds:
            raise CostError(
                f"block kind '{kind}' has no price{nearest(kind, kinds)}; the table prices: {', '.join(sorted(kinds)[:12])}"
            )
        known = sorted({(d, t) for k, d, t in self._curves if k == kind})
        raise CostError(
            f"block kind '{kind}' has no price on device type '{device_type}' at tensor_parallel_size {tensor_parallel_size}; "
            f"priced (type, size): {known}"
        )

    def has(self, kind: str, device_type: str, tensor_parallel_size: int = 1) -> bool:
        """Whether there is any price for this kind, type and degree."""
        return (kind, device_type, tensor_parallel_size) in self._curves or (
            kind,
            ANY,
            tensor_parallel_size,
        ) in self._curves

    def block(self, kind: str, device_type: str, tensor_parallel_size: int, samples: int) -> BlockCost:
        """Return the price for a slice of `samples` >= 1 samples, interpolated between entries.

        Raises CostError outside the priced range: prices are never extrapolated.
        """
        key = (kind, device_type, tensor_parallel_size, samples)
        found = self._cache.get(key)
        if found is None:
            found = self._cache[key] = self._price(*key)
        return found

    def _price(self, kind: str, device_type: str, tensor_parallel_size: int, samples: int) -> BlockCost:
        curve = self.curve(kind, device_type, tensor_parallel_size)
        if self.costs.proportional:
            return scaled(curve[0], samples)
        sizes = [e.samples for e in curve]
        at = bisect_left(sizes, samples)
        if at < len(sizes) and sizes[at] == samples:
            return curve[at]
        if at == 0 or at == len(sizes):
            raise CostError(
                f"block kind '{kind}' on '{device_type}' is priced for slices of {sizes[0]}..{sizes[-1]} samples; "
                f"{samples} is outside, and prices are not extrapolated; profile or price that size"
            )
        return blend(curve[at - 1], curve[at], samples)
