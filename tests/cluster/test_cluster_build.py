"""Clusters made in code, this machine, and the layout that a cluster keeps of itself."""

from __future__ import annotations

import copy
import math
import os
import pickle
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopiper.cluster import Cluster, DeviceType, Link, Node, Tier, build, catalogue, detect
from autopiper.errors import ClusterError


def test_equal_nodes() -> None:
    cluster = Cluster.homogeneous("a100-80g", num_nodes=3, devices_per_node=4, inter_node_GBps=200, nics=8)
    assert cluster.counts() == {"a100-80g": 12}
    assert cluster.link(0, 3).bytes_per_s == 300e9
    assert cluster.link(0, 4).bytes_per_s == 200e9
    assert cluster.nodes[0].nic.bytes_per_s == 25e9
    assert cluster.device(11).node == 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_nodes": 0}, "num_nodes is 0; it must be 1 or more"),
        ({"devices_per_node": -2}, "devices_per_node is -2; it must be 1 or more"),
        ({"nics": 0}, "nics is 0"),
        ({"inter_node_GBps": 0}, "inter_node_GBps is 0; it must be above zero"),
        ({"intra_node_GBps": -1}, "intra_node_GBps is -1"),
        ({"intra_node_GBps": math.nan}, "intra_node_GBps is nan"),
        ({"inter_node_latency_us": -1}, "inter_node_latency_us is -1; it must be zero or more"),
    ],
)
def test_impossible_nodes_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ClusterError, match=words):
        Cluster.homogeneous("l4", **change)


def test_an_ideal_machine_is_the_same_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Cluster.local(4, ideal=True)
    monkeypatch.setattr(detect, "usable_cores", lambda: 0.5)
    monkeypatch.setattr(detect, "gpus", lambda: (detect.FoundGpu(driver_name="NVIDIA H200", memory_bytes=1e11),) * 8)
    assert Cluster.local(4, ideal=True) == here
    assert here.link(0, 3) == Link(bytes_per_s=math.inf)
    assert here.device(0).type.usable_bytes == math.inf
    assert here.device(0).type.supports("fp64") and here.device(0).type.supports("fp32")


def test_processes_share_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detect, "gpus", lambda: ())
    monkeypatch.setattr(detect, "usable_cores", lambda: 3.5)
    monkeypatch.setattr(detect, "usable_memory_bytes", lambda: 14e9)
    assert Cluster.local().num_devices == 3
    seven = Cluster.local(7)
    assert seven.device(6).type.memory_bytes == 2e9
    assert seven.device(0).type.peak_flops["fp32"] == 0.5 * catalogue.get("cpu").peak_flops["fp32"]
    assert "assumption" in seven.device(0).type.source
    with pytest.raises(ClusterError, match="num_devices is 0; it must be 1 or more"):
        Cluster.local(0)


def test_graphics_processors_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    listing = "NVIDIA H200, 143771\n" * 2 + "NVIDIA L4, 23034\n"
    monkeypatch.setattr(detect, "gpus", lambda: detect.parse_gpus(listing))
    monkeypatch.setattr(detect, "nvlink_bytes_per_s", lambda: 478e9)
    cluster = Cluster.local()
    assert cluster.nodes[0].devices == ("h200", "h200", "l4")
    assert cluster.nodes[0].intra.bytes_per_s == 478e9
    assert Cluster.local(2).counts() == {"h200": 2}
    # More processes than there are devices run on the cores.
    assert set(Cluster.local(4).counts()) == {"cpu"}
    monkeypatch.setattr(detect, "nvlink_bytes_per_s", lambda: None)
    assert Cluster.local().nodes[0].intra == build.PCIE


def test_an_unknown_graphics_processor_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detect, "gpus", lambda: detect.parse_gpus("Quadro P400, 2048\n"))
    with pytest.raises(ClusterError, match=r"'Quadro P400' of this machine is not in the catalogue; describe it"):
        Cluster.local()


def test_what_the_driver_prints() -> None:
    listing = "Tesla V100-SXM2-32GB, 32510\nnonsense\nNVIDIA, with comma, 100\n"
    assert [(g.driver_name, g.memory_bytes / 2**20) for g in detect.parse_gpus(listing)] == [
        ("Tesla V100-SXM2-32GB", 32510), ("NVIDIA, with comma", 100),
    ]  # fmt: skip
    links = "GPU 0: NVIDIA A100\n" + "".join(f"\t Link {i}: 25 GB/s\n" for i in range(12))
    assert detect.parse_nvlink(links) == 300e9
    assert detect.parse_nvlink("GPU 0: Tesla T4\n\t Link 0: <inactive>\n") is None


