"""AutoPiper: from a model and the accelerators you have to a training plan that runs.

    plan = autopiper.optimize(model, cluster)

Importing this package is light; each name below loads what it needs when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from autopiper._version import __version__ as __version__

if TYPE_CHECKING:
    from autopiper import costmodel as costmodel
    from autopiper import runtime as runtime
    from autopiper import search as search
    from autopiper.api import make_plan as make_plan
    from autopiper.api import optimize as optimize
    from autopiper.api import price as price
    from autopiper.api import profile as profile
    from autopiper.api import simulate as simulate
    from autopiper.api import trace as trace
    from autopiper.api import verify as verify
    from autopiper.cluster import Cluster as Cluster
    from autopiper.errors import AutoPiperError as AutoPiperError
    from autopiper.errors import ClusterError as ClusterError
    from autopiper.errors import CostError as CostError
    from autopiper.errors import ExportError as ExportError
    from autopiper.errors import InfeasibleError as InfeasibleError
    from autopiper.errors import ModelError as ModelError
    from autopiper.errors import PlanError as PlanError
    from autopiper.errors import RuntimeFault as RuntimeFault
    from autopiper.ir.piper_json import read_piper as read_piper
    from autopiper.ir.piper_write import write_piper as write_piper
    from autopiper.model import Model as Model
    from autopiper.model.annotations import annotate as annotate
    from autopiper.plan import CostTable as CostTable
    from autopiper.plan import Plan as Plan
    from autopiper.plan import Space as Space
    from autopiper.plan import Strategy as Strategy
    from autopiper.plan import Timeline as Timeline
    from autopiper.plan import Training as Training
    from autopiper.plan import load_plan as load_plan
    from autopiper.plan.directives import buckets as buckets
    from autopiper.plan.directives import cut as cut
    from autopiper.plan.directives import degrees as degrees
    from autopiper.plan.directives import order as order
    from autopiper.plan.directives import pipeline as pipeline
    from autopiper.plan.directives import place as place
    from autopiper.plan.directives import recompute as recompute
    from autopiper.plan.directives import replicate as replicate
    from autopiper.plan.directives import shard as shard
    from autopiper.plan.directives import slices as slices
    from autopiper.plan.directives import split as split


_WHERE = {
    **dict.fromkeys(("make_plan", "optimize", "price", "profile", "simulate", "trace", "verify"), "autopiper.api"),
    "Cluster": "autopiper.cluster",
    "Model": "autopiper.model",
    "annotate": "autopiper.model.annotations",
    "read_piper": "autopiper.ir.piper_json",
    "write_piper": "autopiper.ir.piper_write",
    **dict.fromkeys(
        ("CostTable", "Plan", "Space", "Strategy", "Timeline", "Training", "load_plan"), "autopiper.plan"
    ),
    **dict.fromkeys(
        (
            "AutoPiperError", "ClusterError", "CostError", "ExportError", "InfeasibleError", "ModelError", "PlanError",
            "RuntimeFault",
        ),
        "autopiper.errors",
    ),
    **dict.fromkeys(
        (
            "buckets", "cut", "degrees", "order", "pipeline", "place", "recompute", "replicate", "shard", "slices",
            "split",
        ),
        "autopiper.plan.directives",
    ),
}  # fmt: skip
_PARTS = ("costmodel", "runtime", "search", "model", "cluster", "plan", "ir", "export", "report")

__all__ = ["__version__", *sorted(_WHERE)]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    if name in _PARTS:
        return importlib.import_module(f"autopiper.{name}")
    raise AttributeError(f"module 'autopiper' has no attribute '{name}'")


def __dir__() -> list[str]:
    return [*__all__, *_PARTS]
