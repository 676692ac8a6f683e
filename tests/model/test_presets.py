"""Presets against published parameter counts, and against the models that transformers builds."""

from __future__ import annotations

from typing import Any

import pytest

from autopiper.errors import ModelError
from autopiper.model import Model

PUBLISHED = {
    "gpt-2": 124_439_808,
    "gpt-2-xl": 1_557_611_200,
    "opt-350m": 331_196_416,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "qwen2-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v2": 235_741_434_880,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_ones(name: str) -> None:
    assert Model.from_preset(name).parameters == PUBLISHED[name]


@pytest.mark.parametrize(
    ("name", "billions", "tolerance"),
    [("gpt-3-175b", 175, 0.005), ("gpt-3-1.3b", 1.3, 0.02), ("gpt-3-13b", 13, 0.02), ("deepseek-v3", 671.0, 0.0002)],
)
def test_parameters_are_the_published_ones_as_far_as_they_were_rounded(
    name: str, billions: float, tolerance: float
) -> None:
    assert Model.from_preset(name).parameters / 1e9 == pytest.approx(billions, rel=tolerance)


def test_deepseek_v3_activates_37_billion_per_token() -> None:
    """The published 37B counts parameters a token meets; the head's matrix is among them, the embedding's is not."""
    model = Model.from_preset("deepseek-v3")
    idle = sum(b.expert_parameters * (256 - 8) / 256 for b in model.blocks)
    active = model.parameters - idle
    assert active / 1e9 == pytest.approx(37, rel=0.02)


@pytest.mark.parametrize(
    ("name", "model_type", "settings"),
    [
        ("deepseek-v3", "deepseek_v3", {"vocab_size": 129280, "hidden_size": 7168}),
        (
            "qwen3-8b",
            "qwen3",
            {
                "vocab_size": 151936, "hidden_size": 4096, "num_hidden_layers": 36, "num_key_value_heads": 8,
                "intermediate_size": 12288,
            },
        ),
    ],
)  # fmt: skip
def test_parameters_are_those_of_transformers(name: str, model_type: str, settings: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(model_type, **settings)
    with torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(config)
    assert Model.from_preset(name).parameters == sum(p.numel() for p in module.parameters())


def test_batch_sizes_and_lengths_are_the_published_ones() -> None:
    gpt = Model.from_preset("gpt-3-175b")
    assert (gpt.global_batch_size, gpt.sequence_length) == (1536, 2048)
    llama = Model.from_preset("llama-3.1-405b")
    assert (llama.global_batch_size or 0) * llama.sequence_length == 16 * 2**20
    assert Model.from_preset("llama-3-8b").global_batch_size is None


def test_every_preset_can_be_built_at_another_length() -> None:
    for name in Model.presets():
        model = Model.from_preset(name, sequence_length=512)
        assert model.sequence_length == 512
        assert model.name == name
        assert name in model.source


def test_a_misspelt_name_gets_the_nearest() -> None:
    with pytest.raises(ModelError, match=r"no preset is named 'llama3-8b' \(did you mean 'llama-3-8b'\?\)"):
        Model.from_preset("llama3-8b")


def test_a_wrong_length_is_refused() -> None:
    with pytest.raises(ModelError, match="sequence_length is 0; it must be a whole number, 1 or more"):
        Model.from_preset("llama-3-8b", sequence_length=0)


def test_each_layer_with_experts_is_a_region() -> None:
    mixtral = Model.from_preset("mixtral-8x7b")
    assert [(a.name, a.index, a.start, a.stop) for a in mixtral.annotations] == [
        ("EP", i, i + 1, i + 2) for i in range(32)
    ]
    deepseek = Model.from_preset("deepseek-v3")
    assert [a.start for a in deepseek.annotations] == list(range(4, 62)), "after the embedding and three dense layers"
    assert {b.num_experts for b in deepseek.blocks} == {0, 256}
    assert Model.from_preset("llama-3-8b").annotations == ()
    for name in Model.presets():
        for block in Model.from_preset(name).blocks:
            assert bool(block.num_experts) == bool(block.expert_parameters), (name, block.name)
