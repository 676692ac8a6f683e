"""What the registry refuses, and in which words."""

from __future__ import annotations

from typing import Any

import pytest
from schedule_oracle import layout, loop, one, opposite, vee

from autopiper.errors import PlanError
from autopiper.ir.schedules import FAMILIES, Layout, rows

TWO = Layout(holds=(((0, 0),), ((1, 0),)), num_stages={0: 1, 1: 1}, num_micro_batches={0: 4, 1: 4})
SAME_WAY = Layout(holds=(((0, 0), (1, 0)), ((0, 1), (1, 1))), num_stages={0: 2, 1: 2}, num_micro_batches={0: 4, 1: 4})
UNLIKE = Layout(holds=(((0, 0), (1, 1)), ((0, 1), (1, 0))), num_stages={0: 2, 1: 2}, num_micro_batches={0: 4, 1: 5})
ODD = opposite(3, 6)


def test_the_families() -> None:
    assert list(FAMILIES) == [
        "gpipe", "1f1b", "interleaved-1f1b", "eager-1f1b", "zb-h1", "zb-h2", "zb-v", "dualpipe", "dualpipe-v",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("family", "where", "parameters", "words"),
    [
        ("1f1f", one(2, 4), {}, ["'1f1f' is unknown (did you mean '1f1b'?)", "allowed: gpipe, 1f1b", "'searched'"]),
        ("searched", one(2, 4), {}, ["has no generator", "filters="]),
        ("1f1b", one(2, 4), {"warmup": 2}, ["'1f1b' has no parameter 'warmup'", "it takes: none"]),
        ("eager-1f1b", one(2, 4), {"forwards_per_hops": 2},
         ["(did you mean 'forwards_per_hop'?)", "it takes: forwards_per_hop (default 2)"]),
        ("eager-1f1b", one(2, 4), {"forwards_per_hop": 1.5}, ["is 1.5 (float); it must be a whole number"]),
        ("eager-1f1b", one(2, 4), {"forwards_per_hop": 0}, ["forwards_per_hop is 0", "1 (as 1f1b) or more"]),
        ("interleaved-1f1b", loop(2, 2, 4), {"split_backward": 1}, ["is 1 (int); it must be True or False"]),
        ("1f1b", TWO, {}, ["orders one pipeline at a time, got 2"]),
        ("dualpipe", one(2, 4), {}, ["orders 2 pipelines at a time, got 1"]),
        ("dualpipe", SAME_WAY, {}, ["opposite directions", "stage 0 of pipeline 0 must hold stage 1 of pipeline 1"]),
        ("dualpipe", UNLIKE, {}, ["alike", "2 stages and 4 micro-batches", "2 and 5"]),
        ("dualpipe", ODD, {}, ["even number of stages, got 3; nearest: 4"]),
        ("dualpipe", opposite(4, 3), {}, ["3 micro-batches in each direction are fewer than the 4 stages"]),
        ("dualpipe-v", vee(4, 7), {}, ["7 micro-batches are fewer than the 8 stages = 2 x 4", "zb-v"]),
        ("dualpipe-v", loop(2, 2, 8), {}, ["V", "device group 0 holds 0, 2 instead of 0, 3"]),
        ("zb-v", one(3, 8), {}, ["device group 1 holds 1 instead of 1, 4", "3 device groups take 6 stages, not 3"]),
        ("gpipe", layout((0,), (0, 1), micro_batches=2), {}, ["stage 0", "held by 2 device groups (0, 1)"]),
        ("gpipe", layout((0,), (2,), micro_batches=2), {}, ["stage 1 of pipeline 0 is held by no device group"]),
        ("gpipe", layout((0, 1), (), micro_batches=2), {}, ["device group 1 of the layout holds no stage"]),
        ("gpipe", layout((0, 1), micro_batches=0), {}, ["2 stages and 0 micro-batches; each must be 1 or more"]),
        ("gpipe", Layout(holds=(((0, 0), (7, 2)),), num_stages={0: 1}, num_micro_batches={0: 1}), {},
         ["device group 0 holds stage 2 of pipeline 7, which is not ordered here"]),
    ],
)  # fmt: skip
def test_refusals(family: str, where: Layout, parameters: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(PlanError) as error:
        rows(family, where, parameters)
    for each in words:
        assert each in str(error.value)
    assert f"'{family}'" in str(error.value)
