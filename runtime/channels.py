"""Communicators: one per (rank set, stream), made and warmed in one global order; and messages between two stages.

A channel carries messages of one kind from one rank to another in an order that both ends know from their Programs;
at the start both exchange a hash of that order. The first forward message is preceded by a header that says what a
message consists of (how many tensors, their shapes per sample, types, which of them carry gradients); afterwards a
message is just its tensors, because the samples of each are known from the Programs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopiper._data import data
from autopiper.errors import PlanError, RuntimeFault
from autopiper.plan import Action, Program
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
        kind, keys, tensors = type(value).__name__, (), list(value)
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


class Channel:
    """One direction between two ranks. The sender uses `send`, the receiver `receive`."""

    def __init__(self, group: dist.ProcessGroup | None, peer: int, device: torch.device, lanes: Lanes) -> None:
        self._group, self._peer, self._device, self._lanes = group, peer, device, lanes
        self._header = False
        self.form: Form | None = None
        """What a message consists of, once known."""

    def send(self, tensors: Sequence[Tensor], form: Form, *, announce: bool, over: Callable[[], None]) -> None:
        """Send one message and keep its tensors until it is over; `announce`: with a header before the first one."""
        out = [t for t in tensors if t.numel()]
        if announce and not self._header:
            out.insert(0, _encode(form, self._device))
            self._header = True
        works = [w for t in out if (w := dist.isend(t, self._peer, group=self._group)) is not None]
        self._lanes.keep_until_sent(works, out, over)

    def receive(self, samples: int, *, announced: bool, then: Callable[[list[Tensor], Form], None]) -> Pending:
        """Receive one message of so many samples. Its buffers are posted at once where its form is known by now."""
        if self.form is not None:
            tensors, works = self._post(samples, self.form)
            form = self.form
            return Pending(works, lambda: then(tensors, form))
        header, first = None, []
        if announced and not self._header:
            self._header = True
            header = torch.empty(HEADER_BYTES, dtype=torch.uint8, device=self._device)
            work = dist.irecv(header, self._peer, group=self._group)
            first = [work] if work is not None else []

        def late() -> None:
            if header is not None:
                self.form = _decode(header)
            if self.form is None:
                raise RuntimeFault("a message arrived whose form is not known yet")
            tensors, works = self._post(samples, self.form)
            for work in works:
                work.wait()
            then(tensors, self.form)

        return Pending(first, late)

    def _post(self, samples: int, form: Form) -> tuple[list[Tensor], list[dist.Work]]:
        tensors = [
            torch.empty((samples, *t.shape), dtype=getattr(torch, t.dtype), device=self._device) for t in form.tensors
        ]
        works = [dist.irecv(t, self._peer, group=self._group) for t in tensors if t.numel()]
        return tensors, [w for w in works if w is not None]


def identities(actions: Sequence[Action]) -> list[str]:
    """Name the messages of a channel so that both ends say the same: "p0 F0 5[0:3]" for sender's stage 0."""
    out = []
    for a in actions:
        step = 1 if a.kind.endswith("F") else -1
        sender = a.stage if a.kind.startswith("SEND") else (a.stage or 0) - step
        start, stop = a.samples or (0, 0)
        out.append(f"p{a.pipeline} {a.kind[-1]}{sender} {a.micro_batch}[{start}:{stop}]")
    return out


def make_groups(programs: Sequence[Program], rank: int, device: torch.device) -> dict[str, dist.ProcessGroup]:
    """Make one communicator for each stream that this rank shares with others, and exchange a first value on it.

    Every rank works through the streams in the order of their names, so any two ranks meet in the same order. On
    channels the value is a hash of the messages to come. Raises PlanError where the ends disagree.
    """
    members: dict[str, set[int]] = {}
    for program in programs:
        for stream in program.streams:
            members.setdefault(stream, set()).update(program.ranks)
    mine = next(p for p in programs if rank in p.ranks)
    groups: dict[str, dist.ProcessGroup] = {}
    backend = "nccl" if device.type == "cuda" else "gloo"
    for stream in sorted(mine.streams):
        ranks = sorted(members[stream])
        if stream == "compute" or len(ranks) == 1:
            continue
        group = dist.new_group(ranks, backend=backend, use_local_synchronization=True)
        groups[stream] = group
        actions = mine.streams[stream]
        transfer = actions[0].kind.startswith(("SEND", "RECV"))
        names = identities(actions) if transfer else [a.text for a in actions]
        digest = hashlib.sha256("\n".join(names).encode()).digest()
        value = torch.tensor([int.from_bytes(digest[:7], "little")], dtype=torch.int64, device=device)
        found = [torch.zeros_like(value) for _ in ranks]
        dist.all_gather(found, value, group=group)
        if any(int(v) != int(value) for v in found):
            raise PlanError(
                f"stream '{stream}': ranks {', '.join(map(str, ranks))} do not agree on its {len(names)} actions, of "
                f"which rank {rank} has first {names[0]}"
            )
    return groups
