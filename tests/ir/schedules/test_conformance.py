"""What every family of the registry is held to; a new one is covered as soon as it is listed."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_oracle import layout, loop, one, opposite, play, vee

from autopiper.errors import PlanError
from autopiper.ir.schedules import FAMILIES, Layout, Rows, rows
from autopiper.plan.passes import Pass

ANY_MAP = ("gpipe", "1f1b", "eager-1f1b", "interleaved-1f1b", "zb-h1", "zb-h2")


def random_map(rng: random.Random, micro_batches: int) -> Layout:
    """Stages scattered over device groups: unequal numbers, no order."""
    ranks = rng.randint(1, 5)
    homes = [*range(ranks), *(rng.randrange(ranks) for _ in range(rng.randint(0, 9)))]
    rng.shuffle(homes)
    return layout(*(tuple(s for s, h in enumerate(homes) if h == r) for r in range(ranks)), micro_batches=micro_batches)


def own_map(stage_map: str, rng: random.Random, micro_batches: int) -> Layout:
    """A map that the family names as its own."""
    ranks = rng.randint(1, 6)
    if stage_map == "opposite":
        return opposite(2 * ranks, micro_batches)
    return {
        "one": lambda: one(ranks, micro_batches),
        "loop": lambda: loop(ranks, rng.randint(1, 4), micro_batches),
        "v": lambda: vee(ranks, micro_batches),
        "any": lambda: random_map(rng, micro_batches),
    }[stage_map]()


def random_parameters(family: str, rng: random.Random) -> dict[str, object]:
    return {
        name: rng.random() < 0.5 if isinstance(default, bool) else rng.randint(1, 4)
        for name, default in FAMILIES[family].parameters.items()
        if rng.random() < 0.7
    }


def check(family: str, parameters: dict[str, object], where: Layout, rng: random.Random) -> Rows | None:
    """Valid rows whatever the costs, or a refusal that names the family."""
    try:
        found = rows(family, where, parameters)
    except PlanError as error:
        assert str(error).startswith(f"schedule '{family}': ")
        return None
    costs = {(k, p, s): rng.uniform(0.1, 9) for k in "FBIW" for p, n in where.num_stages.items() for s in range(n)}

    def time(p: Pass) -> float:
        return costs[p.kind, p.pipeline, p.stage]

    played = play(found, where, time, link=rng.choice([0.0, 0.7, 5.0]))
    assert played.makespan >= max(played.busy) - 1e-9
    kinds = {p.kind for row in found for group in row for p in group}
    assert parameters or ("I" in kinds) == FAMILIES[family].splits_backward
    assert found == rows(family, where, parameters), "the same twice"
    # Device groups in another order, and a pipeline of another index, change names and nothing else.
    turned = list(range(len(found)))
    rng.shuffle(turned)
    again = rows(family, replace(where, holds=tuple(where.holds[i] for i in turned)), parameters)
    assert again == [found[i] for i in turned]
    renamed = Layout(
        holds=tuple(tuple((p + 3, s) for p, s in each) for each in where.holds),
        num_stages={p + 3: n for p, n in where.num_stages.items()},
        num_micro_batches={p + 3: n for p, n in where.num_micro_batches.items()},
    )
    moved = [[tuple(replace(p, pipeline=p.pipeline + 3) for p in group) for group in row] for row in found]
    assert rows(family, renamed, parameters) == moved
    return found


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_own_map(family: str, seed: int) -> None:
    rng = random.Random(seed)
    micro_batches = rng.randint(1, 30)
    where = own_map(FAMILIES[family].stage_map, rng, micro_batches)
    found = check(family, random_parameters(family, rng), where, rng)
    assert found is not None or micro_batches < max(where.num_stages.values()), "refused though there is plenty"


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_any_map(family: str, seed: int) -> None:
    rng = random.Random(seed)
    where = random_map(rng, rng.randint(1, 20))
    found = check(family, random_parameters(family, rng), where, rng)
    assert found is not None or family not in ANY_MAP


@pytest.mark.parametrize("family", FAMILIES)
def test_one_micro_batch_and_one_device_group(family: str) -> None:
    it = FAMILIES[family]
    assert it.name == family and "arXiv" in it.source
    if it.stage_map in ("one", "any", "loop"):
        kinds = [p.kind for group in rows(family, one(1, 1), {})[0] for p in group]
        assert kinds == (["F", "I", "W"] if it.splits_backward else ["F", "B"])
        for where in (one(1, 1), one(1, 5), one(5, 1), loop(1, 3, 1), loop(1, 3, 4), loop(4, 2, 1)):
            play(rows(family, where, {}), where)
    elif it.stage_map == "v":
        least = 2 if family == "dualpipe-v" else 1
        play(rows(family, vee(1, least), {}), vee(1, least))
    else:
        play(rows(family, opposite(2, 2), {}), opposite(2, 2))


OCTO = ((0, 4, 8, 12, 16, 19, 20), (1, 5, 9, 13, 17, 21), (2, 6, 10, 14, 18, 22), (3, 7, 11, 15, 23))
SCATTERED = {
    "v": ((0, 7), (1, 6), (2, 5), (3, 4)),
    "wave": ((0, 7, 8, 15), (1, 6, 9, 14), (2, 5, 10, 13), (3, 4, 11, 12)),
    "blocks": ((0, 1), (2, 3), (4, 5)),
    "uneven": ((0,), (1, 3), (2, 4)),
    "published": OCTO,
    "no order": ((0, 3, 9), (1, 8), (2, 4, 6, 10), (5, 7, 11)),
}


@pytest.mark.parametrize("name", SCATTERED)
@pytest.mark.parametrize("family", ANY_MAP)
def test_list_scheduling_is_no_waste(family: str, name: str) -> None:
    """On maps without a closed form: well over half of the time is work, and no more is live than was said."""
    where = layout(*SCATTERED[name], micro_batches=24)
    most, stages = max(map(len, SCATTERED[name])), sum(map(len, SCATTERED[name]))
    played = play(rows(family, where, {}), where)
    assert played.excess <= 0.27 * max(played.busy)
    if family in ("zb-h1", "zb-h2"):
        assert played.excess <= 0.06 * max(played.busy)
    times = {"1f1b": 2, "zb-h1": 2, "interleaved-1f1b": 3, "zb-h2": 4, "eager-1f1b": 4}.get(family)
    if times:
        for held, live in zip(SCATTERED[name], played.live, strict=True):
            assert live <= sum(-(-times * (stages - s) // most) for s in held)
    if name in ("v", "wave"):
        assert played.makespan < play(rows("gpipe", where, {}), where).makespan * 1.12


@pytest.mark.parametrize("name", SCATTERED)
def test_eager_is_1f1b_with_a_higher_limit(name: str) -> None:
    where = layout(*SCATTERED[name], micro_batches=24)
    assert rows("eager-1f1b", where, {"forwards_per_hop": 1}) == rows("1f1b", where, {})
    plain, eager = (play(rows(f, where, {}), where) for f in ("1f1b", "eager-1f1b"))
    assert eager.makespan <= plain.makespan and sum(eager.live) > sum(plain.live)
