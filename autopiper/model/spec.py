"""Model as data: blocks, edges, ties and annotations, and the ways to describe one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopiper._data import data, require
from autopiper.errors import ModelError
from autopiper.model import annotations as regions
from autopiper.model.annotations import Annotation
from autopiper.model.parts import Block, Edge, TensorSpec, TiedParameter

if TYPE_CHECKING:
    import torch

__all__ = ["RECOMPUTE_CHOICES", "Annotation", "Block", "Edge", "Model", "TensorSpec", "TiedParameter"]

RECOMPUTE_CHOICES = ("none", "selective", "full")


@data
class Model:
    """Ordered blocks, the edges between them, tied parameters, and what one sample is."""

    name: str
    blocks: tuple[Block, ...]
    edges: tuple[Edge, ...]
    tied: tuple[TiedParameter, ...] = ()
    sequence_length: int = 1
    """Tokens in one sample; it fixes what a sample is."""
    inputs: tuple[TensorSpec, ...] = ()
    """The model's own inputs, per sample."""
    global_batch_size: int | None = None
    """The published global batch size of a preset, in samples of its published sequence length."""
    source: str = "numbers"
    """Where the description came from: a preset, a config.json, a module."""
    annotations: tuple[Annotation, ...] = ()
    """Regions that directives pick out by tag. They are about the strategy: the fingerprint leaves them out."""

    def __post_init__(self) -> None:
        if not self.blocks:
            raise ModelError(f"model '{self.name}' has no blocks; at least one is needed")
        if self.sequence_length < 1:
            raise ModelError(f"sequence_length is {self.sequence_length}; it must be 1 or more")
        last = len(self.blocks) - 1
        for edge in self.edges:
            if not 0 <= edge.source < edge.target <= last:
                raise ModelError(
                    f"edge {edge.source} -> {edge.target} of model '{self.name}' must run forward within 0..{last}"
                )
        for tied in self.tied:
            if len(set(tied.blocks)) < 2 or not all(0 <= b <= last for b in tied.blocks):
                raise ModelError(
                    f"tied parameter '{tied.name}' names blocks {tied.blocks}; allowed: two or more of 0..{last}"
                )
            least = min((self.blocks[b] for b in tied.blocks), key=lambda b: b.dense_parameters)
            if not 0 <= tied.parameters <= least.dense_parameters:
                raise ModelError(
                    f"tied parameter '{tied.name}' has {tied.parameters} elements, but block '{least.name}', which uses it, "
                    f"has {least.dense_parameters} dense parameters; each block counts the tied ones too"
                )
        regions.check(self.annotations, len(self.blocks), self.name)

    @property
    def parameters(self) -> int:
        """All parameters, tied ones counted once."""
        return sum(b.parameters for b in self.blocks) - sum(t.parameters * (len(t.blocks) - 1) for t in self.tied)

    @property
    def flops(self) -> float:
        """Model FLOPs of one sample's forward and backward (no recompute): the numerator of MFU."""
        return sum(b.forward_flops + b.backward_input_flops + b.backward_weight_flops for b in self.blocks)

    def untied_parameters(self, block: int) -> int:
        """Parameters of a block that no other block uses."""
        return self.blocks[block].parameters - sum(t.parameters for t in self.tied if block in t.blocks)

    def stage_parameters(self, start: int, stop: int) -> int:
        """Parameters that a stage [start, stop) holds; a tied one used twice in it is one copy."""
        total = sum(b.parameters for b in self.blocks[start:stop])
        for tied in self.tied:
            inside = sum(start <= b < stop for b in tied.blocks)
            total -= tied.parameters * max(0, inside - 1)
        return total

    def crossing(self, cut: int) -> tuple[TensorSpec, ...]:
        """Tensors that cross a cut before block `cut`, each once however many read it: what SEND and RECV carry there."""
        crossing = sorted((e for e in self.edges if e.source < cut <= e.target), key=lambda e: e.source)
        return tuple({(e.source, t.name): t for e in crossing for t in e.tensors}.values())

    def fingerprint(self) -> str:
        """16 hex digits of everything that a plan depends on; names of presets and annotations do not count."""
        content = asdict(self)
        for key in ("name", "source", "global_batch_size", "annotations"):
            del content[key]
        text = json.dumps(content, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def annotate(self, name: str, *ranges: tuple[int, int]) -> Model:
        """Return the model with a region called `name` for each range of blocks [start, stop), under the next numbers.

        E.g. `model.annotate("PP", (0, 3), (3, 7))`. Raises ModelError where regions of one name overlap, leave the
        blocks or are not in their order, or the name is reserved (PIPE, MB, PASS).
        """
        return replace(self, annotations=regions.appended(self.annotations, name, ranges))

    def with_sequence_length(self, sequence_length: int) -> Model:
        """Refuse: the work of a sample is not proportional to its length; describe the model again instead."""
        if sequence_length == self.sequence_length:
            return self
        raise ModelError(
            f"sequence_length {sequence_length} was asked of model '{self.name}', described for "
            f"{self.sequence_length}; describe it again with sequence_length={sequence_length}"
        )

    @staticmethod
    def from_preset(name: str, *, sequence_length: int | None = None) -> Model:
        """Describe a published model by name; `Model.presets()` lists them. Raises ModelError with the nearest name."""
        from autopiper.model import presets

        return presets.from_preset(name, sequence_length=sequence_length)

    @staticmethod
    def presets() -> tuple[str, ...]:
        """Names that `from_preset` knows."""
        from autopiper.model import presets

        return presets.names()

    @staticmethod
    def from_config(config: str | Path | Mapping[str, Any], *, sequence_length: int | None = None) -> Model:
        """Describe a decoder-only model by its Hugging Face config.json (a path or the parsed dict)."""
        from autopiper.model import hf_config

        return hf_config.from_config(config, sequence_length=sequence_length)

    @staticmethod
    def from_module(
        module: torch.nn.Module, example_inputs: Any, *, batch_dim: int = 0, name: str | None = None
    ) -> Model:
        """Describe an nn.Module; `example_inputs` = args tuple or kwargs dict of a batch of one sample."""
        from autopiper.model import tracing

        return tracing.from_module(module, example_inputs, batch_dim=batch_dim, name=name)

    @staticmethod
    def transformer(
        *,
        num_layers: int,
        hidden_size: int,
        num_attention_heads: int,
        sequence_length: int,
        vocab_size: int,
        num_key_value_heads: int | None = None,
        intermediate_size: int | None = None,
        gated_mlp: bool = False,
        num_experts: int = 0,
        experts_per_token: int = 0,
        moe_intermediate_size: int | None = None,
        num_shared_experts: int = 0,
        moe_layer_frequency: int = 1,
        tie_embeddings: bool = False,
        name: str = "transformer",
    ) -> Model:
        """Describe a decoder-only transformer by its dimensions (formulas: `model.transformer`)."""
        from autopiper.model.transformer import Dimensions, build

        return build(
            Dimensions(
                num_layers=num_layers,
                hidden_size=hidden_size,
                num_attention_heads=num_attention_heads,
                sequence_length=sequence_length,
                vocab_size=vocab_size,
                num_key_value_heads=num_key_value_heads,
                intermediate_size=intermediate_size,
                gated_mlp=gated_mlp,
                num_experts=num_experts,
                experts_per_token=experts_per_token,
                moe_intermediate_size=moe_intermediate_size,
                num_shared_experts=num_shared_experts,
                moe_layer_frequency=moe_layer_frequency,
                tie_embeddings=tie_embeddings,
            ),
            name=name,
        )

    @staticmethod
    def chain(num_blocks: int, *, name: str = "chain", kinds: Sequence[str] | None = None) -> Model:
        """Blocks without an architecture: prices come from a CostTable (`CostTable.from_layers`).

        Every block is its own kind ("layer0", "layer1", …) unless `kinds` names them.
        """
        require(ModelError, "num_blocks", num_blocks, int)
        if num_blocks < 1:
            raise ModelError(f"num_blocks is {num_blocks}; it must be 1 or more")
        if kinds is not None and len(kinds) != num_blocks:
            raise ModelError(f"kinds has {len(kinds)} names for {num_blocks} blocks; give one each")
        blocks = tuple(Block(name=f"layer{i}", kind=kinds[i] if kinds else f"layer{i}") for i in range(num_blocks))
        edges = tuple(
            Edge(source=i, target=i + 1, tensors=(TensorSpec(name="hidden", shape=(0,)),))
            for i in range(num_blocks - 1)
        )
        return Model(name=name, blocks=blocks, edges=edges, source="chain")
