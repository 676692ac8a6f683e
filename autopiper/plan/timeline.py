"""Timeline: when every action starts and ends, memory, and where the time of each rank went."""

from __future__ import annotations

from autopiper._data import data


@data
class Event:
    """One action as simulated or measured, seconds from the start of the step."""

    action: str
    stream: str
    start_s: float
    end_s: float
    kind: str = ""
    """Kind of the action, as `Action.kind`: F, B, I, W, SEND_F, REDUCE_GRAD, A2A_B, UPDATE …; empty where not known."""
    pipeline: int | None = None
    stage: int | None = None
    micro_batch: int | None = None
    node: int = -1
    """Number of the node of the joint graph, one for all events of it on whatever lane: both ends of a message, all
    members of a collective. -1 where it is not known, as of a measured step."""


@data
class MemoryPoint:
    """What the memory of a rank holds from `time_s` on, until the next point; bytes by what they are for."""

    time_s: float
    parameters_bytes: float
    gradients_bytes: float
    optimizer_bytes: float
    activations_bytes: float
    buffers_bytes: float

    @property
    def total_bytes(self) -> float:
        """Sum of the categories."""
        return (
            self.parameters_bytes
            + self.gradients_bytes
            + self.optimizer_bytes
            + self.activations_bytes
            + self.buffers_bytes
        )


@data
class RankTime:
    """Where the step of one Program's ranks went; the parts sum to the step."""

    compute_s: float
    recompute_s: float
    exposed_s: dict[str, float]
    """Waiting of the compute stream that a running transfer or collective explains, by kind."""
    bubble_s: float
    """The rest: waiting for work of other ranks."""

    @property
    def total_s(self) -> float:
        """Sum of the parts."""
        return self.compute_s + self.recompute_s + sum(self.exposed_s.values()) + self.bubble_s


@data
class Lane:
    """Everything about the ranks of one Program."""

    ranks: tuple[int, ...]
    devices: tuple[int, ...]
    events: tuple[Event, ...]
    peak_memory_bytes: float
    static_memory_bytes: float
    """Weights, gradients, master weights and optimizer states."""
    peak_live_activations: int
    """Most micro-batches between their F and their B at any time, summed over the stages held."""
    time: RankTime
    memory: tuple[MemoryPoint, ...] = ()
    """Memory over the step, in the order of time: each point holds until the next. Empty where it is not known."""


@data
class Timeline:
    """One step as the simulator walked it, or as a run measured it."""

    step_time_s: float
    """Period of consecutive steps in the steady state."""
    makespan_s: float
    """One isolated step."""
    lanes: tuple[Lane, ...]
    global_batch_size: int
    tokens: int
    """Tokens of one step."""
    model_flops: float
    """Model FLOPs of one step."""
    peak_flops: float
    """Sum of the used devices' peaks in the training precision."""
    relative_error: float = 0.0
    """Half-width of the error bar of the times, from the prices used."""

    @property
    def num_ranks(self) -> int:
        """Used devices."""
        return sum(len(lane.ranks) for lane in self.lanes)

    @property
    def peak_memory_bytes(self) -> tuple[float, ...]:
        """Peak memory of each rank, by rank."""
        pairs = [(rank, lane.peak_memory_bytes) for lane in self.lanes for rank in lane.ranks]
        return tuple(bytes_ for _, bytes_ in sorted(pairs))

    @property
    def bubble_fraction(self) -> float:
        """Share of rank-seconds of the isolated step in which a rank waits for the work of others."""
        total = sum(lane.time.total_s * len(lane.ranks) for lane in self.lanes)
        return sum(lane.time.bubble_s * len(lane.ranks) for lane in self.lanes) / total if total else 0.0

    @property
    def exposed_fraction(self) -> float:
        """Share of rank-seconds of the isolated step in which a rank waits for a transfer or collective."""
        total = sum(lane.time.total_s * len(lane.ranks) for lane in self.lanes)
        exposed = sum(sum(lane.time.exposed_s.values()) * len(lane.ranks) for lane in self.lanes)
        return exposed / total if total else 0.0

    @property
    def breakdown(self) -> dict[str, float]:
        """Mean seconds per rank: compute, recompute, exposed communication by kind, bubble; sums to `makespan_s`."""
        out: dict[str, float] = {"compute": 0.0, "recompute": 0.0}
        for lane in self.lanes:
            weight = len(lane.ranks) / self.num_ranks
            out["compute"] += lane.time.compute_s * weight
            out["recompute"] += lane.time.recompute_s * weight
            for kind, seconds in lane.time.exposed_s.items():
                out[f"exposed {kind}"] = out.get(f"exposed {kind}", 0.0) + seconds * weight
            out["bubble"] = out.get("bubble", 0.0) + lane.time.bubble_s * weight
        return out

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second in the steady state."""
        return self.tokens / self.step_time_s if self.step_time_s else 0.0

    @property
    def tflops_per_device(self) -> float:
        """Model TFLOP/s per used device."""
        return self.model_flops / self.step_time_s / self.num_ranks / 1e12 if self.step_time_s else 0.0

    @property
    def mfu(self) -> float:
        """Model FLOPs over the peak of the used devices."""
        return self.model_flops / self.step_time_s / self.peak_flops if self.step_time_s and self.peak_flops else 0.0
