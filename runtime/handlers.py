"""What each kind of action does on a rank that holds one stage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopiper.errors import RuntimeFault
from autopiper.ir import TrainingGraph
from autopiper.plan import Action, Place, Program
from autopiper.runtime import batches
from autopiper.runtime.channels import Channel, Form, enter, take_apart
from autopiper.runtime.gradients import BackwardWatch, GradientBuffer
from autopiper.runtime.interpreter import Handler, Interpreter
from autopiper.runtime.lanes import Collective, Lanes, Pending
from autopiper.runtime.stages import LiveStage

LossFunction = Callable[[Any, Any], Any]
InputsFunction = Callable[[Any], tuple[tuple[Any, ...], dict[str, Any]]]
Parts = list[tuple[tuple[int, int], list[Tensor]]]


class _Flow:
    """A micro-batch between its F and its B: what the backward starts from and what it ends in."""

    def __init__(self, received: list[Tensor], roots: list[Any]) -> None:
        self.received, self.roots = received, roots


class Handlers:
    """State of one rank during a step, and a method per kind of action."""

    interpreter: Interpreter

    def __init__(
        self,
        graph: TrainingGraph,
        program: Program,
        stage: LiveStage,
        channels: Mapping[str, Channel],
        groups: Mapping[str, dist.ProcessGroup],
        buffers: Mapping[int, GradientBuffer],
        optimizers: Mapping[int, torch.optim.Optimizer],
        loss_fn: LossFunction,
        inputs_fn: InputsFunction,
        lanes: Lanes,
        device: torch.device,
        rank: int,
    ) -> None:
        self._graph, self._stage, self._channels, self._groups = graph, stage, channels, groups
        self._buffers, self._optimizers = buffers, optimizers
        self._loss_fn, self._inputs_fn, self._lanes = loss_fn, inputs_fn, lanes
        self._device, self._rank = device, rank
        self._place: Place = program.places[0]
        self._graph_stage = graph.stage(self._place.pipeline, self._place.stage)
        self._sends = Counter((a.kind, a.micro_batch) for a in program.actions() if a.kind.startswith("SEND"))
        self._watch = BackwardWatch(stage)
        self._form: Form | None = None

    def table(self) -> dict[str, Handler]:
        """Return the handler of each kind."""
        return {
            "F": self._forward, "B": self._backward, "SEND_F": self._send, "SEND_B": self._send,
            "RECV_F": self._receive, "RECV_B": self._receive, "REDUCE_GRAD": self._reduce, "LOSS": self._loss,
            "NORM": self._norm, "UPDATE": self._update,
        }  # fmt: skip

    def begin(self, batch: Any, first_sample: Mapping[int, int]) -> None:
        """Begin a step on a batch; `first_sample` maps samples of the global batch to positions in it."""
        self._batch, self._position = batch, first_sample
        self._flows: dict[int, _Flow] = {}
        self._inbox: dict[tuple[str, int], Parts] = {}
        self._outbox: dict[tuple[str, int], tuple[list[Tensor], Form, int]] = {}
        self._left = dict(self._sends)
        self._sums = torch.zeros(2, dtype=torch.float64, device=self._device)
        self.norm: Tensor | None = None
        for buffer in self._buffers.values():
            buffer.clear()

    @property
    def loss_and_weight(self) -> Tensor:
        """Global loss sum and weight, float64; after LOSS."""
        return self._sums

    def _range(self, micro_batch: int) -> tuple[int, int]:
        return self._graph_stage.ranges(micro_batch)[self._place.member]

    def _own(self, micro_batch: int) -> Any:
        """This rank's samples of a micro-batch."""
        start, stop = batches.sample_range(self._graph, self._place, micro_batch)
        at = self._position[start]
        return batches.cut(self._batch, at, at + stop - start, self._device)

    def _assemble(self, kind: str, micro_batch: int, form: Form) -> list[Tensor]:
        """Join what arrived of a micro-batch, region by region."""
        parts = sorted(self._inbox.pop((kind, micro_batch), []), key=lambda part: part[0])
        start, stop = self._range(micro_batch)
        for (low, high), tensors in parts:
            if low != start:
                break
            start = high
            self._lanes.use(tensors)
        if start != stop:
            raise RuntimeFault(f"samples from {start} on of micro-batch {micro_batch} did not arrive")
        if len(parts) == 1:
            return parts[0][1]
        return [torch.cat([tensors[i] for _, tensors in parts]) for i in range(len(form.tensors))]

    def _forward(self, action: Action) -> None:
        micro_batch = _number(action.micro_batch)
        start, stop = self._range(micro_batch)
        stage, received = self._stage, list[Tensor]()
        own = self._own(micro_batch) if stage.first or stage.last else None
        if stage.first:
            args, kwargs = self._inputs_fn(own)
            output = stage(*args, **kwargs)
        else:
            form = self._received_form
            received = [
                t.requires_grad_(f.grad)
                for t, f in zip(self._assemble("F", micro_batch, form), form.tensors, strict=True)
            ]
            output = stage(form.build([enter(t) if t.requires_grad else t for t in received]))
        if stage.last:
            loss_sum, weight = self._loss_of(output, own, stop - start)
            self._sums += torch.stack([loss_sum.detach(), weight]).to(self._sums)
            self._flows[micro_batch] = _Flow(received, [loss_sum])
            return
        tensors, form = take_apart(output, stop - start, f"stage {stage.start}..{stage.stop - 1}")
        if self._form is None:
            self._form = form
            for name, channel in self._channels.items():
                if name.endswith(":B"):  # what comes back has the form of what went out
                    channel.learn(form.gradients())
        elif form != self._form:
            raise RuntimeFault(f"the stage put out {form.text}; before it was {self._form.text}")
        # Only the way back is kept: the output itself goes once it is sent.
        roots = [torch.autograd.graph.get_gradient_edge(t) for t in tensors if t.requires_grad]
        self._flows[micro_batch] = _Flow(received, roots)
        self._outbox["F", micro_batch] = ([t.detach().contiguous() for t in tensors], form, start)

    def _loss_of(self, output: Any, batch: Any, samples: int) -> tuple[Tensor, Tensor]:
        value = self._loss_fn(output, batch)
        loss, weight = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            found = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise RuntimeFault(
                f"loss_fn returned a loss of {found}; it must be one number: a sum with its weight, or a mean"
            )
        if weight is None:
            loss, weight = loss * samples, samples
        if not loss.requires_grad:
            raise RuntimeFault("loss_fn returned a loss that carries no gradient (detached, or computed under no_grad)")
        if not isinstance(weight, int | float) and not (isinstance(weight, Tensor) and weight.numel() == 1):
            found = f"shape {tuple(weight.shape)}" if isinstance(weight, Tensor) else type(weight).__name__
            raise RuntimeFault(
                f"loss_fn returned a weight of {found}; it must be one number: what the sum is divided by"
            )
        return loss.reshape(()), torch.as_tensor(weight, dtype=torch.float64, device=self._device).detach().reshape(())

    def _backward(self, action: Action) -> None:
        micro_batch = _number(action.micro_batch)
        flow = self._flows.pop(micro_batch)
        gradients: list[Tensor | None] = [None] * len(flow.roots)
        if not self._stage.last and self._form is not None:
            gradients = list(self._assemble("B", micro_batch, self._form.gradients()))
        if action.text in self.interpreter.watched:
            self._watch.begin(lambda block: self.interpreter.passed(action.text, block))
        if flow.roots:
            torch.autograd.backward(flow.roots, gradients)
        self._watch.end()
        if not self._stage.first:
            wanted = [t for t in flow.received if t.requires_grad]
            out = [(torch.zeros_like(t) if t.grad is None else t.grad).contiguous() for t in wanted]
            self._outbox["B", micro_batch] = (out, self._received_form.gradients(), self._range(micro_batch)[0])

    def _send(self, action: Action) -> None:
        kind, micro_batch = action.kind[-1], _number(action.micro_batch)
        tensors, form, start = self._outbox[kind, micro_batch]
        low, high = action.samples or (0, 0)
        pieces = [t[low - start : high - start] for t in tensors]
        self._channels[action.stream].send(pieces, form, announce=kind == "F", over=self.interpreter.sending(action))
        self._left[action.kind, micro_batch] -= 1
        if not self._left[action.kind, micro_batch]:
            del self._outbox[kind, micro_batch]

    def _receive(self, action: Action) -> Pending:
        kind, region = action.kind[-1], action.samples or (0, 0)

        def arrived(tensors: list[Tensor], form: Form) -> None:
            if kind == "F":
                self._received_form = form
            self._inbox.setdefault((kind, _number(action.micro_batch)), []).append((region, tensors))

        channel = self._channels[action.stream]
        return channel.receive(region[1] - region[0], announced=kind == "F", then=arrived)

    def _reduce(self, action: Action) -> Pending:
        buffer = self._buffers[_number(action.gradient_block)]
        return self._sum(buffer.bucket(_number(action.bucket)), action.stream)

    def _sum(self, tensor: Tensor, stream: str, then: Callable[[], None] | None = None) -> Pending:
        """Sum a tensor in place over the ranks of a stream."""
        group = self._groups.get(stream)
        work = None if group is None else dist.all_reduce(tensor, group=group, async_op=True)
        return Collective([] if work is None else [work], then)

    def _loss(self, action: Action) -> Pending:
        return self._sum(self._sums, action.stream)

    def _norm(self, action: Action) -> Pending:
        """Sum of squares of the summed gradients, every parameter counted by its first holder."""
        first = [b.flat for b in self._buffers.values() if b.ranks[0] == self._rank]
        squares = [torch.linalg.vector_norm(f, dtype=torch.float64).square() for f in first]
        total = torch.stack(squares).sum() if squares else self._sums.new_zeros(())
        self.norm = total
        return self._sum(total, action.stream)

    def scales(self) -> tuple[Tensor, Tensor | None]:
        """Return the global weight, and the gradient norm where it is asked for; after LOSS and NORM."""
        weight = torch.where(self._sums[1] == 0, 1.0, self._sums[1])
        return weight, None if self.norm is None else self.norm.sqrt() / weight

    def _update(self, action: Action) -> None:
        index = _number(action.gradient_block)
        buffer = self._buffers[index]
        weight, norm = self.scales()
        buffer.flat.div_(weight.to(buffer.flat.dtype))
        limit = self._graph.training.clip_grad_norm
        if norm is not None and limit is not None:  # as torch.nn.utils.clip_grad_norm_ does
            buffer.flat.mul_((limit / (norm + 1e-6)).clamp(max=1.0).to(buffer.flat.dtype))
        self._optimizers[index].step()


def _number(value: int | None) -> int:
    assert value is not None
    return value
