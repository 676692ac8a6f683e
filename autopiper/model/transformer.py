"""Formulas of a decoder-only transformer: from its dimensions to a Model.

Conventions, all per sample of s tokens (h hidden size, a heads, V vocabulary):

* *FLOPs*: 2·m·n·k per matrix product; attention scores in full, s² (a causal mask is not discounted, as Megatron-LM
  counts them: Narayanan et al., arXiv 2104.04473, section 5.1). The backward of a weight matrix costs its forward once
  for I and once for W; that of the attention core, which has no weights, twice for I. Norms, activations and rotary
  embeddings are no matrix work: they count as moved elements.
* *Kept elements*: Korthikanti et al., arXiv 2205.05198, section 4: a GPT layer keeps 34·s·h + 5·a·s² bytes in 16-bit,
  i.e. 17·s·h + 2.5·a·s² elements with dropout masks. The default reading is FlashAttention's: nothing quadratic is
  kept (only the fp32 log-sum-exp, 2·s·a elements), so selective recompute gains next to nothing. Of the 17·s·h, the
  norms' inputs and outputs and the masks (10·s·h bytes there) are whole on every tensor-parallel rank. Gated MLPs keep
  3 vectors of the intermediate size. Routed experts keep k·(3f + h) per token (or 2f for plain ones).
* *Moved elements*: each memory-bound operation, fused as usual, reads its inputs and writes its output once.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopiper.model.annotations import EXPERTS, appended
from autopiper.model.dimensions import Dimensions
from autopiper.model.parts import EXPERT_SEGMENTS, ONE_SEGMENT
from autopiper.model.spec import Block, Edge, Model, TensorSpec, TiedParameter

__all__ = ["Dimensions", "build"]

VOCABULARY_PADDING = 128
"""Tensor-parallel vocabularies are padded to a multiple of this (Megatron-LM's default); parameters are not counted
so, for the padding holds nothing that is trained."""


@dataclass(slots=True)
class _Sum:
    """What the parts of one layer add up to, per sample."""

    parameters: float = 0
    replicated: float = 0
    expert: float = 0
    matrix_flops: float = 0
    core_flops: float = 0
    moved: float = 0
    kernels: int = 0
    kept: float = 0
    kept_replicated: float = 0
    kept_core: float = 0
    expert_flops: float = 0
    expert_moved: float = 0
    expert_kernels: int = 0


def build(dimensions: Dimensions, *, name: str = "transformer") -> Model:
    """Describe the model: block 0 the embedding, one block per layer, the last one the head with norm and loss.

    Each layer with routed experts is a region "EP", so that `shard` finds them.
    """
    d = dimensions
    layers = [_layer(d, i) for i in range(d.num_layers)]
    blocks = (_embedding(d), *layers, _head(d))
    hidden = TensorSpec(name="hidden_states", shape=(d.sequence_length, d.hidden_size))
    tied = TiedParameter(
        name="embedding.weight",
        blocks=(0, len(blocks) - 1),
        parameters=d.vocab_size * (d.embedding_size or d.hidden_size),
    )
    ranges = [(i, i + 1) for i, block in enumerate(blocks) if block.num_experts]
    return Model(
        name=name,
        blocks=blocks,
        edges=tuple(Edge(source=i, target=i + 1, tensors=(hidden,)) for i in range(len(blocks) - 1)),
        tied=(tied,) if d.tie_embeddings else (),
        sequence_length=d.sequence_length,
        inputs=(TensorSpec(name="input_ids", shape=(d.sequence_length,), dtype="int64"),),
        source="dimensions",
        annotations=appended((), EXPERTS, ranges) if ranges else (),
    )


def _vocabulary_divisor(d: Dimensions) -> tuple[str, int]:
    padded = -(-d.vocab_size // VOCABULARY_PADDING) * VOCABULARY_PADDING
    name = "vocab_size" if padded == d.vocab_size else f"vocab_size padded to {VOCABULARY_PADDING}s"
    return (name, padded)


def _embedding(d: Dimensions) -> Block:
    """A gather: no matrix work, except for the projection of a narrow embedding."""
    s, h, width = d.sequence_length, d.hidden_size, d.embedding_size or d.hidden_size
    projection = width * h if d.embedding_size else 0
    positions = d.learned_positions * h
    # Reads a row, writes it; with positions reads both tables and their sum's operands.
    moved = 2 * s * width + (4 * s * h if positions else 0) + (2 * s * h if d.dropout else 0)
    mask = s * h / 2 if d.dropout else 0
    kept_ids = 4 * s  # int64 ids, in elements of 16 bits
    kept_input = s * width if projection else 0
    return Block(
        name="embedding",
        kind="embedding",
        dense_parameters=d.vocab_size * width + projection + positions,
        replicated_parameters=projection + positions,
        forward_flops=2.0 * s * projection,
        backward_input_flops=2.0 * s * projection,
        backward_weight_flops=2.0 * s * projection,
        forward_moved_elements=moved,
        kernels=1 + bool(projection) + 2 * bool(positions) + d.dropout,
        kept_elements=kept_ids + kept_input + mask,
        kept_elements_selective=kept_ids + kept_input + mask,
        kept_replicated_elements=kept_ids + kept_input + mask,
        tensor_divisors=(_vocabulary_divisor(d),),
        # The sum over vocabulary shards, in F only; the head's, in its backward only, is not counted: one for the other.
        tensor_collectives=1,
        tensor_collective_elements=s * width,
    )


def _head(d: Dimensions) -> Block:
    """Final norm, vocabulary projection, and the loss over fp32 logits (Korthikanti et al., section 4.3)."""
    s, h, width = d.sequence_length, d.hidden_size, d.embedding_size or d.hidden_size
    norm = d.norm_vectors * h if d.final_norm else 0
    projection = h * width if d.embedding_size else 0
    logits = d.vocab_size * width + (d.vocab_size if d.head_bias else 0)
    flops = 2.0 * s * (projection + d.vocab_size * width)
    kept = s * ((h if d.final_norm else 0) + (h if projection else 0) + width)
    return Block(
        name="head",
        kind="head",
        dense_parameters=norm + projection + logits,
        replicated_parameters=norm + projection,
        forward_flops=flops,
        backward_input_flops=flops,
        backward_weight_flops=flops,
        # The loss writes the logits as fp32 and reads them back: 2 elements each way.
        forward_moved_elements=(2 * s * h if d.final_norm else 0) + 4 * s * d.vocab_size,
        kernels=d.final_norm + bool(projection) + 1 + 3,
        kept_elements=kept,
        kept_elements_selective=kept,
        kept_replicated_elements=kept,
        kept_fp32_elements=s * d.vocab_size,
        tensor_divisors=(_vocabulary_divisor(d),),
        # Largest logit, sum of exponentials, logit of the target: one number per token each.
        tensor_collectives=3,
        tensor_collective_elements=3 * s,
    )


def _layer(d: Dimensions, index: int) -> Block:
    s, h = d.sequence_length, d.hidden_size
    total = _Sum()
    _norms_and_residuals(d, total)
    if d.kv_lora_rank is not None:
        _latent_projections(d, total, d.kv_lora_rank)
    else:
        _projections(d, total)
    _attention_core(d, total)
    experts = d.has_experts(index)
    divisors = [("num_attention_heads", d.num_attention_heads)]
    if d.kv_lora_rank is None:
        divisors.append(("num_key_value_heads", d.key_value_heads))
    if experts:
        _experts(d, total)
        divisors.append(("moe_intermediate_size", d.expert_size))
        if d.shared_size:
            divisors.append(("shared experts' intermediate_size", d.shared_size))
    else:
        _mlp(d, total, d.mlp_size)
        divisors.append(("intermediate_size", d.mlp_size))
    return Block(
        name=f"layers.{index}",
        kind="moe_layer" if experts else "dense_layer",
        dense_parameters=int(total.parameters + total.replicated),
        expert_parameters=int(total.expert),
        replicated_parameters=int(total.replicated),
        forward_flops=total.matrix_flops + total.core_flops,
        backward_input_flops=total.matrix_flops + 2 * total.core_flops,
        backward_weight_flops=total.matrix_flops,
        forward_moved_elements=total.moved,
        kernels=total.kernels,
        kept_elements=total.kept + total.kept_replicated + total.kept_core,
        kept_elements_selective=total.kept + total.kept_replicated,
        kept_replicated_elements=total.kept_replicated,
        tensor_divisors=tuple(divisors),
        tensor_collectives=2,
        tensor_collective_elements=2 * s * h,
        num_experts=d.num_experts if experts else 0,
        expert_forward_flops=total.expert_flops,
        expert_backward_input_flops=total.expert_flops,
        expert_backward_weight_flops=total.expert_flops,
        expert_moved_elements=total.expert_moved,
        expert_kernels=total.expert_kernels,
        all_to_all_elements=d.experts_per_token * s * h if experts else 0,
        segments=EXPERT_SEGMENTS if experts else ONE_SEGMENT,
    )


def _norms_and_residuals(d: Dimensions, total: _Sum) -> None:
    s, h = d.sequence_length, d.hidden_size
    total.replicated += d.norms_per_layer * d.norm_vectors * h
    total.moved += d.norms_per_layer * 2 * s * h + 2 * 3 * s * h
    total.kernels += d.norms_per_layer + 2
    total.kept_replicated += d.norms_per_layer * 2 * s * h  # input, and output = input of what follows
    if d.dropout:
        total.kept_replicated += 2 * s * h / 2  # one byte per element of a mask
        total.moved += 2 * 2 * s * h
        total.kernels += 2


def _projections(d: Dimensions, total: _Sum) -> None:
    """Queries, keys, values and output of (grouped-query) attention; rotary embedding; norms of queries and keys."""
    s, h = d.sequence_length, d.hidden_size
    query, group = d.num_attention_heads * d.query_dim, d.key_value_heads * d.query_dim
    weights = h * (query + 2 * group) + query * h
    total.parameters += weights + (query + 2 * group if d.biased("attention_bias") else 0)
    total.replicated += h if d.biased("attention_output_bias") else 0
    total.matrix_flops += 2.0 * s * weights
    total.kept += s * (query + 2 * group)
    total.kernels += 4
    if d.qk_norm:
        total.replicated += 2 * d.norm_vectors * d.query_dim
        total.moved += 2 * s * (query + group)
        total.kept += s * (query + group)
        total.kernels += 2
    if not d.learned_positions:
        total.moved += 2 * s * (query + group)
        total.kernels += 2


def _latent_projections(d: Dimensions, total: _Sum, rank: int) -> None:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): low-rank queries, keys and values."""
    s, h, a = d.sequence_length, d.hidden_size, d.num_attention_heads
    rope, nope = d.qk_rope_head_dim or 0, d.qk_nope_head_dim or 0
    query = a * d.query_dim
    down = h * (rank + rope)  # the latent and the shared rotary key: whole on every rank
    up = rank * a * (nope + d.value_dim) + a * d.value_dim * h
    if d.q_lora_rank is None:
        up += h * query
    else:
        down += h * d.q_lora_rank
        up += d.q_lora_rank * query
    latents = rank + (d.q_lora_rank or 0)
    total.parameters += up
    total.replicated += down + latents  # their norms have one vector each
    if d.biased("attention_bias"):
        total.replicated += rank + rope + (d.q_lora_rank or 0) + h
    total.matrix_flops += 2.0 * s * (down + up)
    total.kept += s * (2 * query + a * d.value_dim)
    total.kept_replicated += 2 * s * latents
    total.moved += 2 * s * latents + 2 * s * (a + 1) * rope
    total.kernels += 9 if d.q_lora_rank else 7


def _attention_core(d: Dimensions, total: _Sum) -> None:
    """Scores, softmax, and their product with the values; what is kept within is what selective recompute drops."""
    s, a = d.sequence_length, d.num_attention_heads
    total.core_flops += 2.0 * s * s * a * (d.query_dim + d.value_dim)
    total.kept += s * a * d.value_dim  # the output, which the output projection reads
    if d.attention == "flash":
        total.kept_core += 2 * s * a
        total.kernels += 1
    else:
        total.kept_core += a * s * s * (2.5 if d.dropout else 1.0)
        total.moved += a * s * s * (6 if d.dropout else 4)
        total.kernels += 4 if d.dropout else 3


def _matrices(d: Dimensions) -> int:
    return 3 if d.gated_mlp else 2


def _mlp(d: Dimensions, total: _Sum, width: int) -> None:
    s, h, n = d.sequence_length, d.hidden_size, _matrices(d)
    total.parameters += n * h * width
    if d.biased("mlp_bias"):
        total.parameters += (n - 1) * width
        total.replicated += h
    total.matrix_flops += 2.0 * s * n * h * width
    total.moved += s * n * width
    total.kept += s * n * width
    total.kernels += n + 1


def _experts(d: Dimensions, total: _Sum) -> None:
    """Router, k routed experts per token of perfectly balanced load, and the shared experts."""
    s, h, n, k, f = d.sequence_length, d.hidden_size, _matrices(d), d.experts_per_token, d.expert_size
    total.replicated += d.num_experts * h
    total.expert += d.num_experts * n * h * f
    total.expert_flops = 2.0 * s * k * n * h * f
    total.matrix_flops += 2.0 * s * d.num_experts * h + total.expert_flops
    # Tokens permuted to their experts and back; activations. Beside the experts: routing probabilities in fp32.
    total.expert_moved = 2 * s * k * h + s * (k + 1) * h + s * k * n * f
    total.moved += 4 * s * d.num_experts + total.expert_moved
    total.kept += s * k * (n * f + h)
    total.kept_replicated += 2 * s * d.num_experts
    total.expert_kernels = 2 + n + 1
    total.kernels += 3 + total.expert_kernels
    if d.shared_size:
        _mlp(d, total, d.shared_size)
        total.moved += 3 * s * h
        total.kernels += 1
    if d.shared_expert_gate:
        total.replicated += h
        total.matrix_flops += 2.0 * s * h
        total.kernels += 1
