"""Plan: the decision with everything that it rests on, complete in one file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from math import inf
from pathlib import Path

from autopiper._data import data, require
from autopiper.cluster.spec import Cluster
from autopiper.errors import PlanError
from autopiper.model.spec import Model
from autopiper.plan.actions import Program
from autopiper.plan.costs import CostTable
from autopiper.plan.strategy import Strategy
from autopiper.plan.training import Training

SCHEMA_VERSION = 2


@data
class Alternative:
    """Another plan that the search met: what it is in words, its predicted step time, and the strategy itself."""

    label: str
    step_time_s: float
    strategy: Strategy
    note: str = ""


@data
class Trial:
    """One line of the search's history."""

    number: int
    label: str
    step_time_s: float | None
    """None = pruned or infeasible."""
    elapsed_s: float


@data
class Provenance:
    """How the plan was found."""

    autopiper_version: str
    seed: int | None = None
    n_trials: int | None = None
    search_s: float = 0.0
    libraries: Mapping[str, str] = field(default_factory=dict)
    history: tuple[Trial, ...] = ()


@data
class Plan:
    """A strategy for a model on a cluster, with its programs, prices, predictions and bound."""

    schema_version: int = SCHEMA_VERSION
    model: Model
    cluster: Cluster
    costs: CostTable
    strategy: Strategy
    """`strategy.training` has its precision resolved."""
    programs: tuple[Program, ...]
    step_time_s: float
    makespan_s: float
    relative_error: float
    """Half-width of the error bar of the predicted times, from the prices."""
    peak_memory_bytes: tuple[float, ...]
    """Predicted, by rank."""
    lower_bound_s: float
    binding: str
    """Which bound is the tightest, in words."""
    uniform: Alternative | None = None
    """The best uniform 3D layout on the same cluster."""
    alternatives: tuple[Alternative, ...] = ()
    notes: tuple[str, ...] = ()
    """Idle devices and why, assumptions made, anything a reader must know."""
    provenance: Provenance

    def __post_init__(self) -> None:
        numbers = {
            name: getattr(self, name) for name in ("step_time_s", "makespan_s", "relative_error", "lower_bound_s")
        }
        numbers |= {f"peak_memory_bytes[{rank}]": value for rank, value in enumerate(self.peak_memory_bytes)}
        wrong = [f"{name} is {value}; it must be zero or more and finite"
                 for name, value in numbers.items() if not 0 <= value < inf]  # fmt: skip
        if wrong:
            raise PlanError("a plan's predictions are wrong:", wrong)

    def __repr__(self) -> str:  # one line: the fields themselves fill a book
        return (
            f"<Plan of {self.model.name} on {self.cluster.name}: {self.step_time_s:.4g} s a step, "
            f"{len(self.programs)} programs>"
        )

    @property
    def training(self) -> Training:
        """Batch, precision and optimizer."""
        return self.strategy.training

    @property
    def gap(self) -> float:
        """How far the step time may be above the best possible, relative: step / bound - 1."""
        return self.step_time_s / self.lower_bound_s - 1 if self.lower_bound_s else float("inf")

    @property
    def devices(self) -> tuple[int, ...]:
        """Used device ids, by rank."""
        pairs = {r: d for p in self.programs for r, d in zip(p.all_ranks, p.all_devices, strict=True)}
        return tuple(pairs[r] for r in sorted(pairs))

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, whole or not at all."""
        from autopiper.plan import file

        require(PlanError, "path", path, str | Path)
        file.write(path, "plan", self)


def load_plan(path: str | Path) -> Plan:
    """Read a plan that `Plan.save` wrote; never executes code. Raises PlanError naming the field that is wrong."""
    from autopiper.plan import file

    return file.read(path, "plan", Plan, PlanError)
