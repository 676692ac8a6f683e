"""Formulas of the transformer against closed forms of the literature."""

from __future__ import annotations

from typing import Any

import pytest

from autopiper.errors import ModelError
from autopiper.model import Model, TensorSpec
from autopiper.model.transformer import Dimensions, build

S, H, A, V, LAYERS = 1024, 768, 12, 50257, 12
GPT: dict[str, Any] = {
    "num_layers": LAYERS, "hidden_size": H, "num_attention_heads": A, "sequence_length": S, "vocab_size": V,
}  # fmt: skip


def test_llama_3_8b_by_its_dimensions() -> None:
    model = Model.transformer(
        num_layers=32,
        hidden_size=4096,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=14336,
        gated_mlp=True,
        vocab_size=128256,
        sequence_length=8192,
    )
    assert model.parameters == 8_030_261_248
    assert len(model.blocks) == 34
    assert [b.kind for b in model.blocks[:2]] + [model.blocks[-1].kind] == ["embedding", "dense_layer", "head"]


def test_gpt_2_with_learned_positions_and_tied_embeddings() -> None:
    model = build(Dimensions(**GPT, learned_positions=1024, tie_embeddings=True))
    assert model.parameters == 124_439_808
    assert model.tied[0].blocks == (0, LAYERS + 1)
    assert model.stage_parameters(0, LAYERS + 2) == model.parameters
    assert sum(b.parameters for b in model.blocks) == model.parameters + V * H


@pytest.mark.parametrize("recompute", [False, True])
def test_flops_are_megatrons_formula(recompute: bool) -> None:
    """arXiv 2104.04473, equation 3: 96·B·s·l·h²·(1 + s/(6h) + V/(16·l·h)) with recompute, 72 without."""
    model = build(Dimensions(**GPT))
    forward = sum(b.forward_flops for b in model.blocks[1:-1])
    work = model.flops + (forward if recompute else 0)
    factor = 96 if recompute else 72
    logits = 6 * S * H * V
    assert work == pytest.approx(factor * S * LAYERS * H**2 * (1 + S / (6 * H)) + logits, rel=1e-12)


def test_attention_core_has_no_weights_so_no_work_in_w() -> None:
    layer = build(Dimensions(**GPT)).blocks[1]
    core = 4 * S * S * H
    assert layer.forward_flops - layer.backward_weight_flops == core
    assert layer.backward_input_flops - layer.backward_weight_flops == 2 * core


def test_embedding_is_a_gather() -> None:
    embedding = build(Dimensions(**GPT)).blocks[0]
    assert embedding.forward_flops == embedding.backward_input_flops == embedding.backward_weight_flops == 0
    assert embedding.forward_moved_elements > 0


def test_kept_elements_are_korthikantis() -> None:
    """arXiv 2205.05198, table 2 and section 4.3: 34·s·h + 5·a·s² bytes of a layer; 4·s·h·(1 + V/h) of the head."""
    model = build(Dimensions(**GPT, learned_positions=1024, dropout=True, attention="eager"))
    layer, head = model.blocks[1], model.blocks[-1]
    assert 2 * layer.kept_elements == 34 * S * H + 5 * A * S**2
    assert 2 * layer.kept_elements_selective == 34 * S * H
    assert 2 * layer.kept_replicated_elements == 10 * S * H
    assert 2 * head.kept_elements + 4 * head.kept_fp32_elements == 4 * S * H * (1 + V / H)


def test_fused_attention_keeps_nothing_quadratic() -> None:
    """Selective recompute then gains the log-sum-exp only: 4 bytes per token and head."""
    layer = build(Dimensions(**GPT, dropout=True)).blocks[1]
    assert layer.kept_elements_selective == 17 * S * H
    assert layer.kept_elements - layer.kept_elements_selective == 2 * S * A
    twice = build(Dimensions(**{**GPT, "sequence_length": 2 * S}, dropout=True)).blocks[1]
    assert twice.kept_elements == 2 * layer.kept_elements


def test_gated_grouped_query_layer() -> None:
    s, h, a, g, f = 128, 512, 8, 2, 1376
    dimensions = Dimensions(
        num_layers=1, hidden_size=h, num_attention_heads=a, num_key_value_heads=g, intermediate_size=f,
        gated_mlp=True, vocab_size=1000, sequence_length=s,
    )  # fmt: skip
    layer = build(dimensions).blocks[1]
    kv = h // a * g
    weights = 2 * h * h + 2 * h * kv + 3 * h * f
    assert layer.dense_parameters == weights + 2 * h
    assert layer.replicated_parameters == 2 * h
    assert layer.forward_flops == 2 * s * weights + 4 * s * s * h
    assert layer.kept_elements_selective == s * (4 * h + h + 2 * kv + h + 3 * f)
    assert dict(layer.tensor_divisors) == {"num_attention_heads": a, "num_key_value_heads": g, "intermediate_size": f}
    assert (layer.tensor_collectives, layer.tensor_collective_elements) == (2, 2 * s * h)


