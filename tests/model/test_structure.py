"""How live modules are cut into blocks."""

from __future__ import annotations

from typing import Any

import pytest

from autopiper.errors import ModelError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from torch import nn  # noqa: E402

from autopiper.model.tracing import find_blocks, parameter_names, trace  # noqa: E402

SMALL: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4,
    "intermediate_size": 48, "vocab_size": 61, "max_position_embeddings": 16, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip


def causal_lm(model_type: str, **changes: Any) -> Any:
    config = transformers.AutoConfig.for_model(model_type, **{**SMALL, **changes})
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


def test_llama_by_its_own_plan() -> None:
    layout = find_blocks(causal_lm("llama"))
    assert layout.form == "causal_lm"
    assert [b.name for b in layout.blocks] == ["embedding", *(f"model.layers.{i}" for i in range(3)), "head"]
    assert layout.blocks[0].modules == ("model.embed_tokens",)
    assert layout.blocks[-1].modules == ("model.norm", "lm_head")
    assert parameter_names(layout, 4) == ("model.norm.weight", "lm_head.weight")
    assert (layout.container, layout.owner, layout.shared) == ("model.layers", "model", ("model.rotary_emb",))
    assert layout.tied == ()
    assert "model.layers.1.mlp.up_proj.weight" in parameter_names(layout, 2)


def test_gpt2_has_no_plan_and_ties_its_embedding() -> None:
    layout = find_blocks(causal_lm("gpt2"))
    assert layout.blocks[0].modules == ("transformer.wte", "transformer.wpe", "transformer.drop")
    assert layout.blocks[-1].modules == ("transformer.ln_f", "lm_head")
    assert layout.tied == (("transformer.wte.weight", "lm_head.weight"),)


def test_opt_runs_its_layers_two_modules_down() -> None:
    layout = find_blocks(causal_lm("opt", ffn_dim=48, word_embed_proj_dim=16, do_layer_norm_before=False))
    assert layout.owner == "model.decoder"
    assert [m.rpartition(".")[2] for m in layout.blocks[0].modules] == ["embed_tokens", "embed_positions", "project_in"]
    assert layout.blocks[-1].modules == ("model.decoder.project_out", "lm_head")


@pytest.mark.parametrize(
    "model_type",
    [
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "qwen2_moe",
        "qwen3_moe",
        "mixtral",
        "gemma",
        "gemma2",
        "phi3",
        "gpt2",
        "gpt_neox",
        "opt",
        "deepseek_v2",
        "deepseek_v3",
        "bloom",
        "falcon",
        "gptj",
    ],
)
def test_every_parameter_is_in_one_block_in_registration_order(model_type: str) -> None:
    module = causal_lm(model_type)
    layout = find_blocks(module)
    order = [n for n, _ in module.named_parameters(remove_duplicate=False)]
    names = [n for block in layout.blocks for n in block.parameters]
    assert sorted(names) == sorted(order)
    for block in layout.blocks:
        assert list(block.parameters) == sorted(block.parameters, key=order.index)
    assert len(layout.blocks) == 3 + 2


def test_a_sequential_is_one_block_per_child() -> None:
    linear = nn.Linear(4, 4)
    layout = find_blocks(nn.Sequential(linear, nn.ReLU(), linear))
    assert layout.form == "sequential"
    assert [b.parameters for b in layout.blocks] == [("0.weight", "0.bias"), (), ("2.weight", "2.bias")]
    assert layout.tied == (("0.weight", "2.weight"), ("0.bias", "2.bias"))


class Residual(nn.Module):
    """Every second layer reads the first block's output: a skip over the cuts between."""

    def __init__(self, first: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16) if first else None
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(3)])
        self.last = nn.Linear(16, 4)
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: Any) -> Any:
        if self.first is not None:
            x = self.first(x)
        skip = x
        for layer in self.layers:
            x = layer(x) * self.scale + skip
        return self.last(x)


class Branching(nn.Module):
    """Asks for a value, which no trace of shapes can know."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])

    def forward(self, x: Any) -> Any:
        return self.layers[0](x) if x.sum() > 0 else self.layers[1](x)


def test_any_other_module_is_traced() -> None:
    module = Residual()
    with pytest.raises(ModelError, match=r"Residual is neither an nn.Sequential nor .* give example_inputs"):
        find_blocks(module)
    layout = find_blocks(module, (torch.zeros(2, 8),))
    assert layout.form == "traced"
    assert [b.name for b in layout.blocks] == ["before", "layers.0", "layers.1", "layers.2", "after"]
    assert layout.split_points == ("layers.0", "layers.1", "layers.2")
    assert layout.tied == (("scale", "scale", "scale"),)
    names = {n for b in layout.blocks for n in b.parameters}
    assert names == {n for n, _ in module.named_parameters()}
    assert find_blocks(Residual(first=False), (torch.zeros(2, 16),)).blocks[0].name == "layers.0"


def test_the_pieces_of_a_trace_compute_what_the_module_computes() -> None:
    module, x = Residual(), torch.randn(2, 8)
    layout = find_blocks(module, (x,))
    pipe = trace(module, layout.split_points, (x,), {})
    assert pipe.num_stages == len(layout.blocks)
    held = [{n for n, _ in pipe.get_stage_module(i).named_parameters()} for i in range(pipe.num_stages)]
    assert held == [set(b.parameters) for b in layout.blocks]
    assert torch.equal(pipe(x)[0], module(x))


def test_the_module_is_left_as_it_was() -> None:
    module = Residual().eval()
    weight = module.scale
    find_blocks(module, (torch.zeros(2, 8),))
    assert module.scale is weight
    assert not module.training
    assert not module.layers[0]._forward_pre_hooks
    assert not module.layers[-1]._forward_hooks
    assert module(torch.zeros(2, 8)).shape == (2, 4)


def test_what_cannot_be_traced_says_what_was_tried() -> None:
    words = r"Branching cannot be cut into blocks. Tried: nn.Sequential .*pipeline\(\), cut at layers.0, layers.1: "
    with pytest.raises(ModelError, match=words):
        find_blocks(Branching(), (torch.zeros(1, 4),))


def test_the_reason_is_the_first_cause_not_torchs_general_advice() -> None:
    class Coupled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4), nn.BatchNorm1d(4)])

        def forward(self, x: Any) -> Any:
            return self.layers[1](self.layers[0](x))

    with pytest.raises(ModelError, match="ValueError: Expected more than 1 value per channel when training"):
        find_blocks(Coupled().train(), (torch.zeros(2, 4),))


def test_a_parameter_that_no_block_uses_is_refused() -> None:
    class Idle(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Linear(2, 2))
            self.idle = nn.Parameter(torch.zeros(3))

    with pytest.raises(ModelError, match="parameters idle of Idle belong to none of its 1 blocks"):
        find_blocks(Idle())
