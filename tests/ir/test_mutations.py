"""Damaged Programs are refused, or do what the whole ones do: judged by running them in symbols at random speeds.

The suite tries what takes seconds; AUTOPIPER_MUTATIONS=12000 tries that many, each at more speeds.
"""

from __future__ import annotations

import os
import random
from collections import Counter

import pytest
from mutations import mutate
from random_strategies import random_graph
from symbolic_run import Wrong, run

from autopiper import ir
from autopiper.errors import PlanError
from autopiper.ir.schedules import FAMILIES

MUTATIONS = int(os.environ.get("AUTOPIPER_MUTATIONS", "900"))
PER_STRATEGY = 25
TIMINGS = 3 if MUTATIONS < 5000 else 6
"""Random timings of each damaged step that was let through."""


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_whole_programs_are_proved_and_run(family: str) -> None:
    """What lowering writes is proved, folded or not, and right at every speed."""
    for seed in range(8):
        graph = random_graph(random.Random(f"{family} {seed}"), family)
        for programs in (ir.lower(graph), ir.lower_all(graph)):
            assert ir.verify(graph, programs)
            for timing in range(2):
                run(graph, programs, timing)


def try_mutations(family: str, count: int, seed: int = 0) -> Counter[str]:
    """Damage `count` times; return how many were refused, and let through. Raises AssertionError for a wrong one."""
    found: Counter[str] = Counter()
    for number in range(-(-count // PER_STRATEGY)):
        rng = random.Random(f"{family} {seed} {number}")
        graph = random_graph(rng, family)
        whole = ir.lower(graph) if number % 2 else ir.lower_all(graph)
        for _ in range(PER_STRATEGY):
            what, damaged = mutate(rng, graph, whole)
            if damaged == list(whole):
                continue
            try:
                ir.verify(graph, damaged)
            except PlanError:
                found["refused"] += 1
                continue
            found["harmless"] += 1
            for timing in range(TIMINGS):
                try:
                    run(graph, damaged, timing)
                except Wrong as wrong:
                    raise AssertionError(
                        f"{family}, strategy {number}: let through, but wrong: {what}: {wrong}"
                    ) from None
    return found


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_damage_is_refused_or_harmless(family: str) -> None:
    found = try_mutations(family, MUTATIONS // len(FAMILIES))
    print(f"{family}: {dict(found)}")
    assert found["refused"] > 2 * found["harmless"] > 0
