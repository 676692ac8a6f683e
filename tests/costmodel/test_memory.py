"""Memory of a stage against published figures, closed forms, and cost tables that give their own."""

from __future__ import annotations

import pytest

from autopiper.cluster import Cluster
from autopiper.costmodel import memory, price
from autopiper.errors import CostError, PlanError
from autopiper.model.spec import Block, Edge, Model, TensorSpec, TiedParameter
from autopiper.plan import CostTable, Training

GIB = 2**30
NODE = Cluster.homogeneous("a100-80g", devices_per_node=8)
NO_COSTS = CostTable(blocks=())
HALF = Training(global_batch_size=4, precision="fp16")


@pytest.fixture(scope="module")
def gpt22b() -> Model:
    """The 22B model of Korthikanti et al. (arXiv 2205.05198, table 3)."""
    return Model.transformer(
        num_layers=48, hidden_size=6144, num_attention_heads=64, sequence_length=2048, vocab_size=51200
    )


def test_parameters_and_optimizer_of_a_published_model(gpt22b: Model) -> None:
    # 45.56 GiB per device with tensor parallelism 8, layers alone: figure 1 of arXiv 2205.05198.
    assert memory.static_bytes(gpt22b, HALF, NO_COSTS, 1, 49, 8) / GIB == pytest.approx(45.5625, rel=2e-3)


def test_kept_activations_of_a_published_model(gpt22b: Model) -> None:
    # s·b·h (10 + 24/t) bytes per layer without the attention scores (equation 2 and section 5 of arXiv 2205.05198), of
    # which two dropout masks of s·b·h bytes are left out here.
    index = price(gpt22b, NODE, HALF).index()
    size = 2048 * 4 * 6144
    kept = memory.stage_kept_bytes(index, gpt22b, "a100-80g", 8, 1, 49, ("selective",) * 48, 4)
    assert kept == pytest.approx(48 * size * (8 + 24 / 8), rel=1e-3)
    full = memory.stage_kept_bytes(index, gpt22b, "a100-80g", 8, 1, 49, ("full",) * 48, 4)
    assert full == 48 * size * 2


def test_a_tied_parameter_used_twice_in_a_stage_is_one_copy() -> None:
    block = Block(name="x", kind="x", dense_parameters=100, replicated_parameters=20, forward_flops=1)
    model = Model(
        name="tied", blocks=(block,) * 3, edges=(), tied=(TiedParameter(name="w", blocks=(0, 2), parameters=40),)
    )
    assert memory.stage_parameters(model, 0, 3, 1) == model.stage_parameters(0, 3) == 260
    assert memory.stage_parameters(model, 0, 2, 1) == 200
    assert memory.stage_parameters(model, 0, 3, 2) == 3 * (20 + 40) - 20
    assert memory.static_bytes(model, HALF, NO_COSTS, 0, 3, 2) == 160 * 18
    with pytest.raises(PlanError, match="precision is still None"):
        memory.static_bytes(model, Training(global_batch_size=1), NO_COSTS, 0, 3, 1)


def test_given_bytes_win() -> None:
    costs = CostTable.from_layers(
        forward_s=[1, 1, 1], backward_s=[2, 2, 2], parameter_bytes=[5, 7, 11], output_bytes=[3, 4, 9]
    )
    model = Model.chain(3)
    assert memory.static_bytes(model, HALF, costs, 1, 3, 1) == 18
    assert memory.static_bytes(model, HALF, costs, 1, 3, 2) == 9
    assert memory.boundary_bytes(model, HALF, costs, 2) == 4
    for field in ("parameter_bytes", "output_bytes"):
        with pytest.raises(CostError, match=f"{field} of the costs has 3 values for the 4 blocks of model 'chain'"):
            if field == "parameter_bytes":
                memory.static_bytes(Model.chain(4), HALF, costs, 0, 1, 1)
            else:
                memory.boundary_bytes(Model.chain(4), HALF, costs, 1)


def test_given_bytes_are_divided_as_the_parameters_are() -> None:
    block = Block(name="x", kind="x", dense_parameters=100, replicated_parameters=20, forward_flops=1)
    costs = CostTable(blocks=(), parameter_bytes=(1000.0,))
    assert memory.static_bytes(Model(name="m", blocks=(block,), edges=()), HALF, costs, 0, 1, 2) == 600


def test_all_edges_that_cross_a_cut_count_once_per_source() -> None:
    block = Block(name="x", kind="x", forward_flops=1)
    wide, ids = TensorSpec(name="wide", shape=(8, 2)), TensorSpec(name="ids", shape=(8,), dtype="int64")
    edges = (
        Edge(source=0, target=1, tensors=(wide,)), Edge(source=0, target=2, tensors=(wide,)),
        Edge(source=1, target=2, tensors=(wide, ids)),
    )  # fmt: skip
    model = Model(name="skip", blocks=(block,) * 3, edges=edges)
    assert memory.boundary_bytes(model, HALF, NO_COSTS, 1) == 32
    assert memory.boundary_bytes(model, HALF, NO_COSTS, 2) == 32 + 32 + 64


def test_workspace_is_that_of_the_largest_block_computed_again(gpt22b: Model) -> None:
    index = price(gpt22b, NODE, HALF).index()
    layer = index.block(gpt22b.blocks[1].kind, "a100-80g", 8, 2)

    def workspace(*recompute: str) -> float:
        return memory.stage_workspace_bytes(index, gpt22b, "a100-80g", 8, 1, 1 + len(recompute), recompute, 2)

    assert workspace("none", "none") == layer.workspace_bytes > 0
    assert workspace("none", "full") == layer.workspace_bytes + layer.kept_bytes - layer.kept_bytes_full


@pytest.mark.parametrize("tp", [1, 8])
def test_the_head_has_room_for_three_copies_of_its_fp32_logits(gpt22b: Model, tp: int) -> None:
    # Logits, their softmax and their gradient, as the planner of X-MoE counts them; the rest is small beside them.
    index = price(gpt22b, NODE, HALF).index()
    where = (index, gpt22b, "a100-80g", tp, 49, 50, ("none",), 2)
    total = memory.stage_kept_bytes(*where) + memory.stage_workspace_bytes(*where)
    logits = 4 * 2048 * 51200 * 2 / tp
    hidden = 2 * 2048 * 6144 * 2  # bytes of the hidden states; the head keeps two, and has one in and its widest
    assert total == pytest.approx(3 * logits + 3.5 * hidden, rel=1e-3)


def test_an_empty_slice_needs_nothing_and_wrong_words_are_refused(gpt22b: Model) -> None:
    index = price(gpt22b, NODE, HALF).index()
    assert memory.stage_kept_bytes(index, gpt22b, "a100-80g", 1, 1, 3, ("none", "none"), 0) == 0
    assert memory.stage_workspace_bytes(index, gpt22b, "a100-80g", 1, 1, 3, ("full", "none"), 0) == 0
    with pytest.raises(
        CostError, match=r"recompute 'ful' is unknown \(did you mean 'full'\?\); allowed: none, selective"
    ):
        memory.stage_kept_bytes(index, gpt22b, "a100-80g", 1, 1, 2, ("ful",), 1)
