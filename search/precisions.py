"""Which precision on which devices: one search for each that could win.

All used devices share one precision, so leaving out a device type that lacks a better one is a choice of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopiper._data import data
from autopiper.cluster.spec import Cluster
from autopiper.costmodel import price
from autopiper.errors import InfeasibleError, PlanError
from autopiper.model.spec import Model
from autopiper.plan.costs import CostTable
from autopiper.plan.space import Space
from autopiper.plan.training import PREFERENCE, Training


@data
class Variant:
    """A precision, the devices that support it, and the prices that hold there."""

    training: Training
    devices: tuple[int, ...]
    costs: CostTable


def variants(
    model: Model, cluster: Cluster, training: Training, costs: CostTable, space: Space
) -> tuple[list[Variant], list[str]]:
    """Return the variants worth a search, all devices first, and notes on what was left out.

    Analytic prices are made again for another precision; measured and given ones hold only for theirs. Raises PlanError
    where the precision asked for is supported nowhere.
    """
    devices = _allowed(cluster, space)
    names = list(dict.fromkeys(cluster.device(d).type.name for d in devices))
    priced = {b.device_type for b in costs.blocks}
    unpriced = [n for n in names if n not in priced and "*" not in priced]
    notes = [f"{n} has no prices in the cost table and stays idle" for n in unpriced]
    names = [n for n in names if n not in unpriced]
    if not names:
        raise PlanError(
            f"the cost table prices {', '.join(sorted(priced))}, and none of them may be used in cluster '{cluster.name}'"
        )
    wanted = training.precision or costs.precision
    analytic = bool(costs.blocks) and all(b.evidence == "analytic" for b in costs.blocks)
    found: list[Variant] = []
    for precision in PREFERENCE if training.precision is None else (training.precision,):
        able = [n for n in names if cluster.device_type(n).supports(precision)]
        if not able:
            continue
        if found and set(able) <= {cluster.device(d).type.name for v in found for d in v.devices}:
            continue  # a worse precision on no other devices
        fits = costs.precision is None or costs.precision == precision
        if not fits and not analytic:
            continue
        resolved = training.resolve(cluster.device_type(n) for n in able)
        if resolved.precision != precision:
            reason = f"the prices hold for it ({costs.source})"
            resolved = replace(training, precision=precision, precision_reason=reason)
        table = costs if fits else _again(model, cluster, able, resolved)
        ids = tuple(d for d in devices if cluster.device(d).type.name in able)
        found.append(Variant(training=resolved, devices=ids, costs=table))
    if not found:
        kinds = ", ".join(names)
        if wanted is not None:
            training.resolve(cluster.device_type(n) for n in names)  # says who lacks it
        raise PlanError(f"no precision is supported by any of {kinds} under the prices given (for {costs.precision})")
    return sorted(found, key=lambda v: -len(v.devices)), notes


def _allowed(cluster: Cluster, space: Space) -> tuple[int, ...]:
    if space.devices is None:
        return tuple(range(cluster.num_devices))
    unknown = [d for d in space.devices if not 0 <= d < cluster.num_devices]
    if unknown:
        raise PlanError(
            f"space.devices names {unknown}; cluster '{cluster.name}' has devices 0..{cluster.num_devices - 1}"
        )
    if not space.devices:
        raise InfeasibleError("space.devices is empty; there is nothing to train on")
    return tuple(sorted(set(space.devices)))


def _again(model: Model, cluster: Cluster, names: Sequence[str], training: Training) -> CostTable:
    """Price the model on some device types alone, in their own precision."""
    nodes = [
        replace(n, devices=tuple(d for d in n.devices if d in names))
        for n in cluster.nodes
        if set(n.devices) & set(names)
    ]
    return price(model, replace(cluster, nodes=tuple(nodes)), training)
