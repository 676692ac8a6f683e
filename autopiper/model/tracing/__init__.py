"""Models from live torch modules: the blocks of a module, and what each of them costs. Only this package has torch here.

`find_blocks` is the one notion of how a module is cut into blocks; the runtime builds its stages from the same layout.
Blocks of live modules are the default, because whole-program tracing fails on many architectures; torch's own
`pipeline()` is the fallback for modules of no known structure.

    structure  modules whose structure tells their blocks       traced  the fallback
    blocks     both behind one door                             scopes  regions that the forward marks (`annotate`)
    capture    what each unit of a block is called with         experts what of a unit runs in scopes of experts
    measure    what a unit costs, under fake tensors            assemble  units added up to blocks
    intake     `from_module`: a module as a Model
"""

from autopiper.model.layout import BlockLayout, BlockPart, parameter_names
from autopiper.model.tracing.blocks import fake_inputs, find_blocks
from autopiper.model.tracing.intake import from_module
from autopiper.model.tracing.measure import Fakes
from autopiper.model.tracing.traced import trace

__all__ = [
    "BlockLayout",
    "BlockPart",
    "Fakes",
    "fake_inputs",
    "find_blocks",
    "from_module",
    "parameter_names",
    "trace",
]
