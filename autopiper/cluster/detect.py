"""What this machine has: graphics processors as the driver lists them, processor cores and memory as they may be used.

No torch: the driver's own command is asked, so that planning needs nothing installed.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
from pathlib import Path

from autopiper._data import data

_TIMEOUT_S = 20


@data
class FoundGpu:
    """A graphics processor that the driver lists."""

    driver_name: str
    memory_bytes: float


def _ask(*command: str) -> str:
    """Return what a command prints, or nothing where it is not there or fails."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def gpus() -> tuple[FoundGpu, ...]:
    """Return the NVIDIA devices of this machine, in the driver's order; none without a driver."""
    return parse_gpus(_ask("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"))


def parse_gpus(listing: str) -> tuple[FoundGpu, ...]:
    """Read the driver's list: a name and mebibytes per line."""
    found = []
    for line in listing.splitlines():
        name, _, mebibytes = line.rpartition(",")
        if name and mebibytes.strip().isdigit():
            found.append(FoundGpu(driver_name=name.strip(), memory_bytes=int(mebibytes) * 2.0**20))
    return tuple(found)


def nvlink_bytes_per_s() -> float | None:
    """Return what the first device's NVLinks carry in one direction, all together; None without any."""
    return parse_nvlink(_ask("nvidia-smi", "nvlink", "--status", "-i", "0"))


def parse_nvlink(listing: str) -> float | None:
    """Add up the links of one device: a line such as "Link 0: 25.781 GB/s" each."""
    rates = [float(rate) for rate in re.findall(r"Link \d+:\s*([\d.]+) GB/s", listing)]
    return sum(rates) * 1e9 if rates else None


def usable_cores() -> float:
    """Return the processor cores that this process may use: its affinity, and a container's quota where there is one."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min([float(allowed), *_quotas()])


def _quotas() -> list[float]:
    quotas = []
    unified = _read("/sys/fs/cgroup/cpu.max").split()
    if len(unified) == 2 and unified[0].isdigit():
        quotas.append(int(unified[0]) / int(unified[1]))
    quota, period = (_read(f"/sys/fs/cgroup/cpu/cpu.cfs_{name}_us").strip() for name in ("quota", "period"))
    if quota.isdigit() and period.isdigit():
        quotas.append(int(quota) / int(period))
    return [q for q in quotas if q > 0]


def usable_memory_bytes() -> float:
    """Return the main memory that this process may use: the machine's, and a container's limit where there is one."""
    try:
        total = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (ValueError, OSError, AttributeError):
        total = math.inf
    limits = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
    return min([total, *(float(text) for path in limits if (text := _read(path).strip()).isdigit())])


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
