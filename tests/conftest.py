"""Small clusters and models that tests share."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from autopiper.cluster.spec import Cluster, DeviceType, Link, Node


def make_cluster(*counts: int, link_s: float = 0.0, memory_bytes: float = float("inf")) -> Cluster:
    """Nodes with these numbers of equal devices; every message takes `link_s`, whatever its size."""
    device = DeviceType(name="unit", memory_bytes=memory_bytes, peak_flops={"fp32": 1e12}, memory_bytes_per_s=1e11)
    link = Link(bytes_per_s=float("inf"), latency_s=link_s)
    nodes = tuple(Node(name=f"n{i}", devices=("unit",) * count, intra=link, nic=link) for i, count in enumerate(counts))
    return Cluster(name="test", device_types=(device,), nodes=nodes)


@pytest.fixture(scope="session")
def cluster_of() -> Callable[..., Cluster]:
    """Return `make_cluster`."""
    return make_cluster
