"""The orders that torch's own pipelining generates, against ours: equal, wherever torch generates a valid one."""

from __future__ import annotations

from typing import Any

import pytest
from schedule_oracle import loop, one, play, vee

from autopiper.ir.schedules import Rows, rows
from autopiper.plan.passes import Pass, parse_group

torch_schedules: Any = pytest.importorskip("torch.distributed.pipelining.schedules")


def torch_rows(name: str, ranks: int, virtual: int, micro_batches: int) -> Rows | None:
    """What torch would run, without a process group; None where it refuses the number of micro-batches."""
    it = object.__new__(getattr(torch_schedules, name))
    rounds = max(1, micro_batches // ranks)
    if "Interleaved" in name and micro_batches % rounds:
        return None
    it.__dict__.update(
        pp_group_size=ranks, _n_microbatches=micro_batches, n_local_stages=virtual, num_stages=ranks * virtual,
        _num_stages=ranks * virtual, number_of_rounds=rounds, microbatches_per_round=micro_batches // rounds,
    )  # fmt: skip
    if name == "Schedule1F1B":
        actions = it._get_pipeline_order()
    else:
        actions = {r: it._calculate_single_rank_operations(r) for r in range(ranks)}
    return [
        [parse_group(str(a)) for a in actions[r] if a is not None and "REDUCE_GRAD" not in str(a)] for r in range(ranks)
    ]


@pytest.mark.parametrize(
    ("name", "family", "parameters"),
    [
        ("ScheduleInterleaved1F1B", "interleaved-1f1b", {}),
        ("ScheduleInterleavedZeroBubble", "interleaved-1f1b", {"split_backward": True}),
        ("ScheduleZBVZeroBubble", "zb-v", {}),
        ("ScheduleDualPipeV", "dualpipe-v", {}),
    ],
)
def test_equal_orders(name: str, family: str, parameters: dict[str, bool]) -> None:
    compared = 0
    for ranks in (1, 2, 3, 4, 6, 8):
        for virtual in (1, 2, 3) if family == "interleaved-1f1b" else (2,):
            for m in range(2 * ranks if family == "dualpipe-v" else 1, 26):
                given = loop(ranks, virtual, m) if family == "interleaved-1f1b" else vee(ranks, m)
                theirs = torch_rows(name, ranks, virtual, m)
                if theirs is not None:
                    assert rows(family, given, parameters) == theirs, (ranks, virtual, m)
                    compared += 1
    assert compared >= 100


def test_equal_orders_of_1f1b() -> None:
    """The order that torch 2.13 states for 1F1B counts the last rank's forwards from 1; what it runs counts from 0."""
    for ranks in (2, 3, 4, 8):
        for m in range(ranks, 26):
            theirs = torch_rows("Schedule1F1B", ranks, 1, m)
            assert theirs is not None
            ours = rows("1f1b", one(ranks, m), {})
            assert theirs[:-1] == ours[:-1]
            shift = int(theirs[-1][0][0].micro_batch)
            assert shift in (0, 1)
            last = [
                (Pass(kind=p.kind, stage=p.stage, micro_batch=p.micro_batch - shift * (p.kind == "F")),)
                for (p,) in theirs[-1]
            ]
            assert last == ours[-1]
            if shift:
                with pytest.raises(AssertionError, match="has passes"):
                    play(theirs, one(ranks, m))


def test_where_torch_refuses_the_bubble_is_no_larger() -> None:
    """A number of micro-batches that does not divide into rounds: torch refuses it, ours keeps the bubble."""
    for ranks, m in ((2, 5), (4, 9), (4, 13), (8, 17), (8, 23)):
        assert torch_rows("ScheduleInterleaved1F1B", ranks, 2, m) is None
        played = play(rows("interleaved-1f1b", loop(ranks, 2, m), {}), loop(ranks, 2, m))
        full = loop(ranks, 2, 3 * ranks)
        assert played.excess == play(rows("interleaved-1f1b", full, {}), full).excess
