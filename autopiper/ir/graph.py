"""TrainingGraph: the intermediate representation that is written by directives, priced, run and exported.

It is kept folded: one entry per stage and one row of passes per device group, instead of one node per action;
`to_networkx` unfolds it for inspection, `ir.lower` into Programs. Transformations are pure: they return a new graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from autopiper._data import data
from autopiper.cluster.spec import Cluster
from autopiper.model.spec import Model
from autopiper.plan.actions import Place
from autopiper.plan.passes import Pass, PassGroup
from autopiper.plan.strategy import DEFAULT_BUCKET_BYTES
from autopiper.plan.training import Training

if TYPE_CHECKING:
    import networkx as nx

Members = tuple[tuple[int, ...], ...]
"""A device group: device ids of each data-parallel member, tensor-parallel ranks fastest."""


@data
class Border:
    """Where one segment of a stage ends and the next begins."""

    half: int
    """2b = before block b, 2b + 1 = before its routed experts."""
    exchange: int | None = None
    """The block whose tokens are exchanged here (all-to-all), if any."""


@data
class GraphStage:
    """One stage of one pipeline: its blocks, its members, and what is chosen for them."""

    pipeline: int
    index: int
    start: int
    stop: int
    members: Members = ()
    slices: tuple[tuple[int, ...], ...] = ()
    """`slices[micro_batch][member]`, in samples."""
    recompute: tuple[str, ...] = ()
    """Per block."""
    zero: tuple[int, ...] = ()
    """ZeRO level per block."""
    tensor_parallel_size: int = 1
    sequence_parallel: bool = False
    expert_parallel_size: int = 1
    """Consecutive members over which the experts of the `sharded` blocks are divided; 1 = not said yet or none."""
    sharded: tuple[int, ...] = ()
    """Blocks whose experts are divided over members, with an all-to-all before and after them."""
    borders: tuple[Border, ...] = ()
    """Between its segments, rising; none = one segment."""
    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    reduce_stream: str | None = None
    gather_stream: str | None = None
    exchange_stream: str | None = None
    source: str = field(default="", compare=False)
    """The directive that made the stage, for messages."""

    @property
    def tag(self) -> str:
        """ "p0.s1", as messages name a stage."""
        return f"p{self.pipeline}.s{self.index}"

    @property
    def num_segments(self) -> int:
        """Parts between borders."""
        return len(self.borders) + 1

    def segment(self, number: int) -> tuple[int, int]:
        """Half blocks [low, high) of a segment."""
        edges = (2 * self.start, *(b.half for b in self.borders), 2 * self.stop)
        return edges[number], edges[number + 1]

    def segment_of(self, half: int) -> int:
        """Number of the segment that a half block lies in."""
        return sum(b.half <= half for b in self.borders)

    def ranges(self, micro_batch: int) -> list[tuple[int, int]]:
        """Samples [start, stop) of a micro-batch that each member takes, in member order."""
        ends = list(accumulate(self.slices[micro_batch]))
        return list(zip([0, *ends[:-1]], ends, strict=True))

    def places(self) -> tuple[Place, ...]:
        """Where the stage is held, member by member."""
        return tuple(Place(pipeline=self.pipeline, stage=self.index, member=m) for m in range(len(self.members)))


@data
class GraphPipeline:
    """One pipeline: its micro-batches and stages."""

    index: int
    micro_batch_sizes: tuple[int, ...]
    stages: tuple[GraphStage, ...] = ()


@data
class Row:
    """The order in which one device group works: groups of passes, one after the other.

    Passes of one group may overlap: lowering interleaves their segments.
    """

    members: Members
    groups: tuple[PassGroup, ...]
    source: str = field(default="", compare=False)
    """The directive that gave it, for messages."""

    def passes(self) -> Iterator[Pass]:
        """Every pass in order."""
        for group in self.groups:
            yield from group


@data
class Bucket:
    """A piece of a gradient block that is reduced, and under ZeRO gathered, at once."""

    start: int
    stop: int
    """Element range in the flat gradient of the gradient block."""
    highest_block: int
    lowest_block: int
    """The bucket is final when the last backward has passed this block."""


@data
class GradientBlock:
    """Parameters with one holder set: the unit of gradient aggregation (block-wise, arXiv 2610.22035)."""

    index: int
    kind: str
    """"dense", "expert" or "tied"."""
    blocks: tuple[int, ...]
    """Model blocks in backward order, highest first; for a tied parameter, the blocks that use it."""
    tied: int | None = None
    """Index into `model.tied`."""
    shard: tuple[int, int] | None = None
    """Which part of how many equal parts of the experts."""
    holders: tuple[Place, ...]
    """One place per holding rank."""
    elements: int
    buckets: tuple[Bucket, ...]
    zero: int = 0
    """ZeRO level over the holders."""
    reduce_stream: str = ""
    gather_stream: str = ""

    @property
    def low_half(self) -> int:
        """0 where the parameters are in the dense halves of their blocks, 1 where in the experts'."""
        return int(self.kind == "expert")


@data
class TrainingGraph:
    """The whole strategy for one model on one cluster."""

    model: Model
    cluster: Cluster
    training: Training
    pipelines: tuple[GraphPipeline, ...] = ()
    rows: tuple[Row, ...] = ()
    """One per device group."""
    micro_batch_tag: str = "MB"
    """What filters call a micro-batch."""
    gradient_blocks: tuple[GradientBlock, ...] = ()

    def stages(self) -> Iterator[GraphStage]:
        """Every stage of every pipeline."""
        for pipe in self.pipelines:
            yield from pipe.stages

    def stage(self, pipeline: int, index: int) -> GraphStage:
        """Return a stage."""
        return self.pipelines[pipeline].stages[index]

    def groups(self) -> dict[Members, list[GraphStage]]:
        """Device groups, each with the stages that it holds, in order of pipeline and stage."""
        found: dict[Members, list[GraphStage]] = {}
        for stage in self.stages():
            found.setdefault(stage.members, []).append(stage)
        return found

    def devices(self) -> tuple[int, ...]:
        """Used device ids, sorted: a rank is a position in this tuple."""
        return tuple(sorted({d for stage in self.stages() for member in stage.members for d in member}))

    def to_networkx(self) -> nx.DiGraph[Any]:
        """Unfold into one node per compute, message and collective, with data and order edges, to inspect or draw."""
        import networkx as nx

        from autopiper.ir.joint import join
        from autopiper.ir.lower import lower_all

        joint = join(lower_all(self))
        graph: nx.DiGraph[Any] = nx.DiGraph()
        for number, node in enumerate(joint.nodes):
            graph.add_node(number, kind=node.kind, text=node.text, programs=tuple(node.programs))
        for target, sources in enumerate(joint.waits):
            graph.add_edges_from(((source, target) for source, _ in sources), kind="data")
        for target, earlier in enumerate(joint.stream_before):
            graph.add_edges_from(((source, target) for source in earlier), kind="order")
        return graph
