"""Published bubbles and live activations of every family; span and makespan told apart. p ranks, m micro-batches."""

from __future__ import annotations

import pytest
from schedule_oracle import EQUAL, loop, one, opposite, play, vee

from autopiper.ir.schedules import FAMILIES, rows

UNEQUAL = ({"F": 1, "I": 1.2, "W": 0.8}, {"F": 2, "I": 3, "W": 2}, {"F": 1, "I": 2, "W": 1})
COSTS = [{**c, "B": c["I"] + c["W"]} for c in (EQUAL, *UNEQUAL)]
SIZES = ((1, 1), (2, 3), (3, 8), (4, 12), (8, 24))


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize(("p", "m"), SIZES)
def test_gpipe_and_1f1b(p: int, m: int, cost: dict[str, float]) -> None:
    for family in ("gpipe", "1f1b", "eager-1f1b"):
        played = play(rows(family, one(p, m), {}), one(p, m), cost)
        assert played.excess == pytest.approx((p - 1) * (cost["F"] + cost["B"]))
        live = {"gpipe": m, "1f1b": min(p, m), "eager-1f1b": min(2 * p - 1, m)}[family]
        assert played.live[0] == max(played.live) == live


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize(
    ("p", "v", "m"), [(2, 2, 4), (2, 3, 5), (4, 2, 8), (4, 2, 11), (4, 3, 16), (8, 4, 16), (3, 5, 7)]
)
def test_interleaved(p: int, v: int, m: int, cost: dict[str, float]) -> None:
    given = loop(p, v, m)
    played = play(rows("interleaved-1f1b", given, {}), given, {k: t / v for k, t in cost.items()})
    assert played.excess == pytest.approx((p - 1) * (cost["F"] + cost["B"]) / v)
    if m % p == 0:  # with a remainder the bubble stays and more is live
        assert played.live[0] / v == pytest.approx(p * (1 + (p - 1) / (p * v)))
    split = play(rows("interleaved-1f1b", given, {"split_backward": True}), given, {k: t / v for k, t in cost.items()})
    assert split.makespan < played.makespan


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize(("p", "m"), [(2, 4), (3, 8), (4, 12), (4, 17), (8, 24)])
def test_zero_bubble_h(p: int, m: int, cost: dict[str, float]) -> None:
    h1 = play(rows("zb-h1", one(p, m), {}), one(p, m), cost)
    assert h1.excess == pytest.approx((p - 1) * (cost["F"] + cost["I"] - cost["W"]))
    assert h1.live == [p] * p
    h2 = play(rows("zb-h2", one(p, m), {}), one(p, m), cost)
    assert h2.span_bubble == pytest.approx((p - 1) * (cost["F"] + cost["I"] - 2 * cost["W"]))
    assert h2.live == [2 * p - 1] * p


def test_the_gain_of_zb_h2_is_of_span_and_not_of_makespan() -> None:
    played = {f: play(rows(f, one(4, 12), {}), one(4, 12)) for f in ("1f1b", "zb-h1", "zb-h2")}
    assert [p.excess for p in played.values()] == [9, 3, 3]
    assert [max(p.live) for p in played.values()] == [4, 4, 7]
    assert played["zb-h2"].span_bubble == 0 < played["zb-h1"].span_bubble


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
def test_zb_v(p: int) -> None:
    for m in (2 * p - 1, 2 * p, 3 * p + 1, 5 * p):
        played = play(rows("zb-v", vee(p, m), {}), vee(p, m))
        assert played.span_bubble == 0 and played.excess == p - 1
        assert max(played.live) == 2 * p  # of half size: as much as p micro-batches of 1f1b


@pytest.mark.parametrize("half", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("family", ["dualpipe", "dualpipe-v"])
def test_dual_pipes(family: str, half: int) -> None:
    stages = 2 * half
    for m in (stages, stages + 1, 2 * stages, 3 * stages + 1):
        given = opposite(stages, m) if family == "dualpipe" else vee(half, m)
        order = rows(family, given, {})
        f, w, b, pair = 1, 1, 2, 3
        atomic = play(order, given, pair=pair)
        assert atomic.excess == (half - 1) * (pair + b - 3 * w)
        assert atomic.live == [stages + 1] * len(given.holds)
        lowered = play(order, given)
        assert lowered.excess == (half - 1) * f
        assert lowered.live == [stages + 1] * len(given.holds)
        assert len(given.holds) == (stages if family == "dualpipe" else half)  # either way each holds two stages
        assert {len(each) for each in given.holds} == {2}
    assert FAMILIES[family].num_pipelines == (2 if family == "dualpipe" else 1)


def test_1f1b_with_links_between_neighbours() -> None:
    f, b, cases = 1.0, 2.0, 0
    for p in range(1, 9):
        for m in range(1, 23):
            for c in (0.05, 0.3):
                played = play(rows("1f1b", one(p, m), {}), one(p, m), link=c * f)
                waits = (p - 1) * ((m - 1) // p) + max(0, (m - 1) % p - 1)
                assert played.makespan == pytest.approx((m + p - 1) * (f + b) + 2 * (p - 1) * c + 2 * c * waits)
                cases += 1
    assert cases == 352


def test_eager_1f1b_hides_links() -> None:
    for p, m in ((2, 8), (4, 12), (4, 24), (8, 32)):
        for c in (0.3, 1.0, 1.5):  # up to (F + B)/2
            eager = play(rows("eager-1f1b", one(p, m), {}), one(p, m), link=c)
            assert eager.makespan == pytest.approx(3 * (m + p - 1) + 2 * (p - 1) * c)
            assert eager.makespan < play(rows("1f1b", one(p, m), {}), one(p, m), link=c).makespan
    assert rows("eager-1f1b", one(4, 9), {"forwards_per_hop": 1}) == rows("1f1b", one(4, 9), {})
