"""Worker processes that live as long as the session and run one plan after another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # the cases are shared with processes that know nothing of pytest

from runtime_cases import Case  # noqa: E402

from autopiper.plan import Plan  # noqa: E402


class Pool:
    """Four ranks; a plan uses the first of them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._workers: list[subprocess.Popen[str]] = []
        self._jobs = 0

    def run(self, plan: Plan, case: Case) -> list[dict[str, Any]]:
        """Run a plan and return the result of each rank, {"refused": text} where the plan was refused.

        A fault of any rank fails the test, with all tracebacks.
        """
        if not self._workers:
            self._workers = [
                subprocess.Popen(
                    [sys.executable, str(HERE / "runtime_worker.py"), str(rank)],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                    env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", "TRANSFORMERS_VERBOSITY": "error"},
                )
                for rank in range(4)
            ]  # fmt: skip
        self._jobs += 1
        base = self._directory / f"job{self._jobs}"
        plan.save(f"{base}.json")
        world_size = case.world_size or len(plan.devices)
        job = {
            "plan": f"{base}.json", "case": asdict(case), "store": f"{base}.store", "out": str(base),
            "world_size": world_size,
        }  # fmt: skip
        for worker in self._workers:
            assert worker.stdin is not None
            worker.stdin.write(json.dumps(job) + "\n")
            worker.stdin.flush()
        faults = []
        for worker in self._workers:
            assert worker.stdout is not None
            answer = worker.stdout.readline()
            fault = json.loads(answer)["fault"] if answer else "a worker died"
            if fault:
                faults.append(fault)
        if faults:
            self.close()
            pytest.fail("\n\n".join(faults))
        return [torch.load(f"{base}.{rank}", weights_only=False) for rank in range(world_size)]

    def refusal(self, plan: Plan, case: Case) -> str:
        """Run a plan that must be refused by all ranks alike, before the first message; return what they say."""
        found = self.run(plan, case)
        assert [set(f) for f in found] == [{"refused", "messages"}] * len(found)
        assert len({f["refused"] for f in found}) == 1
        assert {f["messages"] for f in found} <= {found[0]["messages"]}
        self.messages = int(found[0]["messages"])
        return str(found[0]["refused"])

    def close(self) -> None:
        for worker in self._workers:
            worker.kill()
            worker.wait()
            for pipe in (worker.stdin, worker.stdout):
                if pipe is not None:
                    pipe.close()
        self._workers = []


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    made = Pool(tmp_path_factory.mktemp("pool"))
    yield made
    made.close()
