"""A split backward gives the gradients of a whole one, and each of its halves does its own part only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from runtime_cases import WIDTH
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from autopiper.runtime.backward import Flow
from autopiper.runtime.channels import enter


class Reused(nn.Module):
    """One weight twice, once transposed, and a scale that nothing but itself needs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight) @ self.weight.t() * self.scale.exp()


class Aside(nn.Module):
    """Puts out a value that does not depend on what was received, but on a parameter that the other one uses too."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.other = nn.Parameter(torch.randn(3, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.lin(x) * self.other, self.other.sin() + self.lin.bias


class Attention(nn.Module):
    """Several joints side by side, a residual around them, a norm before them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        out: Tensor = x + self.down(nn.functional.gelu(self.up(x)))
        return out


class Again(nn.Module):
    """Computes its inner module again in the backward, with the same dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.inner, x, use_reentrant=False)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "reused": Reused,
    "aside": Aside,
    "attention": Attention,
    "two layers": lambda: nn.Sequential(Attention(), nn.Dropout(0.3), Attention()),
    "recompute": Again,
    "in place": lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH), nn.SiLU(inplace=True)),
    "no parameters": lambda: nn.Sequential(nn.Tanh(), nn.Softmax(-1)),
}


def forward(module: nn.Module, received: Tensor, recomputes: bool) -> Flow:
    """Run a stage as the handlers do."""
    torch.manual_seed(5)
    output = module(enter(received))
    tensors = output if isinstance(output, tuple) else (output,)
    flow = Flow([received], [torch.autograd.graph.get_gradient_edge(t) for t in tensors], recomputes=recomputes)
    flow.arrive([torch.linspace(-1, 1, t.numel(), dtype=t.dtype).view_as(t) for t in tensors])
    return flow


def leaf() -> Tensor:
    torch.manual_seed(3)
    return torch.randn(2, 3, WIDTH, dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("name", MODULES)
def test_split_backwards_equal_whole_ones(name: str, recomputes: bool) -> None:
    torch.manual_seed(1)
    module = MODULES[name]().double()
    parameters = list(module.parameters())
    whole = forward(module, leaf(), recomputes).whole()
    expected = [p.grad for p in parameters]
    for p in parameters:
        p.grad = torch.zeros_like(p)
    flows = [forward(module, leaf(), recomputes) for _ in range(2)]
    found = [flow.for_inputs() for flow in flows]  # other passes come between
    assert not any(p.grad is None or p.grad.any() for p in parameters)
    for flow in reversed(flows):
        flow.for_weights(parameters)
    for mine in found:
        assert torch.allclose(mine[0], whole[0], rtol=1e-12, atol=1e-14)
    for p, grad in zip(parameters, expected, strict=True):
        assert p.grad is not None and grad is not None
        assert torch.allclose(p.grad, 2 * grad, rtol=1e-12, atol=1e-14)


class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.mm.default
        return func(*args, **(kwargs or {}))


def test_nothing_is_computed_twice() -> None:
    weights = [nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64)) for _ in range(5)]
    order: list[int] = []
    for n, weight in enumerate(weights):
        weight.register_post_accumulate_grad_hook(lambda _, n=n: order.append(n))  # type: ignore[no-untyped-call]

    class Chain(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for weight in weights:
                x = torch.tanh(x @ weight)
            return x

    flow = forward(Chain(), leaf(), recomputes=False)
    with Products() as inputs:  # type: ignore[no-untyped-call]
        flow.for_inputs()
    assert inputs.count == 5 and order == []
    with Products() as products:  # type: ignore[no-untyped-call]
        flow.for_weights(weights)
    assert products.count == 5
    assert order == [4, 3, 2, 1, 0]  # the highest block is final first


def test_where_nothing_was_received_w_is_all_of_it() -> None:
    module = nn.Linear(WIDTH, WIDTH)
    flow = Flow([], [module(torch.ones(2, WIDTH)).sum()])
    assert flow.for_inputs() == [] and module.weight.grad is None
    flow.for_weights(list(module.parameters()))
    assert module.weight.grad is not None and torch.equal(module.weight.grad, torch.full((WIDTH, WIDTH), 2.0))
