"""Models from live modules: against the formulas, against real runs, and against each other."""

from __future__ import annotations

from typing import Any

import pytest

from autopiper.errors import ModelError
from autopiper.model import Model, TensorSpec

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from torch import nn  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.autograd.graph import saved_tensors_hooks  # noqa: E402

LENGTH = 64
SMALL: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 4,
    "intermediate_size": 96, "vocab_size": 211, "max_position_embeddings": LENGTH, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "num_key_value_heads": 8, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 10, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20,
    "n_shared_experts": 2, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1,
}  # fmt: skip
IDS = (torch.zeros(1, LENGTH, dtype=torch.long),)


def config_of(model_type: str, **changes: Any) -> Any:
    return transformers.AutoConfig.for_model(model_type, **{**SMALL, **changes})


def build(config: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_config(config)


def on_meta(config: Any) -> Any:
    with torch.device("meta"):
        return build(config)


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("gpt2", {}),
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
        ("qwen3", {"head_dim": 16}),
        ("opt", {"ffn_dim": 72, "word_embed_proj_dim": 32, "do_layer_norm_before": False}),
        ("gpt_neox", {"num_key_value_heads": None}),
        ("deepseek_v3", LATENT),
    ],
)
def test_the_module_and_its_config_agree(model_type: str, changes: dict[str, Any]) -> None:
    config = config_of(model_type, **changes)
    live = Model.from_module(on_meta(config), IDS)
    described = Model.from_config(config.to_dict(), sequence_length=LENGTH)
    assert live.parameters == described.parameters
    assert len(live.blocks) == len(described.blocks) == 5
    for ours, theirs in zip(live.blocks, described.blocks, strict=True):
        assert ours.dense_parameters == theirs.dense_parameters
        assert ours.expert_parameters == theirs.expert_parameters
        for field in ("forward_flops", "backward_input_flops", "backward_weight_flops"):
            assert getattr(ours, field) == pytest.approx(getattr(theirs, field), rel=0.02), (ours.name, field)
        assert ours.kept_fp32_elements == theirs.kept_fp32_elements
        assert (ours.num_experts, ours.segments) == (theirs.num_experts, theirs.segments)
        assert ours.all_to_all_elements == theirs.all_to_all_elements
        for field in ("expert_forward_flops", "expert_backward_input_flops", "expert_backward_weight_flops"):
            assert getattr(ours, field) == pytest.approx(getattr(theirs, field), rel=0.02), (ours.name, field)
    assert live.annotations == described.annotations
    assert [t.blocks for t in live.tied] == [t.blocks for t in described.tied]
    assert [t.parameters for t in live.tied] == [t.parameters for t in described.tied]
    assert live.edges == described.edges
    assert (live.inputs, live.sequence_length) == (described.inputs, LENGTH)
    assert len({b.kind for b in live.blocks}) == len({b.kind for b in described.blocks})


def test_real_meta_and_fake_modules_are_all_the_same() -> None:
    config = config_of("llama")
    real = Model.from_module(build(config), IDS)
    meta = Model.from_module(on_meta(config), (torch.zeros(1, LENGTH, dtype=torch.long, device="meta"),))
    with FakeTensorMode():
        fake_ids = torch.zeros(1, LENGTH, dtype=torch.long)
        module = build(config)
    assert real == meta
    assert real == Model.from_module(module, {"input_ids": fake_ids})
    assert real == Model.from_module(build(config), (torch.zeros(7, LENGTH, dtype=torch.long),)), "any batch will do"


def test_equal_layers_are_one_kind_and_unequal_ones_are_not() -> None:
    kinds = [b.kind for b in Model.from_module(on_meta(config_of("llama")), IDS).blocks]
    assert kinds == ["embedding", "LlamaDecoderLayer", "LlamaDecoderLayer", "LlamaDecoderLayer", "head"]
    mixed = Model.from_module(on_meta(config_of("deepseek_v3", **LATENT)), IDS)
    kinds = [b.kind for b in mixed.blocks]
    assert kinds[1] != kinds[2] == kinds[3]


def saved_by(module: Any, *args: Any, **kwargs: Any) -> int:
    """Bytes that a real forward keeps for its backward, parameters left out."""
    parameters = {p.untyped_storage().data_ptr() for p in module.parameters()}
    kept: dict[int, Any] = {}

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage
        return tensor

    with saved_tensors_hooks(pack, lambda t: t):
        module(*args, **kwargs)
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_kept_elements_are_what_a_real_forward_keeps(model_type: str) -> None:
    """All but what the layers share: masks and rotary tables, which are not kept per layer."""
    module = build(config_of(model_type))
    model = Model.from_module(module, IDS)
    real = saved_by(module, *IDS, use_cache=False) / 4
    assert sum(b.kept_elements for b in model.blocks) == pytest.approx(real, rel=0.02)


def chain() -> Any:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 4))


