"""One stage on the bench: its passes timed back to back, its memory counted. What the profiler is made of."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from autopiper._data import data
from autopiper.runtime.backward import Flow
from autopiper.runtime.channels import enter
from autopiper.runtime.handlers import InputsFunction, LossFunction
from autopiper.runtime.stages import LiveStage

MOST_PASSES = 1000
"""Per window: passes of empty blocks are too short to fill it."""


@data
class Memory:
    """Bytes of one slice."""

    kept: float
    """Kept from forward to backward."""
    inputs: float
    """What the stage before hands over (or the module's own inputs)."""
    workspace: float
    """Most that is alive during a forward or backward beside what is kept."""


class Watch:
    """Marks points in time: on the host, or on the current CUDA stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None

    def mark(self) -> Any:
        """Mark now."""
        if self._device is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def sums(self, marks: Sequence[Sequence[Any]]) -> list[float]:
        """Return the mean seconds between neighbouring marks, over rows of marks; waits for the device."""
        if self._device is not None:
            torch.cuda.synchronize(self._device)
            return [
                sum(r[i].elapsed_time(r[i + 1]) for r in marks) / 1e3 / len(marks) for i in range(len(marks[0]) - 1)
            ]
        return [sum(r[i + 1] - r[i] for r in marks) / len(marks) for i in range(len(marks[0]) - 1)]


class Bench:
    """A stage, a slice of `samples` for it, and the times found so far: seconds per pass, one entry per window."""

    def __init__(
        self, stage: LiveStage, batch: Any, received: Any, inputs: InputsFunction, loss_fn: LossFunction,
        device: torch.device,
    ) -> None:  # fmt: skip
        self._stage, self._batch, self._received = stage, batch, received
        self._inputs, self._loss_fn, self._device = inputs, loss_fn, device
        self._watch = Watch(device)
        self._gradients: list[Tensor | None] = []
        self._passes = 1
        self.windows: tuple[list[float], list[float], list[float], list[float]] = ([], [], [], [])
        """Seconds of forwards, of backwards, of backwards for the inputs, for the weights: the mean of each window."""

    def _arrived(self) -> tuple[Any, list[Tensor]]:
        """Make what the stage before sent anew, as leaves of a new graph; return it and those that want a gradient."""
        fresh = tree_map_only(Tensor, lambda t: t.detach().requires_grad_(t.requires_grad), self._received)
        return fresh, [t for t in tree_leaves(fresh) if isinstance(t, Tensor) and t.requires_grad]

    def _forward(self) -> tuple[list[Tensor], list[Tensor], Any]:
        """Run a forward as the runtime does; return what a backward starts from, what it ends in, and the output."""
        fresh, wanted = self._arrived()
        fresh = tree_map_only(Tensor, lambda t: enter(t) if t.requires_grad else t, fresh)
        if self._stage.first:
            args, kwargs = self._inputs(self._batch)
            output = self._stage(*args, **kwargs)
        else:
            output = self._stage(fresh)
        if self._stage.last:
            value = self._loss_fn(output, self._batch)
            return [value[0] if isinstance(value, tuple) else value], wanted, output
        return [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad], wanted, output

    def output(self) -> Any:
        """Return what the stage hands to the next one, without its graph."""
        output = self._forward()[2]
        return (
            None
            if self._stage.last
            else tree_map_only(Tensor, lambda t: t.detach().requires_grad_(t.requires_grad), output)
        )

    def prepare(self, window_s: float) -> None:
        """Warm up, let gradients accumulate as they do in training, and choose how many passes fill a window."""
        roots, _, _ = self._forward()
        # A loss starts with 1; what comes from the next stage is a tensor.
        self._gradients = [None if self._stage.last else torch.randn_like(t) for t in roots]
        if roots:
            torch.autograd.backward(roots, self._gradients)
        del roots
        one_s = sum(self._watch.sums([self._pass()]))
        self._passes = min(MOST_PASSES, math.ceil(window_s / one_s))

    def _pass(self) -> list[Any]:
        marks = [self._watch.mark()]
        roots, _, output = self._forward()
        del output
        marks.append(self._watch.mark())
        if roots:
            torch.autograd.backward(roots, self._gradients)
        marks.append(self._watch.mark())
        return marks

    def window(self) -> None:
        """Time forwards and backwards in turn; in every other window also backwards in their two halves."""
        means = self._watch.sums([self._pass() for _ in range(self._passes)])
        for times, mean_s in zip(self.windows, means, strict=False):
            times.append(mean_s)
        if len(self.windows[0]) % 2:
            for times, mean_s in zip(self.windows[2:], self._split_window(math.ceil(self._passes / 2)), strict=True):
                times.append(mean_s)

    def _split_window(self, passes: int) -> list[float]:
        """Time I and W as the runtime does them."""
        marks = []
        parameters = list(self._stage.held.values())
        for _ in range(passes):
            roots, wanted, output = self._forward()
            del output
            flow = Flow(wanted, roots, recomputes=self._stage.recomputes)
            del roots
            if not self._stage.last:
                flow.arrive([g for g in self._gradients if g is not None])
            row = [self._watch.mark()]
            if wanted:
                flow.for_inputs()
            row.append(self._watch.mark())
            flow.for_weights(parameters)
            row.append(self._watch.mark())
            marks.append(row)
        means = self._watch.sums(marks)
        return means if wanted else [0.0, means[1]]

    def update_windows(
        self, optimizer: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer], repeats: int, window_s: float
    ) -> list[float]:
        """Time what a step does to the parameters beside passes: clear, divide, optimizer; on copies of them."""
        copies = [nn.Parameter(p.detach().clone()) for p in self._stage.held.values()]
        if not copies:
            return [0.0]
        flat = torch.randn(sum(p.numel() for p in copies), dtype=copies[0].dtype, device=self._device)
        kept, at = flat.clone(), 0
        for p in copies:
            p.grad = flat[at : at + p.numel()].view(p.shape)
            at += p.numel()
        engine = optimizer(copies)

        def once() -> tuple[Any, Any]:
            begin = self._watch.mark()
            flat.zero_()
            flat.div_(1.0)
            engine.step()
            end = self._watch.mark()
            flat.copy_(kept)
            return begin, end

        once()
        one_s = self._watch.sums([once()])[0]
        passes = min(MOST_PASSES, max(2, math.ceil(window_s / one_s)))
        return [self._watch.sums([once() for _ in range(passes)])[0] for _ in range(repeats)]

    def memory(self) -> Memory:
        """Count the bytes of one forward and backward."""
        weights = {_storage(t) for t in (*self._stage.parameters(), *self._stage.buffers())}
        saved: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            if _storage(tensor) not in weights:
                saved[_storage(tensor)] = tensor.untyped_storage().nbytes()
            return tensor

        with Alive() as alive:
            with saved_tensors_hooks(pack, lambda t: t):
                roots, _, output = self._forward()
                del output
            kept = sum(saved.values())
            gradients = [None if self._stage.last else torch.zeros_like(t) for t in roots]
            before, peak = alive.now, alive.peak
            alive.peak = before
            if roots:
                torch.autograd.backward(roots, gradients)
        received = self._received if self._received is not None else self._inputs(self._batch)
        inputs = sum(t.untyped_storage().nbytes() for t in tree_leaves(received) if isinstance(t, Tensor))
        return Memory(kept=float(kept), inputs=float(inputs), workspace=float(max(0, peak - kept, alive.peak - before)))

    def close(self) -> None:
        """Leave the module without gradients."""
        for p in self._stage.held.values():
            p.grad = None


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class Alive(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the tensors made within that are still alive, and their most."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_storage(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and _storage(tensor) not in given | self._known:
                self._made(tensor)
        return result

    def _made(self, tensor: Tensor) -> None:
        storage, key = tensor.untyped_storage(), _storage(tensor)
        size = storage.nbytes()
        self._known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size
