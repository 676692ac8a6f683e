"""How the logical streams of a Program meet the device: plain calls on a CPU, one CUDA stream each on a GPU.

The interpreter is one thread. On a CPU "over" means that the host has seen the end; on a GPU it means that the work
is queued, and whoever depends on it makes its own CUDA stream wait.
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

DRAIN_S = 60.0
"""How long a finished rank waits for its last messages to be taken."""


class Pending:
    """A transfer or collective that was issued and may not be over."""

    def __init__(self, works: Sequence[dist.Work] = (), then: Callable[[], None] | None = None) -> None:
        self._works: Sequence[dist.Work] = works
        self._then = then
        self.over = False

    def poll(self) -> bool:
        """Whether it is known to be over, without waiting."""
        return self.over

    def finish(self, lanes: Lanes) -> None:
        """Wait until it is over: the host on a CPU, the current CUDA stream on a GPU."""
        if not self.over or lanes.asynchronous:
            for work in self._works:
                work.wait()
        if not self.over:
            self.over = True
            if not lanes.asynchronous:
                self._works = ()  # they keep what they carried
            if self._then is not None:
                self._then()


class Collective(Pending):
    """A collective, whose end the backend reports by itself."""

    def poll(self) -> bool:
        """Whether the backend says that it is over."""
        return self.over or all(work.is_completed() for work in self._works)


class Lanes:
    """Streams of a CPU: there are none. Sends are waited for by a thread of their own, so that compute never is."""

    asynchronous = False

    def __init__(self) -> None:
        self._sent: queue.SimpleQueue[tuple[Sequence[dist.Work], Any, Callable[[], None]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._fault: BaseException | None = None

    @contextmanager
    def issue(self, stream: str, after: Sequence[Any]) -> Iterator[None]:
        """Issue work on a stream, after what `after` marks."""
        yield

    def mark(self) -> Any:
        """Mark the present point of the current stream."""
        return None

    def wait_for(self, mark: Any) -> None:
        """Make the current stream wait for a mark."""

    def use(self, tensors: Sequence[Tensor]) -> None:
        """Say that the current stream uses tensors that were allocated on another one."""

    def keep_until_sent(self, works: Sequence[dist.Work], tensors: Sequence[Tensor], over: Callable[[], None]) -> None:
        """Keep `tensors` alive until `works` are over, then call `over`."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._reap, name="autopiper-sends", daemon=True)
            self._thread.start()
            atexit.register(self.drain)  # a rank that is done must not leave before its messages are taken
        self._sent.put((works, tensors, over))

    def _reap(self) -> None:
        while (entry := self._sent.get()) is not None:
            works, _, over = entry
            try:
                for work in works:
                    work.wait()
                over()
            except BaseException as fault:
                self._fault = self._fault or fault
            del entry, works, over

    def check(self) -> None:
        """Raise the fault of a send that failed meanwhile."""
        if self._fault is not None:
            fault, self._fault = self._fault, None
            raise fault

    def drain(self) -> None:
        """Wait until everything sent has arrived, at most `DRAIN_S`."""
        if self._thread is not None:
            self._sent.put(None)
            self._thread.join(DRAIN_S)
            self._thread = None
            atexit.unregister(self.drain)

    def synchronize(self) -> None:
        """Wait for the device."""


class CudaLanes(Lanes):
    """One CUDA stream per logical stream; compute runs on the current stream of the main thread."""

    asynchronous = True

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._streams: dict[str, torch.cuda.Stream] = {}

    @contextmanager
    def issue(self, stream: str, after: Sequence[Any]) -> Iterator[None]:
        """Issue work on a CUDA stream of its own, after what `after` marks."""
        lane = self._streams.setdefault(stream, torch.cuda.Stream(self._device))  # type: ignore[no-untyped-call]
        for mark in after:
            lane.wait_event(mark)
        with torch.cuda.stream(lane):
            yield

    def mark(self) -> torch.cuda.Event:
        """Record an event on the current stream."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def wait_for(self, mark: torch.cuda.Event) -> None:
        """Make the current stream wait for an event."""
        torch.cuda.current_stream(self._device).wait_event(mark)

    def use(self, tensors: Sequence[Tensor]) -> None:
        """Tell the allocator that the current stream uses these tensors."""
        for tensor in tensors:
            tensor.record_stream(torch.cuda.current_stream(self._device))

    def keep_until_sent(self, works: Sequence[dist.Work], tensors: Sequence[Tensor], over: Callable[[], None]) -> None:
        """Let the lane (the current stream) wait for the sends, and the allocator for the lane."""
        for work in works:
            work.wait()
        self.use(tensors)
        over()

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self._device)


def make_lanes(device: torch.device) -> Lanes:
    """Return the lanes of a device."""
    return CudaLanes(device) if device.type == "cuda" else Lanes()


def now_s() -> float:
    """Seconds of the clock that measured timelines use."""
    return time.perf_counter()