def test_a_sequential_counts_each_tensor_once() -> None:
    """The output of a ReLU is kept by it and by the next layer: one tensor."""
    module = chain()
    model = Model.from_module(module, torch.zeros(1, 16))
    assert sum(b.kept_elements for b in model.blocks) == saved_by(module, torch.zeros(1, 16)) / 4 == 16 + 32 + 16
    assert [b.forward_flops for b in model.blocks] == [2 * 16 * 32, 0, 2 * 32 * 16, 0, 2 * 16 * 4]
    assert model.blocks[0].backward_input_flops == 0, "nobody wants the gradient of the model's own input"
    assert [b.backward_weight_flops for b in model.blocks] == [b.forward_flops for b in model.blocks]
    assert model.blocks[2].backward_input_flops == model.blocks[2].forward_flops
    assert model.crossing(2) == (TensorSpec(name="hidden_states", shape=(32,)),)
    assert model.inputs == (TensorSpec(name="input", shape=(16,)),)
    assert model.sequence_length == 1
    assert model.blocks[1].forward_moved_elements == 2 * 32, "a ReLU reads and writes"
    assert [b.kernels for b in model.blocks] == [1, 1, 1, 1, 1]


def test_the_backward_is_what_torch_counts_for_the_whole() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    module = chain()
    with FlopCounterMode(display=False) as counter:
        module(torch.zeros(1, 16)).sum().backward()
    assert Model.from_module(module, torch.zeros(1, 16)).flops == counter.get_total_flops()


class Skipping(nn.Module):
    """Every layer also reads what ran before the first one, and the end reads an input."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(3)])
        self.last = nn.Linear(16, 4)
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: Any, weight: Any) -> Any:
        x = self.first(x)
        skip = x
        for layer in self.layers:
            x = layer(x) * self.scale + skip
        return self.last(x) * weight


@pytest.mark.parametrize("where", ["real", "meta"])
def test_a_module_of_no_known_structure_is_traced(where: str) -> None:
    module = Skipping().to(where) if where == "meta" else Skipping()
    model = Model.from_module(module, {"x": torch.zeros(3, 8), "weight": torch.zeros(3, 4)})
    assert [b.name for b in model.blocks] == ["before", "layers.0", "layers.1", "layers.2", "after"]
    assert model.parameters == sum(p.numel() for p in module.parameters())
    assert [b.forward_flops for b in model.blocks] == [2 * 8 * 16, *[2 * 16 * 16] * 3, 2 * 16 * 4]
    (tied,) = model.tied
    assert (tied.name, tied.blocks, tied.parameters) == ("scale", (1, 2, 4), 16)
    skip, hidden = (16,), (16,)
    assert [t.shape for t in model.crossing(3)] == [skip, (4,), hidden]
    assert {(e.source, e.target) for e in model.edges} == {(0, 1), (0, 2), (0, 4), (1, 2), (2, 3), (3, 4)}


def test_the_batch_may_be_another_dimension() -> None:
    class Time(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(2)])

        def forward(self, x: Any) -> Any:
            for layer in self.layers:
                x = layer(x)
            return x

    model = Model.from_module(Time(), torch.zeros(5, 3, 6), batch_dim=1)
    assert model.inputs == (TensorSpec(name="x", shape=(5, 6)),)
    assert [t.shape for t in model.crossing(1)] == [(5, 6)]
    assert [b.forward_flops for b in model.blocks] == [2 * 5 * 6 * 6] * 2


def test_a_module_of_one_block() -> None:
    model = Model.from_module(nn.Linear(3, 4), torch.zeros(1, 3), name="one")
    assert (model.name, len(model.blocks), model.parameters, model.flops) == ("one", 1, 16, 2 * 24)


def test_the_module_is_left_as_it_was() -> None:
    module = build(config_of("llama")).eval()
    before = {n: p.data_ptr() for n, p in module.named_parameters()}
    layer = module.model.layers[1]
    Model.from_module(module, IDS)
    assert not module.training
    assert "forward" not in vars(layer)
    assert {n: p.data_ptr() for n, p in module.named_parameters()} == before
    assert all(p.grad is None for p in module.parameters())


@pytest.mark.parametrize(
    ("inputs", "batch_dim", "words"),
    [
        ((), 0, "example_inputs holds no tensor"),
        ("ids", 0, "example_inputs is a str; give the args as a tuple or the kwargs as a dict"),
        ((torch.zeros(2, 16), torch.zeros(3, 16)), 0, r"sizes \[2, 3\] in dimension 0"),
        ((torch.zeros(2, 16),), 2, r"batch_dim is 2, but example_inputs has the shapes \[\(2, 16\)\]"),
        ((torch.zeros(2, 15),), 0, r"Sequential does not run on example_inputs of the shapes \[\(1, 15\)\]"),
    ],
)
def test_wrong_inputs_are_refused_in_words(inputs: Any, batch_dim: int, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        Model.from_module(chain(), inputs, batch_dim=batch_dim)
