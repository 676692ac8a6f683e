"""The pieces of first light: its text, its loss, the order of samples, and the measure of equality."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

import autopiper as ap
from autopiper.plan.strategy import Group, Pipeline, Stage
from autopiper.runtime.links import LinkReading

FOLDER = str(Path(__file__).parents[2] / "experiments")


@pytest.fixture(scope="module")
def emulation() -> Iterator[ModuleType]:
    path = list(sys.path)
    sys.path.insert(0, FOLDER)
    yield importlib.import_module("emulation")
    sys.path[:] = path


def test_every_byte_is_to_foretell_the_next_one(emulation: ModuleType) -> None:
    first, second = emulation.read_text()[:2]
    assert torch.equal(first["labels"][:-1], first["input_ids"][1:])
    assert first["labels"][-1] == second["input_ids"][0]
    assert len(first["input_ids"]) == 256


def test_the_loss_is_a_sum_over_bytes(emulation: ModuleType) -> None:
    output = SimpleNamespace(logits=torch.zeros(2, 5, 256))
    loss, weight = emulation.loss_fn(output, {"labels": torch.zeros(2, 5, dtype=torch.long)})
    assert weight == 10
    assert float(loss) == pytest.approx(10 * math.log(256), rel=1e-6)


def test_one_process_takes_what_the_last_stages_take(emulation: ModuleType) -> None:
    def stage(start: int, stop: int, members: int, rows: tuple[tuple[int, ...], ...]) -> Stage:
        group = Group(members=tuple((m,) for m in range(members)), slices=rows)
        return Stage(start=start, stop=stop, group=group, recompute=("none",) * (stop - start))

    pipes = (
        Pipeline(micro_batch_sizes=(3, 2), stages=(stage(0, 1, 1, ((3,), (2,))), stage(1, 2, 2, ((2, 1), (2, 0))))),
        Pipeline(micro_batch_sizes=(1,), stages=(stage(0, 2, 1, ((1,),)),)),
    )
    training = ap.Training(global_batch_size=6, precision="fp32")
    plan = SimpleNamespace(strategy=ap.Strategy(training=training, pipelines=pipes))
    assert emulation.slices(plan) == [2, 1, 2, 1]


def test_equality_is_relative_to_the_tensor_and_not_below_a_millionth_of_all(emulation: ModuleType) -> None:
    expected = {"a": torch.tensor([3.0, 4.0]), "b": torch.zeros(2)}
    off = {"a": torch.tensor([3.0, 4.05]), "b": torch.zeros(2)}
    assert emulation.gradient_error(off, expected) == pytest.approx(0.01, rel=1e-4)
    tiny = {"a": expected["a"], "b": torch.tensor([5e-9, 0.0])}
    assert emulation.gradient_error(tiny, expected) == pytest.approx(1e-3, rel=1e-4)


def test_the_network_of_two_ranks_is_that_of_the_slower_one(emulation: ModuleType) -> None:
    links = [
        LinkReading(
            send_latency_s=latency, send_bytes_per_s=send, reduce_latency_s=1.0, reduce_bytes_per_s=reduce, message_s=0.0,
            relative_error=0.0,
        )
        for latency, send, reduce in ((1e-4, 3e9, 2e9), (3e-4, 5e8, 9e8))
    ]  # fmt: skip
    cluster = emulation.emulated(("fast", "slow"), {"fast": 0.8, "slow": 0.2}, links, 1e9)
    assert cluster.link(0, 1) == ap.cluster.Link(bytes_per_s=5e8, latency_s=3e-4)
    fast, slow = (cluster.device_type(n).peak_flops["fp32"] for n in ("fast", "slow"))
    assert fast == pytest.approx(4 * slow)
