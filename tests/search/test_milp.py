"""The solver behind one door: right answers, clear statuses, proven bounds, and silence."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys

import pytest

from autopiper.search.milp import Milp, Solution


def _knapsack(values: list[int], weights: list[int], room: int) -> Solution:
    milp = Milp("knapsack", maximise=True)
    taken = [milp.binary(f"x{i}") for i in range(len(values))]
    milp.objective(Milp.sum(v * x for v, x in zip(values, taken, strict=True)) + 5)
    milp.require(Milp.sum(w * x for w, x in zip(weights, taken, strict=True)) <= room)
    return milp.solve()


@pytest.mark.parametrize("seed", range(20))
def test_knapsacks_equal_brute_force(seed: int) -> None:
    rng = random.Random(seed)
    count = rng.randint(1, 8)
    values, weights = ([rng.randint(1, 20) for _ in range(count)] for _ in range(2))
    room = rng.randint(0, 60)
    found = _knapsack(values, weights, room)
    best = max(
        sum(itertools.compress(values, taken))
        for taken in itertools.product((0, 1), repeat=count)
        if sum(itertools.compress(weights, taken)) <= room
    )
    assert found.status == "optimal"
    assert found.objective == pytest.approx(best + 5)
    assert found.bound == pytest.approx(best + 5)
    assert found.gap < 1e-9


def test_statuses() -> None:
    milp = Milp("none")
    x = milp.variable("x", 0, 1, integer=True)
    milp.objective(x)
    milp.require(2 * x == 1)
    assert milp.solve().status == "infeasible"
    free = Milp("unbounded", maximise=True)
    free.objective(free.variable("x"))
    assert free.solve().status == "unbounded"
    linear = Milp("linear")
    y = linear.variable("y", 0, None)
    linear.objective(2 * y)
    linear.require(y >= 1.5)
    solved = linear.solve()
    assert (solved.status, solved.objective, solved.bound, solved.gap) == ("optimal", 3.0, 3.0, 0.0)
    assert solved.values == {"y": 1.5}


def test_a_time_limit_of_nothing_is_unknown_or_bounded() -> None:
    rng = random.Random(0)
    milp = Milp("hard", maximise=True)
    taken = [milp.binary(f"x{i}") for i in range(60)]
    for _ in range(20):
        milp.require(Milp.sum(rng.randint(1, 99) * x for x in taken) <= 900)
    milp.objective(Milp.sum(rng.randint(1, 99) * x for x in taken))
    found = milp.solve(time_limit_s=0.0)
    assert found.status in ("unknown", "feasible")
    if found.found:
        assert found.bound >= found.objective and found.gap > 0


@pytest.mark.parametrize("nodes", [0, 1, 20])
def test_a_limit_of_nodes_stops_with_what_there_is(nodes: int) -> None:
    rng = random.Random(0)
    milp = Milp("hard", maximise=True)
    taken = [milp.binary(f"x{i}") for i in range(60)]
    rows = [[rng.randint(1, 99) for _ in taken] for _ in range(20)]
    values = [rng.randint(1, 99) for _ in taken]
    for row in rows:
        milp.require(Milp.sum(w * x for w, x in zip(row, taken, strict=True)) <= 900)
    milp.objective(Milp.sum(v * x for v, x in zip(values, taken, strict=True)))
    found = milp.solve(node_limit=nodes)
    assert found.status in ("feasible", "unknown")
    if found.found:
        chosen = [round(found.values[f"x{i}"]) for i in range(60)]
        assert all(sum(w * x for w, x in zip(row, chosen, strict=True)) <= 900 for row in rows)
        assert sum(v * x for v, x in zip(values, chosen, strict=True)) == pytest.approx(found.objective)
        assert found.bound > found.objective


def test_nothing_reaches_the_output_of_the_process() -> None:
    script = """
from autopiper.search.milp import Milp
milp = Milp("quiet")
x = milp.variable("x", 0, 10, integer=True)
milp.objective(x)
milp.require(3 * x >= 7)
print('{"first": 1,', flush=False)
found = milp.solve()
print(f'"x": {found.values["x"]}' + '}')
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {"first": 1, "x": 3.0}
    assert done.stderr == ""
