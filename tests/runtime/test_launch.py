"""Ranks on this machine: results, and that one failing rank ends all, with its own traceback and nobody left."""

from __future__ import annotations

import multiprocessing as mp
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import runtime_ranks
from runtime_cases import Case, cpu_cluster, describe, make_plan, run_reference

from autopiper.errors import PlanError, RuntimeFault
from autopiper.plan import Plan, Strategy, Training
from autopiper.runtime import run_local
from autopiper.runtime.launch import launch

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Two stages; the second has the loss."""
    model, cluster = describe("sequential", "fp32"), cpu_cluster(2)
    training = Training(global_batch_size=4, precision="fp32", optimizer="sgd-momentum")
    return make_plan(
        model, cluster, Strategy.uniform(model, cluster, training, micro_batch_size=2, pipeline_parallel_size=2)
    )


def test_results_by_rank_and_the_environment_of_torchrun(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOPIPER_TEST_DIRECTORY", str(tmp_path))
    results = run_local(plan, runtime_ranks.train, setup=runtime_ranks.note_rank, timeout=100)
    assert len(results) == 2
    assert results[0]["losses"] == results[1]["losses"]
    assert results[0]["losses"] == pytest.approx(
        run_reference(plan, Case(module="sequential", steps=3))["losses"], rel=1e-5
    )
    assert len(results[0]["environment"]) == 6
    assert results[0]["threads"] == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["setup0", "setup1"]


@pytest.mark.parametrize(
    ("fail", "words"),
    [
        ("raise", r"rank 1 \(p0\.s1\.m0\), action 1F0: ArithmeticError: the loss went wrong on purpose"),
        ("pending", r"rank 1 \(p0\.s1\.m0\), action 1F0: ArithmeticError: the loss went wrong on purpose"),
        ("kill", r"rank 1 was ended by SIGKILL \(out of memory\?\) without a traceback"),
        ("exit", r"rank 1 left with exit code 7 without a traceback"),
    ],
)
def test_one_failing_rank_ends_all(plan: Plan, fail: str, words: str) -> None:
    # A rank that hung would be reported as the timeout, in other words.
    with pytest.raises(RuntimeFault, match=words) as fault:
        run_local(plan, runtime_ranks.train, fail, timeout=100)
    text = str(fault.value)
    if fail in ("raise", "pending"):
        assert text.count("Traceback (most recent call last)") == 1
        assert re.search(r"runtime_ranks\.py\", line \d+, in misbehave", text)
        assert "rank 0" not in text
    assert not mp.active_children()


def test_a_hanging_rank_is_ended_at_the_timeout(plan: Plan) -> None:
    with pytest.raises(RuntimeFault, match=r"rank 0, 1 did not end within the timeout of 5 s"):
        run_local(plan, runtime_ranks.train, "hang", timeout=5)
    assert not mp.active_children()


def test_a_refusal_stays_a_plan_error(plan: Plan) -> None:
    with pytest.raises(PlanError, match="the module has 5 blocks"):
        run_local(plan, runtime_ranks.fail_early, timeout=100)
    assert not mp.active_children()


def test_what_cannot_be_handed_over(plan: Plan) -> None:
    with pytest.raises(PlanError, match="cannot hand its arguments to other processes"):
        run_local(plan, lambda plan: None)


def test_interrupt_ends_all(plan: Plan) -> None:
    timer = threading.Timer(5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            run_local(plan, runtime_ranks.train, "hang", timeout=100)
    finally:
        timer.cancel()
    assert not mp.active_children()


def test_launch_runs_a_script_on_every_rank(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys\n"
        "from autopiper.plan import load_plan\n"
        "plan = load_plan(os.environ['AUTOPIPER_PLAN'])\n"
        "assert __name__ == '__main__'\n"
        "from torch.utils.data import DataLoader\n"
        "assert len(list(DataLoader(range(4), batch_size=2, num_workers=1))) == 2\n"
        "open(sys.argv[1] + os.environ['RANK'], 'w').write(str(len(plan.devices)))\n"
        "if len(sys.argv) > 2: sys.exit(3)\n"
    )
    assert launch(tmp_path / "plan.json", script, [str(tmp_path / "out")]) == 0
    assert [(tmp_path / f"out{rank}").read_text() for rank in (0, 1)] == ["2", "2"]
    with pytest.raises(RuntimeFault, match="the script ended with exit code 3"):
        launch(tmp_path / "plan.json", script, [str(tmp_path / "out"), "leave"])
    with pytest.raises(PlanError, match="there is no script"):
        launch(tmp_path / "plan.json", tmp_path / "none.py")


def test_without_run_local_a_failing_rank_leaves_and_the_others_notice(plan: Plan, tmp_path: Path) -> None:
    """As under torchrun: nobody kills anybody, every process ends by itself."""
    plan.save(tmp_path / "plan.json")
    code = (
        "import runtime_ranks; from autopiper.plan import load_plan;"
        f"runtime_ranks.train(load_plan({str(tmp_path / 'plan.json')!r}), 'pending')"
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, cwd=HERE,
            env=os.environ
            | {
                "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                "GLOO_SOCKET_IFNAME": "lo",
            },
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        limit = time.monotonic() + 100
        outputs = [rank.communicate(timeout=max(1, limit - time.monotonic()))[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [1, 1]
    assert "ArithmeticError: the loss went wrong on purpose" in outputs[1]
    assert re.search(r"RuntimeFault: rank 0 \(p0\.s0\.m0\), action 0RECV_B\d<0\[0:2\]: RuntimeError: ", outputs[0]), (
        outputs[0]
    )
