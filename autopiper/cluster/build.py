"""Clusters made in code: equal nodes of one device, and this machine."""

from __future__ import annotations

import math
from dataclasses import replace

from autopiper._data import require
from autopiper.cluster import catalogue, detect
from autopiper.cluster.spec import Cluster, DeviceType, Link, Node
from autopiper.errors import ClusterError

LOOPBACK = Link(bytes_per_s=2e9, latency_s=50e-6)
"""Between processes of one machine by gloo (assumption; profile to know)."""

PCIE = Link(bytes_per_s=25e9, latency_s=5e-6)
"""Between devices without NVLink: PCIe 4.0 with 16 lanes, 31.5 GB/s less protocol (assumption; profile to know)."""

NVLINK_LATENCY_S = 3e-6


def homogeneous(
    device: str, *, num_nodes: int = 1, devices_per_node: int = 1, intra_node_GBps: float = 300,
    inter_node_GBps: float = 25, intra_node_latency_us: float = 3, inter_node_latency_us: float = 10, nics: int = 1,
    name: str | None = None,
) -> Cluster:  # fmt: skip
    """Make equal nodes of one catalogue device; `inter_node_GBps` is all interfaces of a node together.

    Raises ClusterError naming the argument, what came and what is allowed.
    """
    require(ClusterError, "device", device, str)
    require(ClusterError, "name", name, str | None)
    for label, count in (("num_nodes", num_nodes), ("devices_per_node", devices_per_node), ("nics", nics)):
        require(ClusterError, label, count, int)
        if count < 1:
            raise ClusterError(f"{label} is {count}; it must be 1 or more")
    for label, rate in (("intra_node_GBps", intra_node_GBps), ("inter_node_GBps", inter_node_GBps)):
        require(ClusterError, label, rate, float)
        if not rate > 0:
            raise ClusterError(f"{label} is {rate}; it must be above zero (gigabytes per second and direction)")
    for label, wait in (
        ("intra_node_latency_us", intra_node_latency_us), ("inter_node_latency_us", inter_node_latency_us),
    ):  # fmt: skip
        require(ClusterError, label, wait, float)
        if not (wait >= 0 and math.isfinite(wait)):
            raise ClusterError(f"{label} is {wait}; it must be zero or more (microseconds)")
    intra = Link(bytes_per_s=intra_node_GBps * 1e9, latency_s=intra_node_latency_us * 1e-6)
    nic = Link(bytes_per_s=inter_node_GBps * 1e9 / nics, latency_s=inter_node_latency_us * 1e-6)
    return Cluster(
        name=name or f"{num_nodes}x{devices_per_node}-{device}",
        device_types=(catalogue.get(device),),
        nodes=tuple(
            Node(name=f"node{i}", devices=(device,) * devices_per_node, intra=intra, nic=nic, nics=nics)
            for i in range(num_nodes)
        ),
    )


def local(num_devices: int | None = None, *, ideal: bool = False) -> Cluster:
    """Describe this machine as one node.

    Its NVIDIA devices where there are as many as asked for; else processes on its cores, which share cores, memory and
    memory bandwidth evenly (by default one per usable core). `ideal=True`: catalogue cores with free links and no memory
    limit, the same on every machine. Raises ClusterError where `num_devices` is below 1 or a device is unknown.
    """
    require(ClusterError, "num_devices", num_devices, int | None)
    if num_devices is not None and num_devices < 1:
        raise ClusterError(f"num_devices is {num_devices}; it must be 1 or more")
    if ideal:
        free = Link(bytes_per_s=math.inf)
        unlimited = replace(catalogue.get("cpu"), memory_bytes=math.inf, reserved_bytes=0.0)
        return _one_node("ideal", unlimited, num_devices or _whole_cores(), free)
    found = detect.gpus()
    if found and (num_devices or len(found)) <= len(found):
        return _local_gpus(found[: num_devices or len(found)])
    count = num_devices or _whole_cores()
    core, share = catalogue.get("cpu"), detect.usable_cores() / count
    process = replace(
        core,
        memory_bytes=detect.usable_memory_bytes() / count,
        memory_bytes_per_s=core.memory_bytes_per_s * share,
        peak_flops={precision: peak * share for precision, peak in core.peak_flops.items()},
        source=f"{share:g} cores of this machine; {core.source}",
    )
    return _one_node("local", process, count, LOOPBACK)


def _whole_cores() -> int:
    return max(1, int(detect.usable_cores()))


def _local_gpus(found: tuple[detect.FoundGpu, ...]) -> Cluster:
    types: dict[str, DeviceType] = {}
    names = []
    for gpu in found:
        device = catalogue.find(gpu.driver_name, gpu.memory_bytes)
        if device is None:
            raise ClusterError(
                f"device '{gpu.driver_name}' of this machine is not in the catalogue; describe it in a cluster file "
                f"under [[device_types]] (memory_GiB, memory_GBps, TFLOPS)"
            )
        types[device.name] = replace(device, memory_bytes=min(device.memory_bytes, gpu.memory_bytes))
        names.append(device.name)
    rate = detect.nvlink_bytes_per_s()
    intra = PCIE if rate is None else Link(bytes_per_s=rate, latency_s=NVLINK_LATENCY_S)
    node = Node(name="node0", devices=tuple(names), intra=intra, nic=LOOPBACK)
    return Cluster(name="local", device_types=tuple(types.values()), nodes=(node,))


def _one_node(name: str, device: DeviceType, count: int, link: Link) -> Cluster:
    node = Node(name="node0", devices=(device.name,) * count, intra=link, nic=link)
    return Cluster(name=name, device_types=(device,), nodes=(node,))
