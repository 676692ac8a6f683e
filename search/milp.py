"""Mixed-integer linear programs: the only file that knows PuLP and HiGHS.

Variables and sums of them are PuLP's and are opaque elsewhere: they add, scale and compare as one would write them.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import pulp

from autopiper._data import data
from autopiper.errors import AutoPiperError

Status = Literal["optimal", "feasible", "infeasible", "unbounded", "unknown"]
_INFINITY = float("inf")


@data
class Solution:
    """What the solver found, and how good that is proven to be."""

    status: Status
    """"optimal" = within the gap asked for; "feasible" = stopped before by a limit; "unknown" = stopped with nothing."""
    objective: float = _INFINITY
    bound: float = -_INFINITY
    """No solution is below this (for a maximum: above)."""
    values: dict[str, float]
    seconds: float = 0.0

    @property
    def found(self) -> bool:
        """Whether there are values."""
        return self.status in ("optimal", "feasible")

    @property
    def gap(self) -> float:
        """Relative distance of the objective from the proven bound."""
        if not self.found:
            return _INFINITY
        return abs(self.objective - self.bound) / max(abs(self.objective), 1e-12)


class Milp:
    """One program, built step by step and solved once or, with further constraints, again."""

    def __init__(self, name: str, *, maximise: bool = False) -> None:
        self._problem = pulp.LpProblem(name, pulp.LpMaximize if maximise else pulp.LpMinimize)
        self._maximise = maximise

    def variable(self, name: str, low: float | None = 0.0, high: float | None = None, *, integer: bool = False) -> Any:
        """Add a variable; `name` must be unique in the program and of letters, digits and underscores."""
        make = getattr(self._problem, "add_variable", pulp.LpVariable)  # older PuLP has no add_variable
        return make(name, low, high, pulp.LpInteger if integer else pulp.LpContinuous)

    def binary(self, name: str) -> Any:
        """Add a variable that is 0 or 1."""
        return self.variable(name, 0, 1, integer=True)

    @staticmethod
    def sum(terms: Iterable[Any]) -> Any:
        """Add up many terms; much faster than +."""
        return pulp.lpSum(terms)

    def objective(self, expression: Any) -> None:
        """Set what is minimised (or maximised)."""
        self._problem.setObjective(pulp.lpSum([expression]))

    def require(self, constraint: Any) -> None:
        """Add a constraint such as `x + y <= 3`."""
        self._problem += constraint

    def solve(
        self, *, gap: float = 0.0, time_limit_s: float | None = None, node_limit: int | None = None, seed: int = 0
    ) -> Solution:
        """Solve by HiGHS on one thread, quietly.

        Stops at the relative `gap`, at `node_limit` or at `time_limit_s`; without the last the result is reproducible.
        """
        options: dict[str, Any] = {"random_seed": seed, "threads": 1, "mip_abs_gap": 1e-12}
        if node_limit is not None:
            options["mip_max_nodes"] = node_limit
        solver = pulp.HiGHS(msg=False, gapRel=gap, timeLimit=time_limit_s, **options)
        started = time.monotonic()
        try:
            with _quiet():
                self._problem.solve(solver)
        except KeyError:
            # PuLP has copied the values, then has no word for how HiGHS stopped: at a limit of nodes.
            if self._problem.solverModel.getModelStatus().name != "kSolutionLimit":
                raise
        except pulp.PulpSolverError as fault:
            raise AutoPiperError(f"the solver HiGHS failed on '{self._problem.name}': {fault}") from fault
        return self._result(time.monotonic() - started)

    def _result(self, seconds: float) -> Solution:
        highs = self._problem.solverModel
        model_status, info = highs.getModelStatus().name, highs.getInfo()
        has_values = info.primal_solution_status == 2  # HiGHS: kSolutionStatusFeasible
        if model_status == "kInfeasible" or (model_status == "kUnboundedOrInfeasible" and not has_values):
            return Solution(status="infeasible", values={}, seconds=seconds)
        if model_status == "kUnbounded":
            return Solution(status="unbounded", values={}, seconds=seconds)
        if not has_values:
            return Solution(status="unknown", values={}, seconds=seconds)
        sign = -1.0 if self._maximise else 1.0  # PuLP hands HiGHS the negative of a maximum
        constant = float(self._problem.objective.constant)
        objective = sign * info.objective_function_value + constant
        integer = any(v.cat == pulp.LpInteger for v in self._problem.variables())
        bound = sign * info.mip_dual_bound + constant if integer else objective
        return Solution(
            status="optimal" if model_status == "kOptimal" else "feasible",
            objective=objective,
            bound=bound,
            values={v.name: float(v.value()) for v in self._problem.variables() if v.value() is not None},
            seconds=seconds,
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Send file descriptor 1 nowhere: HiGHS prints its banner there past Python, into the middle of JSON output."""
    sys.stdout.flush()
    try:
        kept = os.dup(1)
    except OSError:  # closed: nothing to protect
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)