def test_cores_and_memory_of_this_process() -> None:
    cores = os.cpu_count()
    assert cores is not None and 0 < detect.usable_cores() <= cores
    assert 2**26 < detect.usable_memory_bytes() < 2**50


def test_a_container_quota_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"/sys/fs/cgroup/cpu.max": "50000 100000\n", "/sys/fs/cgroup/memory.max": "123456789\n"}
    monkeypatch.setattr(detect, "_read", lambda path: files.get(path, ""))
    assert detect.usable_cores() == 0.5
    assert detect.usable_memory_bytes() == 123456789
    monkeypatch.setattr(detect, "_read", lambda path: "max 100000\n" if path.endswith("cpu.max") else "max\n")
    assert detect.usable_cores() >= 1


def _tiered() -> Cluster:
    types = tuple(catalogue.get(n) for n in ("a100-80g", "v100-32g"))

    def node(name: str, devices: tuple[str, ...], domains: tuple[str, str], gbps: float) -> Node:
        link = Link(bytes_per_s=gbps * 1e9, latency_s=gbps * 1e-6)
        return Node(name=name, devices=devices, intra=replace(link, bytes_per_s=1e11), nic=link, domains=domains)

    return Cluster(
        name="tiered",
        device_types=types,
        nodes=(
            node("a", ("a100-80g", "v100-32g"), ("east", "r1"), 10),
            node("b", ("a100-80g",) * 3, ("east", "r1"), 20),
            node("c", ("v100-32g",), ("east", "r2"), 30),
            node("d", ("a100-80g",), ("west", "r1"), 40),
        ),
        tiers=(
            Tier(name="regions", link=Link(bytes_per_s=1e9, latency_s=1e-2)),
            Tier(name="racks", link=Link(bytes_per_s=15e9, latency_s=1e-5)),
        ),
    )


def test_devices_and_ways_by_hand() -> None:
    cluster = _tiered()
    flat = [(n, name) for n, node in enumerate(cluster.nodes) for name in node.devices]
    assert [(d.node, d.type.name) for d in cluster.devices()] == flat
    assert [cluster.device(i) for i in range(cluster.num_devices)] == list(cluster.devices())
    assert [cluster.first_device(n) for n in range(4)] == [0, 2, 5, 6]
    assert [cluster.tier(0, other) for other in (1, 2, 5, 6)] == ["node", "network", "racks", "regions"]
    assert cluster.link(0, 2).bytes_per_s == 10e9
    assert cluster.link(0, 2).latency_s == pytest.approx(20e-6)
    assert cluster.link(2, 5).bytes_per_s == 15e9
    assert cluster.link(2, 5).latency_s == pytest.approx(30e-6 + 1e-5)
    assert cluster.link(5, 6).bytes_per_s == 1e9
    for wrong in (-1, 7):
        with pytest.raises(ClusterError, match=rf"device {wrong} does not exist; cluster 'tiered' has devices 0\.\.6"):
            cluster.device(wrong)


@given(st.integers(0, 6), st.integers(0, 6))
def test_a_way_is_the_same_in_both_directions(a: int, b: int) -> None:
    cluster = _tiered()
    assert cluster.tier(a, b) == cluster.tier(b, a)
    if cluster.device(a).node != cluster.device(b).node:
        assert cluster.link(a, b) == cluster.link(b, a)


def test_the_layout_is_no_part_of_the_data() -> None:
    used, fresh = _tiered(), _tiered()
    used.link(0, 6)
    assert used == fresh and asdict(used) == asdict(fresh) and repr(used) == repr(fresh)
    assert used.fingerprint() == fresh.fingerprint()
    for copied in (pickle.loads(pickle.dumps(used)), copy.deepcopy(used), copy.copy(used)):
        assert copied == fresh and copied.link(0, 6) == fresh.link(0, 6)
    # A changed copy must not see the layout of what it was made from.
    halved = replace(used, nodes=used.nodes[:1])
    assert halved.num_devices == 2 and len(halved.devices()) == 2


def test_device_types_are_known_and_differ() -> None:
    device = DeviceType(name="x", memory_bytes=1, peak_flops={"fp32": 1}, memory_bytes_per_s=1)
    link = Link(bytes_per_s=1)
    node = Node(name="n", devices=("y",), intra=link, nic=link)
    with pytest.raises(ClusterError, match="device 'y' is unknown"):
        Cluster(name="c", device_types=(device,), nodes=(node,))
    with pytest.raises(ClusterError, match="cluster 'c' has two device types named 'x'; names differ"):
        Cluster(name="c", device_types=(device, device), nodes=(replace(node, devices=("x",)),))
