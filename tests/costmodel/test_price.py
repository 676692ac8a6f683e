"""Analytic prices: the roofline is never beaten, every choice is priced, impossible things are refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopiper.cluster import Cluster, Link, Node, catalogue
from autopiper.costmodel import price
from autopiper.costmodel.blocks import Boundary, price_block, update_s
from autopiper.costmodel.collectives import ring_all_reduce_s
from autopiper.costmodel.efficiency import best_share, matmul_s
from autopiper.errors import CostError, PlanError
from autopiper.model.spec import Block, Edge, Model, TensorSpec
from autopiper.plan import Training
from autopiper.plan.prices import EXPERT_PARTS, BlockCost

EXAMPLE = Path(__file__).parents[2] / "examples/clusters/a100-v100.toml"
A100 = catalogue.get("a100-80g")
LINK = Link(bytes_per_s=300e9, latency_s=3e-6)
BF16 = Training(global_batch_size=64, precision="bf16")


def layer(hidden: int = 64, heads: int = 6) -> Block:
    return Block(
        name="layer", kind="layer", dense_parameters=12 * hidden**2, replicated_parameters=2 * hidden,
        forward_flops=30.0 * hidden**2, backward_input_flops=36.0 * hidden**2, backward_weight_flops=24.0 * hidden**2,
        forward_moved_elements=20.0 * hidden, kernels=12, kept_elements=17.0 * hidden,
        kept_elements_selective=13.0 * hidden, kept_replicated_elements=5.0 * hidden, kept_fp32_elements=hidden,
        tensor_divisors=(("num_attention_heads", heads),), tensor_collectives=2,
        tensor_collective_elements=2.0 * hidden,
    )  # fmt: skip


def small_model(block: Block) -> Model:
    hidden = TensorSpec(name="hidden", shape=(64,))
    return Model(
        name="small", blocks=(replace(block, name="a"), replace(block, name="b")),
        edges=(Edge(source=0, target=1, tensors=(hidden,)),), inputs=(TensorSpec(name="ids", shape=(4,), dtype="int64"),),
    )  # fmt: skip


def test_every_choice_on_the_example_cluster_is_priced() -> None:
    cluster = Cluster.from_file(EXAMPLE)
    model = Model.from_preset("llama-3-8b", sequence_length=2048)
    table = price(model, cluster, Training(global_batch_size=1000))
    assert table.precision == "fp16" and table.optimizer == "adamw"
    index = table.index()
    for block in model.blocks:
        for device in cluster.counts():
            for tp in (1, 2, 4, 8):
                curve = index.curve(block.kind, device, tp)
                assert [p.samples for p in curve] == [1, 2, 4, 8, 16, 32, 64]
                for less, more in pairwise(curve):
                    # Twice the samples take longer, but not twice as long.
                    assert less.forward_s < more.forward_s <= 2 * less.forward_s
                    assert less.backward_s < more.backward_s <= 2 * less.backward_s
                    assert 2 * less.kept_bytes == pytest.approx(more.kept_bytes)
                for p in curve:
                    assert p.evidence == "analytic" and p.relative_error > 0
                    assert p.backward_s <= p.backward_input_s + p.backward_weight_s
                    assert p.kept_bytes_full <= p.kept_bytes_selective <= p.kept_bytes
    a, v = (index.block("dense_layer", d, 1, 4) for d in ("a100-80g", "v100-32g"))
    assert 2 < v.forward_s / a.forward_s < 3.2


@settings(max_examples=100, deadline=None)
@given(
    st.integers(8, 8192), st.sampled_from(["t4", "v100-32g", "a100-80g", "h100", "mi300x", "rtx-4090", "cpu"]),
    st.sampled_from([1, 2, 3, 6]), st.sampled_from([1, 3, 64]), st.sampled_from(["fp16", "bf16", "fp32", "fp64"]),
)  # fmt: skip
def test_the_roofline_is_never_beaten(hidden: int, name: str, tp: int, samples: int, precision: str) -> None:
    device, block = catalogue.get(name), layer(hidden)
    if not device.supports(precision):
        return
    training = Training(global_batch_size=64, precision=precision)
    boundary = Boundary(input_bytes=2.0 * hidden, output_bytes=2.0 * hidden)
    got = price_block(block, boundary, device, LINK, training, tensor_parallel_size=tp, samples=samples)
    peak, rate, element = device.peak_flops[precision], device.memory_bytes_per_s, training.activation_bytes
    for seconds, flops, moved in (
        (got.forward_s, block.forward_flops, block.forward_moved_elements),
        (got.backward_input_s, block.backward_input_flops, block.forward_moved_elements),
        (got.backward_weight_s, block.backward_weight_flops, 0.0),
    ):
        assert seconds >= samples / tp * (flops / peak + moved * element / rate)
        assert seconds >= block.kernels * device.kernel_launch_s
    assert got.forward_s >= block.dense_parameters / tp * training.weight_bytes / rate
    assert got.update_s >= block.dense_parameters / tp * training.bytes_per_parameter / rate
    assert got.forward_s > got.forward_collective_s >= 0 and got.backward_s > got.backward_collective_s >= 0


def test_one_block_by_hand() -> None:
    block, h = layer(4096), 4096
    got = price_block(
        block, Boundary(input_bytes=8192, output_bytes=8192), A100, LINK, BF16, tensor_parallel_size=2, samples=16
    )
    rate = A100.memory_bytes_per_s * 0.85
    parameters = 2 * h + (12 * h**2 - 2 * h) / 2
    weights = parameters * 2 / rate
    work = 30 * h**2 * 16 / 2 / (312e12 * 0.86 * 0.80) + 6e-6 * 0.4 * 12
    assert weights > work  # few tokens: reading the weights takes longer than multiplying by them
    collective = 2 * ring_all_reduce_s(LINK, 2, h * 2 * 16)
    undivided = 5 / 17 + 12 / 17 / 2
    moved = 20 * h * 2 * 16 * undivided / rate
    assert got.forward_collective_s == got.backward_collective_s == pytest.approx(collective)
    assert got.forward_s == pytest.approx(12 * 4e-6 + weights + moved + collective)
    assert got.backward_weight_s == pytest.approx(12 * 4e-6 + parameters * 8 / rate)
    assert got.backward_s == got.backward_input_s + got.backward_weight_s
    assert got.kept_bytes == 16 * ((5 * h + 12 * h / 2) * 2 + h * 4 / 2)
    assert got.kept_bytes_selective == 16 * ((5 * h + 8 * h / 2) * 2 + h * 4 / 2)
    assert got.kept_bytes_full == 8192 * 16
    assert got.workspace_bytes > 2 * 8192 * 16
    saved = 16 * 4 * h / 2 * 2
    core = matmul_s(A100, "bf16", 6 * h**2 * 16 / 2, 2)
    assert got.selective_forward_s == pytest.approx(2 * 4e-6 + core + 2 * saved / rate)


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(["mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v2"]), st.sampled_from(["t4", "a100-80g", "cpu"]),
    st.sampled_from([64, 1024]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 3, 64]),
)  # fmt: skip
def test_the_experts_have_their_share_of_each_price(preset: str, name: str, length: int, tp: int, samples: int) -> None:
    model = Model.from_preset(preset, sequence_length=length)
    moe, device = model.blocks[-2], catalogue.get(name)
    boundary = Boundary(input_bytes=1.0, output_bytes=1.0)
    training = Training(global_batch_size=64, precision="fp32")

    def priced(block: Block) -> BlockCost:
        return price_block(block, boundary, device, LINK, training, tensor_parallel_size=tp, samples=samples)

    got, peak = priced(moe), device.peak_flops["fp32"]
    for part, whole in EXPERT_PARTS:
        assert 0 < getattr(got, part) < getattr(got, whole)
    # No part beats the roofline of its own work.
    assert got.expert_forward_s >= samples / tp * moe.expert_forward_flops / peak
    assert got.expert_backward_input_s >= samples / tp * moe.expert_backward_input_flops / peak
    assert got.expert_backward_weight_s >= samples / tp * moe.expert_backward_weight_flops / peak
    assert got.expert_backward_s == got.expert_backward_input_s + got.expert_backward_weight_s
    # A block of nothing but experts is theirs, collectives apart.
    alone = replace(
        moe, dense_parameters=0, replicated_parameters=0, forward_flops=moe.expert_forward_flops,
        backward_input_flops=moe.expert_backward_input_flops, backward_weight_flops=moe.expert_backward_weight_flops,
        forward_moved_elements=moe.expert_moved_elements, kernels=moe.expert_kernels, tensor_collectives=0,
    )  # fmt: skip
    for part, whole in EXPERT_PARTS:
        assert getattr(priced(alone), part) == pytest.approx(getattr(priced(alone), whole), rel=1e-12)
    dense = priced(model.blocks[0])
    assert not any(getattr(dense, part) for part, _ in EXPERT_PARTS)


def test_few_tokens_leave_the_experts_the_reading_of_their_weights() -> None:
    moe = Model.from_preset("mixtral-8x7b", sequence_length=8).blocks[1]
    got = price_block(moe, Boundary(input_bytes=1, output_bytes=1), A100, LINK, BF16, tensor_parallel_size=1, samples=1)
    rate, tokens = A100.memory_bytes_per_s * 0.85, 8
    moved = tokens * (2 * 2 * 4096 + 3 * 4096 + 2 * 3 * 14336) * 2 / rate
    weights = 8 * 3 * 4096 * 14336
    assert got.expert_forward_s == pytest.approx(6 * 4e-6 + weights * 2 / rate + moved)
    assert got.expert_backward_weight_s == pytest.approx(6 * 4e-6 + weights * 2 * 4 / rate)


def test_the_optimizer_step_is_its_memory_traffic() -> None:
    # bf16, AdamW: gradient read and cleared 8, moments read and written 16, master 8, weight written 2 = 34 bytes.
    rate = A100.memory_bytes_per_s * 0.85
    assert update_s(A100, BF16, 1e9) == pytest.approx(34e9 / rate)
    # fp32, plain SGD: gradient read and cleared 8, weight read and written 8.
    assert update_s(A100, replace(BF16, precision="fp32", optimizer="sgd"), 1e9) == pytest.approx(16e9 / rate)


def test_efficiency_saturates_with_size() -> None:
    flops = [2.0 * n**3 for n in (128, 512, 1024, 2048, 4096, 16384)]
    shares = [work / A100.peak_flops["bf16"] / matmul_s(A100, "bf16", work, 1) for work in flops]
    assert shares == sorted(shares)
    assert 0.3 < shares[2] < 0.5  # a 1024-cube product reaches about half of the best
    assert shares[-1] == pytest.approx(best_share(A100), rel=0.01)
    assert matmul_s(A100, "bf16", 0, 1) == 0
    core = catalogue.get("cpu")
    assert matmul_s(core, "fp32", 1, 1) == 1 / (core.peak_flops["fp32"] * best_share(core))
    with pytest.raises(CostError, match=r"'v100-32g' does not support precision 'bf16'; allowed: fp64, fp32, fp16"):
        matmul_s(catalogue.get("v100-32g"), "bf16", 1, 1)


def test_sizes_follow_the_nodes_and_the_heads() -> None:
    node = Node(name="n", devices=("a100-80g",) * 5 + ("v100-32g",) * 2, intra=LINK, nic=LINK)
    cluster = Cluster(name="c", device_types=(A100, catalogue.get("v100-32g")), nodes=(node, replace(node, name="m")))
    index = price(small_model(layer(heads=6)), cluster, Training(global_batch_size=3)).index()
    sizes = {tp for tp in range(1, 9) if index.has("layer", "a100-80g", tp)}
    assert sizes == {1, 2}  # 4 does not divide the 6 heads
    assert {tp for tp in range(1, 9) if index.has("layer", "v100-32g", tp)} == {1, 2}
    assert [p.samples for p in index.curve("layer", "v100-32g", 2)] == [1, 2, 4]
    asked = price(
        small_model(layer(heads=6)), cluster, Training(global_batch_size=64), tensor_parallel_sizes=[3], max_samples=5
    ).index()
    assert asked.has("layer", "a100-80g", 3) and not asked.has("layer", "v100-32g", 3)
    assert asked.curve("layer", "a100-80g", 3)[-1].samples == 8


def test_the_slowest_inner_link_prices_the_collectives() -> None:
    nodes = tuple(
        Node(name=str(g), devices=("a100-80g",) * 2, intra=Link(bytes_per_s=g * 1e9), nic=LINK) for g in (300, 50)
    )
    mixed = Cluster(name="c", device_types=(A100,), nodes=nodes)
    slow = Cluster(name="c", device_types=(A100,), nodes=nodes[1:])
    model = small_model(layer())
    assert price(model, mixed, BF16).index().block("layer", "a100-80g", 2, 8) == price(model, slow, BF16).index().block(
        "layer", "a100-80g", 2, 8
    )


def test_only_what_enters_a_block_is_kept_under_full_recompute() -> None:
    model = small_model(layer())
    lone = replace(model, blocks=(replace(model.blocks[0], kind="first"), model.blocks[1]))
    index = price(lone, Cluster.homogeneous("a100-80g"), BF16).index()
    assert index.block("layer", "a100-80g", 1, 2).kept_bytes_full == 2 * 64 * 2
    assert index.block("first", "a100-80g", 1, 2).kept_bytes_full == 2 * 4 * 8  # the model's own input, four int64


def test_impossible_prices_are_refused() -> None:
    cluster, model = Cluster.homogeneous("a100-80g", devices_per_node=4), small_model(layer())
    with pytest.raises(CostError, match=r"model 'chain' says nothing about the work .* CostTable\.from_layers"):
        price(Model.chain(3), cluster, BF16)
    with pytest.raises(CostError, match=r"size 4 does not divide num_attention_heads = 6 of block 'a' \(6 mod 4 = 2\)"):
        price(model, cluster, BF16, tensor_parallel_sizes=[1, 4])
    with pytest.raises(CostError, match="size 8 exceeds the devices of one type in any node: 4 x a100-80g"):
        price(model, cluster, BF16, tensor_parallel_sizes=[8])
    with pytest.raises(CostError, match="tensor-parallel size 0 must be 1 or more"):
        price(model, cluster, BF16, tensor_parallel_sizes=[0])
    with pytest.raises(CostError, match="tensor_parallel_sizes is empty"):
        price(model, cluster, BF16, tensor_parallel_sizes=[])
    with pytest.raises(CostError, match="max_samples is 0; it must be 1 or more"):
        price(model, cluster, BF16, max_samples=0)
    with pytest.raises(PlanError, match="precision 'bf16' is not supported by v100-32g"):
        price(model, Cluster.homogeneous("v100-32g"), BF16)
