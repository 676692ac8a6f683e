"""Action and Program: what every rank does, in order, per stream; and the text that names each action.

The text is torch pipelining's where it can be ("2F5", "1B2") and extended where it must be:

    2F5 2B5 2I5 2W5          stage 2, micro-batch 5: forward, fused backward, backward for the input, for the weights
    0SEND_F0>2[0:3]          stage 0 sends samples 0..2 of micro-batch 0's activations to member 2 of the next stage
    1RECV_F0<0[0:3]          stage 1 receives them from member 0 of the stage before; SEND_B / RECV_B likewise
    g3.0REDUCE_GRAD          gradient block 3, bucket 0: sum over all its holders
    g3UPDATE  LOSS  NORM     optimizer of gradient block 3; global loss and weight; global gradient norm
    p1:2F5                   pipeline 1, where the rank serves several
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from autopiper._data import data
from autopiper.errors import PlanError

COMPUTE_KINDS = ("F", "I", "W", "B")
TRANSFER_KINDS = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
COLLECTIVE_KINDS = ("REDUCE_GRAD", "LOSS", "NORM")
KINDS = (*COMPUTE_KINDS, *TRANSFER_KINDS, *COLLECTIVE_KINDS, "UPDATE")

COMPUTE_STREAM = "compute"


@data
class Wait:
    """An action of the same Program that must be over first, or, with `block`, have passed that block backward."""

    action: str
    block: int | None = None

    @property
    def text(self) -> str:
        """ "1B7" or "1B7@5": after the backward 1B7 has passed block 5."""
        return self.action if self.block is None else f"{self.action}@{self.block}"


def compute_text(stage: int | None, kind: str, micro_batch: int | str) -> str:
    """Name F, B, I or W of a micro-batch: "2F5"."""
    return f"{stage}{kind}{micro_batch}"


@data
class Action:
    """One instruction of a Program."""

    kind: str
    stream: str
    pipeline: int = 0
    stage: int | None = None
    micro_batch: int | None = None
    gradient_block: int | None = None
    bucket: int | None = None
    peer: int | None = None
    """Member of the peer stage (SEND: of the next or previous stage; RECV likewise)."""
    samples: tuple[int, int] | None = None
    """Samples [start, stop) of the micro-batch that a transfer carries."""
    waits: tuple[Wait, ...] = ()
    prefix: str = ""
    """"p1:" where the rank serves several pipelines, else empty."""
    segment: int = 0

    @property
    def text(self) -> str:
        """The name of the action, unique in its Program."""
        kind, mb = self.kind, "" if self.micro_batch is None else self.micro_batch
        if kind in COMPUTE_KINDS:
            return self.prefix + compute_text(self.stage, kind, mb)
        if kind in TRANSFER_KINDS:
            start, stop = self.samples or (0, 0)
            arrow = ">" if kind.startswith("SEND") else "<"
            return f"{self.prefix}{self.stage}{kind}{mb}{arrow}{self.peer}[{start}:{stop}]"
        if kind == "REDUCE_GRAD":
            return f"g{self.gradient_block}.{self.bucket}REDUCE_GRAD"
        if kind == "UPDATE":
            return f"g{self.gradient_block}UPDATE"
        return kind


_PATTERN = re.compile(
    r"(?:p(?P<pipeline>\d+):)?(?P<stage>\d+)(?P<compute>[FIWB])(?P<mb>\d+)"
    r"|(?:p(?P<tpipeline>\d+):)?(?P<tstage>\d+)(?P<transfer>SEND_F|RECV_F|SEND_B|RECV_B)(?P<tmb>\d+)"
    r"(?P<arrow>[<>])(?P<peer>\d+)\[(?P<start>\d+):(?P<stop>\d+)\]"
    r"|g(?P<block>\d+)\.(?P<bucket>\d+)REDUCE_GRAD|g(?P<ublock>\d+)UPDATE|(?P<global>LOSS|NORM)",
    re.ASCII,
)


def parse_action(text: str, *, stream: str, waits: tuple[Wait, ...] = (), pipeline: int = 0) -> Action:
    """Read the text of an action; `pipeline` is the one meant where the text names none.

    Raises PlanError with the text where it is not one, trailing characters included.
    """
    m = _PATTERN.fullmatch(text)
    if m is None:
        raise PlanError(
            f"'{text}' is not an action; expected e.g. 2F5, 0SEND_F0>2[0:3], g3.0REDUCE_GRAD, g3UPDATE, LOSS"
        )
    g = {k: v for k, v in m.groupdict().items() if v is not None}
    named = g.get("pipeline", g.get("tpipeline"))
    prefix = "" if named is None else f"p{named}:"
    owner = pipeline if named is None else int(named)
    if "compute" in g:
        return Action(
            kind=g["compute"], stream=stream, pipeline=owner, stage=int(g["stage"]), micro_batch=int(g["mb"]),
            waits=waits, prefix=prefix,
        )  # fmt: skip
    if "transfer" in g:
        if (g["arrow"] == ">") != g["transfer"].startswith("SEND"):
            raise PlanError(f"'{text}': a SEND points with '>', a RECV with '<'")
        return Action(
            kind=g["transfer"], stream=stream, pipeline=owner, stage=int(g["tstage"]), micro_batch=int(g["tmb"]),
            peer=int(g["peer"]), samples=(int(g["start"]), int(g["stop"])), waits=waits, prefix=prefix,
        )  # fmt: skip
    if "block" in g:
        return Action(
            kind="REDUCE_GRAD",
            stream=stream,
            gradient_block=int(g["block"]),
            bucket=int(g["bucket"]),
            waits=waits,
        )
    if "ublock" in g:
        return Action(kind="UPDATE", stream=stream, gradient_block=int(g["ublock"]), waits=waits)
    return Action(kind=g["global"], stream=stream, waits=waits)


@data
class Place:
    """A member of a stage: (pipeline, stage, member). What peers are named by."""

    pipeline: int
    stage: int
    member: int

    @property
    def text(self) -> str:
        """ "p0.s1.m0"."""
        return f"p{self.pipeline}.s{self.stage}.m{self.member}"


@data
class Program:
    """The ordered actions, per stream, of one class of ranks: here the tensor-parallel ranks of one member.

    Each stream keeps its order; actions of different streams only wait for what `waits` names.
    """

    ranks: tuple[int, ...]
    """Positions among the used devices; tensor-parallel ranks of one member run the same Program."""
    devices: tuple[int, ...]
    """Their device ids in the cluster, in the same order."""
    places: tuple[Place, ...]
    """What these ranks hold: one place, or several (virtual stages, several pipelines)."""
    streams: Mapping[str, tuple[Action, ...]]

    def __post_init__(self) -> None:
        if len(self.ranks) != len(self.devices) or not self.ranks:
            raise PlanError(
                f"a program names ranks {self.ranks} and devices {self.devices}; give one device for each rank"
            )

    def actions(self) -> Iterator[Action]:
        """Every action, stream by stream."""
        for actions in self.streams.values():
            yield from actions
