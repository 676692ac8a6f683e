"""The runtime: one interpreter of Programs on torch.distributed, and what launches it.

`Engine` trains one rank's part, `run_local` starts all ranks on this machine; `autopiper.runtime.launch.launch` does
so with a script, `autopiper.runtime.profile.profile` measures prices.
"""

if __name__ != "autopiper.runtime":
    raise ImportError("import this as autopiper.runtime, not as runtime: the folder is linked into the package")

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autopiper.runtime.engine import Engine as Engine
    from autopiper.runtime.engine import StepResult as StepResult
    from autopiper.runtime.launch import run_local as run_local

_WHERE = {"Engine": "engine", "StepResult": "engine", "run_local": "launch"}

__all__ = ["Engine", "StepResult", "run_local"]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(f"autopiper.runtime.{_WHERE[name]}"), name)
    raise AttributeError(f"module 'autopiper.runtime' has no attribute '{name}'")
