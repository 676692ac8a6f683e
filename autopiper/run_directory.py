"""The folder that a search leaves behind.

plan.json, resolved.toml (what was settled, in words), step.trace.json (one step, for ui.perfetto.dev) and log.txt.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from autopiper.cluster.spec import Cluster
from autopiper.errors import PlanError
from autopiper.model.spec import Model
from autopiper.plan.costs import CostTable
from autopiper.plan.plan import Plan
from autopiper.plan.space import Space
from autopiper.plan.timeline import Timeline
from autopiper.plan.training import Training

PLAN, RESOLVED, TRACE, LOG = "plan.json", "resolved.toml", "step.trace.json", "log.txt"
MOST_TRACED = 50_000
"""Actions of all programs above which nobody waits for a trace that was not asked for; it takes seconds by then."""


def _toml(value: Any) -> str:
    """Write one TOML value; strings as JSON writes them, which TOML reads alike."""
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(k, ensure_ascii=False)} = {_toml(v)}" for k, v in value.items()) + " }"
    return json.dumps(value, ensure_ascii=False)


def _table(name: str, values: dict[str, Any]) -> str:
    # TOML has no null: what nobody settled is left out.
    return "\n".join([f"[{name}]", *(f"{k} = {_toml(v)}" for k, v in values.items() if v is not None), ""])


class RunDirectory:
    """Writes the files of one search; with `path=None` it only shows progress, and with `show=False` not even that."""

    def __init__(self, path: str | Path | None, *, show: bool = False) -> None:
        self.path = None if path is None else Path(path)
        self.show = show
        self._began = time.monotonic()
        self._log: IO[str] | None = None
        self._best_s = math.inf
        self._on_line = False

    def __enter__(self) -> Self:
        if self.path is not None:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                self._log = (self.path / LOG).open("a")
            except (OSError, ValueError) as fault:
                raise PlanError(f"cannot write to run_dir '{self.path}': {fault}") from None
            self._log.write(f"# {datetime.now().astimezone().isoformat(timespec='seconds')}\n")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._on_line:
            print(file=sys.stderr)
        if self._log is not None:
            self._log.close()

    def log(self, message: str) -> None:
        """Keep one line of progress."""
        if self._log is not None:
            self._log.write(f"{self._elapsed()}  {message}\n")
            self._log.flush()

    def trial(self, number: int, label: str, best_s: float) -> None:
        """Keep a line about a trial of the search. On a terminal it replaces the last one; else only gains are shown."""
        best = f"best so far {best_s:.4g} s" if math.isfinite(best_s) else "nothing fits yet"
        self.log(f"trial {number}: {label}; {best}")
        if not self.show:
            return
        line = f"{self._elapsed()}  {best}, trial {number}: {label}"
        if sys.stderr.isatty():
            width = shutil.get_terminal_size().columns
            print(f"\r{line[: width - 1]:<{width - 1}}", end="", file=sys.stderr, flush=True)
            self._on_line = True
        elif best_s < self._best_s:
            print(line, file=sys.stderr, flush=True)
        self._best_s = best_s

    def _elapsed(self) -> str:
        return f"{time.monotonic() - self._began:7.1f} s"

    def resolved(
        self,
        model: Model,
        cluster: Cluster,
        training: Training,
        costs: CostTable,
        space: Space,
        notes: Sequence[str],
        settings: Mapping[str, Any],
    ) -> None:
        """Write what the arguments came to mean: before the search starts, and again when the precision is settled."""
        if self.path is None:
            return
        from autopiper.plan.file import write_text

        tables = {
            "model": {
                "name": model.name, "source": model.source, "blocks": len(model.blocks),
                "parameters": model.parameters, "sequence_length": model.sequence_length,
                "fingerprint": model.fingerprint(),
            },
            "cluster": {
                "name": cluster.name, "nodes": len(cluster.nodes), "devices": cluster.counts(),
                "fingerprint": cluster.fingerprint(),
            },
            "training": asdict(training) | (
                {"bytes_per_parameter": training.bytes_per_parameter} if training.precision
                else {"precision_reason": "open: the best that all used devices support"}
            ),
            "costs": {"source": costs.source},
            "search": dict(settings),
            "space": asdict(space),
            "notes": {"lines": list(notes)},
        }  # fmt: skip
        text = "# What this search was asked, with everything left open settled. See log.txt for how it went.\n\n"
        write_text(self.path / RESOLVED, text + "\n".join(_table(name, values) for name, values in tables.items()))

    def plan(self, plan: Plan) -> None:
        """Write the plan, whole or not at all."""
        if self.path is not None:
            plan.save(self.path / PLAN)
            self.log(f"wrote {self.path / PLAN}")

    def trace(self, plan: Plan, simulate: Callable[[Plan], Timeline]) -> None:
        """Write the trace of the plan's step, unless it is long. The plan is safe by now: nothing here may lose it."""
        if self.path is None:
            return
        from autopiper.report.trace import write_trace

        target = self.path / TRACE
        actions = sum(len(stream) for program in plan.programs for stream in program.streams.values())
        try:
            if actions > MOST_TRACED:
                target.unlink(missing_ok=True)  # that of an earlier search would be taken for this one's
                self.log(f"left {TRACE} out: a step of {actions:,} actions; `autopiper trace` writes it")
                return
            write_trace(simulate(plan), target, plan.cluster)
        except (OSError, KeyboardInterrupt) as fault:
            self.log(f"left {TRACE} out: {type(fault).__name__} {fault}".rstrip())
        else:
            self.log(f"wrote {target}")
