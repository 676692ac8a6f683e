"""Published models by name: their dimensions, the sequence length of pre-training, and the global batch size.

One row per model, and a source for each family. Where a batch size was published in tokens, it is divided by the
sequence length (0.5M, 1M, 2M, 4M, 16M tokens read as powers of two). Where a length was not published, 4096 stands.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autopiper._data import require
from autopiper.errors import ModelError, nearest
from autopiper.model.spec import Model
from autopiper.model.transformer import Dimensions, build

Row = tuple[int, int, int, int | None, int | None, int, int, int | None, dict[str, Any]]
"""num_layers, hidden_size, num_attention_heads, num_key_value_heads, intermediate_size, vocab_size, sequence_length,
global_batch_size in samples (None = not published), anything else."""

_GPT2: dict[str, Any] = {"learned_positions": 1024, "tie_embeddings": True}
_GPT3: dict[str, Any] = {"learned_positions": 2048, "tie_embeddings": True}
_OPT: dict[str, Any] = {"learned_positions": 2050, "tie_embeddings": True}
_LLAMA: dict[str, Any] = {"gated_mlp": True}
_QWEN2: dict[str, Any] = {"gated_mlp": True, "attention_bias": True}
_QWEN3: dict[str, Any] = {"gated_mlp": True, "head_dim": 128, "qk_norm": True}
_LATENT: dict[str, Any] = {
    "gated_mlp": True, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip


def _moe(experts: int, per_token: int, **more: Any) -> dict[str, Any]:
    return {"num_experts": experts, "experts_per_token": per_token, **more}


_FAMILIES: dict[str, dict[str, Row]] = {
    "Radford et al. 2019 (batch 512)": {
        "gpt-2": (12, 768, 12, None, None, 50257, 1024, 512, _GPT2),
        "gpt-2-medium": (24, 1024, 16, None, None, 50257, 1024, 512, _GPT2),
        "gpt-2-large": (36, 1280, 20, None, None, 50257, 1024, 512, _GPT2),
        "gpt-2-xl": (48, 1600, 25, None, None, 50257, 1024, 512, _GPT2),
    },
    # 1.3B: the table's 24 heads of 128 do not make its width of 2048, 16 do; 13B: 5140 read as 5120.
    # 175B: 3.2M tokens, the 1536 samples that are usual for it.
    "Brown et al. 2020, arXiv 2005.14165, table 2.1": {
        "gpt-3-125m": (12, 768, 12, None, None, 50257, 2048, 256, _GPT3),
        "gpt-3-350m": (24, 1024, 16, None, None, 50257, 2048, 256, _GPT3),
        "gpt-3-760m": (24, 1536, 16, None, None, 50257, 2048, 256, _GPT3),
        "gpt-3-1.3b": (24, 2048, 16, None, None, 50257, 2048, 512, _GPT3),
        "gpt-3-2.7b": (32, 2560, 32, None, None, 50257, 2048, 512, _GPT3),
        "gpt-3-6.7b": (32, 4096, 32, None, None, 50257, 2048, 1024, _GPT3),
        "gpt-3-13b": (40, 5120, 40, None, None, 50257, 2048, 1024, _GPT3),
        "gpt-3-175b": (96, 12288, 96, None, None, 50257, 2048, 1536, _GPT3),
    },
    "Zhang et al. 2022, arXiv 2205.01068, table 1": {
        "opt-350m": (24, 1024, 16, None, None, 50272, 2048, 256, {**_OPT, "embedding_size": 512, "final_norm": False}),
    },
    "Touvron et al. 2023, arXiv 2307.09288, section 2.2 (4M tokens)": {
        "llama-2-7b": (32, 4096, 32, None, 11008, 32000, 4096, 1024, _LLAMA),
        "llama-2-13b": (40, 5120, 40, None, 13824, 32000, 4096, 1024, _LLAMA),
        "llama-2-70b": (80, 8192, 64, 8, 28672, 32000, 4096, 1024, _LLAMA),
    },
    # The batch size was published for 405B alone: 16M tokens for most of its training.
    "Llama team 2024, arXiv 2407.21783, section 3": {
        "llama-3-8b": (32, 4096, 32, 8, 14336, 128256, 8192, None, _LLAMA),
        "llama-3-70b": (80, 8192, 64, 8, 28672, 128256, 8192, None, _LLAMA),
        "llama-3.1-8b": (32, 4096, 32, 8, 14336, 128256, 8192, None, _LLAMA),
        "llama-3.1-70b": (80, 8192, 64, 8, 28672, 128256, 8192, None, _LLAMA),
        "llama-3.1-405b": (126, 16384, 128, 8, 53248, 128256, 8192, 2048, _LLAMA),
    },
    "Jiang et al. 2023 and 2024, arXiv 2310.06825 and 2401.04088": {
        "mistral-7b": (32, 4096, 32, 8, 14336, 32000, 8192, None, _LLAMA),
        "mixtral-8x7b": (32, 4096, 32, 8, 14336, 32000, 32768, None, {**_LLAMA, **_moe(8, 2)}),
        "mixtral-8x22b": (56, 6144, 48, 8, 16384, 32000, 4096, None, {**_LLAMA, **_moe(8, 2)}),
    },
    "Qwen team, arXiv 2407.10671 and 2412.15115": {
        "qwen2-7b": (28, 3584, 28, 4, 18944, 152064, 4096, None, _QWEN2),
        "qwen2.5-7b": (28, 3584, 28, 4, 18944, 152064, 4096, None, _QWEN2),
        "qwen2.5-72b": (80, 8192, 64, 8, 29568, 152064, 4096, None, _QWEN2),
    },
    "Qwen team 2025, arXiv 2505.09388": {
        "qwen3-8b": (36, 4096, 32, 8, 12288, 151936, 4096, None, _QWEN3),
        "qwen3-32b": (64, 5120, 64, 8, 25600, 151936, 4096, None, _QWEN3),
        "qwen3-30b-a3b": (48, 2048, 32, 4, 6144, 151936, 4096, None, {
            **_QWEN3, **_moe(128, 8, moe_intermediate_size=768),
        }),
        "qwen3-235b-a22b": (94, 4096, 64, 4, 12288, 151936, 4096, None, {
            **_QWEN3, **_moe(128, 8, moe_intermediate_size=1536),
        }),
    },
    # Batch sizes after the ramp. V3 without its multi-token-prediction module.
    "DeepSeek-AI 2024, arXiv 2405.04434 (section 3.1.2, appendix B) and 2412.19437 (section 4.2)": {
        "deepseek-v2-lite": (27, 2048, 16, None, 10944, 102400, 4096, 4608, {
            **_LATENT, "dense_layers": (0,), **_moe(64, 6, moe_intermediate_size=1408, num_shared_experts=2),
        }),
        "deepseek-v2": (60, 5120, 128, None, 12288, 102400, 4096, 9216, {
            **_LATENT, "q_lora_rank": 1536, "dense_layers": (0,),
            **_moe(160, 6, moe_intermediate_size=1536, num_shared_experts=2),
        }),
        "deepseek-v3": (61, 7168, 128, None, 18432, 129280, 4096, 15360, {
            **_LATENT, "q_lora_rank": 1536, "dense_layers": (0, 1, 2),
            **_moe(256, 8, moe_intermediate_size=2048, num_shared_experts=1),
        }),
    },
}  # fmt: skip


def names() -> tuple[str, ...]:
    """Names of all presets."""
    return tuple(name for rows in _FAMILIES.values() for name in rows)


def from_preset(name: str, *, sequence_length: int | None = None) -> Model:
    """Describe a published model; `sequence_length=None` = that of its pre-training.

    `Model.global_batch_size` counts samples of the published length, whatever length is asked for; None = not
    published. Raises ModelError with the nearest name.
    """
    require(ModelError, "name", name, str)
    for source, rows in _FAMILIES.items():
        if name in rows:
            layers, hidden, heads, groups, intermediate, vocabulary, length, batch, more = rows[name]
            dimensions = Dimensions(
                num_layers=layers,
                hidden_size=hidden,
                num_attention_heads=heads,
                num_key_value_heads=groups,
                intermediate_size=intermediate,
                vocab_size=vocabulary,
                sequence_length=length if sequence_length is None else sequence_length,
                **more,
            )
            model = build(dimensions, name=name)
            return replace(model, global_batch_size=batch, source=f"preset {name}: {source}")
    raise ModelError(f"no preset is named '{name}'{nearest(name, names())}; presets: {', '.join(names())}")
