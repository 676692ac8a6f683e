"""Scopes in a module's forward: which blocks they cover, what of a block is its experts', and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import autopiper as ap
from autopiper.errors import ModelError
from autopiper.model import Model

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from autopiper.model.tracing.experts import count_experts  # noqa: E402
from autopiper.model.tracing.scopes import Scopes  # noqa: E402

H, F, E, K, S = 8, 24, 4, 2, 6
ROWS = torch.zeros(1, S, H)


class Layer(nn.Module):
    """Dense, then (stacked) experts; `scope` = where the scope of the experts stands."""

    def __init__(self, scope: str | None = "EP", width: int = H) -> None:
        super().__init__()
        self.scope = scope
        self.dense = nn.Linear(width, width)
        self.router = nn.Linear(width, E, bias=False)
        self.up = nn.Parameter(torch.empty(E, width, F))
        self.down = nn.Parameter(torch.empty(E, F, width))

    def forward(self, x: Any) -> Any:
        x = x + self.dense(x)
        scores = self.router(x).softmax(-1)
        if self.scope is None:
            return x + self.experts(x, scores)
        with ap.annotate(self.scope):
            y = self.experts(x, scores)
        return x + y

    def experts(self, x: Any, scores: Any) -> Any:
        """Balanced routing: every expert gets K * S / E tokens."""
        weights = scores[..., :K].mean(-1, keepdim=True)
        tokens = x.repeat(1, K, 1).view(E, K * S // E, x.shape[-1])
        y = torch.bmm(torch.relu(torch.bmm(tokens, self.up)), self.down)
        return y.view(1, K, S, x.shape[-1]).sum(1) * weights


def regions(model: Model) -> list[tuple[str, int, int, int]]:
    return [(a.name, a.index, a.start, a.stop) for a in model.annotations]


def check_expert_part(model: Model, block: int) -> None:
    """Two products of K * S rows each way; the rest of the block is not theirs."""
    found, flops = model.blocks[block], 2 * 2 * K * S * H * F
    assert found.segments == ("dense", "experts")
    assert found.num_experts == E
    assert found.expert_parameters == 2 * E * H * F
    assert found.dense_parameters == H * H + H + H * E
    assert found.expert_forward_flops == flops
    assert found.expert_backward_input_flops == flops
    assert found.expert_backward_weight_flops == flops
    dense = 2 * S * (H * H + H * E)
    assert found.forward_flops == flops + dense
    assert found.backward_weight_flops == flops + dense
    assert found.all_to_all_elements == K * S * H
    assert 0 < found.expert_moved_elements < found.forward_moved_elements
    assert 0 < found.expert_kernels < found.kernels


def test_a_scope_inside_a_block_makes_its_experts() -> None:
    model = Model.from_module(nn.Sequential(nn.Linear(H, H), Layer(), Layer(), nn.Linear(H, 2)), ROWS)
    assert regions(model) == [("EP", 0, 1, 2), ("EP", 1, 2, 3)]
    assert model.blocks[1].kind == model.blocks[2].kind
    assert model.blocks[0].segments == model.blocks[3].segments == ("all",)
    for block in (1, 2):
        check_expert_part(model, block)


def test_scopes_change_nothing_else_of_a_model() -> None:
    """The same work is counted with and without them."""
    with_scopes = Model.from_module(nn.Sequential(Layer(), Layer()), ROWS)
    without = Model.from_module(nn.Sequential(Layer(None), Layer(None)), ROWS)
    assert without.annotations == ()
    for ours, theirs in zip(with_scopes.blocks, without.blocks, strict=True):
        for field in ("forward_flops", "forward_moved_elements", "kernels", "kept_elements", "parameters"):
            assert getattr(ours, field) == getattr(theirs, field), field
    other = Model.from_module(nn.Sequential(Layer("PP"), Layer("PP")), ROWS)
    assert regions(other) == [("PP", 0, 0, 1), ("PP", 1, 1, 2)]
    assert replace(other, annotations=()) == without, "any other name makes no experts"


class Net(nn.Module):
    """No known structure, so it is traced; one stage per entry of `stages`, and more scopes where asked for."""

    def __init__(self, stages: tuple[int, ...] = (2, 2), layers: Any = lambda: Layer("EP"), whole: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(H, H)
        self.layers = nn.ModuleList([layers() for _ in range(sum(stages))])
        self.last = nn.Linear(H, 2)
        self.stages, self.whole = stages, whole

    def forward(self, x: Any) -> Any:
        at = 0
        for number, count in enumerate(self.stages):
            with ap.annotate("PP"):
                if number == 0 and self.whole:
                    x = self.first(x)
                for layer in self.layers[at : at + count]:
                    x = layer(x)
                at += count
                if number == len(self.stages) - 1 and self.whole:
                    x = self.last(x)
        return x if self.whole else self.last(x + 0 * self.first(x))


def test_scopes_of_a_traced_module() -> None:
    model = Model.from_module(Net((1, 2)), ROWS)
    assert [b.name for b in model.blocks] == ["before", "layers.0", "layers.1", "layers.2", "after"]
    assert regions(model) == [("PP", 0, 0, 2), ("EP", 0, 1, 2), ("PP", 1, 2, 5), ("EP", 1, 2, 3), ("EP", 2, 3, 4)]
    assert model.blocks[1].kind == model.blocks[2].kind == model.blocks[3].kind
    for block in (1, 2, 3):
        check_expert_part(model, block)


def test_a_traced_module_has_the_same_blocks_whether_scopes_are_marked_or_not() -> None:
    """A scope that begins before the first layer, or ends after the last, makes no block of its own."""
    from autopiper.model.tracing import find_blocks

    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Layer(None) for _ in range(3)])

        def forward(self, x: Any) -> Any:
            with ap.annotate("PP"):
                x = self.layers[0](x)
            with ap.annotate("PP"):
                return self.layers[2](self.layers[1](x))

    module = Bare()
    model = Model.from_module(module, ROWS)
    assert [b.name for b in model.blocks] == [b.name for b in find_blocks(module, ROWS).blocks]
    assert [b.name for b in model.blocks] == ["layers.0", "layers.1", "layers.2"]
    assert regions(model) == [("PP", 0, 0, 1), ("PP", 1, 1, 3)]


def test_the_same_module_runs_and_compiles_as_it_is() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(Layer(), Layer())
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(1, S, H)
    plain = module(x)
    for layer in module:
        layer.scope = None  # type: ignore[assignment]
    assert torch.equal(module(x), plain)
    for layer in module:
        layer.scope = "EP"  # type: ignore[assignment]
    assert torch.equal(torch.compile(module, fullgraph=True, backend="eager")(x), plain)


class Wrapped(nn.Sequential):
    """A sequential (of its own forward, so it is traced) with scopes around some of its children."""

    def __init__(self, *children: nn.Module, plan: str) -> None:
        super().__init__(*children)
        self.plan = plan

    def forward(self, x: Any) -> Any:
        """`plan` = one letter per child: equal letters are one scope, "." is none."""
        for at, letter in enumerate(self.plan):
            if letter == "." or (at and self.plan[at - 1] == letter):
                if letter == ".":
                    x = self[at](x)
                continue
            with ap.annotate("EP" if letter == "E" else "PP"):
                for child in range(at, len(self.plan)):
                    if self.plan[child] == letter:
                        x = self[child](x)
        return x


def linears(count: int) -> list[nn.Module]:
    return [nn.Linear(H, H) for _ in range(count)]


def test_blocks_that_are_experts_whole() -> None:
    model = Model.from_module(Wrapped(*linears(3), plan=".E."), ROWS)
    block = model.blocks[1]
    assert regions(model) == [("EP", 0, 1, 2)]
    assert block.segments == ("dense", "experts")
    assert (block.num_experts, block.expert_parameters, block.dense_parameters) == (1, H * H + H, 0)
    assert block.expert_forward_flops == block.forward_flops == 2 * S * H * H
    assert block.expert_backward_input_flops == block.backward_input_flops == block.forward_flops
    assert model.blocks[0].kind != block.kind


def test_what_is_no_run_of_blocks_is_refused_in_words() -> None:
    scopes = Scopes(traced=False)
    scopes.enter("PP")
    for block in (0, 2):
        with scopes.inside(block):
            pass
    scopes.exit("PP")
    with pytest.raises(
        ModelError, match=r"annotate\('PP'\) covers blocks 'a' to 'c', but 'b' between them runs outside"
    ):
        scopes.regions(["a", "b", "c"])

    class Twice(Layer):
        def forward(self, x: Any) -> Any:
            return super().forward(super().forward(x))

    with pytest.raises(ModelError, match=r"scope 1 of annotate\('EP'\) covers block '0', which is in .* scope 0"):
        Model.from_module(nn.Sequential(Twice(), Layer()), ROWS)

    class Half(Net):
        def forward(self, x: Any) -> Any:
            with ap.annotate("PP"):
                x = self.layers[0](self.first(x)).relu()
            return self.last(self.layers[1](x * 2))

    with pytest.raises(
        ModelError, match=r"scope 0 of annotate\('PP'\) covers half of block 'layers\.0' \(and 1 more\)"
    ):
        Model.from_module(Half((1, 1)), ROWS)

    class Empty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(linears(2))

        def forward(self, x: Any) -> Any:
            with ap.annotate("PP"):
                pass
            return self.layers[1](self.layers[0](x))

    with pytest.raises(ModelError, match=r"scope 0 of annotate\('PP'\) covers no block"):
        Model.from_module(Empty(), ROWS)
    for module in (nn.Sequential(Layer("MB"), Layer("MB")), Net(layers=lambda: Layer("MB"))):
        with pytest.raises(ModelError, match="an annotation cannot be named 'MB'"):
            Model.from_module(module, ROWS)


def test_a_parameter_that_is_used_outside_too_is_no_experts() -> None:
    class Shared(Layer):
        def experts(self, x: Any, scores: Any) -> Any:
            return super().experts(self.dense(x), scores)

    block = Model.from_module(nn.Sequential(Shared(), nn.Linear(H, H)), ROWS).blocks[0]
    assert block.expert_parameters == 2 * E * H * F
    assert block.dense_parameters == H * H + H + H * E


@pytest.mark.parametrize(
    ("shapes", "count"),
    [
        ({"experts.0.w": (4, 4), "experts.1.w": (4, 4), "experts.2.w": (4, 4)}, 3),
        ({"layers.3.experts.0.w": (4, 4), "layers.3.experts.1.w": (4, 4)}, 2),
        ({"experts.0.w.0": (4, 4), "experts.1.w.0": (4, 4), "experts.0.b.1": (4,), "experts.1.b.1": (4,)}, 2),
        ({"up": (5, 4, 8), "down": (5, 8, 4), "bias": (5, 8)}, 5),
        ({"up": (5, 4, 8), "down": (6, 8, 4)}, 1),
        ({"w1": (4, 8), "w2": (8, 4)}, 1),
        ({"experts.0.w": (4, 4), "experts.1.w": (4, 4), "gate": (4,)}, 1),
        ({}, 1),
    ],
)
def test_experts_are_counted_by_names_or_stacks(shapes: dict[str, tuple[int, ...]], count: int) -> None:
    assert count_experts(shapes) == count
