"""Memory of one rank over the simulated step: parameters, activations from F to B or W, messages, workspace."""

from __future__ import annotations

from collections.abc import Sequence

from autopiper.costmodel.durations import Durations
from autopiper.costmodel.memory import boundary_bytes, stage_kept_bytes, stage_workspace_bytes, static_bytes
from autopiper.ir.joint import Joint
from autopiper.ir.lower import RECEIVE_DEPTH
from autopiper.plan.actions import COMPUTE_STREAM

TIE = 1e-10
"""Of two moments that differ by less than this, relative, neither is later: sums of floats differ by as much."""


def memory(
    number: int, joint: Joint, durations: Durations, start: Sequence[float], end: Sequence[float]
) -> tuple[float, float, int]:
    """Return (static bytes, peak bytes, peak live micro-batches) of the ranks of Program `number`.

    Activations count from the start of F to the end of B (or W); a received message from the moment its receive is
    posted (the one before has arrived, and the one before that is used up) until the pass that uses it is over; a sent
    one from the pass that made it until it has gone.
    """
    graph, program = durations.graph, durations.programs[number]
    place = program.places[0]
    stage = graph.stage(place)
    tp = stage.tensor_parallel_size
    device_type = durations.devices[program.devices[0]].type.name
    static = static_bytes(graph.model, graph.training, durations.costs, stage.start, stage.stop, tp)
    kept: dict[int, float] = {}
    workspace = 0.0
    for samples in {row[place.member] for row in stage.slices}:
        args = (durations.prices, graph.model, device_type, tp, stage.start, stage.stop, stage.recompute, samples)
        kept[samples] = stage_kept_bytes(*args)
        workspace = max(workspace, stage_workspace_bytes(*args))
    changes: list[tuple[float, int, float, int]] = []
    """(when, releases first, bytes, micro-batches)"""

    def hold(begin_s: float, until_s: float, num_bytes: float, live: int = 0) -> None:
        changes.append((begin_s, 1, num_bytes, live))
        changes.append((until_s * (1 - TIE), 0, -num_bytes, -live))

    begun: dict[int, float] = {}
    done: dict[tuple[str, int], float] = {}
    for node in joint.streams.get((number, COMPUTE_STREAM), ()):
        entry = joint.nodes[node]
        mb = entry.actions[0].micro_batch
        if mb is None:
            continue
        done[entry.kind, mb] = end[node]
        if entry.kind == "F":
            begun[mb] = start[node]
        elif entry.kind in ("B", "W") and mb in begun:
            hold(begun[mb], end[node], kept[stage.slices[mb][place.member]], 1)
    for nodes in joint.by_program.get(number, {}).values():
        if not nodes or joint.nodes[nodes[0]].kind != "TRANSFER":
            continue
        below = joint.nodes[nodes[0]].action_of(number).kind in ("SEND_B", "RECV_F")
        cut = stage.start if below else stage.stop
        per_sample = boundary_bytes(graph.model, graph.training, durations.costs, cut)
        used_up: list[float] = []
        for place_in_channel, node in enumerate(nodes):
            action = joint.nodes[node].action_of(number)
            low, high = action.samples or (0, 0)
            mb = action.micro_batch or 0
            passes = ("F",) if action.kind.endswith("F") else ("B", "I")
            over = next((done[k, mb] for k in passes if (k, mb) in done), end[node])
            if action.kind.startswith("SEND"):
                hold(over, end[node], per_sample * (high - low))
            else:
                posted = end[nodes[place_in_channel - 1]] if place_in_channel else 0.0
                if place_in_channel >= RECEIVE_DEPTH:
                    posted = max(posted, used_up[-RECEIVE_DEPTH])
                used_up.append(max(over, end[node]))
                hold(posted, used_up[-1], per_sample * (high - low))
    total = peak = 0.0
    live = most = 0
    for _, _, num_bytes, count in sorted(changes, key=lambda c: (c[0], c[1])):
        total, live = total + num_bytes, live + count
        peak, most = max(peak, total), max(most, live)
    return static, static + peak + workspace, most
