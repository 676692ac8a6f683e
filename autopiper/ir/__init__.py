"""The IR: a strategy's directives become a training graph, the graph becomes Programs, and both are proved right."""

from autopiper.ir.build import build
from autopiper.ir.graph import GradientBlock, GraphPipeline, GraphStage, TrainingGraph
from autopiper.ir.lower import lower, lower_all, program_of
from autopiper.ir.verify import verify

__all__ = [
    "GradientBlock", "GraphPipeline", "GraphStage", "TrainingGraph", "build", "lower", "lower_all", "program_of", "verify",
]  # fmt: skip
