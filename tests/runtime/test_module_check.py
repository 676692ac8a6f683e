"""Plans made from a config.json run on the module that the configuration builds, for every family that can be read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf

from autopiper.model.spec import Model
from autopiper.runtime.checks import module_faults
from autopiper.runtime.gradients import match_tied
from autopiper.runtime.stages import open_module

SIZES = {
    "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 64,
}  # fmt: skip
CONFIGS: dict[str, Any] = {
    "llama": hf.LlamaConfig(**SIZES),
    "llama, tied": hf.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "mistral": hf.MistralConfig(**SIZES),
    "qwen2": hf.Qwen2Config(**SIZES),
    "qwen3": hf.Qwen3Config(**SIZES, head_dim=8),
    "mixtral": hf.MixtralConfig(**SIZES, num_local_experts=4),
    "gpt2": hf.GPT2Config(
        vocab_size=96, n_embd=32, n_layer=3, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_blocks_of_the_configuration_are_those_of_the_module(name: str) -> None:
    config = CONFIGS[name]
    model = Model.from_config(config.to_dict(), sequence_length=16)
    module, layout = open_module(lambda: hf.AutoModelForCausalLM.from_config(config), torch.float32)
    assert module_faults(model, layout, module) == []
    sizes = {n: module.get_parameter(n).numel() for b in layout.blocks for n in b.parameters}
    assert len(match_tied(model, layout, sizes)) == len(layout.tied) == ("tied" in name or name == "gpt2")
