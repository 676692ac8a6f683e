"""Cluster as data: device types, nodes, links and tiers.

A device id is the position of a device in the cluster, nodes in file order.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path

from autopiper._data import data
from autopiper.errors import ClusterError, nearest

PRECISIONS = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "mxfp8", "nvfp4")


@data
class Link:
    """A way for bytes: bandwidth of one direction and latency of one message."""

    bytes_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0:
            raise ClusterError(f"link bandwidth is {self.bytes_per_s} bytes/s; it must be above zero")
        if not (self.latency_s >= 0 and math.isfinite(self.latency_s)):
            raise ClusterError(f"link latency is {self.latency_s} s; it must be zero or more")


@data
class DeviceType:
    """What one kind of accelerator can do, by its data sheet or by measurement."""

    name: str
    memory_bytes: float
    peak_flops: Mapping[str, float]
    """Dense peak per precision, FLOP/s; a precision that is missing is *unsupported*."""
    memory_bytes_per_s: float
    kernel_launch_s: float = 4e-6
    reserved_bytes: float = 0.0
    """Memory that the driver, the context and the communicators take from `memory_bytes`."""
    price_per_hour: float | None = None
    platform: str = "cuda"
    """"cuda", "rocm" or "cpu"; cuda and rocm do not mix in one job."""
    source: str = "given"
    """Where the figures come from."""

    def __post_init__(self) -> None:
        for field in ("memory_bytes", "memory_bytes_per_s"):
            value = getattr(self, field)
            if not value > 0:
                raise ClusterError(f"device type '{self.name}': {field} is {value}; it must be above zero")
        if not self.peak_flops:
            raise ClusterError(f"device type '{self.name}' supports no precision; give at least one peak")
        for precision, peak in self.peak_flops.items():
            if precision not in PRECISIONS:
                raise ClusterError(
                    f"device type '{self.name}': precision '{precision}' is unknown{nearest(precision, PRECISIONS)}; "
                    f"allowed: {', '.join(PRECISIONS)}"
                )
            if not peak > 0:
                raise ClusterError(f"device type '{self.name}': peak of {precision} is {peak}; it must be above zero")
        if self.platform not in ("cuda", "rocm", "cpu"):
            raise ClusterError(f"device type '{self.name}': platform is '{self.platform}'; allowed: cuda, rocm, cpu")

    def supports(self, precision: str) -> bool:
        """Whether the device computes in `precision` at all."""
        return precision in self.peak_flops

    @property
    def usable_bytes(self) -> float:
        """Memory that a plan may fill."""
        return self.memory_bytes - self.reserved_bytes


@data
class Node:
    """One machine: its devices (names of device types, in order), its inner link and its network interfaces."""

    name: str
    devices: tuple[str, ...]
    intra: Link
    """Between two devices of the node, per device and direction."""
    nic: Link
    """One network interface, per direction."""
    nics: int = 1
    domains: tuple[str, ...] = ()
    """Where the node stands, outermost first, e.g. ("region-a", "rack-3"); one name for each tier of the cluster."""

    def __post_init__(self) -> None:
        if not self.devices:
            raise ClusterError(f"node '{self.name}' has no devices; give at least one")
        if self.nics < 1:
            raise ClusterError(f"node '{self.name}': nics is {self.nics}; it must be 1 or more")

    @property
    def network(self) -> Link:
        """All interfaces of the node together, per direction."""
        return Link(bytes_per_s=self.nic.bytes_per_s * self.nics, latency_s=self.nic.latency_s)


@data
class Tier:
    """A level of the network above the nodes. Tier k joins nodes whose `domains[:k]` agree and `domains[k]` differ."""

    name: str
    link: Link
    """Between two nodes across this tier, per node and direction; its latency comes on top of the interface's."""


@data
class Device:
    """One device of the cluster."""

    id: int
    node: int
    type: DeviceType


class _Layout:
    """Where each device stands and what joins each pair of nodes, worked out once per cluster."""

    def __init__(self, cluster: Cluster) -> None:
        types = {t.name: t for t in cluster.device_types}
        flat = [(n, name) for n, node in enumerate(cluster.nodes) for name in node.devices]
        self.devices = tuple(Device(id=i, node=n, type=types[name]) for i, (n, name) in enumerate(flat))
        self.starts = (0, *accumulate(len(n.devices) for n in cluster.nodes))
        self.ways: dict[tuple[int, int], tuple[str, Link]] = {}


class _WithLayout:
    """Room for the layout beside the fields of a frozen, slotted dataclass: no part of equality, copies or files."""

    __slots__ = ("_layout",)
    _layout: _Layout


