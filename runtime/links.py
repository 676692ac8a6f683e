"""Measure what messages and reductions between two ranks cost, through the backend that the runtime uses."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from autopiper._data import data
from autopiper.plan.costs import LinkCost
from autopiper.runtime.profile import spread

SMALL_BYTES, LARGE_BYTES = 1024, 4 * 2**20


@data
class LinkReading:
    """One pair of ranks: seconds of a small message, bytes per second of a large one; by sending and by summing."""

    send_latency_s: float
    send_bytes_per_s: float
    reduce_latency_s: float
    """Of one of the two rounds of an all-reduce between two ranks."""
    reduce_bytes_per_s: float
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
    peer: int, group: dist.ProcessGroup, *, device: torch.device | str = "cpu", repeats: int = 5, window_s: float = 0.1
) -> LinkReading:
    """Measure the link to rank `peer`; both ends call it at the same time, with a group of just the two of them.

    Messages go back and forth back to back for `window_s` seconds (the sustained price, on throttled devices too); the
    median over `repeats` windows counts. All-reduce of two ranks: 2·latency + bytes / bandwidth (a ring of two).
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
        relative_error=max(spread(times[name, LARGE_BYTES]) for name in ("send", "reduce")),
    )


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
