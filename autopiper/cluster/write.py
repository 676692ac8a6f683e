"""A cluster written as the TOML that `file.read` reads: what comes back is equal."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

from autopiper.cluster import catalogue
from autopiper.cluster.entries import GIB, GIGA, MICRO, TERA
from autopiper.cluster.spec import Cluster, DeviceType, Node


def write(cluster: Cluster, path: str | Path) -> None:
    """Write a cluster file."""
    Path(path).write_text(to_toml(cluster), encoding="utf-8")


def to_toml(cluster: Cluster) -> str:
    """Return a cluster as TOML: equal neighbours as one entry with a count, devices of the catalogue by name alone."""
    parts = [[f"name = {_text(cluster.name)}"]]
    parts += [["[[nodes]]", *_node(run, prefix)] for run, prefix in _runs(cluster.nodes)]
    for tier in cluster.tiers:
        link = tier.link
        lines = [f"name = {_text(tier.name)}", f"GBps = {_in(link.bytes_per_s, GIGA)}"]
        parts.append(["[[tiers]]", *lines, f"latency_us = {_in(link.latency_s, MICRO)}"])
    known = catalogue.names()
    parts += [
        ["[[device_types]]", *_device(device)]
        for device in cluster.device_types
        if device.name not in known or device != catalogue.get(device.name)
    ]
    return "\n\n".join("\n".join(lines) for lines in parts) + "\n"


def _text(text: str) -> str:
    # A JSON string is a TOML basic string, but for DEL, which TOML wants escaped.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _in(value: float, unit: Decimal) -> str:
    """Write a quantity in a unit, digit by digit, so that reading it multiplies back to the very same number."""
    if math.isinf(value):
        return "inf"
    written = f"{Decimal(repr(value)) / unit:f}"
    return written.rstrip("0").rstrip(".") if "." in written else written


def _gib(value: float) -> str:
    return "inf" if math.isinf(value) else f"{Decimal(repr(value / GIB)):f}"


def _runs(nodes: tuple[Node, ...]) -> Iterable[tuple[tuple[Node, ...], str | None]]:
    """Yield neighbouring nodes that one entry can say, with the name of the entry."""
    start = 0
    while start < len(nodes):
        prefix, stop = nodes[start].name.removesuffix("-0"), start + 1
        if nodes[start].name == f"node{start}":
            while stop < len(nodes) and _alike(nodes, start, stop, f"node{stop}"):
                stop += 1
            yield nodes[start:stop], None
        else:
            while prefix != nodes[start].name and stop < len(nodes):
                if not _alike(nodes, start, stop, f"{prefix}-{stop - start}"):
                    break
                stop += 1
            yield nodes[start:stop], prefix if stop - start > 1 else nodes[start].name
        start = stop


def _alike(nodes: tuple[Node, ...], first: int, other: int, name: str) -> bool:
    return nodes[other] == replace(nodes[first], name=name)


def _node(run: tuple[Node, ...], prefix: str | None) -> list[str]:
    node, names = run[0], run[0].devices
    lines = [] if prefix is None else [f"name = {_text(prefix)}"]
    if len(run) > 1:
        lines.append(f"count = {len(run)}")
    if len(set(names)) == 1:
        lines += [f"devices = {_text(names[0])}", f"devices_per_node = {len(names)}"]
    else:
        lines.append(f"devices = [{', '.join(map(_text, names))}]")
    lines += [
        f"intra_node_GBps = {_in(node.intra.bytes_per_s, GIGA)}",
        f"intra_node_latency_us = {_in(node.intra.latency_s, MICRO)}",
        f"nics = {node.nics}",
        f"nic_GBps = {_in(node.nic.bytes_per_s, GIGA)}",
        f"inter_node_latency_us = {_in(node.nic.latency_s, MICRO)}",
    ]
    if node.domains:
        lines.append(f"domains = [{', '.join(map(_text, node.domains))}]")
    return lines


def _device(device: DeviceType) -> list[str]:
    peaks = ", ".join(f"{precision} = {_in(peak, TERA)}" for precision, peak in device.peak_flops.items())
    lines = [
        f"name = {_text(device.name)}",
        f"platform = {_text(device.platform)}",
        f"memory_GiB = {_gib(device.memory_bytes)}",
        f"reserved_GiB = {_gib(device.reserved_bytes)}",
        f"memory_GBps = {_in(device.memory_bytes_per_s, GIGA)}",
        f"TFLOPS = {{ {peaks} }}",
        f"kernel_launch_us = {_in(device.kernel_launch_s, MICRO)}",
        f"source = {_text(device.source)}",
    ]
    if device.price_per_hour is not None:
        lines.append(f"price_per_hour = {_in(device.price_per_hour, Decimal(1))}")
    return lines
