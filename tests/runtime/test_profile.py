"""The profiler against modules that keep their own time: every pass advances a clock by a known amount."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopiper.errors import CostError
from autopiper.model import Model
from autopiper.model.spec import Block, Edge, TensorSpec
from autopiper.plan import CostTable, Training
from autopiper.runtime import bench
from autopiper.runtime.profile import Part, beside, parts_of, profile, spread
from autopiper.runtime.stages import LiveStage

WIDTH = 4
FORWARD, INPUT, WEIGHT, BESIDE, HEAD = 2.0, 3.0, 1.0, 0.5, 7.0
"""Seconds of a block for one sample: forward, backwards; seconds of a stage beside its blocks; of the head's forward."""
NOW = [0.0]


class Spend(torch.autograd.Function):
    """Hands its input on; forward and backward take time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        NOW[0] += forward_s
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        NOW[0] += ctx.backward_s
        return grad, None, None


class Layer(nn.Module):
    def __init__(self, forward_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.forward_s = forward_s

    def forward(self, x: Tensor) -> Tensor:
        n = len(x)
        spent = Spend.apply(x, self.forward_s * n, INPUT * n)  # type: ignore[no-untyped-call]
        weight = Spend.apply(self.weight, 0.0, WEIGHT * n)  # type: ignore[no-untyped-call]
        out: Tensor = spent.sin() + weight
        return out


def make_module(layers: int = 5) -> nn.Sequential:
    return nn.Sequential(*(Layer(FORWARD) for _ in range(layers)), Layer(HEAD))


def make_model(layers: int = 5, parameters: int = WIDTH) -> Model:
    kinds = ["layer"] * layers + ["head"]
    tensor = TensorSpec(name="x", shape=(WIDTH,))
    return Model(
        name="clockwork",
        blocks=tuple(Block(name=f"b{i}", kind=k, dense_parameters=parameters) for i, k in enumerate(kinds)),
        edges=tuple(Edge(source=i, target=i + 1, tensors=(tensor,)) for i in range(layers)),
        inputs=(tensor,),
    )


TRAINING = Training(global_batch_size=4, precision="fp32")
INPUTS = torch.ones(1, WIDTH)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    forward = LiveStage.forward

    def slower(self: LiveStage, *args: Any, **kwargs: Any) -> Any:
        NOW[0] += BESIDE
        return forward(self, *args, **kwargs)

    def mark(self: bench.Watch) -> float:
        NOW[0] += 1e-9  # no two marks at the same time
        return NOW[0]

    monkeypatch.setattr(bench.Watch, "mark", mark)
    monkeypatch.setattr(LiveStage, "forward", slower)
    yield


def measured(sizes: tuple[int, ...] = (1, 2)) -> CostTable:
    return profile(
        make_module(), make_model(), TRAINING, device_type="clock", example_inputs=INPUTS, micro_batch_sizes=sizes,
        repeats=2, window_s=0.01,
    )  # fmt: skip


@pytest.mark.usefixtures("clock")
def test_times_are_those_that_the_blocks_take() -> None:
    costs = measured()
    prices = {(b.kind, b.samples): b for b in costs.blocks}
    assert set(prices) == {("layer", 1), ("layer", 2), ("head", 1), ("head", 2)}
    for n in (1, 2):
        layer, head = prices["layer", n], prices["head", n]
        assert layer.forward_s == pytest.approx(FORWARD * n)
        assert layer.backward_s == pytest.approx((INPUT + WEIGHT) * n)
        assert layer.backward_input_s == pytest.approx(INPUT * n)
        assert layer.backward_weight_s == pytest.approx(WEIGHT * n)
        assert head.forward_s == pytest.approx(HEAD * n)
        assert head.backward_input_s == pytest.approx(INPUT * n)
        assert head.backward_weight_s == pytest.approx(WEIGHT * n)
        assert {layer.evidence, head.evidence} == {"measured"}
        assert layer.device_type == "clock"
    assert (costs.precision, costs.optimizer) == ("fp32", "adamw")


@pytest.mark.usefixtures("clock")
def test_what_a_stage_costs_beside_its_blocks_is_told_apart() -> None:
    (host,) = measured().hosts
    assert host.forward_s == pytest.approx(BESIDE)
    assert host.backward_s == pytest.approx(0.0, abs=1e-6)


@pytest.mark.usefixtures("clock")
def test_of_the_first_block_w_is_all_of_the_backward() -> None:
    costs = profile(
        make_module(0), make_model(0), TRAINING, device_type="x", example_inputs=INPUTS, micro_batch_sizes=(1,),
        repeats=1, window_s=0.001,
    )  # fmt: skip
    (head,) = costs.blocks
    assert head.backward_input_s == 0.0
    assert head.backward_weight_s == pytest.approx(head.backward_s)


def test_the_first_block_has_no_backward_for_inputs_that_need_none() -> None:
    costs = profile(
        make_module(0), make_model(0), TRAINING, device_type="x", example_inputs=INPUTS, micro_batch_sizes=(1,),
        repeats=1, window_s=0.001,
    )  # fmt: skip
    assert costs.blocks[0].backward_input_s == 0.0
    assert costs.blocks[0].backward_weight_s > 0


def test_bytes_are_those_that_autograd_keeps() -> None:
    prices = {(b.kind, b.samples): b for b in measured((1, 3)).blocks}
    for n in (1, 3):
        # sin keeps what it was applied to: one activation of the block's input size
        assert prices["layer", n].kept_bytes == 4 * WIDTH * n
        assert prices["layer", n].kept_bytes_full == 4 * WIDTH * n


def test_the_module_is_left_as_it_was() -> None:
    module = make_module()
    before = {n: p.clone() for n, p in module.named_parameters()}
    threads = torch.get_num_threads()
    profile(
        module, make_model(), TRAINING, device_type="x", example_inputs=INPUTS, micro_batch_sizes=(1,), repeats=1,
        window_s=0.001,
    )  # fmt: skip
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.grad is None
    assert torch.get_num_threads() == threads


def test_each_kind_is_measured_alone_and_in_its_longest_run() -> None:
    def parts(kinds: str) -> set[tuple[int, int, str]]:
        blocks = tuple(Block(name=str(i), kind=k) for i, k in enumerate(kinds))
        return {(p.start, p.count, p.kind) for p in parts_of(Model(name="m", blocks=blocks, edges=()))}

    assert parts("eLLLLLLh") == {(0, 1, "e"), (1, 1, "L"), (1, 4, "L"), (7, 1, "h")}
    assert parts("aabaaab") == {(3, 1, "a"), (3, 3, "a"), (2, 1, "b")}
    assert parts("LLL") == {(1, 1, "L"), (1, 2, "L")}
    assert parts("LL") == {(1, 1, "L")}
    assert Part(start=3, count=2, kind="a").stop == 5


def test_beside_solves_two_equations_and_is_never_negative() -> None:
    # beside 2, block 5: one block 7, four blocks 22
    assert beside([([7.0, 7.0], [22.0, 22.0])], 4) == pytest.approx(2.0)
    assert beside([([7.0, 7.0, 99.0], [22.0, 22.0, 22.0])], 4) == pytest.approx(2.0)
    assert beside([([5.0], [22.0])], 4) == 0.0


def test_spread_is_half_the_distance_of_the_quartiles() -> None:
    assert spread([8.0, 9.0, 10.0, 11.0, 12.0]) == pytest.approx(0.1)
    assert spread([3.0]) == 0.0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"training": Training(global_batch_size=4)}, "training.precision is None; resolve it first"),
        ({"training": Training(global_batch_size=4, precision="bf16")}, "precision 'bf16' cannot be run yet; allowed"),
        ({"micro_batch_sizes": (0, 1)}, r"micro_batch_sizes is \(0, 1\); give sizes of 1 or more"),
        ({"repeats": 0}, "repeats is 0 and window_s 0.01; allowed: 1 or more"),
        ({"model": make_model(4)}, "the module has 6 blocks, model 'clockwork' has 5; profile the module that"),
        (
            {"model": make_model(5, 9)},
            "block '0' of the module has 4 parameters, block 'b0' of model 'clockwork' has 9",
        ),
    ],
)
def test_refusals_say_what_does_not_fit(changes: dict[str, Any], words: str) -> None:
    arguments: dict[str, Any] = {"model": make_model(), "training": TRAINING, "repeats": 1, "micro_batch_sizes": (1,)}
    with pytest.raises(CostError, match=words):
        profile(make_module(), **{**arguments, **changes}, device_type="x", example_inputs=INPUTS, window_s=0.01)


def test_living_tensors_are_counted_with_their_peak() -> None:
    x = torch.ones(8, requires_grad=True)
    with bench.Alive() as alive:
        y = (x * 2).exp()  # the product dies once exp has it
        z = y.sum()
        assert (alive.now, alive.peak) == (4 * 8 + 4, 2 * 4 * 8)
        del y, z
        assert alive.now == 0
