"""Bytes per parameter are the published sums; a precision is the best in common, and the reason names who lacks what."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopiper.cluster import DeviceType
from autopiper.errors import PlanError
from autopiper.plan import Training


def device(name: str, *precisions: str) -> DeviceType:
    return DeviceType(name=name, memory_bytes=1e9, memory_bytes_per_s=1e9, peak_flops=dict.fromkeys(precisions, 1e12))


A100 = device("a100", "bf16", "fp16", "tf32", "fp32", "fp64")
V100 = device("v100", "fp16", "fp32", "fp64")
CPU = device("cpu", "fp32", "fp64")


@pytest.mark.parametrize(
    ("precision", "optimizer", "layout", "expected"),
    [
        ("bf16", "adamw", "mixed", 2 + 4 + 4 + 8),  # Megatron-LM's 18
        ("fp16", "adam", "mixed", 2 + 4 + 4 + 8),
        ("bf16", "adamw", "ornl-16", 2 + 2 + 4 + 8),  # arXiv 2605.05049
        ("fp32", "adamw", "mixed", 4 + 4 + 0 + 8),
        ("tf32", "adamw", "mixed", 4 + 4 + 0 + 8),
        ("fp64", "adamw", "mixed", 8 + 8 + 0 + 16),
        ("bf16", "sgd", "mixed", 2 + 4 + 4 + 0),
        ("bf16", "sgd-momentum", "mixed", 2 + 4 + 4 + 4),
    ],
)
def test_bytes_per_parameter(precision: str, optimizer: str, layout: str, expected: int) -> None:
    training = Training(global_batch_size=1, precision=precision, optimizer=optimizer, state_layout=layout)
    assert training.bytes_per_parameter == expected


def test_best_common_precision_and_why() -> None:
    training = Training(global_batch_size=1)
    assert training.resolve([A100]).precision == "bf16"
    assert training.resolve([A100]).precision_reason == "best precision, supported by all used devices"
    mixed = training.resolve([A100, V100, A100])
    assert mixed.precision == "fp16"
    assert mixed.precision_reason == (
        "best that all used devices support (bf16 is not supported by v100); with dynamic loss scaling"
    )
    slow = training.resolve([A100, V100, CPU])
    assert slow.precision == "fp32"
    assert "bf16 is not supported by v100, cpu; fp16 is not supported by cpu" in slow.precision_reason


@given(st.lists(st.sets(st.sampled_from(["bf16", "fp16", "tf32", "fp32", "fp64"]), min_size=1), min_size=1, max_size=4))
def test_resolution_is_the_first_of_the_intersection(sets: list[set[str]]) -> None:
    types = [device(f"d{i}", *s) for i, s in enumerate(sets)]
    common = set.intersection(*sets)
    if not common:
        with pytest.raises(PlanError, match="have no precision in common"):
            Training(global_batch_size=1).resolve(types)
        return
    order = ["bf16", "fp16", "tf32", "fp32", "fp64"]
    assert Training(global_batch_size=1).resolve(types).precision == min(common, key=order.index)


def test_unsupported_precision_names_device_and_what_all_support() -> None:
    with pytest.raises(
        PlanError, match="precision 'bf16' is not supported by v100; all used devices support: fp16, fp32, fp64"
    ):
        Training(global_batch_size=1, precision="bf16").resolve([A100, V100])


def test_norm_is_needed_by_clipping_and_by_loss_scaling_only() -> None:
    assert not Training(global_batch_size=1, precision="bf16").needs_norm
    assert Training(global_batch_size=1, precision="bf16", clip_grad_norm=1.0).needs_norm
    assert Training(global_batch_size=1, precision="fp16").needs_norm


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("global_batch_size", 0, "global_batch_size is 0; it must be 1 or more"),
        ("global_batch_size", -4, "global_batch_size is -4; it must be 1 or more"),
        ("precision", "bf61", r"precision 'bf61' cannot be trained in \(did you mean 'bf16'\?\); allowed: "),
        ("precision", "fp8", "precision 'fp8' cannot be trained in"),
        ("optimizer", "adamW", r"optimizer 'adamW' is unknown \(did you mean 'adamw'\?\)"),
        ("clip_grad_norm", 0.0, "clip_grad_norm is 0.0; it must be above zero, or None"),
        ("clip_grad_norm", float("nan"), "clip_grad_norm is nan"),
        ("state_layout", "ornl", "state_layout 'ornl' is unknown; allowed: mixed, ornl-16"),
    ],
)
def test_wrong_fields_are_refused_in_words(field: str, value: object, words: str) -> None:
    arguments: dict[str, object] = {"global_batch_size": 8, field: value}
    with pytest.raises(PlanError, match=words):
        Training(**arguments)  # type: ignore[arg-type]


def test_bytes_are_not_guessed_while_the_precision_is_open() -> None:
    with pytest.raises(PlanError, match=r"precision is still None; call Training.resolve\(device_types\) first"):
        _ = Training(global_batch_size=1).bytes_per_parameter
