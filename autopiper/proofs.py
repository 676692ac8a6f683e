"""What `verify` holds a plan to beyond its structure: memory by the costs, and that its predictions are the simulator's."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from autopiper.cluster.spec import Cluster
from autopiper.plan.actions import Program
from autopiper.plan.plan import Plan
from autopiper.plan.timeline import Timeline

GIB = 2**30
SAME = 1e-9
"""Two runs of the simulator over equal Programs and prices agree to this; a stored prediction must too."""


def memory_faults(timeline: Timeline, cluster: Cluster) -> Iterable[str]:
    """Say which devices would be filled beyond what a plan may use."""
    for lane in timeline.lanes:
        for id in lane.devices:
            limit = cluster.device(id).type.usable_bytes
            if lane.peak_memory_bytes > limit:
                yield (
                    f"device {id} ({cluster.device(id).type.name}) needs {lane.peak_memory_bytes / GIB:.2f} GiB at its peak, "
                    f"of which {lane.static_memory_bytes / GIB:.2f} GiB are weights, gradients and optimizer states; "
                    f"it has {limit / GIB:.2f} GiB: {(lane.peak_memory_bytes - limit) / GIB:.2f} GiB too much"
                )


def differences(plan: Plan, programs: Sequence[Program], timeline: Timeline, *, predictions: bool) -> Iterable[str]:
    """Say where a stored plan is not what its own strategy gives."""
    if len(plan.programs) != len(programs):
        yield f"the plan stores {len(plan.programs)} programs, its strategy lowers to {len(programs)}"
    for stored, lowered in zip(plan.programs, programs, strict=False):
        if stored == lowered:
            continue
        names = ", ".join(p.text for p in lowered.places)
        where = next((s for s in lowered.streams if stored.streams.get(s) != lowered.streams[s]), "ranks or places")
        pairs = zip(stored.streams.get(where, ()), lowered.streams.get(where, ()), strict=False)
        first = next((f": it stores {a.text}, expected {b.text}" for a, b in pairs if a != b), "")
        yield f"the program of {names} differs from what the strategy lowers to, in '{where}'{first}"
    if predictions:
        for name in ("step_time_s", "makespan_s"):
            kept, found = getattr(plan, name), getattr(timeline, name)
            if not math.isclose(kept, found, rel_tol=SAME):
                yield f"{name} is stored as {kept:.9g}, the simulator finds {found:.9g}"
        kept_bytes, found_bytes = plan.peak_memory_bytes, timeline.peak_memory_bytes
        if len(kept_bytes) != len(found_bytes):
            yield f"peak_memory_bytes is stored for {len(kept_bytes)} ranks, the plan has {len(found_bytes)}"
        else:
            for rank, (a, b) in enumerate(zip(kept_bytes, found_bytes, strict=True)):
                if not math.isclose(a, b, rel_tol=SAME):
                    yield f"peak_memory_bytes of rank {rank} is stored as {a:.9g}, the simulator finds {b:.9g}"