@data
class Cluster(_WithLayout):
    """Nodes of devices and what joins them."""

    name: str
    device_types: tuple[DeviceType, ...]
    nodes: tuple[Node, ...]
    tiers: tuple[Tier, ...] = ()

    def __post_init__(self) -> None:
        if not self.nodes:
            raise ClusterError(f"cluster '{self.name}' has no nodes; give at least one")
        names = [t.name for t in self.device_types]
        for name in names:
            if names.count(name) > 1:
                raise ClusterError(f"cluster '{self.name}' has two device types named '{name}'; names differ")
        for node in self.nodes:
            for device in node.devices:
                if device not in names:
                    raise ClusterError(
                        f"node '{node.name}': device '{device}' is unknown{nearest(device, names)}; allowed: {', '.join(names)}"
                    )
            if len(node.domains) != len(self.tiers):
                raise ClusterError(
                    f"node '{node.name}' has {len(node.domains)} domains for {len(self.tiers)} tiers; give one name each"
                )
        platforms = {t.platform for t in self.device_types if t.name in {d for n in self.nodes for d in n.devices}}
        if {"cuda", "rocm"} <= platforms:
            raise ClusterError(f"cluster '{self.name}' mixes CUDA and ROCm devices; one job runs on one of them")

    @property
    def num_devices(self) -> int:
        """Devices in the cluster."""
        return sum(len(n.devices) for n in self.nodes)

    def _laid_out(self) -> _Layout:
        # The simulator asks for devices and links by the million; a field would show in files and comparisons.
        try:
            return self._layout
        except AttributeError:
            object.__setattr__(self, "_layout", _Layout(self))
            return self._layout

    def device(self, device_id: int) -> Device:
        """Return the device with this id. Raises ClusterError outside 0..num_devices-1."""
        devices = self._laid_out().devices
        if not 0 <= device_id < len(devices):
            raise ClusterError(
                f"device {device_id} does not exist; cluster '{self.name}' has devices 0..{len(devices) - 1}"
            )
        return devices[device_id]

    def devices(self) -> tuple[Device, ...]:
        """Return every device, by id."""
        return self._laid_out().devices

    def first_device(self, node: int) -> int:
        """Return the id of the first device of a node, by the node's position."""
        return self._laid_out().starts[node]

    def device_type(self, name: str) -> DeviceType:
        """Return the device type of this name. Raises ClusterError with the nearest name."""
        for device_type in self.device_types:
            if device_type.name == name:
                return device_type
        names = [t.name for t in self.device_types]
        raise ClusterError(f"device type '{name}' is unknown{nearest(name, names)}; allowed: {', '.join(names)}")

    def counts(self) -> dict[str, int]:
        """Return how many devices there are of each type, in order of appearance."""
        return dict(Counter(d for n in self.nodes for d in n.devices))

    def tier(self, a: int, b: int) -> str:
        """Name what two devices talk over: "node" inside one, a tier's name, or "network" where no tier is given."""
        return self._way(a, b)[0]

    def link(self, a: int, b: int) -> Link:
        """Return the link between two devices: per device inside a node, per *node* (all its interfaces) between nodes."""
        return self._way(a, b)[1]

    def _way(self, a: int, b: int) -> tuple[str, Link]:
        pair = (self.device(a).node, self.device(b).node)
        ways = self._laid_out().ways
        if pair not in ways:
            ways[pair] = self._find_way(self.nodes[pair[0]], self.nodes[pair[1]], same=pair[0] == pair[1])
        return ways[pair]

    def _find_way(self, a: Node, b: Node, *, same: bool) -> tuple[str, Link]:
        if same:
            return "node", a.intra
        bytes_per_s = min(a.network.bytes_per_s, b.network.bytes_per_s)
        latency_s = max(a.network.latency_s, b.network.latency_s)
        for tier, x, y in zip(self.tiers, a.domains, b.domains, strict=True):
            if x != y:
                return tier.name, Link(
                    bytes_per_s=min(bytes_per_s, tier.link.bytes_per_s), latency_s=latency_s + tier.link.latency_s
                )
        return "network", Link(bytes_per_s=bytes_per_s, latency_s=latency_s)

    def fingerprint(self, device_ids: Iterable[int] | None = None) -> str:
        """16 hex digits of the cluster, or of the types of the devices named."""
        content = asdict(self) if device_ids is None else [self.device(d).type.name for d in device_ids]
        return hashlib.sha256(json.dumps(content, sort_keys=True, default=dict).encode()).hexdigest()[:16]

    @staticmethod
    def from_file(path: str | Path) -> Cluster:
        """Read a cluster from TOML. Raises ClusterError naming the file, the key and the nearest right one."""
        from autopiper.cluster import file

        return file.read(path)

    @staticmethod
    def homogeneous(
        device: str,
        *,
        num_nodes: int = 1,
        devices_per_node: int = 1,
        intra_node_GBps: float = 300,
        inter_node_GBps: float = 25,
        intra_node_latency_us: float = 3,
        inter_node_latency_us: float = 10,
        nics: int = 1,
        name: str | None = None,
    ) -> Cluster:
        """Make `num_nodes` equal nodes of one catalogue device; GBps per direction, intra per device, inter per node."""
        from autopiper.cluster import build

        return build.homogeneous(
            device,
            num_nodes=num_nodes,
            devices_per_node=devices_per_node,
            intra_node_GBps=intra_node_GBps,
            inter_node_GBps=inter_node_GBps,
            intra_node_latency_us=intra_node_latency_us,
            inter_node_latency_us=inter_node_latency_us,
            nics=nics,
            name=name,
        )

    @staticmethod
    def local(num_devices: int | None = None, *, ideal: bool = False) -> Cluster:
        """Describe this machine. `ideal=True`: free links and no memory limit, for schedule studies."""
        from autopiper.cluster import build

        return build.local(num_devices, ideal=ideal)
