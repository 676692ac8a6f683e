"""Models as data: ordered blocks with their parameters, work and bytes."""

from autopiper.model.spec import Annotation, Block, Edge, Model, TensorSpec, TiedParameter

__all__ = ["Annotation", "Block", "Edge", "Model", "TensorSpec", "TiedParameter"]
