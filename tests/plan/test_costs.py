"""Prices are looked up exactly, interpolated linearly between entries, and never extrapolated."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopiper.errors import CostError
from autopiper.plan import BlockCost, CostTable, LinkCost
from autopiper.plan.costs import DEFAULT_OVERLAPS, OverlapCost


def entry(samples: int, forward_s: float = 1.0, kind: str = "layer", device: str = "a", **more: float) -> BlockCost:
    fields: dict[str, float] = {"backward_s": 2.0, "backward_input_s": 1.0, "backward_weight_s": 1.0, **more}
    return BlockCost(kind=kind, device_type=device, samples=samples, forward_s=forward_s, **fields)  # type: ignore[arg-type]


@given(
    st.lists(st.tuples(st.integers(1, 200), st.floats(0, 1e3)), min_size=2, max_size=6, unique_by=lambda p: p[0]),
    st.data(),
)
def test_interpolation_is_piecewise_linear(points: list[tuple[int, float]], data: st.DataObject) -> None:
    points = sorted(points)
    index = CostTable(blocks=tuple(entry(n, t) for n, t in points)).index()
    asked = data.draw(st.integers(points[0][0], points[-1][0]))
    for (x0, y0), (x1, y1) in pairwise(points):
        if x0 <= asked <= x1:
            expected = y0 + (y1 - y0) * (asked - x0) / (x1 - x0)
    found = index.block("layer", "a", 1, asked)
    assert found.forward_s == pytest.approx(expected, rel=1e-12, abs=1e-12)
    assert found.samples == asked


def test_entries_are_returned_as_they_are_and_blends_say_so() -> None:
    table = CostTable(blocks=(entry(1, 1.0, relative_error=0.1), entry(4, 7.0, relative_error=0.3)))
    measured = CostTable(blocks=tuple(replace(b, evidence="measured") for b in table.blocks)).index()
    assert measured.block("layer", "a", 1, 4) == replace(table.blocks[1], evidence="measured")
    blended = measured.block("layer", "a", 1, 2)
    assert (blended.evidence, blended.relative_error, blended.forward_s) == ("interpolated", 0.3, 3.0)


@pytest.mark.parametrize("samples", [1, 9])
def test_no_extrapolation(samples: int) -> None:
    index = CostTable(blocks=(entry(2), entry(8))).index()
    words = f"block kind 'layer' on 'a' is priced for slices of 2..8 samples; {samples} is outside, and prices are not extrapolated"
    with pytest.raises(CostError, match=words):
        index.block("layer", "a", 1, samples)


def test_missing_prices_name_what_is_priced() -> None:
    index = CostTable(blocks=(entry(1), entry(1, kind="head"))).index()
    with pytest.raises(
        CostError, match=r"block kind 'layr' has no price \(did you mean 'layer'\?\); the table prices: head, layer"
    ):
        index.block("layr", "a", 1, 1)
    with pytest.raises(
        CostError, match=r"no price on device type 'b' at tensor_parallel_size 2; priced \(type, size\): \[\('a', 1\)\]"
    ):
        index.block("layer", "b", 2, 1)
    assert index.has("layer", "a")
    assert not index.has("layer", "b")


def test_a_price_for_any_device_type_gives_way_to_a_specific_one() -> None:
    index = CostTable(blocks=(entry(1, 5.0, device="*"), entry(1, 3.0, device="fast"))).index()
    assert index.block("layer", "fast", 1, 1).forward_s == 3.0
    assert index.block("layer", "slow", 1, 1).forward_s == 5.0


def test_from_layers_is_proportional_in_samples() -> None:
    table = CostTable.from_layers(
        forward_s=[1, 2], backward_input_s=[3, 4], backward_weight_s=[5, 6], activation_bytes=[7, 8]
    )
    price = table.index().block("layer1", "anything", 1, 3)
    assert (price.forward_s, price.backward_s, price.backward_input_s, price.backward_weight_s) == (6, 30, 12, 18)
    assert price.kept_bytes == 24
    assert CostTable.from_layers(forward_s=[1], backward_s=[4]).blocks[0].backward_input_s == 2


def test_from_layers_refuses_unequal_lists() -> None:
    with pytest.raises(CostError, match=r"backward_s has 1 values for 2 blocks \(forward_s has 2\); give one each"):
        CostTable.from_layers(forward_s=[1, 2], backward_s=[1])
    with pytest.raises(CostError, match="give backward_s, or both backward_input_s and backward_weight_s"):
        CostTable.from_layers(forward_s=[1], backward_input_s=[1])


def test_merge_joins_types_and_the_other_wins() -> None:
    a = CostTable(
        blocks=(entry(1, 1.0), entry(2, 2.0)),
        precision="bf16",
        source="here",
        links=(LinkCost(tier="node", latency_s=1, bytes_per_s=1),),
    )
    b = CostTable(
        blocks=(entry(2, 9.0), entry(1, 3.0, device="b")),
        precision="bf16",
        source="there",
        links=(LinkCost(tier="node", latency_s=2, bytes_per_s=1),),
    )
    merged = a.merge(b)
    prices = {(e.device_type, e.samples): e.forward_s for e in merged.blocks}
    assert prices == {("a", 1): 1.0, ("a", 2): 9.0, ("b", 1): 3.0}
    assert [link.latency_s for link in merged.links] == [2]
    assert merged.source == "here + there"
    assert a.merge(a) == a


def test_merge_refuses_other_conditions() -> None:
    a = CostTable(blocks=(entry(1),), precision="bf16")
    with pytest.raises(CostError, match="cannot merge prices for precision 'bf16' with prices for 'fp16'"):
        a.merge(CostTable(blocks=(entry(2),), precision="fp16"))
    assert a.merge(CostTable(blocks=(entry(2),))).precision == "bf16"


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_impossible_prices_are_refused(value: float) -> None:
    with pytest.raises(CostError, match=r"forward_s of block kind 'layer' is .*; it must be zero or more and finite"):
        entry(1, value)


def test_two_prices_for_one_thing_are_refused() -> None:
    with pytest.raises(CostError, match=r"two prices for .* = \('layer', 'a', 1, 1\); keep one"):
        CostTable(blocks=(entry(1), entry(1, 2.0)))


def test_save_and_load(tmp_path: Path) -> None:
    table = CostTable(
        blocks=(entry(1, 0.1 + 0.2),),
        links=(LinkCost(tier="node", latency_s=0.0, bytes_per_s=float("inf")),),
        optimizer="adamw",
    )
    table.save(tmp_path / "deep" / "costs.json")
    assert CostTable.load(tmp_path / "deep" / "costs.json") == table
    assert "Infinity" in (tmp_path / "deep" / "costs.json").read_text()


def test_the_experts_part_is_blended_and_scaled_like_the_whole() -> None:
    less = entry(1, 1.0, expert_forward_s=0.5, expert_backward_s=1.0)
    more = entry(5, 5.0, expert_forward_s=4.5, expert_backward_s=2.0)
    index = CostTable(blocks=(less, more)).index()
    found = index.block("layer", "a", 1, 2)
    assert (found.expert_forward_s, found.expert_backward_s) == (1.5, 1.25)
    unit = replace(entry(1), expert_forward_s=0.25, expert_backward_input_s=0.5, expert_backward_weight_s=0.125)
    found = CostTable(blocks=(unit,), proportional=True).index().block("layer", "a", 1, 8)
    assert (found.expert_forward_s, found.expert_backward_input_s, found.expert_backward_weight_s) == (2, 4, 1)


def test_a_part_is_no_more_than_its_whole() -> None:
    entry(1, 1.0, expert_forward_s=1.0)
    with pytest.raises(CostError, match=r"expert_forward_s of block kind 'layer' is 1.1, but forward_s, .*, is 1.0"):
        entry(1, 1.0, expert_forward_s=1.1)
    with pytest.raises(CostError, match=r"expert_backward_s of block kind 'layer' is -1.0; it must be zero or more"):
        entry(1, expert_backward_s=-1.0)


def slow(slowdown: float, under: str = "all_reduce") -> OverlapCost:
    return OverlapCost(kind="all_to_all", under=under, slowdown=slowdown, evidence="measured")  # type: ignore[arg-type]


def test_measured_slowdowns_win_over_the_default() -> None:
    bare = CostTable(blocks=(entry(1),))
    assert [(o.kind, o.under, o.slowdown) for o in bare.overlaps] == [("all_to_all", "all_reduce", 1.46)]
    measured = replace(bare, overlaps=(slow(1.2), slow(1.1, "compute")))
    assert bare.merge(measured).overlaps == measured.merge(bare).overlaps == measured.overlaps
    later = replace(bare, overlaps=(slow(1.3),))
    assert [o.slowdown for o in measured.merge(later).overlaps] == [1.3, 1.1]
    assert replace(bare, overlaps=()).merge(bare).overlaps == DEFAULT_OVERLAPS


def test_impossible_slowdowns_are_refused() -> None:
    with pytest.raises(
        CostError, match=r"under of an overlap is 'allreduce' \(did you mean 'all_reduce'\?\); allowed:"
    ):
        slow(1.5, "allreduce")
    for slowdown in (0.9, float("inf"), float("nan")):
        with pytest.raises(
            CostError, match=r"slowdown of all_to_all under all_reduce is .*; it must be a finite factor of 1"
        ):
            slow(slowdown)
    with pytest.raises(
        CostError, match=r"two slowdowns for \(kind, under\) = \('all_to_all', 'all_reduce'\); keep one"
    ):
        CostTable(blocks=(entry(1),), overlaps=(slow(1.2), slow(1.3)))


def test_experts_and_slowdowns_come_back_from_a_file(tmp_path: Path) -> None:
    table = CostTable(blocks=(entry(1, expert_forward_s=0.1 + 0.2),), overlaps=(slow(1.1, "compute"),))
    table.save(tmp_path / "costs.json")
    assert CostTable.load(tmp_path / "costs.json") == table
    text = (tmp_path / "costs.json").read_text()
    (tmp_path / "costs.json").write_text(text.replace('"under": "compute"', '"under": "computing"'))
    with pytest.raises(CostError, match=r"overlaps\.0\.under"):
        CostTable.load(tmp_path / "costs.json")
