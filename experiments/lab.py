"""The emulation lab: unlike "devices" on one Linux machine, by CPU quotas of control groups.

    with Quotas({"fast": 0.84, "slow": 0.30}) as lab:
        run_local(plan, train, setup=lab.setup(("fast", "slow", "slow")))

A process in a group of quota 0.3 gets 0.3 of a core, all its threads together. Groups of one name are one per *rank*
(two "slow" ranks have 0.3 each). Works with control groups v1 (a writable `cpu` hierarchy) and v2 (a delegated group
with the `cpu` controller); `why_not()` says in words what is missing.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
PERIOD_US = 10_000
"""Accounting period. Short, so that a throttled rank stalls for milliseconds; a quota must be 1 ms of it at least."""
PREFIX = "autopiper-lab-"


class NotPermitted(RuntimeError):
    """Control groups cannot be used here; the message says why."""


@dataclass(frozen=True)
class Hierarchy:
    """Where groups are made: a directory, and which version of control groups its files speak."""

    base: Path
    version: int

    def make(self, name: str, quota: float) -> Path:
        """Make a group of at most `quota` cores, weighted so that up to there it goes before other programs."""
        group = self.base / name
        group.mkdir(exist_ok=True)
        quota_us = round(quota * PERIOD_US)
        if self.version == 1:
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(quota_us))
            (group / "cpu.shares").write_text(str(round(100 * 1024 * quota)))
        else:
            (group / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
            (group / "cpu.weight").write_text(str(max(1, min(10_000, round(10_000 * quota)))))
        return group


def _own_group(root: Path, version: int) -> Path | None:
    """The directory of this process's own group: of the v1 `cpu` hierarchy, or of the unified one."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if version == 1 and "cpu" in controllers.split(","):
            return root / "cpu" / path.lstrip("/")
        if version == 2 and number == "0" and not controllers:
            unified = root / "unified" if (root / "unified").is_dir() else root
            return unified / path.lstrip("/")
    return None


def _remove_stale(base: Path) -> None:
    """Remove groups that a crashed run left: their names carry the process id of their maker."""
    for group in base.glob(f"{PREFIX}*"):
        pid = group.name.removeprefix(PREFIX).split("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            with contextlib.suppress(OSError):
                group.rmdir()


def find_hierarchy(root: Path = ROOT) -> Hierarchy:
    """Return where groups with CPU quotas can be made, proved by making one. Raises NotPermitted with every reason."""
    reasons = []
    for version, knob in ((1, "cpu.cfs_quota_us"), (2, "cpu.max")):
        base = _own_group(root, version)
        if base is None or not (base / "cgroup.procs").is_file():
            reasons.append(f"v{version}: no such hierarchy with a cpu controller is mounted under {root}")
            continue
        hierarchy = Hierarchy(base, version)
        _remove_stale(base)
        try:
            if version == 2:
                _delegate(base)
            trial = base / f"{PREFIX}{os.getpid()}-trial"
            try:
                hierarchy.make(trial.name, 0.5)
            finally:
                if trial.is_dir():
                    trial.rmdir()
        except OSError as error:
            reasons.append(f"v{version}: {base} does not take a group with {knob} ({error.strerror or error})")
            continue
        return hierarchy
    raise NotPermitted("CPU quotas are not permitted here: " + "; ".join(reasons))


def _delegate(base: Path) -> None:
    """Give children of a v2 group the cpu controller; a group that distributes it may hold no process itself."""
    if "cpu" not in (base / "cgroup.controllers").read_text().split():
        raise OSError(None, "the cpu controller is not delegated; try: systemd-run --user --scope -p Delegate=yes …")
    control = base / "cgroup.subtree_control"
    if "cpu" in control.read_text().split():
        return
    try:
        control.write_text("+cpu")
    except OSError:
        leaf = base / f"{PREFIX}{os.getpid()}-self"
        leaf.mkdir(exist_ok=True)
        (leaf / "cgroup.procs").write_text(str(os.getpid()))
        control.write_text("+cpu")


def why_not() -> str | None:
    """Why quotas cannot be used here, or None where they can."""
    try:
        find_hierarchy()
    except NotPermitted as error:
        return str(error)
    return None


@dataclass(frozen=True)
class JoinGroup:
    """Moves the process that calls it into the group of its rank; plain data, so that it travels to spawned ranks."""

    groups: tuple[str, ...]
    cores: tuple[int, ...] | None

    def __call__(self, rank: int) -> None:
        (Path(self.groups[rank]) / "cgroup.procs").write_text(str(os.getpid()))
        if self.cores is not None:
            os.sched_setaffinity(0, {self.cores[rank]})


def pack(quotas: Sequence[float], cores: Sequence[int]) -> tuple[int, ...] | None:
    """Give each rank a core so that no core is promised more than once over; None where first-fit finds no way.

    Largest first. With it no rank waits for the scheduler to move it off a core that another one uses.
    """
    free = dict.fromkeys(cores, 1.0)
    out: dict[int, int] = {}
    for rank in sorted(range(len(quotas)), key=lambda r: -quotas[r]):
        core = next((c for c, left in free.items() if left >= quotas[rank]), None)
        if core is None:
            return None
        free[core] -= quotas[rank]
        out[rank] = core
    return tuple(out[r] for r in range(len(quotas)))


class Quotas:
    """Device types by CPU quota (cores); a context manager that removes its groups at the end."""

    def __init__(self, quotas: Mapping[str, float]) -> None:
        for name, quota in quotas.items():
            if not quota * PERIOD_US >= 1000:
                raise ValueError(f"quota of '{name}' is {quota}; allowed: {1000 / PERIOD_US} cores or more")
        self.quotas = dict(quotas)
        self.hierarchy = find_hierarchy()

    def __enter__(self) -> Quotas:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the groups."""
        for group in self.hierarchy.base.glob(f"{PREFIX}{os.getpid()}-*"):
            for _ in range(50):  # a process that has just ended leaves its group a moment later
                try:
                    group.rmdir()
                    break
                except OSError:
                    time.sleep(0.02)

    def setup(self, devices: Sequence[str]) -> JoinGroup:
        """Return what puts rank r under the quota of `devices[r]`: for `run_local(setup=…)`."""
        groups = tuple(
            str(self.hierarchy.make(f"{PREFIX}{os.getpid()}-{rank}-{name}", self.quotas[name]))
            for rank, name in enumerate(devices)
        )
        return JoinGroup(groups, pack([self.quotas[d] for d in devices], sorted(os.sched_getaffinity(0))))
