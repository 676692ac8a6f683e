"""Models from a Hugging Face config.json, without transformers: the keys of each model type, and what they mean.

One function per family turns the keys into `Dimensions`; the formulas are `transformer.build`'s. Keys that do not
change parameters or work (rope scaling, windows, token ids) are not read. Sizes must be there; flags and what derives
from sizes may be left out and then have the default of the type's configuration class.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from autopiper._data import require
from autopiper.errors import ModelError, nearest
from autopiper.model.spec import Model
from autopiper.model.transformer import Dimensions, build

LONGEST_DEFAULT = 8192
"""The sequence length where none is asked for: max_position_embeddings, but at most this."""


class _Keys:
    """The keys of one config, and where they came from; every miss is a ModelError that names the key."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.config = config
        self.where = where

    def whole(self, key: str, *, least: int = 1) -> int:
        """Return a size, which must be there."""
        if key not in self.config:
            near = nearest(key, self.config).replace("did you mean", "it has").replace("?)", ")")
            raise ModelError(f"{self.where} lacks '{key}'{near}; it must be {least} or more")
        value = self.config[key]
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ModelError(f"{self.where}: '{key}' is {value!r}; it must be a whole number, {least} or more")
        return value

    def maybe(self, key: str, default: int | None = None, *, least: int = 1) -> int | None:
        """Return a size that may be left out or null."""
        return default if self.config.get(key) is None else self.whole(key, least=least)

    def flag(self, key: str, default: bool) -> bool:
        """Return a yes or no that may be left out."""
        value = self.config.get(key, default)
        if not isinstance(value, bool):
            raise ModelError(f"{self.where}: '{key}' is {value!r}; it must be true or false")
        return value

    def layers(self, key: str) -> tuple[int, ...]:
        """Return a list of layer numbers that may be left out or null."""
        value = self.config.get(key) or []
        if not isinstance(value, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in value):
            raise ModelError(f"{self.where}: '{key}' is {value!r}; it must be a list of layer numbers")
        return tuple(value)


Fields = dict[str, Any]


def _decoder(keys: _Keys, *, tied: bool = False, groups: bool = True) -> Fields:
    """What Llama-like types share; `groups`: the key for key-value heads has no other default than to be there."""
    return {
        "num_layers": keys.whole("num_hidden_layers"),
        "hidden_size": keys.whole("hidden_size"),
        "num_attention_heads": keys.whole("num_attention_heads"),
        "num_key_value_heads": keys.whole("num_key_value_heads") if groups else keys.maybe("num_key_value_heads"),
        "head_dim": keys.maybe("head_dim"),
        "intermediate_size": keys.whole("intermediate_size"),
        "vocab_size": keys.whole("vocab_size"),
        "gated_mlp": True,
        "tie_embeddings": keys.flag("tie_word_embeddings", tied),
    }


def _biases(keys: _Keys) -> Fields:
    bias = keys.flag("attention_bias", False)
    return {"attention_bias": bias, "attention_output_bias": bias}


def _llama(keys: _Keys) -> Fields:
    return {**_decoder(keys, groups=False), **_biases(keys), "mlp_bias": keys.flag("mlp_bias", False)}


def _phi3(keys: _Keys) -> Fields:
    return _decoder(keys, groups=False)


def _qwen2(keys: _Keys) -> Fields:
    return {**_decoder(keys), "attention_bias": True}


def _qwen3(keys: _Keys) -> Fields:
    return {**_decoder(keys), **_biases(keys), "head_dim": keys.maybe("head_dim", 128), "qk_norm": True}


def _sparse(keys: _Keys) -> Fields:
    """Experts of Qwen: every `decoder_sparse_step`-th layer, counted from one, unless named as dense."""
    step = keys.maybe("decoder_sparse_step", 1) or 1
    return {
        "num_experts": keys.whole("num_local_experts" if "num_local_experts" in keys.config else "num_experts"),
        "experts_per_token": keys.whole("num_experts_per_tok"),
        "moe_intermediate_size": keys.whole("moe_intermediate_size"),
        "moe_layer_frequency": step,
        "moe_layer_offset": step - 1,
        "dense_layers": keys.layers("mlp_only_layers"),
    }


def _qwen2_moe(keys: _Keys) -> Fields:
    return {
        **_decoder(keys),
        **_sparse(keys),
        "attention_bias": keys.flag("qkv_bias", True),
        "shared_intermediate_size": keys.whole("shared_expert_intermediate_size"),
        "shared_expert_gate": True,
    }


def _qwen3_moe(keys: _Keys) -> Fields:
    # Unlike Qwen3, this type derives the head size from the hidden size where it is left out.
    return {**_decoder(keys), **_sparse(keys), **_biases(keys), "qk_norm": True}


def _mixtral(keys: _Keys) -> Fields:
    return {
        **_decoder(keys),
        "num_experts": keys.whole("num_local_experts"),
        "experts_per_token": keys.whole("num_experts_per_tok"),
    }


def _gemma(keys: _Keys) -> Fields:
    return {**_decoder(keys, tied=True), **_biases(keys), "head_dim": keys.maybe("head_dim", 256)}


def _gemma2(keys: _Keys) -> Fields:
    return {**_gemma(keys), "norms_per_layer": 4}


