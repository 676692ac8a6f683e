"""The catalogue of devices: what their data sheets say, in catalogue.toml, one table for each."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection
from decimal import Decimal
from functools import cache
from importlib import resources

from autopiper.cluster.entries import DeviceEntry
from autopiper.cluster.spec import DeviceType
from autopiper.errors import ClusterError, nearest


@cache
def entries() -> dict[str, DeviceEntry]:
    """Return every entry by the name of its device."""
    text = resources.files("autopiper.cluster").joinpath("catalogue.toml").read_text(encoding="utf-8")
    return {name: DeviceEntry(**table) for name, table in tomllib.loads(text, parse_float=Decimal).items()}


def names() -> tuple[str, ...]:
    """Return the names of all devices."""
    return tuple(entries())


def similar(name: str, known: Collection[str]) -> str:
    """Return " (did you mean 'a100-40g' or 'a100-80g'?)": what begins with the name, else the nearest word, if any."""
    variants = [f"'{n}'" for n in known if name and n.lower().startswith(name.lower())]
    return f" (did you mean {' or '.join(variants)}?)" if variants else nearest(name, known)


@cache
def get(name: str) -> DeviceType:
    """Return a device by name. Raises ClusterError with the nearest name."""
    found = entries().get(name)
    if found is None:
        raise ClusterError(
            f"device '{name}' is unknown{similar(name, names())}; allowed: {', '.join(names())}, "
            f"or describe your own in a cluster file under [[device_types]]"
        )
    return found.device_type(name)


def find(driver_name: str, memory_bytes: float) -> DeviceType | None:
    """Return the device that a driver calls `driver_name`, of variants the one nearest in memory; None if unknown."""
    found = [get(n) for n, e in entries().items() if e.match is not None and re.search(e.match, driver_name.strip())]
    return min(found, key=lambda d: abs(d.memory_bytes - memory_bytes), default=None)
