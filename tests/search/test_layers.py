"""Layers to stages: the ILP against brute force, the fast method against the ILP."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from autopiper.cluster.spec import Cluster, DeviceType, Link, Node
from autopiper.model.spec import Model
from autopiper.plan.costs import CostTable
from autopiper.plan.space import Space
from autopiper.plan.training import Training
from autopiper.search import cuts
from autopiper.search.drafts import Piece, Workshop
from autopiper.search.layers import LayerPlan, LayerProblem, StageSlot, excess_bytes, solve_ilp
from autopiper.search.polish import exact_cuts
from autopiper.search.prices import MemberCosts, Prices
from autopiper.search.shapes import Pattern

RECOMPUTE = ("none", "full")


def _member(rng: random.Random, blocks: int, choices: tuple[str, ...], name: str) -> MemberCosts:
    speed = rng.choice((0.3, 0.5, 1.0, 1.7))
    forward = [rng.uniform(0.5, 2) / speed for _ in range(blocks)]
    kept = [rng.uniform(1, 3) for _ in range(blocks)]
    static = [rng.uniform(1, 4) for _ in range(blocks)]
    workspace = [rng.uniform(0, 2) for _ in range(blocks)]
    tied = (((0, blocks - 1), 0.8 * min(static[0], static[-1])),) if rng.random() < 0.3 and blocks > 1 else ()
    return MemberCosts(
        name=name,
        forward_s=forward,
        backward_s=[f * rng.uniform(1.5, 2.5) for f in forward],
        extra_s={c: forward if c == "full" else [0.0] * blocks for c in choices},
        kept_bytes={c: [k * (0.2 if c == "full" else 1) for k in kept] for c in choices},
        workspace_bytes={c: [w + (0.8 * k if c == "full" else 0) for w, k in zip(workspace, kept, strict=True)] for c in choices},
        static_bytes=static,
        capacity_bytes=float("inf") if rng.random() < 0.25 else rng.uniform(6, 30),
        tied=tied,
        pass_s=rng.choice((0.0, rng.uniform(0, 3))),
        message_s=rng.choice((0.0, rng.uniform(0, 1))),
    )  # fmt: skip


def _problem(rng: random.Random, *, choices: tuple[str, ...] | None = None, most_blocks: int = 7) -> LayerProblem:
    blocks, stages = rng.randint(2, most_blocks), rng.randint(1, 3)
    choices = choices or rng.choice((("none",), ("full",), RECOMPUTE))
    slots = tuple(
        StageSlot(
            members=tuple(_member(rng, blocks, choices, f"m{s}.{k}") for k in range(rng.choice((1, 1, 1, 2)))),
            in_flight=stages - s,
            reserve_bytes=rng.choice((0.0, 1.0)),
            neighbours=(s > 0) + (s < stages - 1),
        )
        for s in range(stages)
    )
    forward, backward = (
        tuple(np.array([rng.choice((0.0, rng.uniform(0, 3))) for _ in range(blocks + 1)]) for _ in range(stages - 1))
        for _ in range(2)
    )
    return LayerProblem(
        stages=slots,
        forward_transfer_s=forward,
        backward_transfer_s=backward,
        micro_batches=rng.choice((1, 2, 5, 20)),
        choices=choices,
        equal_stages=rng.random() < 0.15,
    )


def _brute(problem: LayerProblem) -> float | None:
    """Every cut and every choice of every block, priced from the plain figures of the blocks."""
    blocks, count = problem.num_blocks, len(problem.stages)
    best: float | None = None
    for inner in itertools.combinations(range(1, blocks), count - 1):
        borders = (0, *inner, blocks)
        sizes = [b - a for a, b in itertools.pairwise(borders)]
        if problem.equal_stages and (max(sizes) - min(sizes) > 1 or sizes != sorted(sizes, reverse=True)):
            continue
        least: list[float] = []  # both parts of the objective rise with each stage's time
        for slot, (start, stop) in zip(problem.stages, itertools.pairwise(borders), strict=True):
            times = []
            for chosen in itertools.product(problem.choices, repeat=stop - start):
                fits, slowest = True, 0.0
                for m in slot.members:
                    here = list(zip(range(start, stop), chosen, strict=True))
                    copies = sum(c * max(0, sum(start <= b < stop for b in bs) - 1) for bs, c in m.tied)
                    used = sum(m.block_static_bytes[b] for b, _ in here) - copies + slot.reserve_bytes
                    used += slot.in_flight * sum(m.kept_bytes[c][b] for b, c in here)
                    used += max(m.workspace_bytes[c][b] for b, c in here)
                    fits = fits and used <= m.capacity_bytes
                    seconds = sum(m.forward_s[b] + m.backward_s[b] + m.extra_s[c][b] for b, c in here)
                    slowest = max(slowest, seconds + m.pass_s + 2 * slot.neighbours * m.message_s)
                if fits:
                    times.append(slowest)
            least.append(min(times, default=float("inf")))
        moves = [
            d[s][c] for d in (problem.forward_transfer_s, problem.backward_transfer_s) for s, c in enumerate(inner)
        ]
        value = sum(least) + sum(moves) + (problem.micro_batches - 1) * max((*least, *moves))
        if value < float("inf") and (best is None or value < best):
            best = value
    return best


def _fits(problem: LayerProblem, plan: LayerPlan) -> bool:
    return all(
        excess_bytes(slot, a, b, chosen) <= 1e-4
        for slot, (a, b), chosen in zip(problem.stages, itertools.pairwise(plan.cuts), plan.recompute, strict=True)
    )


@pytest.mark.parametrize("seed", range(240))
def test_ilp_equals_brute_force(seed: int) -> None:
    problem = _problem(random.Random(seed))
    best, plan = _brute(problem), solve_ilp(problem)
    if best is None:
        assert plan is None
        return
    assert plan is not None
    assert plan.step_s(problem.micro_batches) == pytest.approx(best, rel=1e-5)
    assert plan.bound_s == pytest.approx(best, rel=1e-5)
    assert _fits(problem, plan)


def test_the_random_instances_cover_what_matters() -> None:
    problems = [_problem(random.Random(seed)) for seed in range(240)]
    solved = [(p, solve_ilp(p)) for p in problems[:120]]
    assert 10 <= sum(plan is None for _, plan in solved) <= 80, "some without a solution, most with"
    mixed = [plan for _, plan in solved if plan and len({c for r in plan.recompute for c in r}) > 1]
    assert len(mixed) >= 3, "recompute of some blocks only"


@pytest.mark.parametrize("seed", range(150))
def test_the_fast_method_equals_the_ilp_where_it_is_exact(seed: int) -> None:
    rng = random.Random(5000 + seed)
    problem = _problem(rng, choices=rng.choice((("none",), ("full",))), most_blocks=9)
    exact, fast = solve_ilp(problem), cuts.solve(problem)
    assert (exact is None) == (fast is None)
    if exact and fast:
        assert fast.step_s(problem.micro_batches) == pytest.approx(exact.step_s(problem.micro_batches), rel=1e-5)


def test_the_fast_method_is_close_where_stages_mix_choices() -> None:
    ratios = []
    for seed in range(60):
        problem = _problem(random.Random(9000 + seed), choices=RECOMPUTE)
        exact, fast = solve_ilp(problem), cuts.solve(problem)
        if fast:
            assert exact is not None and _fits(problem, fast)
            ratios.append(fast.step_s(problem.micro_batches) / exact.step_s(problem.micro_batches))
    assert len(ratios) > 20
    assert min(ratios) >= 1 - 1e-5, "the ILP is the optimum"
    assert sum(ratios) / len(ratios) < 1.03 and max(ratios) < 1.5


def test_a_slower_device_gets_fewer_blocks() -> None:
    def member(speed: float) -> MemberCosts:
        return MemberCosts(
            name=str(speed), forward_s=[1 / speed] * 12, backward_s=[2 / speed] * 12, extra_s={"none": [0.0] * 12},
            kept_bytes={"none": [0.0] * 12}, workspace_bytes={"none": [0.0] * 12}, static_bytes=[0.0] * 12,
            capacity_bytes=float("inf"),
        )  # fmt: skip

    free = np.zeros(13)
    problem = LayerProblem(
        stages=tuple(StageSlot(members=(member(v),), in_flight=1) for v in (1.0, 2.0, 3.0)),
        forward_transfer_s=(free, free), backward_transfer_s=(free, free), micro_batches=100,
    )  # fmt: skip
    for plan in (solve_ilp(problem), cuts.solve(problem)):
        assert plan is not None
        assert plan.cuts == (0, 2, 6, 12) and plan.bottleneck_s == pytest.approx(6)


def test_exact_cuts_never_make_a_draft_worse() -> None:
    better = 0
    for seed in range(250):
        problem = _problem(random.Random(9000 + seed), choices=RECOMPUTE)
        fast = cuts.solve(problem)
        if fast is None or problem.equal_stages:
            continue
        blocks = problem.num_blocks
        model = Model.chain(num_blocks=blocks)
        link = Link(bytes_per_s=1.0)
        cluster = Cluster(
            name="c",
            device_types=(DeviceType(name="d", memory_bytes=1.0, peak_flops={"fp32": 1.0}, memory_bytes_per_s=1.0),),
            nodes=(Node(name="n", devices=("d",) * 3, intra=link, nic=link),),
        )
        costs = CostTable.from_layers(forward_s=[1.0] * blocks, backward_s=[1.0] * blocks)
        training = Training(global_batch_size=problem.micro_batches, precision="fp32")
        shop = Workshop(Prices(model, cluster, training, costs, RECOMPUTE), range(3), problem.micro_batches, Space())
        count = len(problem.stages)
        piece = Piece(
            shape=Pattern(stages=(("d", 1),) * count, samples=1).shape(1),
            members=tuple(((s,),) for s in range(count)), problem=problem, layers=fast, share=problem.micro_batches,
        )  # fmt: skip
        draft = shop.finish((piece,), "1f1b", RECOMPUTE, "pipeline")
        exact = exact_cuts(shop, draft)
        if exact is not None:
            better += 1
            assert exact.estimate_s < draft.estimate_s
            best = solve_ilp(problem)
            assert best is not None
            assert exact.pieces[0].layers.step_s(problem.micro_batches) == pytest.approx(
                best.step_s(problem.micro_batches), rel=2e-3
            )
    assert better > 2, "mixed recompute is where the fast method falls short"