def _gpt2(keys: _Keys) -> Fields:
    return {
        "num_layers": keys.whole("n_layer"),
        "hidden_size": keys.whole("n_embd"),
        "num_attention_heads": keys.whole("n_head"),
        "intermediate_size": keys.maybe("n_inner"),
        "vocab_size": keys.whole("vocab_size"),
        "learned_positions": keys.whole("n_positions"),
        "tie_embeddings": keys.flag("tie_word_embeddings", True),
    }


def _gpt_neox(keys: _Keys) -> Fields:
    bias = keys.flag("attention_bias", True)
    return {
        "num_layers": keys.whole("num_hidden_layers"),
        "hidden_size": keys.whole("hidden_size"),
        "num_attention_heads": keys.whole("num_attention_heads"),
        "intermediate_size": keys.whole("intermediate_size"),
        "vocab_size": keys.whole("vocab_size"),
        "tie_embeddings": keys.flag("tie_word_embeddings", False),
        "attention_bias": bias,
        "attention_output_bias": bias,
    }


def _opt(keys: _Keys) -> Fields:
    hidden, width = keys.whole("hidden_size"), keys.maybe("word_embed_proj_dim")
    bias = keys.flag("enable_bias", True)
    before = keys.flag("do_layer_norm_before", True)
    return {
        "num_layers": keys.whole("num_hidden_layers"),
        "hidden_size": hidden,
        "num_attention_heads": keys.whole("num_attention_heads"),
        "intermediate_size": keys.whole("ffn_dim"),
        "vocab_size": keys.whole("vocab_size"),
        "learned_positions": keys.whole("max_position_embeddings") + 2,  # its table keeps two rows for padding
        "embedding_size": None if width == hidden else width,
        "final_norm": before and not keys.flag("_remove_final_layer_norm", False),
        "attention_bias": bias,
        "attention_output_bias": bias,
        "mlp_bias": bias,
        "tie_embeddings": keys.flag("tie_word_embeddings", True),
    }


def _deepseek(keys: _Keys) -> Fields:
    """Latent attention; the first layers dense. Multi-token prediction is no part of the model that is trained here."""
    return {
        **_decoder(keys, groups=False),
        **_biases(keys),
        "num_key_value_heads": None,
        "head_dim": None,
        "num_experts": keys.whole("n_routed_experts"),
        "experts_per_token": keys.whole("num_experts_per_tok"),
        "moe_intermediate_size": keys.whole("moe_intermediate_size"),
        "num_shared_experts": keys.maybe("n_shared_experts", 0, least=0),
        "dense_layers": tuple(range(keys.whole("first_k_dense_replace", least=0))),
        "kv_lora_rank": keys.whole("kv_lora_rank"),
        "q_lora_rank": keys.maybe("q_lora_rank"),
        "qk_nope_head_dim": keys.whole("qk_nope_head_dim"),
        "qk_rope_head_dim": keys.whole("qk_rope_head_dim"),
        "v_head_dim": keys.whole("v_head_dim"),
    }


_TYPES: dict[str, Callable[[_Keys], Fields]] = {
    "llama": _llama,
    "mistral": _decoder,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "mixtral": _mixtral,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "opt": _opt,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
}
_OWN_NAMES = {"gpt2": (("hidden_size", "n_embd"), ("num_attention_heads", "n_head"))}
"""Keys of a type that `Dimensions` calls otherwise, for its messages."""


def model_types() -> tuple[str, ...]:
    """Values of `model_type` that can be read."""
    return tuple(_TYPES)


def from_config(config: str | Path | Mapping[str, Any], *, sequence_length: int | None = None) -> Model:
    """Describe a decoder-only model by its config: a path to config.json (or its folder), or the parsed mapping.

    `sequence_length=None`: the config's max_position_embeddings, at most 8192.
    Raises ModelError where the file is no config, the type is unknown, or a key is missing, wrong or indivisible.
    """
    content, where = _read(config)
    kind = content.get("model_type")
    if not isinstance(kind, str):
        raise ModelError(f"{where} lacks 'model_type'{nearest('model_type', content)}; known: {', '.join(_TYPES)}")
    if kind not in _TYPES:
        raise ModelError(
            f"{where}: model_type '{kind}' is unknown{nearest(kind, _TYPES)}; known: {', '.join(_TYPES)}. "
            "Describe it with Model.transformer, or build it and use Model.from_module"
        )
    keys = _Keys(content, where)
    fields = _TYPES[kind](keys)
    if sequence_length is None:
        longest = keys.maybe("n_positions" if kind == "gpt2" else "max_position_embeddings", LONGEST_DEFAULT)
        sequence_length = min(longest or LONGEST_DEFAULT, LONGEST_DEFAULT)
    try:
        dimensions = Dimensions(sequence_length=sequence_length, **fields)
    except ModelError as error:
        text = str(error)
        for ours, theirs in _OWN_NAMES.get(kind, ()):
            text = text.replace(ours, theirs)
        raise ModelError(f"{where}: {text}") from error
    name = content.get("_name_or_path")
    model = build(dimensions, name=name.rpartition("/")[2] if isinstance(name, str) and name else kind)
    return replace(model, source=f"config of model_type {kind}")


def _read(config: str | Path | Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    if isinstance(config, Mapping):
        return config, "the config"
    require(ModelError, "config", config, str | Path)
    path = Path(config)
    if os.path.isdir(path):
        path = path / "config.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds a {type(content).__name__}; a config.json holds an object, {{…}}")
    return content, str(path)
