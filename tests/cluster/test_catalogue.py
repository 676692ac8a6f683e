"""The catalogue: what the issue names is there, dense, unsupported where it is, and known by its driver's name."""

from __future__ import annotations

import pytest

from autopiper.cluster import catalogue
from autopiper.errors import ClusterError

WANTED = [
    "t4",
    "v100-16g",
    "v100-32g",
    "a100-40g",
    "a100-80g",
    "h100",
    "h200",
    "gh200",
    "b200",
    "b300",
    "gb200",
    "gb300",
    "mi250x-die",
    "mi300x",
    "rtx-2080",
    "rtx-3090",
    "rtx-4090",
    "l4",
    "l40s",
    "a10g",
    "cpu",
]

DATA_SHEETS = {  # read off the vendors' sheets a second time: bf16 or fp16 dense TFLOPS, GB/s
    "t4": (65, 320), "v100-32g": (125, 900), "a100-40g": (312, 1555), "a100-80g": (312, 2039), "h100": (989, 3350),
    "h200": (989, 4800), "gh200": (989, 4000), "b200": (2250, 7700), "b300": (2250, 8000), "gb200": (2500, 8000),
    "gb300": (2500, 8000), "mi250x-die": (191.5, 1638), "mi300x": (1307, 5300), "rtx-3090": (71, 936),
    "rtx-4090": (165, 1008), "l4": (121, 300), "l40s": (362, 864), "a10g": (70, 600),
}  # fmt: skip


def test_every_device_is_there_with_its_source() -> None:
    assert set(WANTED) <= set(catalogue.names())
    for name in catalogue.names():
        device = catalogue.get(name)
        assert device.name == name
        assert len(device.source) > 10
        assert device.price_per_hour is None
        assert 0 <= device.reserved_bytes < 0.2 * device.memory_bytes
        # What torch cannot have, context and fragmentation: an A100 has 79.25 of its 80 GiB before anything runs.
        assert device.platform == "cpu" or device.reserved_bytes >= 0.045 * device.memory_bytes
        assert device.supports("fp32") and device.supports("fp64")


@pytest.mark.parametrize("name", DATA_SHEETS)
def test_figures_are_dense_and_as_published(name: str) -> None:
    device, (peak, bandwidth) = catalogue.get(name), DATA_SHEETS[name]
    assert device.peak_flops["fp16"] == pytest.approx(peak * 1e12, rel=2e-3)
    assert device.memory_bytes_per_s == bandwidth * 1e9
    # Twice as fast at half the width, nowhere faster: a sparse figure would stand out.
    if device.supports("fp8"):
        assert device.peak_flops["fp8"] == pytest.approx(2 * device.peak_flops["fp16"], rel=0.02)
    if device.supports("tf32"):
        assert device.peak_flops["tf32"] <= 0.51 * device.peak_flops["fp16"]


def test_what_is_unsupported() -> None:
    lacking_bf16 = {n for n in catalogue.names() if not catalogue.get(n).supports("bf16")}
    assert lacking_bf16 == {"t4", "v100-16g", "v100-32g", "rtx-2080", "rtx-2080-ti", "cpu"}
    lacking_fp8 = {n for n in catalogue.names() if not catalogue.get(n).supports("fp8")}
    assert {"a100-40g", "a100-80g", "mi250x-die", "rtx-3090", "a10g"} | lacking_bf16 == lacking_fp8
    assert {n for n in catalogue.names() if catalogue.get(n).supports("nvfp4")} == {"b200", "b300", "gb200", "gb300"}
    assert {n for n in catalogue.names() if catalogue.get(n).platform == "rocm"} == {"mi250x-die", "mi300x"}


@pytest.mark.parametrize(
    ("wrong", "meant"), [("A100-80GB", "'a100-80g'"), ("a100", "'a100-40g' or 'a100-80g'"), ("rtx3090", "'rtx-3090'")]
)
def test_an_unknown_device_names_what_was_meant(wrong: str, meant: str) -> None:
    with pytest.raises(ClusterError, match=rf"'{wrong}' is unknown \(did you mean {meant}\?\); allowed: t4, "):
        catalogue.get(wrong)


@pytest.mark.parametrize(
    ("driver_name", "gib", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", 80, "a100-80g"), ("NVIDIA A100-SXM4-40GB", 40, "a100-40g"),
        ("Tesla V100-SXM2-16GB", 15.8, "v100-16g"), ("Tesla V100-SXM2-32GB", 31.7, "v100-32g"), ("Tesla T4", 15, "t4"),
        ("NVIDIA H100 80GB HBM3", 79.6, "h100"), ("NVIDIA H200", 140, "h200"), ("NVIDIA GH200 480GB", 95.6, "gh200"),
        ("NVIDIA L4", 22.5, "l4"), ("NVIDIA L40S", 45, "l40s"), ("NVIDIA A10G", 22.5, "a10g"),
        ("NVIDIA GeForce RTX 2080 Ti", 11, "rtx-2080-ti"), ("NVIDIA GeForce RTX 2080", 8, "rtx-2080"),
        ("NVIDIA GeForce RTX 4090", 24, "rtx-4090"), ("NVIDIA B200", 179, "b200"), ("NVIDIA GB200", 185, "gb200"),
        ("NVIDIA GB300", 277, "gb300"),
    ],
)  # fmt: skip
def test_a_device_is_found_by_its_drivers_name(driver_name: str, gib: float, name: str) -> None:
    found = catalogue.find(driver_name, gib * 2**30)
    assert found is not None and found.name == name


@pytest.mark.parametrize(
    "driver_name",
    [
        "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA L40", "Quadro P400", "NVIDIA H100 PCIe", "NVIDIA H100 NVL",
        "NVIDIA H200 NVL",
    ],
)  # fmt: skip
def test_a_like_sounding_device_is_not_taken_for_another(driver_name: str) -> None:
    assert catalogue.find(driver_name, 16 * 2**30) is None
