"""TrainingGraph: the intermediate representation that is written by directives, priced, run and exported.

It is kept folded: one entry per stage, with the order of its passes, instead of one node per action; `nodes` and
`to_networkx` unfold it for inspection, `ir.lower` into Programs. Transformations are pure: they return a new graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from autopiper._data import data
from autopiper.cluster.spec import Cluster
from autopiper.model.spec import Model
from autopiper.plan.actions import Place
from autopiper.plan.strategy import DEFAULT_BUCKET_BYTES
from autopiper.plan.training import Training

if TYPE_CHECKING:
    import networkx as nx


@data
class Pass:
    """One visit of a micro-batch to a stage: kind F, B, I or W."""

    kind: str
    micro_batch: int


@data
class GraphStage:
    """One stage of one pipeline: its blocks, its members and the order in which it works."""

    pipeline: int
    index: int
    start: int
    stop: int
    members: tuple[tuple[int, ...], ...] = ()
    """Device ids of each data-parallel member, tensor-parallel ranks fastest."""
    slices: tuple[tuple[int, ...], ...] = ()
    """`slices[micro_batch][member]`, in samples."""
    recompute: tuple[str, ...] = ()
    """Per block."""
    tensor_parallel_size: int = 1
    sequence_parallel: bool = False
    order: tuple[Pass, ...] = ()

    @property
    def tag(self) -> str:
        """ "p0.s1", as messages name a stage."""
        return f"p{self.pipeline}.s{self.index}"

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
class Bucket:
    """A piece of a gradient block that is reduced at once."""

    start: int
    stop: int
    """Element range in the flat gradient of the gradient block."""
    lowest_block: int
    """The bucket is final when the last backward has passed this block."""


@data
class GradientBlock:
    """Parameters with one holder set: the unit of gradient aggregation (block-wise, arXiv 2610.22035)."""

    index: int
    kind: str
    """"dense" or "tied"."""
    blocks: tuple[int, ...]
    """Model blocks in backward order, highest first; for a tied parameter, the blocks that use it."""
    tied: int | None = None
    """Index into `model.tied`."""
    holders: tuple[Place, ...]
    elements: int
    buckets: tuple[Bucket, ...]


@data
class TrainingGraph:
    """The whole strategy for one model on one cluster."""

    model: Model
    cluster: Cluster
    training: Training
    pipelines: tuple[GraphPipeline, ...] = ()
    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    gradient_blocks: tuple[GradientBlock, ...] = ()

    def stages(self) -> Iterator[GraphStage]:
        """Every stage of every pipeline."""
        for pipe in self.pipelines:
            yield from pipe.stages

    def stage(self, place: Place) -> GraphStage:
        """Return the stage that a place belongs to."""
        return self.pipelines[place.pipeline].stages[place.stage]

    def devices(self) -> tuple[int, ...]:
        """Used device ids, sorted: a rank is a position in this tuple."""
        return tuple(sorted({d for stage in self.stages() for member in stage.members for d in member}))

    def to_networkx(self) -> nx.DiGraph[Any]:
        """Unfold into nodes "p0.s1 2F5@m0" and so on, with data and order edges, for inspection and drawing."""
        import networkx as nx

        from autopiper.ir.joint import join
        from autopiper.ir.lower import lower

        joint = join(lower(self))
        graph: nx.DiGraph[Any] = nx.DiGraph()
        for number, node in enumerate(joint.nodes):
            graph.add_node(number, kind=node.kind, text=node.text, programs=tuple(node.programs))
        for target, sources in enumerate(joint.waits):
            graph.add_edges_from(((source, target) for source, _ in sources), kind="data")
        for target, earlier in enumerate(joint.stream_before):
            graph.add_edges_from(((source, target) for source in earlier), kind="order")
        return graph
