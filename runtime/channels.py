"""Messages between two stages.

A channel carries messages of one kind from one rank to another in an order that both ends know from their Programs;
at the start both exchange a hash of that order (`groups`). The first forward message is preceded by a header that says what a
message consists of (how many tensors, their shapes per sample, types, which of them carry gradients); afterwards a
message is just its tensors, because the samples of each are known from the Programs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopiper._data import data
from autopiper.errors import RuntimeFault
from autopiper.runtime.lanes import Lanes, Pending

HEADER_BYTES = 16384


@data
class TensorForm:
    """One tensor of a boundary, per sample."""

    shape: tuple[int, ...]
    dtype: str
    grad: bool
    """Whether a gradient comes back for it."""


@data
class Form:
    """What a stage hands to the next one: a tensor, or a tuple, list or dict of tensors (none, one or many)."""

    kind: str
    keys: tuple[str, ...] = ()
    tensors: tuple[TensorForm, ...]

    def build(self, tensors: Sequence[Tensor]) -> Any:
        """Put tensors together again."""
        if self.kind == "tensor":
            return tensors[0]
        if self.kind == "dict":
            return dict(zip(self.keys, tensors, strict=True))
        return tuple(tensors) if self.kind == "tuple" else list(tensors)

    def gradients(self) -> Form:
        """What comes back in the backward."""
        return Form(kind="list", tensors=tuple(t for t in self.tensors if t.grad))

    @property
    def text(self) -> str:
        """ "float32[32, 64], int64[32]"."""
        return ", ".join(f"{t.dtype}{list(t.shape)}" for t in self.tensors) or "nothing"


def take_apart(value: Any, samples: int, where: str) -> tuple[list[Tensor], Form]:
    """Return the tensors that a stage's output consists of, and its form. Raises RuntimeFault for anything else."""
    if isinstance(value, Tensor):
        kind, keys, tensors = "tensor", (), [value]
    elif isinstance(value, Mapping):
        kind, keys, tensors = "dict", tuple(value), list(value.values())
    elif isinstance(value, tuple | list):
        kind, keys, tensors = "list" if isinstance(value, list) else "tuple", (), list(value)
    else:
        kind, keys, tensors = "", (), [value]
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise RuntimeFault(
                f"{where} returned a {type(tensor).__name__}; a tensor, or a tuple, list or dict of tensors can cross "
                "to the next stage"
            )
        if tensor.ndim == 0 or tensor.shape[0] != samples:
            raise RuntimeFault(
                f"{where} returned a tensor of shape {tuple(tensor.shape)} for {samples} samples; what crosses to the "
                "next stage must have the samples first"
            )
    forms = tuple(
        TensorForm(shape=tuple(t.shape[1:]), dtype=str(t.dtype).removeprefix("torch."), grad=t.requires_grad)
        for t in tensors
    )
    return tensors, Form(kind=kind, keys=keys, tensors=forms)


class _Entry(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, received: Tensor) -> Tensor:
        storage, at = received.untyped_storage(), received.storage_offset()
        return received.new_empty(0).set_(storage, at, received.size(), received.stride())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def enter(received: Tensor) -> Tensor:
    """Return what was received as no leaf and no view, so that a stage may begin with an operation in place."""
    entered: Tensor = _Entry.apply(received)  # type: ignore[no-untyped-call]
    return entered


def _encode(form: Form, device: torch.device) -> Tensor:
    text = json.dumps([form.kind, form.keys, [[t.shape, t.dtype, t.grad] for t in form.tensors]]).encode()
    if len(text) > HEADER_BYTES:
        raise RuntimeFault(f"a boundary of {len(form.tensors)} tensors needs a header above {HEADER_BYTES} bytes")
    return torch.frombuffer(bytearray(text.ljust(HEADER_BYTES)), dtype=torch.uint8).to(device)


def _decode(header: Tensor) -> Form:
    kind, keys, tensors = json.loads(bytes(header.cpu().tolist()).decode())
    return Form(
        kind=kind,
        keys=tuple(keys),
        tensors=tuple(TensorForm(shape=tuple(s), dtype=d, grad=g) for s, d, g in tensors),
    )


class Arriving(Pending):
    """A message on its way: its buffers are posted as soon as the form of the channel's messages is known."""

    def __init__(self, channel: Channel, samples: int, then: Callable[[list[Tensor], Form], None]) -> None:
        super().__init__()
        self._channel, self._samples = channel, samples
        self._deliver: Callable[[list[Tensor], Form], None] | None = then
        self._tensors: list[Tensor] = []

    def post(self, form: Form) -> None:
        """Give the backend a buffer for every tensor."""
        self._tensors = [
            torch.empty((self._samples, *t.shape), dtype=getattr(torch, t.dtype), device=self._channel.device)
            for t in form.tensors
        ]
        self._works = self._channel.post(self._tensors)

    def finish(self, lanes: Lanes) -> None:
        """Wait for the message, for its form first where that is not known."""
        form = self._channel.known_form()
        super().finish(lanes)
        if self._deliver is not None:
            self._deliver(self._tensors, form)
            self._deliver, self._tensors = None, []  # whoever got them keeps them as long as they are needed


class Channel:
    """One direction between two ranks. The sender uses `send`, the receiver `receive`."""

    def __init__(self, group: dist.ProcessGroup | None, peer: int, device: torch.device, lanes: Lanes) -> None:
        self._group, self._peer, self.device, self._lanes = group, peer, device, lanes
        self._announced = False
        self._form: Form | None = None
        self._header: tuple[Tensor, list[dist.Work]] | None = None
        self._unposted: list[Arriving] = []

    def send(self, tensors: Sequence[Tensor], form: Form, *, announce: bool, over: Callable[[], None]) -> None:
        """Send one message and keep its tensors until it is over; `announce`: with a header before the first one."""
        out = [t for t in tensors if t.numel()]
        if announce and not self._announced:
            out.insert(0, _encode(form, self.device))
            self._announced = True
        works = [w for t in out if (w := dist.isend(t, self._peer, group=self._group)) is not None]
        self._lanes.keep_until_sent(works, out, over)

    def receive(self, samples: int, *, announced: bool, then: Callable[[list[Tensor], Form], None]) -> Arriving:
        """Receive one message of so many samples, and hand it to `then`."""
        arriving = Arriving(self, samples, then)
        if self._form is not None:
            arriving.post(self._form)
            return arriving
        self._unposted.append(arriving)
        if announced and self._header is None:
            header = torch.empty(HEADER_BYTES, dtype=torch.uint8, device=self.device)
            self._header = (header, self.post([header]))
        return arriving

    def post(self, tensors: Sequence[Tensor]) -> list[dist.Work]:
        """Give the backend buffers to receive into; in the order in which they are sent."""
        works = [dist.irecv(t, self._peer, group=self._group) for t in tensors if t.numel()]
        return [w for w in works if w is not None]

    def learn(self, form: Form) -> None:
        """Hear what messages consist of, and post the buffers of all that are expected by now, in their order."""
        if self._form is None:
            self._form = form
            for arriving in self._unposted:
                arriving.post(form)
            self._unposted = []

    def known_form(self) -> Form:
        """Return what messages consist of, reading the header if it must."""
        if self._form is None:
            if self._header is None:
                raise RuntimeFault("a message is waited for before the form of its tensors is known")
            header, works = self._header
            for work in works:
                work.wait()
            self.learn(_decode(header))
        assert self._form is not None
        return self._form
