"""Models as data: ordered blocks with their parameters, work and bytes."""

from autopiper.model.spec import Block, Edge, Model, TensorSpec, TiedParameter

__all__ = ["Block", "Edge", "Model", "TensorSpec", "TiedParameter"]
