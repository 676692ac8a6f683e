"""One step as a file: which of the ways to show it, by how the name of the file ends."""

from __future__ import annotations

from pathlib import Path

from autopiper.cluster.spec import Cluster
from autopiper.errors import AutoPiperError, PlanError, nearest
from autopiper.plan.file import write_text
from autopiper.plan.timeline import Timeline
from autopiper.report.picture import picture
from autopiper.report.trace import write_trace

TRACE, PICTURE = ".json", ".svg"


def check_ending(path: str | Path) -> str:
    """Return the ending of a path in lower case. Raises PlanError, naming both, where it is neither of them."""
    ending = Path(path).suffix.lower()
    if ending not in (TRACE, PICTURE):
        raise PlanError(
            f"path is '{path}'; it must end in {TRACE} (a Chrome trace) or {PICTURE} (a picture)"
            f"{nearest(ending, (TRACE, PICTURE))}"
        )
    return ending


def write_step(timeline: Timeline, path: str | Path, *, cluster: Cluster | None = None, name: str = "") -> Path:
    """Write a timeline whole or not at all, and return the path.

    `cluster` names the device types, `name` says whose step it is. Raises PlanError for another ending, for a
    timeline that cannot be drawn, and where the file cannot be written.
    """
    ending, target = check_ending(path), Path(path)
    title = f"{name}: one step, bubble {timeline.bubble_fraction:.1%}" if name else None
    try:
        if ending == TRACE:
            write_trace(timeline, target, cluster)
        else:
            write_text(target, picture(timeline, title=title, cluster=cluster))
    except AutoPiperError:
        raise
    except (OSError, ValueError) as fault:  # ValueError: a name that no file can have
        raise PlanError(f"cannot write '{path}': {fault}") from None
    return target