def test_experts_are_counted_apart_and_only_chosen_ones_work() -> None:
    s, h, f, experts, k = 64, 256, 512, 8, 2
    common: dict[str, Any] = {
        "num_layers": 4, "hidden_size": h, "num_attention_heads": 4, "vocab_size": 512, "sequence_length": s,
        "gated_mlp": True, "intermediate_size": f,
    }  # fmt: skip
    dense = build(Dimensions(**common)).blocks[1]
    model = build(
        Dimensions(**common, num_experts=experts, experts_per_token=k, moe_layer_frequency=2, dense_layers=(0,))
    )
    assert [b.kind for b in model.blocks[1:-1]] == ["dense_layer", "dense_layer", "moe_layer", "dense_layer"]
    assert replace_names(model.blocks[1]) == replace_names(dense)
    moe = model.blocks[3]
    assert moe.expert_parameters == experts * 3 * h * f
    assert moe.dense_parameters == dense.dense_parameters - 3 * h * f + experts * h
    assert moe.forward_flops - dense.forward_flops == 2 * s * ((k - 1) * 3 * h * f + experts * h)
    mlp_kept = dense.kept_elements - 3 * s * f
    assert moe.kept_elements == mlp_kept + s * k * (3 * f + h) + 2 * s * experts
    assert (moe.num_experts, moe.segments, dense.segments) == (experts, ("dense", "experts"), ("all",))
    assert moe.expert_forward_flops == 2 * s * k * 3 * h * f
    # What is left is the dense layer without its MLP, and the router.
    for name in ("forward_flops", "backward_input_flops", "backward_weight_flops"):
        left = getattr(moe, name) - getattr(moe, f"expert_{name}")
        assert left == getattr(dense, name) - 2 * s * 3 * h * f + 2 * s * h * experts
    assert moe.forward_moved_elements - moe.expert_moved_elements == (
        dense.forward_moved_elements - 3 * s * f + 4 * s * experts
    )
    assert moe.kernels - moe.expert_kernels == dense.kernels - 4 + 3
    assert moe.all_to_all_elements == k * s * h


def replace_names(block: Any) -> Any:
    from dataclasses import replace

    return replace(block, name="")


def test_only_the_hidden_states_cross_a_cut() -> None:
    model = build(Dimensions(**GPT))
    assert model.crossing(5) == (TensorSpec(name="hidden_states", shape=(S, H)),)
    assert model.inputs == (TensorSpec(name="input_ids", shape=(S,), dtype="int64"),)


def test_an_odd_vocabulary_is_padded_for_tensor_parallelism_alone() -> None:
    head = build(Dimensions(**GPT)).blocks[-1]
    assert head.tensor_divisors == (("vocab_size padded to 128s", 50304),)
    assert head.dense_parameters == V * H + 2 * H


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 100, "num_attention_heads": 12}, r"hidden_size 100 is not divisible by num_attention_heads 12 \(100 / 12 = 8.33\); nearest: hidden_size 96 or 108, num_attention_heads 10"),
        ({"num_key_value_heads": 5}, r"num_attention_heads 12 is not divisible by num_key_value_heads 5 .*nearest: num_key_value_heads 4"),
        ({"num_layers": -1}, r"num_layers is -1; it must be a whole number, 1 or more"),
        ({"vocab_size": 3.5}, r"vocab_size is 3.5; it must be a whole number"),
        ({"num_layers": True}, r"num_layers is True"),
        ({"num_experts": 4}, r"experts_per_token is 0 with num_experts 4; it must be 1 to 4"),
        ({"num_experts": 4, "experts_per_token": 5}, r"experts_per_token is 5 with num_experts 4"),
        ({"experts_per_token": 2}, r"experts_per_token is 2 but num_experts is 0"),
        ({"kv_lora_rank": 16}, r"missing: qk_nope_head_dim, qk_rope_head_dim, v_head_dim"),
        ({"learned_positions": 512}, r"sequence_length is 1024, but the model has 512 learned positions"),
        ({"moe_layer_offset": 2, "moe_layer_frequency": 2}, r"moe_layer_offset is 2 .* it must be 0 to 1"),
        ({"dense_layers": (12,)}, r"dense_layers names layer 12; the layers are 0..11"),
        ({"norm": "batch"}, r"norm is 'batch'; allowed: 'rms', 'layernorm'"),
    ],
)  # fmt: skip
def test_wrong_dimensions_are_refused_in_words(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        Dimensions(**{**GPT, **changes})
