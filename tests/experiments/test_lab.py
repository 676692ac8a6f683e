"""The lab gives each process the share of a core that it promises, and cleans up."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from multiprocessing.queues import Queue
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = str(Path(__file__).parents[2] / "experiments")


@pytest.fixture
def lab() -> Iterator[ModuleType]:
    sys.path.insert(0, FOLDER)
    yield importlib.import_module("lab")
    sys.path.remove(FOLDER)


def _spin(setup: Any, rank: int, seconds: float, answers: Queue[tuple[int, float]]) -> None:
    setup(rank)
    wall, cpu = time.perf_counter(), time.process_time()
    while time.perf_counter() - wall < seconds:
        pass
    answers.put((rank, (time.process_time() - cpu) / (time.perf_counter() - wall)))


def _throttled(group: Path) -> float:
    """Share of the periods in which a group wanted more than its quota."""
    counts = dict(line.split() for line in (group / "cpu.stat").read_text().splitlines())
    return int(counts["nr_throttled"]) / max(1, int(counts["nr_periods"]))


def test_processes_get_the_share_of_a_core_that_was_promised(lab: ModuleType) -> None:
    reason = lab.why_not()
    if reason is not None:
        pytest.skip(reason)
    context = multiprocessing.get_context("fork")
    with lab.Quotas({"half": 0.5, "fifth": 0.2}) as quotas:
        setup = quotas.setup(("half", "fifth"))
        answers: Queue[tuple[int, float]] = context.Queue()
        ranks = [context.Process(target=_spin, args=(setup, rank, 1.5, answers)) for rank in range(2)]
        for process in ranks:
            process.start()
        shares = dict(answers.get(timeout=30) for _ in ranks)
        for process in ranks:
            process.join()
        throttled = [_throttled(Path(group)) for group in setup.groups]
    for rank, promised in enumerate((0.5, 0.2)):
        assert 0 < shares[rank] <= promised * 1.05
        if throttled[rank] > 0.9:  # else the machine was busy and had less to give than the quota allows
            assert shares[rank] == pytest.approx(promised, rel=0.05)
    assert not [g for g in setup.groups if Path(g).exists()]


def test_groups_of_a_run_that_died_are_removed(lab: ModuleType) -> None:
    reason = lab.why_not()
    if reason is not None:
        pytest.skip(reason)
    pid = os.fork()
    if pid == 0:
        lab.Quotas({"half": 0.5}).setup(("half",))
        os._exit(1)
    os.waitpid(pid, 0)
    left = lab.find_hierarchy().base.glob(f"{lab.PREFIX}{pid}-*")
    assert not list(left)


def test_a_refusal_says_what_is_missing(lab: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(
        lab.NotPermitted, match=r"CPU quotas are not permitted here: v1: no such hierarchy .*; v2: no such"
    ):
        lab.find_hierarchy(tmp_path)


def test_quota_below_what_the_kernel_takes_is_refused(lab: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"quota of 'tiny' is 0.05; allowed: 0.1 cores or more"):
        lab.Quotas({"tiny": 0.05})


def test_version_two_writes_quota_period_and_weight(lab: ModuleType, tmp_path: Path) -> None:
    group = lab.Hierarchy(tmp_path, 2).make("g", 0.25)
    assert (group / "cpu.max").read_text() == "2500 10000"
    assert (group / "cpu.weight").read_text() == "2500"


def test_packing_never_promises_a_core_twice(lab: ModuleType) -> None:
    assert lab.pack([0.84, 0.48, 0.30, 0.18], [0, 1]) == (0, 1, 1, 1)
    assert lab.pack([0.30, 0.84], [5, 7]) == (7, 5)
    assert lab.pack([0.7, 0.7, 0.7], [0, 1]) is None
