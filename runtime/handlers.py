"""What each kind of pass and message does on a rank, which holds one stage or several."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autopiper.errors import RuntimeFault
from autopiper.ir import TrainingGraph
from autopiper.plan import Action, Program
from autopiper.runtime import batches
from autopiper.runtime.backward import Flow
from autopiper.runtime.channels import Channel, Form, enter, take_apart
from autopiper.runtime.interpreter import Handler, Interpreter
from autopiper.runtime.lanes import Lanes, Pending
from autopiper.runtime.places import LivePlace
from autopiper.runtime.totals import Totals

LossFunction = Callable[[Any, Any], Any]
InputsFunction = Callable[[Any], tuple[tuple[Any, ...], dict[str, Any]]]
Parts = list[tuple[tuple[int, int], list[Tensor]]]
Message = tuple[tuple[int, int], str, int]
"""(pipeline, stage), F or B, micro-batch."""


class Handlers:
    """State of one rank during a step, and a method per kind of action.

    Neighbouring stages on one rank hand tensors over without a message; each still runs as a graph of its own, so
    that their backwards are passes of their own.
    """

    interpreter: Interpreter

    def __init__(
        self,
        graph: TrainingGraph,
        program: Program,
        places: Sequence[LivePlace],
        channels: Mapping[str, Channel],
        totals: Totals,
        loss_fn: LossFunction,
        inputs_fn: InputsFunction,
        lanes: Lanes,
        device: torch.device,
    ) -> None:
        self._graph, self._channels, self._totals = graph, channels, totals
        self._places = {place.key: place for place in places}
        self._loss_fn, self._inputs_fn, self._lanes, self._device = loss_fn, inputs_fn, lanes, device
        self._sends = Counter(
            (self._key(a), a.kind[-1], a.micro_batch) for a in program.actions() if a.kind.startswith("SEND")
        )

    def table(self) -> dict[str, Handler]:
        """Return the handler of each kind."""
        return {
            "F": self._forward, "B": self._backward, "I": self._backward_input, "W": self._backward_weight,
            "SEND_F": self._send, "SEND_B": self._send, "RECV_F": self._receive, "RECV_B": self._receive,
            **self._totals.table(),
        }  # fmt: skip

    def begin(self, batch: Any, first_sample: Mapping[int, int]) -> None:
        """Begin a step on a batch; `first_sample` maps samples of the global batch to positions in it."""
        self._batch, self._position = batch, first_sample
        self._flows: dict[tuple[tuple[int, int], int], Flow] = {}
        self._inbox: dict[Message, Parts] = {}
        self._outbox: dict[Message, tuple[list[Tensor], Form, int]] = {}
        self._left = dict(self._sends)
        self._totals.begin()

    @staticmethod
    def _key(action: Action) -> tuple[int, int]:
        assert action.stage is not None
        return action.pipeline, action.stage

    def _at(self, action: Action) -> tuple[LivePlace, int]:
        """Return where an action happens, and for which micro-batch."""
        assert action.micro_batch is not None
        return self._places[self._key(action)], action.micro_batch

    def _own(self, here: LivePlace, micro_batch: int) -> Any:
        """This place's samples of a micro-batch."""
        start, stop = batches.sample_range(self._graph, here.place, micro_batch)
        at = self._position[start]
        return batches.cut(self._batch, at, at + stop - start, self._device)

    def _assemble(self, here: LivePlace, kind: str, micro_batch: int, form: Form) -> list[Tensor]:
        """Join what arrived of a micro-batch, region by region."""
        parts = sorted(self._inbox.pop((here.key, kind, micro_batch), []), key=lambda part: part[0])
        start, stop = here.range(micro_batch)
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

    def _hand_over(self, here: LivePlace, kind: str, micro_batch: int, tensors: Sequence[Tensor], form: Form) -> None:
        """Give a neighbour on this rank its samples, and lay out for sending what others get."""
        start, stop = here.range(micro_batch)
        pipeline, stage = here.key
        neighbour = self._places.get((pipeline, stage + (1 if kind == "F" else -1)))
        if neighbour is not None:
            low, high = neighbour.range(micro_batch)
            low, high = max(low, start), min(high, stop)
            if low < high:
                pieces = [t[low - start : high - start] for t in tensors]
                if kind == "F":  # what was put out may be kept for a backward, and the neighbour may work in place
                    pieces = [t.clone(memory_format=torch.contiguous_format) for t in pieces]
                    neighbour.received = form
                self._inbox.setdefault((neighbour.key, kind, micro_batch), []).append(((low, high), pieces))
        if self._left.get((here.key, kind, micro_batch)):
            self._outbox[here.key, kind, micro_batch] = ([t.contiguous() for t in tensors], form, start)

    def _forward(self, action: Action) -> None:
        here, micro_batch = self._at(action)
        start, stop = here.range(micro_batch)
        stage, received = here.stage, list[Tensor]()
        own = self._own(here, micro_batch) if stage.first or stage.last else None
        if stage.first:
            args, kwargs = self._inputs_fn(own)
            output = stage(*args, **kwargs)
        else:
            form = here.received
            if form is None:
                raise RuntimeFault("nothing was received")
            received = [
                t.requires_grad_(f.grad)
                for t, f in zip(self._assemble(here, "F", micro_batch, form), form.tensors, strict=True)
            ]
            output = stage(form.build([enter(t) if t.requires_grad else t for t in received]))
        if stage.last:
            loss_sum, weight = self._loss_of(output, own, stop - start)
            self._totals.add(loss_sum, weight)
            self._flows[here.key, micro_batch] = Flow(received, [loss_sum], recomputes=stage.recomputes)
            return
        tensors, form = take_apart(output, stop - start, f"stage {stage.start}..{stage.stop - 1}")
        if here.put_out is None:
            here.learn(form)
        elif form != here.put_out:
            raise RuntimeFault(f"the stage put out {form.text}; before it was {here.put_out.text}")
        # Only the way back is kept: the output itself goes once it is sent.
        roots = [torch.autograd.graph.get_gradient_edge(t) for t in tensors if t.requires_grad]
        self._flows[here.key, micro_batch] = Flow(received, roots, recomputes=stage.recomputes)
        self._hand_over(here, "F", micro_batch, [t.detach() for t in tensors], form)

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

    def _arrived(self, here: LivePlace, micro_batch: int) -> Flow:
        """Return a micro-batch with what came back from the next stage."""
        flow = self._flows[here.key, micro_batch]
        if not here.stage.last and here.put_out is not None:
            flow.arrive(self._assemble(here, "B", micro_batch, here.put_out.gradients()))
        return flow

    def _back(self, here: LivePlace, micro_batch: int, gradients: Sequence[Tensor]) -> None:
        if not here.stage.first:
            assert here.received is not None
            self._hand_over(here, "B", micro_batch, gradients, here.received.gradients())

    def _teller(self, action: Action) -> Callable[[int], None] | None:
        """What to call when a backward that is waited for block by block has passed one."""
        if action.text not in self.interpreter.watched:
            return None
        return lambda block: self.interpreter.passed(action.text, block)

    def _backward(self, action: Action) -> None:
        here, micro_batch = self._at(action)
        flow = self._arrived(here, micro_batch)
        del self._flows[here.key, micro_batch]
        self._back(here, micro_batch, here.watch.over(self._teller(action), flow.whole))

    def _backward_input(self, action: Action) -> None:
        here, micro_batch = self._at(action)
        self._back(here, micro_batch, self._arrived(here, micro_batch).for_inputs())

    def _backward_weight(self, action: Action) -> None:
        here, micro_batch = self._at(action)
        flow = self._flows.pop((here.key, micro_batch))
        here.watch.over(self._teller(action), lambda: flow.for_weights(here.parameters))

    def _send(self, action: Action) -> None:
        here, micro_batch = self._at(action)
        message = (here.key, action.kind[-1], micro_batch)
        tensors, form, start = self._outbox[message]
        low, high = action.samples or (0, 0)
        pieces = [t[low - start : high - start] for t in tensors]
        over = self.interpreter.sending(action)
        self._channels[action.stream].send(pieces, form, announce=message[1] == "F", over=over)
        self._left[message] -= 1
        if not self._left[message]:
            del self._outbox[message]

    def _receive(self, action: Action) -> Pending:
        here, micro_batch = self._at(action)
        kind, region = action.kind[-1], action.samples or (0, 0)

        def arrived(tensors: list[Tensor], form: Form) -> None:
            if kind == "F":
                here.received = form
            self._inbox.setdefault((here.key, kind, micro_batch), []).append((region, tensors))

        return self._channels[action.stream].receive(region[1] - region[0], announced=kind == "F", then=arrived)
