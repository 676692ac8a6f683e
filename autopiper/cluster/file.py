"""Cluster files: TOML that a person writes, and the same written back.

    name = "lab"

    [[nodes]]                        # one entry per kind of node
    name = "a100"                    # two nodes: "a100-0" and "a100-1"; without a name: "node0", "node1", …
    count = 2
    devices = "a100-80g"             # a name of the catalogue or of [[device_types]] …
    devices_per_node = 8
    intra_node_GBps = 300            # gigabytes per second and direction, per device
    intra_node_latency_us = 3
    inter_node_GBps = 25             # per node, all its interfaces together (200 Gb/s = 25 GBps);
    inter_node_latency_us = 10       # or: nics = 4, nic_GBps = 12.5
    domains = ["hall-1", "rack-3"]   # where the nodes stand, one name for each tier, outermost first

    [[nodes]]
    devices = ["mine", "mine", "v100-32g"]   # … or a list, device by device
    intra_node_GBps = 12
    inter_node_GBps = 25
    domains = ["hall-2", "rack-9"]

    [[tiers]]                        # levels above the nodes, outermost first
    name = "halls"
    GBps = 5                         # between two nodes across this tier, per node and direction
    latency_us = 20                  # on top of the interfaces'
    [[tiers]]
    name = "racks"
    GBps = 12.5

    [[device_types]]                 # your own; with `like` the rest is taken from another
    name = "mine"
    like = "a100-80g"
    memory_GiB = 40
    price_per_hour = 1.1
    TFLOPS = { fp32 = 19.5, bf16 = 250 }     # dense peaks; a precision left out is unsupported

Bandwidths are needed where they matter: inside nodes of several devices, between several nodes. Latencies default to
3 us inside nodes, 10 us between them and 0 for tiers.
"""

from __future__ import annotations

import tomllib
from decimal import Decimal
from pathlib import Path

from pydantic import Field, ValidationError

from autopiper.cluster import catalogue
from autopiper.cluster.entries import GIGA, MICRO, DeviceEntry, Entry, NonNegative, Positive, explain
from autopiper.cluster.spec import Cluster, DeviceType, Link, Node, Tier
from autopiper.errors import ClusterError

UNUSED_GBPS = Decimal(1)
"""Stands for a bandwidth that the file may leave out because nothing uses the link."""


class NodeEntry(Entry):
    """`count` equal nodes."""

    name: str | None = None
    count: int = Field(default=1, ge=1, le=65_536, strict=True)
    devices: str | list[str]
    devices_per_node: int | None = Field(default=None, ge=1, le=1024, strict=True)
    intra_node_GBps: Positive | None = None
    intra_node_latency_us: NonNegative = Decimal(3)
    inter_node_GBps: Positive | None = None
    nic_GBps: Positive | None = None
    nics: int = Field(default=1, ge=1, strict=True)
    inter_node_latency_us: NonNegative = Decimal(10)
    domains: tuple[str, ...] = ()

    @property
    def device_names(self) -> tuple[str, ...]:
        """The devices of one node."""
        return (self.devices,) * (self.devices_per_node or 1) if isinstance(self.devices, str) else tuple(self.devices)


class TierEntry(Entry):
    """A level of the network."""

    name: str
    GBps: Positive
    latency_us: NonNegative = Decimal(0)


class OwnDeviceEntry(DeviceEntry):
    """A device type of the file itself."""

    name: str
    like: str | None = None


class ClusterEntry(Entry):
    """The whole file."""

    name: str | None = None
    nodes: list[NodeEntry] = Field(min_length=1)
    tiers: tuple[TierEntry, ...] = ()
    device_types: tuple[OwnDeviceEntry, ...] = ()


_KEYS = {
    "": ClusterEntry.model_fields,
    "nodes": NodeEntry.model_fields,
    "tiers": TierEntry.model_fields,
    "device_types": [k for k in OwnDeviceEntry.model_fields if k != "match"],
}


