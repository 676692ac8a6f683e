"""Measure what messages and reductions between two ranks cost, through the backend that the runtime uses."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from autopiper._data import data
from autopiper.plan.costs import LinkCost
from autopiper.runtime.channels import Channel, take_apart
from autopiper.runtime.lanes import Lanes
from autopiper.runtime.profile import spread

SMALL_BYTES, LARGE_BYTES = 1024, 4 * 2**20
BURN_S, BURNS = 0.01, 12
"""Processor time of the work between two messages, and how often it is done in a window."""


@data
class LinkReading:
    """One pair of ranks: seconds of a small message, bytes per second of a large one; by sending and by summing."""

    send_latency_s: float
    send_bytes_per_s: float
    reduce_latency_s: float
    """Of one of the two rounds of an all-reduce between two ranks."""
    reduce_bytes_per_s: float
    message_s: float
    """What a message, sent or received, takes from the work of this rank's processor; 0 on accelerators."""
    relative_error: float

    def cost(self, tier: str) -> LinkCost:
        """Return one price for both uses: the slower bandwidth, and the latency of a message."""
        return LinkCost(
            tier=tier,
            latency_s=self.send_latency_s,
            bytes_per_s=min(self.send_bytes_per_s, self.reduce_bytes_per_s),
            evidence="measured",
            relative_error=self.relative_error,
        )


def measure_link(
    peer: int,
    group: dist.ProcessGroup,
    *,
    message_bytes: int = 256 * 1024,
    device: torch.device | str = "cpu",
    repeats: int = 5,
    window_s: float = 0.1,
) -> LinkReading:
    """Measure the link to rank `peer`; both ends call it at the same time, with a group of just the two of them.

    Messages go back and forth back to back for `window_s` seconds (the sustained price, on throttled devices too); the
    median over `repeats` windows counts. All-reduce of two ranks: 2·latency + bytes / bandwidth (a ring of two). On a CPU
    also what messages of `message_bytes` (what crosses between two stages) take from the work between them.
    """
    device = torch.device(device)
    first = dist.get_rank() < peer

    def there_and_back(tensor: torch.Tensor) -> None:
        for sends in (first, not first):
            if sends:
                dist.send(tensor, peer, group=group)
            else:
                dist.recv(tensor, peer, group=group)

    def reduce(tensor: torch.Tensor) -> None:
        dist.all_reduce(tensor, group=group)

    times: dict[tuple[str, int], list[float]] = {}
    for number in range(repeats + 1):
        for name, once in (("send", there_and_back), ("reduce", reduce)):
            for size in (SMALL_BYTES, LARGE_BYTES):
                seconds = _window(once, torch.zeros(size // 4, device=device), group, window_s)
                if number:  # the first window warms up
                    times.setdefault((name, size), []).append(seconds / (2 if name == "send" else 1))
    small, large = (
        {name: statistics.median(times[name, size]) for name in ("send", "reduce")}
        for size in (SMALL_BYTES, LARGE_BYTES)
    )
    return LinkReading(
        send_latency_s=small["send"],
        send_bytes_per_s=LARGE_BYTES / max(large["send"] - small["send"], 1e-9),
        reduce_latency_s=small["reduce"] / 2,
        reduce_bytes_per_s=LARGE_BYTES / max(large["reduce"] - small["reduce"], 1e-9),
        message_s=_message_s(peer, group, message_bytes, repeats) if device.type == "cpu" else 0.0,
        relative_error=max(spread(times[name, LARGE_BYTES]) for name in ("send", "reduce")),
    )


def _message_s(peer: int, group: dist.ProcessGroup, message_bytes: int, repeats: int) -> float:
    """Compute with and without messages in between, through the runtime's own channels.

    The processor time that a message adds (of all threads), stretched as this rank's processor time is: by its quota.
    """
    lanes = Lanes()
    channel = Channel(group, peer, torch.device("cpu"), lanes)
    tensor = torch.zeros(1, message_bytes // 4)
    _, form = take_apart(tensor, 1, "the link test")
    matrix = torch.randn(256, 256)

    start = time.thread_time()
    for _ in range(20):
        matrix @ matrix
    products = max(1, round(20 * BURN_S / (time.thread_time() - start)))

    def work() -> None:
        for _ in range(products):
            matrix @ matrix

    def send() -> None:
        channel.send([tensor], form, announce=True, over=lambda: None)
        work()

    def receive() -> None:
        arriving = channel.receive(1, announced=True, then=lambda *_: None)
        work()
        arriving.finish(lanes)

    # One way at a time: ranks of a pipeline do not work in lockstep, which an exchange would force on these two.
    first = dist.get_rank() < peer
    ways = (send, receive) if first else (receive, send)
    for way in ways:  # the first message brings a header
        way()
    windows = [[_processor_s(once, group) for once in (work, *ways)] for _ in range(repeats)]
    lanes.drain()
    # Processor time only grows by what other programs do to the caches, so the least of it is the truth.
    alone_cpu_s, *with_cpu_s = (min(cpu_s for cpu_s, _ in found) for found in zip(*windows, strict=True))
    stretch = statistics.median(alone[1] / alone[0] for alone, *_ in windows)
    return float(sum(max(0.0, cpu_s - alone_cpu_s) for cpu_s in with_cpu_s) / 2 * stretch)


def _processor_s(once: Callable[[], None], group: dist.ProcessGroup) -> tuple[float, float]:
    """Return processor seconds and seconds of one call, over calls that both ends begin together."""
    dist.barrier(group=group)
    cpu_s, start = time.process_time(), time.perf_counter()
    for _ in range(BURNS):
        once()
    found = (time.process_time() - cpu_s) / BURNS, (time.perf_counter() - start) / BURNS
    dist.barrier(group=group)
    return found


def _window(
    once: Callable[[torch.Tensor], None], tensor: torch.Tensor, group: dist.ProcessGroup, window_s: float
) -> float:
    """Return the mean seconds of one call; both ends make equally many."""

    def timed(calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            once(tensor)
        if tensor.device.type == "cuda":
            torch.cuda.synchronize(tensor.device)
        return (time.perf_counter() - start) / calls

    guess = torch.tensor([timed(2)], device=tensor.device)
    dist.all_reduce(guess, op=dist.ReduceOp.MAX, group=group)
    return timed(max(2, min(10_000, int(window_s / max(float(guess), 1e-6)))))
