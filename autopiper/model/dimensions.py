"""The dimensions of a decoder-only transformer, checked when made. `transformer.build` turns them into a Model."""

from __future__ import annotations

from typing import Literal

from autopiper._data import data
from autopiper.errors import ModelError

_COUNTS = (
    "num_layers", "hidden_size", "num_attention_heads", "sequence_length", "vocab_size", "num_key_value_heads",
    "head_dim", "intermediate_size", "moe_intermediate_size", "shared_intermediate_size", "moe_layer_frequency",
    "norms_per_layer", "embedding_size", "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
    "v_head_dim",
)  # fmt: skip
_COUNTS_OR_ZERO = (
    "num_experts", "experts_per_token", "num_shared_experts", "moe_layer_offset", "learned_positions",
)  # fmt: skip
_OPTIONAL = (
    "num_key_value_heads", "head_dim", "intermediate_size", "moe_intermediate_size", "shared_intermediate_size",
    "embedding_size", "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
)  # fmt: skip
_LATENT = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


@data
class Dimensions:
    """Dimensions of a decoder-only transformer; None = derived from the others, or absent.

    Left alone, a gated model is Llama-like (RMS norms, no biases) and any other GPT-like (layer norms, biases).
    Raises ModelError naming the field, the sum and the nearest fix.
    """

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    sequence_length: int
    vocab_size: int
    num_key_value_heads: int | None = None
    """Fewer than the heads for grouped-query attention; None = as many."""
    head_dim: int | None = None
    """None = hidden_size / num_attention_heads, which must then be whole."""
    intermediate_size: int | None = None
    """Width of the dense MLP; None = 4 * hidden_size."""
    gated_mlp: bool = False
    """Three matrices (SwiGLU and alike) instead of two, in the dense MLP and in the experts."""
    num_experts: int = 0
    experts_per_token: int = 0
    moe_intermediate_size: int | None = None
    """Width of one routed expert; None = that of the dense MLP."""
    num_shared_experts: int = 0
    """Experts that every token passes, run as one MLP of their joint width."""
    shared_intermediate_size: int | None = None
    """Joint width of the shared experts; None = num_shared_experts * moe_intermediate_size."""
    shared_expert_gate: bool = False
    """A learned scalar gate on the shared experts (Qwen2-MoE)."""
    moe_layer_frequency: int = 1
    """Layer i has experts where i % moe_layer_frequency == moe_layer_offset and it is not in `dense_layers`."""
    moe_layer_offset: int = 0
    dense_layers: tuple[int, ...] = ()
    """Layers without experts in any case, e.g. DeepSeek's first ones."""
    kv_lora_rank: int | None = None
    """Rank of the latent keys and values: multi-head latent attention (DeepSeek-V2, arXiv 2405.04434)."""
    q_lora_rank: int | None = None
    qk_nope_head_dim: int | None = None
    qk_rope_head_dim: int | None = None
    v_head_dim: int | None = None
    learned_positions: int = 0
    """Rows of a learned position table (GPT-2, OPT); 0 = rotary or none, which has no parameters."""
    embedding_size: int | None = None
    """Width of the token embedding where it is projected to hidden_size and back (OPT-350m)."""
    norm: Literal["rms", "layernorm", None] = None
    """"rms" has one vector, "layernorm" two; None = "rms" for gated models."""
    norms_per_layer: int = 2
    final_norm: bool = True
    qk_norm: bool = False
    """A norm over the head dimension of queries and keys (Qwen3)."""
    attention_bias: bool | None = None
    """Biases of the query, key and value projections; None = not gated_mlp."""
    attention_output_bias: bool | None = None
    mlp_bias: bool | None = None
    head_bias: bool = False
    tie_embeddings: bool = False
    dropout: bool = False
    """Whether the residual dropouts keep their masks."""
    attention: Literal["flash", "eager"] = "flash"
    """"flash" recomputes the scores in its own backward and keeps nothing quadratic; "eager" keeps them."""

    def __post_init__(self) -> None:
        for name in _COUNTS + _COUNTS_OR_ZERO:
            value = getattr(self, name)
            least = 1 if name in _COUNTS else 0
            if value is None and name in _OPTIONAL:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ModelError(f"{name} is {value!r}; it must be a whole number, {least} or more")
        if self.norm not in (None, "rms", "layernorm"):
            raise ModelError(f"norm is {self.norm!r}; allowed: 'rms', 'layernorm'")
        if self.attention not in ("flash", "eager"):
            raise ModelError(f"attention is {self.attention!r}; allowed: 'flash', 'eager'")
        if self.learned_positions and self.sequence_length > self.learned_positions:
            raise ModelError(
                f"sequence_length is {self.sequence_length}, but the model has {self.learned_positions} learned "
                f"positions; it can be {self.learned_positions} at most"
            )
        self._check_heads()
        self._check_experts()

    def _check_heads(self) -> None:
        heads = self.num_attention_heads
        if self.head_dim is None and self.kv_lora_rank is None and self.hidden_size % heads:
            below = max(heads, self.hidden_size // heads * heads)
            raise ModelError(
                f"hidden_size {self.hidden_size} is not divisible by num_attention_heads {heads} "
                f"({self.hidden_size} / {heads} = {self.hidden_size / heads:.2f}); nearest: hidden_size {below} or "
                f"{below + heads}, num_attention_heads {_nearest_divisor(self.hidden_size, heads)}, or give head_dim"
            )
        groups = self.num_key_value_heads
        if groups is not None and heads % groups:
            raise ModelError(
                f"num_attention_heads {heads} is not divisible by num_key_value_heads {groups} "
                f"({heads} / {groups} = {heads / groups:.2f}); nearest: num_key_value_heads "
                f"{_nearest_divisor(heads, groups)}"
            )
        given = [name for name in _LATENT if getattr(self, name) is not None]
        if given and len(given) < len(_LATENT):
            raise ModelError(
                f"latent attention needs all of {', '.join(_LATENT)}; missing: "
                f"{', '.join(n for n in _LATENT if n not in given)}"
            )

    def _check_experts(self) -> None:
        if self.num_experts:
            if not 1 <= self.experts_per_token <= self.num_experts:
                raise ModelError(
                    f"experts_per_token is {self.experts_per_token} with num_experts {self.num_experts}; "
                    f"it must be 1 to {self.num_experts}"
                )
        elif self.experts_per_token or self.num_shared_experts:
            name = "experts_per_token" if self.experts_per_token else "num_shared_experts"
            raise ModelError(f"{name} is {getattr(self, name)} but num_experts is 0; give num_experts, or leave it out")
        if not self.moe_layer_offset < self.moe_layer_frequency:
            raise ModelError(
                f"moe_layer_offset is {self.moe_layer_offset} with moe_layer_frequency {self.moe_layer_frequency}; "
                f"it must be 0 to {self.moe_layer_frequency - 1}"
            )
        outside = [i for i in self.dense_layers if not 0 <= i < self.num_layers]
        if outside:
            raise ModelError(f"dense_layers names layer {outside[0]}; the layers are 0..{self.num_layers - 1}")

    @property
    def key_value_heads(self) -> int:
        """Heads of keys and values."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def query_dim(self) -> int:
        """Width of one query (and key) head."""
        if self.kv_lora_rank is not None:
            return (self.qk_nope_head_dim or 0) + (self.qk_rope_head_dim or 0)
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def value_dim(self) -> int:
        """Width of one value head."""
        return self.v_head_dim if self.v_head_dim is not None else self.query_dim

    @property
    def mlp_size(self) -> int:
        """Width of the dense MLP."""
        return self.intermediate_size or 4 * self.hidden_size

    @property
    def expert_size(self) -> int:
        """Width of one routed expert."""
        return self.moe_intermediate_size or self.mlp_size

    @property
    def shared_size(self) -> int:
        """Joint width of the shared experts of one layer."""
        if self.shared_intermediate_size is not None:
            return self.shared_intermediate_size
        return self.num_shared_experts * self.expert_size

    @property
    def norm_vectors(self) -> int:
        """Vectors of one norm: a scale, and for layer norms a shift."""
        return {"rms": 1, "layernorm": 2}[self.norm or ("rms" if self.gated_mlp else "layernorm")]

    def biased(self, flag: Literal["attention_bias", "attention_output_bias", "mlp_bias"]) -> bool:
        """Whether these projections have biases, defaults filled in."""
        value = getattr(self, flag)
        return not self.gated_mlp if value is None else bool(value)

    def has_experts(self, layer: int) -> bool:
        """Whether this layer routes its tokens to experts."""
        chosen = layer % self.moe_layer_frequency == self.moe_layer_offset
        return self.num_experts > 0 and chosen and layer not in self.dense_layers


def _nearest_divisor(number: int, near: int) -> int:
    return min((d for d in range(1, number + 1) if number % d == 0), key=lambda d: abs(d - near))
