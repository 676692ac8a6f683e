"""A chain of live stages computes what the whole module computes, bit for bit, and holds nothing else."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
import transformers as hf
from runtime_cases import MODULES, SEQUENCE, VOCABULARY, Skip, example, make_module
from torch import Tensor, nn

from autopiper.errors import PlanError
from autopiper.runtime.stages import build_stage, open_module

SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "intermediate_size": 48, "max_position_embeddings": 64,
}  # fmt: skip
ARCHITECTURES: dict[str, Callable[[], Any]] = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL, num_key_value_heads=2)),
    "qwen2 with sliding windows in some layers": lambda: hf.Qwen2ForCausalLM(
        hf.Qwen2Config(**SMALL, num_key_value_heads=2, use_sliding_window=True, sliding_window=3, max_window_layers=2)
    ),
    "gemma, which scales its embeddings": lambda: hf.GemmaForCausalLM(
        hf.GemmaConfig(**SMALL, num_key_value_heads=2, head_dim=8)
    ),
    "mixtral": lambda: hf.MixtralForCausalLM(
        hf.MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=4, experts_implementation="eager")
    ),
    "gpt2, which adds positions": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(
            vocab_size=VOCABULARY, n_embd=32, n_layer=3, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0,
            attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
        )
    ),
    "opt, which projects its embeddings": lambda: hf.OPTForCausalLM(
        hf.OPTConfig(
            vocab_size=VOCABULARY, hidden_size=32, ffn_dim=48, num_hidden_layers=3, num_attention_heads=4,
            max_position_embeddings=64, word_embed_proj_dim=16, dropout=0.0,
        )
    ),
}  # fmt: skip


def in_double(make: Callable[[], Any]) -> nn.Module:
    torch.manual_seed(3)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        module: nn.Module = make()
        return module
    finally:
        torch.set_default_dtype(before)


def run_chain(
    module: nn.Module, cuts: Sequence[int], recompute: str, inputs: dict[str, Tensor]
) -> tuple[Any, Callable[[], None]]:
    """Run stages one after another as separate graphs; return the output and what carries gradients back."""
    _, layout = open_module(module, torch.float64, inputs)
    value: Any = None
    links: list[tuple[Any, Any]] = []
    for start, stop in pairwise(cuts):
        stage = build_stage(
            module, layout, start, stop, recompute=(recompute,) * (stop - start), example_inputs=inputs, samples=(2,)
        )
        if start == 0:
            value = stage(**inputs)
            continue
        sent = {"": value} if isinstance(value, Tensor) else value
        received = {k: t.detach().requires_grad_(t.requires_grad) for k, t in sent.items()}
        links.append((sent, received))
        value = stage(received[""] if isinstance(value, Tensor) else received)

    def back() -> None:
        for sent, received in reversed(links):
            keys = [k for k in sent if sent[k].requires_grad]
            torch.autograd.backward([sent[k] for k in keys], [received[k].grad for k in keys])

    return value, back


def check(module: nn.Module, cuts: Sequence[int], recompute: str, inputs: dict[str, Tensor]) -> None:
    expected = module(**inputs)["logits"]
    expected.square().mean().backward()
    gradients = {n: p.grad for n, p in module.named_parameters()}
    module.zero_grad()
    output, back = run_chain(module, cuts, recompute, inputs)
    assert torch.equal(output["logits"], expected)
    output["logits"].square().mean().backward()
    back()
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter.grad, gradients[name]), name  # type: ignore[arg-type]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("cuts", [(0, 1, 5), (0, 2, 3, 5), (0, 4, 5)])
def test_causal_models(architecture: str, cuts: tuple[int, ...]) -> None:
    ids = torch.randint(0, VOCABULARY, (2, SEQUENCE))
    check(in_double(ARCHITECTURES[architecture]), cuts, "full" if len(cuts) > 3 else "none", {"input_ids": ids})


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_traced_modules_with_a_skip_over_all_stages(recompute: str) -> None:
    inputs = {k: v for k, v in example("traced", 2, "fp64").items() if k != "labels"}
    check(in_double(Skip), (0, 1, 3, 5), recompute, inputs)


def test_full_recompute_keeps_less_and_runs_again() -> None:
    runs: list[int] = []

    class Counted(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            runs.append(1)
            return super().forward(input)

    module = nn.Sequential(Counted(4, 4), Counted(4, 4))
    _, layout = open_module(module, torch.float32)
    stage = build_stage(module, layout, 0, 2, recompute=("none", "full"))
    stage(torch.ones(2, 4)).sum().backward()
    assert len(runs) == 3


@pytest.mark.parametrize("name", ["llama", "llama_tied", "sequential_tied", "traced"])
def test_initial_weights_of_a_factory_do_not_depend_on_the_cut(name: str) -> None:
    inputs = {k: v for k, v in example(name, 1, "fp32").items() if k != "labels"}
    weights: dict[str, Tensor] = {}
    count = 6 if name.startswith("llama") else 5
    for start, stop in ((0, count), (0, 2), (2, count), (1, count - 1), (count - 1, count)):
        module, layout = open_module(MODULES[name], torch.float32, inputs)
        stage = build_stage(module, layout, start, stop, example_inputs=inputs, samples=(1,))
        aliases = {n: g[0] for g in layout.tied for n in g}
        for held, parameter in stage.held.items():
            key = aliases.get(held, held)
            assert torch.equal(weights.setdefault(key, parameter), parameter), held
        others = [n for n, p in module.named_parameters() if not p.is_meta and n not in {*stage.held, *aliases}]
        assert not others, "blocks of other stages were allocated"
    assert weights and not any(torch.isnan(w).any() for w in weights.values())
    spread = {n: float(w.detach().std()) for n, w in weights.items() if w.ndim > 1}
    assert all(0 < s < 1.5 for s in spread.values()), spread


def test_state_fills_a_factory() -> None:
    given = make_module("llama_tied", "fp32")
    module, layout = open_module(MODULES["llama_tied"], torch.float32)
    stage = build_stage(module, layout, 4, 6, state=given.state_dict())
    for name, parameter in stage.held.items():
        assert torch.equal(parameter, given.get_parameter(name))
    module, layout = open_module(MODULES["llama"], torch.float32)
    with pytest.raises(PlanError, match=r"state has no 'model\.layers\.3\.self_attn\.q_proj\.weight'"):
        build_stage(module, layout, 4, 5, state={})


def test_a_module_that_cannot_initialise_itself_is_refused() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

    module, layout = open_module(lambda: nn.Sequential(Bare()), torch.float32)
    with pytest.raises(
        PlanError, match=r"'0\.weight' of Bare was built on the meta device and has no reset_parameters"
    ):
        build_stage(module, layout, 0, 1)
    with pytest.raises(PlanError, match="the module factory returned a str"):
        open_module(lambda: "module", torch.float32)  # type: ignore[arg-type,return-value]


def test_a_stage_lets_go_of_the_other_blocks() -> None:
    for name in ("llama", "traced"):
        module = make_module(name, "fp32")
        inputs = {k: v for k, v in example(name, 1, "fp32").items() if k != "labels"}
        layout = open_module(module, torch.float32, inputs)[1]
        stage = build_stage(module, layout, 2, 3, example_inputs=inputs)
        watched = {n: weakref.ref(p) for n, p in module.named_parameters()}
        del module
        gc.collect()
        assert {n for n, ref in watched.items() if ref() is not None} == set(stage.held)


def test_selective_recompute_is_refused() -> None:
    module = make_module("sequential", "fp32")
    _, layout = open_module(module, torch.float32)
    with pytest.raises(PlanError, match="recompute 'selective' cannot be run yet; allowed: none, full"):
        build_stage(module, layout, 0, 1, recompute=("selective",))
