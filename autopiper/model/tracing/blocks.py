"""How a live module is cut into blocks: `find_blocks`, the one notion of it, for model intake and runtime alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from autopiper.errors import ModelError
from autopiper.model.layout import BlockLayout
from autopiper.model.tracing import traced
from autopiper.model.tracing.measure import Fakes
from autopiper.model.tracing.structure import known_structure


def find_blocks(module: nn.Module, example_inputs: Any = None, *, batch_dim: int = 0) -> BlockLayout:
    """Cut `module` into blocks by its structure.

    `example_inputs` (args tuple or kwargs dict of one batch) is only needed for modules of no known structure, which
    have to be traced. Raises ModelError where the module cannot be cut, saying what was tried.
    """
    known = known_structure(module)
    if known is not None:
        return known
    if example_inputs is None:
        raise ModelError(
            f"{type(module).__name__} is neither an nn.Sequential nor a Hugging Face causal language model of known "
            "structure; give example_inputs, so that it can be traced"
        )
    fakes = Fakes(module)
    args, kwargs = fake_inputs(fakes, example_inputs, batch_dim)
    return traced.cut(module, fakes, args, kwargs)[0]


def fake_inputs(fakes: Fakes, example_inputs: Any, batch_dim: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return args and kwargs with fake tensors of one sample, whatever batch the example has.

    Raises ModelError where the tensors have no such dimension, or batches of different sizes.
    """
    args: tuple[Any, ...]
    if isinstance(example_inputs, Mapping):
        args, kwargs = (), dict(example_inputs)
    elif isinstance(example_inputs, torch.Tensor):
        args, kwargs = (example_inputs,), {}
    elif isinstance(example_inputs, Sequence) and not isinstance(example_inputs, str):
        args, kwargs = tuple(example_inputs), {}
    else:
        raise ModelError(
            f"example_inputs is a {type(example_inputs).__name__}; give the args as a tuple or the kwargs as a dict"
        )
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    if not tensors:
        raise ModelError("example_inputs holds no tensor; give the inputs of a batch of one sample")
    shapes = [tuple(t.shape) for t in tensors]
    if any(not 0 <= batch_dim < t.dim() for t in tensors):
        raise ModelError(f"batch_dim is {batch_dim}, but example_inputs has the shapes {shapes}; every tensor needs it")
    if len({shape[batch_dim] for shape in shapes}) > 1:
        raise ModelError(
            f"the batches of example_inputs differ: sizes {[s[batch_dim] for s in shapes]} in dimension {batch_dim} of "
            f"{shapes}; give every tensor the same batch, of one sample"
        )

    def one(tensor: torch.Tensor) -> torch.Tensor:
        shape = list(tensor.shape)
        shape[batch_dim] = 1
        return fakes.like(tensor, shape=shape)

    return tree_map_only(torch.Tensor, one, args), tree_map_only(torch.Tensor, one, kwargs)
