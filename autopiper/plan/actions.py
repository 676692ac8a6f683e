"""Action and Program: what every rank does, in order, per stream; and the text that names each action.

The text is torch pipelining's where it can be ("2F5", "1B2") and extended where it must be:

    2F5 2B5 2I5 2W5          stage 2, micro-batch 5: forward, fused backward, backward for the input, for the weights
    2.1F5                    segment 1 of the stage; segment 0 has no number
    2.1A2A_F5  2.1A2A_B5     all-to-all at the border between segments 0 and 1, forward and backward
    0SEND_F0>2[0:3]          stage 0 sends samples 0..2 of micro-batch 0's activations to member 2 of the next stage
    1RECV_F0<0[0:3]          stage 1 receives them from member 0 of the stage before; SEND_B / RECV_B likewise
    g3.0REDUCE_GRAD          gradient block 3, bucket 0: sum over all its holders, once a step
    g3.0REDUCE_GRAD5         the same after micro-batch 5 (ZeRO 2 and 3: reduce-scatter)
    g3.0UNSHARD_F5           gather the parameters of the bucket before 2F5 (ZeRO 3); _B, _I and _W likewise
    g3.0RESHARD_F5           let them go after it
    g3.0UNSHARD              gather them once a step, after the update (ZeRO 1 and 2)
    g3UPDATE  LOSS  NORM     optimizer of gradient block 3; global loss and weight; global gradient norm
    p1:2F5                   pipeline 1, where the rank serves several
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from autopiper._data import data
from autopiper.errors import PlanError
from autopiper.plan.passes import PASS_KINDS

COMPUTE_KINDS = PASS_KINDS
SEND_KINDS = ("SEND_F", "SEND_B")
TRANSFER_KINDS = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
EXCHANGE_KINDS = ("A2A_F", "A2A_B")
GATHER_KINDS = ("UNSHARD", "UNSHARD_F", "UNSHARD_B", "UNSHARD_I", "UNSHARD_W")
RELEASE_KINDS = ("RESHARD_F", "RESHARD_B", "RESHARD_I", "RESHARD_W")
COLLECTIVE_KINDS = ("REDUCE_GRAD", "LOSS", "NORM", *GATHER_KINDS, *EXCHANGE_KINDS)
LOCAL_KINDS = (*RELEASE_KINDS, "UPDATE")
"""Beside computing: what a rank does by itself, on the compute stream."""
KINDS = (*COMPUTE_KINDS, *TRANSFER_KINDS, *COLLECTIVE_KINDS, *LOCAL_KINDS)

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


def compute_text(stage: int | None, kind: str, micro_batch: int | None, segment: int = 0, prefix: str = "") -> str:
    """Name F, B, I, W or an all-to-all of a micro-batch: "2F5", "2.1F5", "p1:2.1A2A_F5"."""
    return f"{prefix}{stage}{f'.{segment}' if segment else ''}{kind}{micro_batch}"


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
    """Segment of the stage that is computed; of an all-to-all, the one above the border that it stands at."""

    @property
    def text(self) -> str:
        """The name of the action, unique in its Program."""
        kind = self.kind
        if self.peer is not None:
            start, stop = self.samples or (0, 0)
            arrow = ">" if kind in SEND_KINDS else "<"
            return f"{self.prefix}{self.stage}{kind}{self.micro_batch}{arrow}{self.peer}[{start}:{stop}]"
        if self.stage is not None:
            return compute_text(self.stage, kind, self.micro_batch, self.segment, self.prefix)
        if self.gradient_block is None:
            return kind
        bucket = "" if self.bucket is None else f".{self.bucket}"
        return f"g{self.gradient_block}{bucket}{kind}{'' if self.micro_batch is None else self.micro_batch}"


_PATTERN = re.compile(
    r"(?P<cprefix>p\d+:)?(?P<cstage>\d+)(?:\.(?P<segment>[1-9]\d*))?(?P<compute>[FIWB]|A2A_F|A2A_B)(?P<cmb>\d+)"
    r"|(?P<tprefix>p\d+:)?(?P<tstage>\d+)(?P<transfer>SEND_F|RECV_F|SEND_B|RECV_B)(?P<tmb>\d+)"
    r"(?P<arrow>[<>])(?P<peer>\d+)\[(?P<start>\d+):(?P<stop>\d+)\]"
    r"|g(?P<block>\d+)\.(?P<bucket>\d+)(?P<state>REDUCE_GRAD|UNSHARD_[FBIW]|RESHARD_[FBIW]|UNSHARD)(?P<gmb>\d+)?"
    r"|g(?P<ublock>\d+)UPDATE|(?P<global>LOSS|NORM)",
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
    prefix = g.get("cprefix", g.get("tprefix", ""))
    owner = int(prefix[1:-1]) if prefix else pipeline
    if "compute" in g:
        if g["compute"] in EXCHANGE_KINDS and "segment" not in g:
            raise PlanError(f"'{text}': an all-to-all stands between two segments; name the upper one, as in 2.1A2A_F5")
        return Action(
            kind=g["compute"], stream=stream, pipeline=owner, stage=int(g["cstage"]), micro_batch=int(g["cmb"]),
            waits=waits, prefix=prefix, segment=int(g.get("segment", 0)),
        )  # fmt: skip
    if "transfer" in g:
        if (g["arrow"] == ">") != g["transfer"].startswith("SEND"):
            raise PlanError(f"'{text}': a SEND points with '>', a RECV with '<'")
        return Action(
            kind=g["transfer"], stream=stream, pipeline=owner, stage=int(g["tstage"]), micro_batch=int(g["tmb"]),
            peer=int(g["peer"]), samples=(int(g["start"]), int(g["stop"])), waits=waits, prefix=prefix,
        )  # fmt: skip
    if "block" in g:
        each = "_" in g["state"].removeprefix("REDUCE_GRAD")
        if each != ("gmb" in g) and g["state"] != "REDUCE_GRAD":
            raise PlanError(f"'{text}': {g['state']} {'names' if each else 'does not name'} a micro-batch")
        return Action(
            kind=g["state"], stream=stream, gradient_block=int(g["block"]), bucket=int(g["bucket"]), waits=waits,
            micro_batch=int(g["gmb"]) if "gmb" in g else None,
        )  # fmt: skip
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
class Copy:
    """An equal replica of a Program: other ranks that do the same with peers and samples of their own."""

    ranks: tuple[int, ...]
    devices: tuple[int, ...]
    member: int
    """Of every stage that the Program holds."""

    def __post_init__(self) -> None:
        if len(self.ranks) != len(self.devices) or not self.ranks:
            raise PlanError(
                f"a copy names ranks {self.ranks} and devices {self.devices}; give one device for each rank"
            )


@data
class Program:
    """The ordered actions, per stream, of one class of equal ranks, written for the first of them.

    Each stream keeps its order; actions of different streams only wait for what `waits` names. Streams stand in the
    order in which what is ready is issued: sends first, receives last (arXiv 2606.11169).
    """

    ranks: tuple[int, ...]
    """Positions among the used devices; tensor-parallel ranks of one member run the same Program."""
    devices: tuple[int, ...]
    """Their device ids in the cluster, in the same order."""
    places: tuple[Place, ...]
    """What these ranks hold: one place, or several (virtual stages, several pipelines), all with one member number."""
    streams: Mapping[str, tuple[Action, ...]]
    copies: tuple[Copy, ...] = ()
    """The other ranks of the class; `ir.program_of` writes the Program of any of them."""

    def __post_init__(self) -> None:
        if len(self.ranks) != len(self.devices) or not self.ranks:
            raise PlanError(
                f"a program names ranks {self.ranks} and devices {self.devices}; give one device for each rank"
            )
        if len({p.member for p in self.places}) != 1:
            raise PlanError(
                f"a program holds the places {', '.join(p.text for p in self.places) or 'none'}; it must hold one or "
                "more, all with one member number"
            )

    @property
    def member(self) -> int:
        """Number of these ranks among the data-parallel members of each stage that they hold."""
        return self.places[0].member

    @property
    def name(self) -> str:
        """ "p0.s1.m0", or several of them, as messages name the Program."""
        return "+".join(p.text for p in self.places)

    @property
    def all_ranks(self) -> tuple[int, ...]:
        """Ranks of the whole class, copies included."""
        return (*self.ranks, *(rank for copy in self.copies for rank in copy.ranks))

    @property
    def all_devices(self) -> tuple[int, ...]:
        """Device ids of the whole class, in the order of `all_ranks`."""
        return (*self.devices, *(device for copy in self.copies for device in copy.devices))

    def actions(self) -> Iterator[Action]:
        """Every action, stream by stream."""
        for actions in self.streams.values():
            yield from actions
