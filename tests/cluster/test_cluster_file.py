"""Cluster files: what they mean, what is refused and in which words, and that writing is the inverse of reading."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopiper.cluster import Cluster, DeviceType, Link, Node, Tier, catalogue, file
from autopiper.cluster.write import to_toml, write
from autopiper.errors import ClusterError

EXAMPLE = Path(__file__).parents[2] / "examples/clusters/a100-v100.toml"
TWO = '[[nodes]]\ndevices = "a100-80g"\ndevices_per_node = 2\n'
OK = TWO + "intra_node_GBps = 300\n"


def test_the_example_of_the_demo() -> None:
    cluster = Cluster.from_file(EXAMPLE)
    assert cluster.counts() == {"a100-80g": 16, "v100-32g": 16}
    assert [n.name for n in cluster.nodes] == ["a100-0", "a100-1", "v100-0", "v100-1"]
    assert cluster.link(0, 7) == Link(bytes_per_s=300e9, latency_s=3e-6)
    assert cluster.link(16, 23).bytes_per_s == 150e9
    assert cluster.link(0, 31) == Link(bytes_per_s=25e9, latency_s=10e-6)


def test_the_example_of_the_docstring() -> None:
    assert file.__doc__ is not None
    text = "\n".join(line[4:] for line in file.__doc__.splitlines() if line.startswith("    ") or not line)
    cluster = file.from_toml(text)
    assert [len(n.devices) for n in cluster.nodes] == [8, 8, 3]
    mine = cluster.device_type("mine")
    assert mine.memory_bytes == 40 * 2**30 and mine.memory_bytes_per_s == 2039e9 and mine.price_per_hour == 1.1
    assert not mine.supports("fp16") and mine.peak_flops["bf16"] == 250e12
    assert mine.source.startswith("as a100-80g (NVIDIA") and "given: memory_GiB, TFLOPS" in mine.source
    assert cluster.tier(0, 8) == "network" and cluster.tier(0, 16) == "halls"
    assert cluster.link(0, 16).bytes_per_s == 5e9
    assert cluster.link(0, 16).latency_s == pytest.approx(30e-6)
    assert cluster.nodes[2].domains == ("hall-2", "rack-9")


def test_interfaces_one_by_one_or_together() -> None:
    apart = file.from_toml(OK + "nics = 4\nnic_GBps = 12.5\n").nodes[0]
    together = file.from_toml(OK + "nics = 4\ninter_node_GBps = 50\n").nodes[0]
    assert apart == together
    assert apart.network.bytes_per_s == 50e9


WRONG = [
    ("x = ", r"is not TOML: .*line 1|is not TOML: .*end of document"),
    ("name = 'x'", "nodes is missing"),
    ("nodes = []", "nodes is empty; give at least one"),
    ("nodes = 3", r"nodes is 3; a list is expected, written as \[\[nodes\]\]"),
    (
        "node = 3\n" + OK,
        r"node: unknown key \(did you mean 'nodes'\?\); allowed: name, nodes, tiers, device_types",
    ),
    ('[[nodes]]\ndevices = "a100-80"', r"nodes\[0\]\.devices names 'a100-80' \(did you mean 'a100-80g'\?\); allowed"),
    (TWO, r"nodes\[0\]\.intra_node_GBps is missing; the node has 2 devices"),
    (OK + "count = 2", r"nodes\[0\]\.inter_node_GBps is missing; the cluster has several nodes"),
    (TWO + "intra_node_GBps = 0", r"nodes\[0\]\.intra_node_GBps is 0; it must be above 0"),
    (OK + "inter_node_GBps = -1", r"nodes\[0\]\.inter_node_GBps is -1; it must be above 0"),
    (OK + "count = -1", r"nodes\[0\]\.count is -1; it must be 1 or more"),
    (OK + "count = 1.5", r"nodes\[0\]\.count is 1\.5; a whole number is expected"),
    (OK + "nics = 0", r"nodes\[0\]\.nics is 0; it must be 1 or more"),
    (OK + "intra_node_latency_us = -2", r"nodes\[0\]\.intra_node_latency_us is -2; it must be 0 or more"),
    (TWO + 'intra_node_GBps = "300"', r"nodes\[0\]\.intra_node_GBps is '300'; a number is expected"),
    (TWO + "intra_node_GBps = true", r"nodes\[0\]\.intra_node_GBps is True; a number is expected"),
    (TWO + "intra_node_GBps = nan", r"nodes\[0\]\.intra_node_GBps is NaN; a number is expected"),
    (TWO + "intra_node_bandwidth = 3", r"nodes\[0\]\.intra_node_bandwidth: unknown key \(did you mean 'intra_node_"),
    (OK + "inter_node_Gbps = 200", r"not in gigabits: 200 Gb/s = 25 GBps \(did you mean 'inter_node_GBps'\?\)"),
    (OK + "nic_GBps = 3\ninter_node_GBps = 3", r"nodes\[0\] has both inter_node_GBps and nic_GBps"),
    ('[[nodes]]\ndevices = []', r"nodes\[0\]\.devices is empty"),
    ('[[nodes]]\ndevices = ["l4", "l4"]\ndevices_per_node = 3', "devices_per_node is 3 but devices lists 2"),
    (OK + '[[tiers]]\nname = "racks"\nGBps = 3', "has 0 domains for 1 tiers"),
    (OK + '[[tiers]]\nname = "racks"\nGbps = 3', r"tiers\[0\]\.GBps is missing"),
    (OK + '[[device_types]]\nname = "x"\nlike = "h10"', r"device_types\[0\]\.like is 'h10' \(did you mean 'h100'\?\)"),
    (OK + '[[device_types]]\nname = "x"\nmemory_GiB = 3', r"device_types\[0\]\.memory_GBps is missing"),
    (OK + '[[device_types]]\nlike = "h100"', r"device_types\[0\]\.name is missing"),
    (
        OK + '[[device_types]]\nname = "x"\nlike = "h100"\nplatform = "cudda"',
        r"platform is 'cudda' \(did you mean 'cuda'\?\); allowed",
    ),
    (
        OK + '[[device_types]]\nname = "x"\nlike = "h100"\nTFLOPS = { bf61 = 3 }',
        r"precision 'bf61' is unknown \(did you mean 'bf16'\?\)",
    ),
    (
        OK + '[[device_types]]\nname = "x"\nlike = "h100"\nTFLOPS = { bf16 = 0 }',
        r"device_types\[0\]\.TFLOPS\.bf16 is 0; it must be above 0",
    ),
    (OK + '[[device_types]]\nname = "x"\nlike = "l4"\n' * 2, r"device_types\[1\]\.name is 'x', which an earlier one has"),
    ('[[nodes]]\ndevices = ["h100", "mi300x"]\nintra_node_GBps = 3', "mixes CUDA and ROCm devices"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "words"), WRONG, ids=[str(i) for i in range(len(WRONG))])
def test_wrong_files_are_refused_in_words(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(ClusterError, match=words) as caught:
        Cluster.from_file(path)
    assert str(caught.value).startswith(f"cluster file '{path}'")


def test_every_fault_of_a_file_is_said_at_once() -> None:
    with pytest.raises(ClusterError) as caught:
        file.from_toml(TWO + "intra_node_GBps = 0\ncount = 0\ncolour = 3\n")
    for words in ("intra_node_GBps is 0", "count is 0", "colour: unknown key"):
        assert words in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=re.escape(f"cannot read cluster file '{tmp_path / 'no.toml'}'")):
        Cluster.from_file(tmp_path / "no.toml")


rates = st.floats(min_value=1e3, max_value=1e15) | st.just(math.inf)
waits = st.floats(min_value=0, max_value=10)
names = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=8)


@st.composite
def own_types(draw: st.DrawFn) -> DeviceType:
    return DeviceType(
        name=draw(names),
        memory_bytes=draw(rates),
        peak_flops=draw(st.dictionaries(st.sampled_from(["fp64", "fp32", "bf16"]), rates, min_size=1)),
        memory_bytes_per_s=draw(rates),
        kernel_launch_s=draw(waits),
        reserved_bytes=draw(st.just(0.0) | st.floats(min_value=1, max_value=1e12)),
        price_per_hour=draw(st.none() | st.floats(min_value=0, max_value=1e3)),
        platform=draw(st.sampled_from(["cuda", "cpu"])),
        source=draw(names),
    )


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    links = st.builds(Link, bytes_per_s=rates, latency_s=waits)
    own = draw(st.lists(own_types(), max_size=2, unique_by=lambda t: t.name))
    catalogued = [catalogue.get(n) for n in ("a100-80g", "v100-16g", "cpu") if n not in {t.name for t in own}]
    tiers = draw(st.lists(st.builds(Tier, name=names, link=links), max_size=2))
    nodes: list[Node] = []
    for _ in range(draw(st.integers(1, 3))):
        pick = st.sampled_from([t.name for t in (*own, *catalogued)])
        devices = tuple(draw(st.lists(pick, min_size=1, max_size=3)))
        count = draw(st.integers(1, 3))
        stem = draw(names)
        numbered = draw(st.sampled_from(["node", "stem", "odd"]))
        template = Node(
            name="", devices=devices, intra=draw(links), nic=draw(links), nics=draw(st.integers(1, 8)),
            domains=tuple(draw(names) for _ in tiers),
        )  # fmt: skip
        for i in range(count):
            name = {"node": f"node{len(nodes)}", "stem": f"{stem}-{i}", "odd": stem}[numbered]
            nodes.append(
                Node(
                    name=name, devices=template.devices, intra=template.intra, nic=template.nic, nics=template.nics,
                    domains=template.domains,
                )
            )  # fmt: skip
    used = dict.fromkeys(d for n in nodes for d in n.devices)
    known = {t.name: t for t in (*catalogued, *own)}
    types = [known[n] for n in used] + [t for t in own if t.name not in used]
    return Cluster(name=draw(names), device_types=tuple(types), nodes=tuple(nodes), tiers=tuple(tiers))


@settings(max_examples=150, deadline=None)
@given(clusters())
def test_writing_is_the_inverse_of_reading(cluster: Cluster) -> None:
    assert file.from_toml(to_toml(cluster)) == cluster


def test_a_written_file_is_read_back(tmp_path: Path) -> None:
    cluster = Cluster.from_file(EXAMPLE)
    write(cluster, tmp_path / "again.toml")
    again = Cluster.from_file(tmp_path / "again.toml")
    assert again == cluster
    assert again.fingerprint() == cluster.fingerprint()
    # Equal nodes are one entry, and catalogue devices need no figures: it stays a file for people.
    assert (tmp_path / "again.toml").read_text().count("[[") == 2
