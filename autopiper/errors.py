"""The errors of AutoPiper. Each is also the built-in that a reader would expect.

A message names the field, what came, what is allowed and the nearest fix.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class AutoPiperError(Exception):
    """Base of every error that AutoPiper raises on purpose."""


class ModelError(AutoPiperError, ValueError):
    """A model that cannot be described, or a description that contradicts itself."""


class ClusterError(AutoPiperError, ValueError):
    """A cluster file or object that is wrong."""


class CostError(AutoPiperError, ValueError):
    """A price that is missing, impossible, or belongs to something else."""


class PlanError(AutoPiperError, ValueError):
    """A strategy, directive, program or plan that is wrong; `faults` lists every fault found."""

    def __init__(self, message: str, faults: Iterable[str] = ()) -> None:
        self.faults = tuple(faults)
        super().__init__("\n  - ".join((message, *self.faults)) if self.faults else message)


class InfeasibleError(AutoPiperError, RuntimeError):
    """No plan of the space fits the cluster; the message says what the nearest miss lacks."""


class ExportError(AutoPiperError, ValueError):
    """A plan that the chosen launcher cannot carry; `faults` lists every reason."""

    def __init__(self, message: str, faults: Iterable[str] = ()) -> None:
        self.faults = tuple(faults)
        super().__init__("\n  - ".join((message, *self.faults)) if self.faults else message)


class RuntimeFault(AutoPiperError, RuntimeError):
    """A fault while training: which rank, stage and action, and why."""


def nearest(word: object, allowed: Iterable[str]) -> str:
    """Return " (did you mean 'x'?)" for the closest allowed word whatever its case, or nothing where none is close."""
    if not isinstance(word, str):
        return ""
    by_lower = {w.lower(): w for w in allowed}
    found = difflib.get_close_matches(word.lower(), list(by_lower), n=1, cutoff=0.5)
    return f" (did you mean '{by_lower[found[0]]}'?)" if found else ""
