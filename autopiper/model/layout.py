"""How a live module is cut into blocks, as names: what model intake and the runtime both work from.

`tracing.find_blocks` makes a `BlockLayout`; nothing here needs torch. Names are the qualified names that
`named_modules()` and `named_parameters()` of the whole module give, so they are valid on any copy of it: with real
weights, on the meta device, or under fake tensors.
"""

from __future__ import annotations

from typing import Literal

from autopiper._data import data

Form = Literal["sequential", "causal_lm", "traced"]


@data
class BlockPart:
    """One block of a live module: the sub-modules it runs, in order, and the parameters that they hold."""

    name: str
    modules: tuple[str, ...]
    """Qualified names of the sub-modules that belong to this block alone, in the order in which they run. A traced
    block is a graph instead and names the sub-module it begins with, if any."""
    parameters: tuple[str, ...]
    """Qualified names in registration order, each parameter once; a tied one occurs in every block that uses it,
    under the name that it has there."""


@data
class BlockLayout:
    """The blocks of a module in order, and how its forward ties them together."""

    form: Form
    """"sequential": an nn.Sequential, one block per child. "causal_lm": a Hugging Face causal language model:
    embedding, one block per decoder layer, head (final norm and lm_head). "traced": anything else, cut by
    `torch.distributed.pipelining.pipeline` at `split_points`."""
    blocks: tuple[BlockPart, ...]
    container: str = ""
    """Qualified name of the ModuleList or Sequential whose children are the layers ("" = the module itself)."""
    owner: str = ""
    """causal_lm: the module whose forward runs the layers ("model", "transformer", "model.decoder")."""
    shared: tuple[str, ...] = ()
    """Sub-modules without parameters that every block may need (rotary embeddings)."""
    split_points: tuple[str, ...] = ()
    """traced: the sub-modules at whose beginning a new block starts; one more starts after the last of them."""
    tied: tuple[tuple[str, ...], ...] = ()
    """Groups of parameter names, of two or more blocks, that are one and the same parameter."""


def parameter_names(layout: BlockLayout, block: int) -> tuple[str, ...]:
    """Return the qualified parameter names of one block in registration order, tied ones included."""
    return layout.blocks[block].parameters
