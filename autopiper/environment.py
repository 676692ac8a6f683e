"""What this machine and this installation are: what a bug report needs, found without importing anything heavy."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib import metadata
from typing import Any

from autopiper._version import __version__

LIBRARIES = (
    "torch", "transformers", "numpy", "networkx", "pulp", "highspy", "optuna", "pydantic", "typer", "rich",
)  # fmt: skip


def describe() -> dict[str, Any]:
    """Return versions, cores, memory in bytes and GPUs as JSON types."""
    return {
        "autopiper": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB",
        "gpus": _gpus(),
        "libraries": {name: _version(name) for name in LIBRARIES},
    }


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _gpus() -> list[str]:
    """Ask nvidia-smi, where there is one that answers."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    try:
        asked = subprocess.run(
            [tool, "--query-gpu=name,memory.total", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=10, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in asked.stdout.splitlines() if line.strip()]
