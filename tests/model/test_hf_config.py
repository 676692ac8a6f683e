"""config.json against the models that transformers builds from it, on the meta device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autopiper.errors import ModelError
from autopiper.model import Model
from autopiper.model.hf_config import model_types

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SMALL: dict[str, Any] = {
    "hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2,
    "intermediate_size": 80, "vocab_size": 97, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "num_key_value_heads": 6, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 10, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20,
    "n_shared_experts": 2, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1,
}  # fmt: skip
QWEN_MOE: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 20}),
    ("mistral", {}),
    ("phi3", {}),
    ("qwen2", {}),
    ("qwen3", {}),
    ("qwen3", {"head_dim": 10, "attention_bias": True}),
    ("qwen2_moe", {**QWEN_MOE, "shared_expert_intermediate_size": 36}),
    ("qwen2_moe", {**QWEN_MOE, "shared_expert_intermediate_size": 36, "decoder_sparse_step": 2, "qkv_bias": False}),
    ("qwen3_moe", {**QWEN_MOE, "mlp_only_layers": [1]}),
    ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    ("gemma", {}),
    ("gemma2", {"head_dim": 12}),
    ("gpt2", {"n_inner": 100}),
    ("gpt2", {}),
    ("gpt_neox", {"num_key_value_heads": None}),
    ("gpt_neox", {"num_key_value_heads": None, "attention_bias": False}),
    ("opt", {"ffn_dim": 72}),
    ("opt", {"ffn_dim": 72, "word_embed_proj_dim": 32, "do_layer_norm_before": False}),
    ("opt", {"ffn_dim": 72, "enable_bias": False}),
    ("deepseek_v2", LATENT),
    ("deepseek_v2", {**LATENT, "q_lora_rank": None, "first_k_dense_replace": 0}),
    ("deepseek_v3", LATENT),
    ("deepseek_v3", {**LATENT, "attention_bias": True}),
]


def config_of(model_type: str, changes: dict[str, Any]) -> Any:
    return transformers.AutoConfig.for_model(model_type, **{**SMALL, **changes})


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("model_type", "changes"), CASES)
def test_parameters_are_those_of_the_module(
    model_type: str, changes: dict[str, Any], tied: bool, tmp_path: Path
) -> None:
    config = config_of(model_type, {**changes, "tie_word_embeddings": tied})
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(config)
    model = Model.from_config(tmp_path / "config.json")
    assert model.parameters == sum(p.numel() for p in module.parameters())
    assert bool(model.tied) == tied
    assert model.sequence_length == 64
    experts = sum(p.numel() for n, p in module.named_parameters() if ".experts." in n)
    assert sum(b.expert_parameters for b in model.blocks) == experts


def test_every_type_is_tried() -> None:
    assert {model_type for model_type, _ in CASES} == set(model_types())


@pytest.mark.parametrize("model_type", [t for t in model_types() if not t.endswith("moe") and "deep" not in t])
def test_ties_left_to_the_default_are_those_of_the_type(model_type: str) -> None:
    config = config_of(model_type, {"ffn_dim": 72, "num_local_experts": 4, "num_experts_per_tok": 2})
    content = {k: v for k, v in config.to_dict().items() if k != "tie_word_embeddings"}
    assert bool(Model.from_config(content).tied) == config.tie_word_embeddings


LLAMA = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 99,
    "intermediate_size": 100,
}  # fmt: skip


def test_length_and_name() -> None:
    model = Model.from_config({**LLAMA, "max_position_embeddings": 131072, "_name_or_path": "someone/tiny-llama"})
    assert (model.sequence_length, model.name) == (8192, "tiny-llama")
    assert Model.from_config(LLAMA, sequence_length=77).sequence_length == 77


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "lama"}, r"model_type 'lama' is unknown \(did you mean 'llama'\?\); known: llama, mistral"),
        ({"model_type": None}, "lacks 'model_type'"),
        ({"hidden_size": None}, "'hidden_size' is None; it must be a whole number, 1 or more"),
        ({"hidden_size": -64}, "'hidden_size' is -64; it must be a whole number, 1 or more"),
        ({"hidden_size": 65}, r"hidden_size 65 is not divisible by num_attention_heads 4 \(65 / 4 = 16.25\)"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not divisible by num_key_value_heads 3"),
        ({"vocab_size": "99"}, "'vocab_size' is '99'; it must be a whole number"),
        ({"tie_word_embeddings": 1}, "'tie_word_embeddings' is 1; it must be true or false"),
    ],
)
def test_wrong_keys_are_refused_in_words(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        Model.from_config({**LLAMA, **changes})


def test_a_missing_key_names_the_nearest_one() -> None:
    content = {("num_hiden_layers" if k == "num_hidden_layers" else k): v for k, v in LLAMA.items()}
    with pytest.raises(ModelError, match=r"lacks 'num_hidden_layers' \(it has 'num_hiden_layers'\)"):
        Model.from_config(content)


def test_messages_use_the_keys_of_the_type() -> None:
    content = {"model_type": "gpt2", "n_layer": 1, "n_embd": 10, "n_head": 3, "n_positions": 8, "vocab_size": 5}
    with pytest.raises(ModelError, match="n_embd 10 is not divisible by n_head 3"):
        Model.from_config(content)


def test_files_that_are_no_config(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with pytest.raises(ModelError, match=r"config.json cannot be read: No such file"):
        Model.from_config(path)
    path.write_text('{"model_type": "llama", ')
    with pytest.raises(ModelError, match=r"config.json is not JSON: .*line 1"):
        Model.from_config(path)
    path.write_text("[1, 2]")
    with pytest.raises(ModelError, match="holds a list"):
        Model.from_config(str(tmp_path))
    path.write_text(json.dumps(LLAMA))
    assert Model.from_config(tmp_path).parameters == Model.from_config(LLAMA).parameters