def read(path: str | Path) -> Cluster:
    """Read a cluster file. Raises ClusterError naming the file, the key, what came and what is allowed."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError, TypeError) as fault:  # no such file, no text in it, or no path at all
        raise ClusterError(f"cannot read cluster file '{path}': {fault}") from None
    return from_toml(text, f"cluster file '{path}'", default_name=Path(path).stem)


def from_toml(text: str, label: str = "cluster text", *, default_name: str = "cluster") -> Cluster:
    """Make a cluster of TOML text; `label` is what errors call it. Raises ClusterError as `read` does."""
    try:
        content = tomllib.loads(text, parse_float=Decimal)
    except (ValueError, RecursionError) as fault:  # tomllib's own error, digits without end, brackets without end
        raise ClusterError(f"{label} is not TOML: {fault}") from None
    try:
        _inherit(content)
        entry = ClusterEntry.model_validate(content)
        return _build(entry, default_name)
    except ValidationError as fault:
        lines = explain(fault, {table: tuple(keys) for table, keys in _KEYS.items()})
        raise ClusterError(f"{label}: {lines[0]}" if len(lines) == 1 else "\n  - ".join((label, *lines))) from None
    except ClusterError as fault:
        raise ClusterError(f"{label}: {fault}") from None


def _inherit(content: dict[str, object]) -> None:
    """Fill what a device type takes over from the one that it is like: of the catalogue, or earlier in the file."""
    known = {name: entry.model_dump(exclude={"match"}) for name, entry in catalogue.entries().items()}
    tables = content.get("device_types")
    for position, table in enumerate(tables if isinstance(tables, list) else []):
        if not isinstance(table, dict):
            continue
        like = table.get("like")
        if isinstance(like, str):
            if like not in known:
                raise ClusterError(
                    f"device_types[{position}].like is '{like}'{catalogue.similar(like, known)}; allowed: {', '.join(known)}"
                )
            base = known[like]
            changed = ", ".join(k for k in table if k not in ("name", "like", "price_per_hour", "source"))
            source = f"as {like} ({base['source']})" + (f", but given: {changed}" if changed else "")
            table.update({k: v for k, v in (base | {"source": source}).items() if k not in table})
        if isinstance(table.get("name"), str):
            known[table["name"]] = {k: v for k, v in table.items() if k not in ("name", "like")}


def _build(entry: ClusterEntry, default_name: str) -> Cluster:
    own: dict[str, DeviceType] = {}
    for position, device in enumerate(entry.device_types):
        if device.name in own:
            raise ClusterError(
                f"device_types[{position}].name is '{device.name}', which an earlier one has; names differ"
            )
        if device.match is not None:
            raise ClusterError(f"device_types[{position}].match: unknown key; only the catalogue has it")
        own[device.name] = device.device_type(device.name)
    several = sum(n.count for n in entry.nodes) > 1
    nodes: list[Node] = []
    for position, node in enumerate(entry.nodes):
        nodes.extend(_nodes(node, f"nodes[{position}]", len(nodes), several=several, own=own))
    used = dict.fromkeys(name for node in nodes for name in node.devices)
    types = [own.get(name) or catalogue.get(name) for name in used]
    types += [device for name, device in own.items() if name not in used]
    tiers = [
        Tier(name=t.name, link=Link(bytes_per_s=float(t.GBps * GIGA), latency_s=float(t.latency_us * MICRO)))
        for t in entry.tiers
    ]
    return Cluster(
        name=default_name if entry.name is None else entry.name,
        device_types=tuple(types),
        nodes=tuple(nodes),
        tiers=tuple(tiers),
    )


def _nodes(entry: NodeEntry, at: str, first: int, *, several: bool, own: dict[str, DeviceType]) -> list[Node]:
    names = entry.device_names
    if not names:
        raise ClusterError(f"{at}.devices is empty; give the name of a device, or a list of names")
    if isinstance(entry.devices, list) and entry.devices_per_node not in (None, len(names)):
        raise ClusterError(
            f"{at}.devices_per_node is {entry.devices_per_node} but devices lists {len(names)}; leave one of them out"
        )
    for name in dict.fromkeys(names):
        known = [*own, *catalogue.names()]
        if name not in known:
            raise ClusterError(
                f"{at}.devices names '{name}'{catalogue.similar(name, known)}; allowed: {', '.join(known)}"
            )
    if entry.intra_node_GBps is None and len(names) > 1:
        raise ClusterError(
            f"{at}.intra_node_GBps is missing; the node has {len(names)} devices that talk to each other"
        )
    if entry.inter_node_GBps is not None and entry.nic_GBps is not None:
        raise ClusterError(f"{at} has both inter_node_GBps and nic_GBps; give one (inter_node_GBps = nics x nic_GBps)")
    nic_GBps = entry.nic_GBps
    if entry.inter_node_GBps is not None:
        nic_GBps = entry.inter_node_GBps / entry.nics
    if nic_GBps is None and several:
        raise ClusterError(f"{at}.inter_node_GBps is missing; the cluster has several nodes that talk to each other")
    intra = Link(
        bytes_per_s=float((entry.intra_node_GBps or UNUSED_GBPS) * GIGA),
        latency_s=float(entry.intra_node_latency_us * MICRO),
    )
    nic = Link(
        bytes_per_s=float((nic_GBps or UNUSED_GBPS) * GIGA), latency_s=float(entry.inter_node_latency_us * MICRO)
    )
    return [
        Node(
            name=_node_name(entry.name, i, first + i, entry.count),
            devices=names,
            intra=intra,
            nic=nic,
            nics=entry.nics,
            domains=entry.domains,
        )
        for i in range(entry.count)
    ]


def _node_name(name: str | None, of_entry: int, of_cluster: int, count: int) -> str:
    if name is None:
        return f"node{of_cluster}"
    return name if count == 1 else f"{name}-{of_entry}"
