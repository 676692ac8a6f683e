"""Gradient blocks on a rank: flat buffers that parameters' gradients live in, and who is told when they are final.

A gradient block's buffer holds its parameters in backward order (blocks highest first, inside a block the last
registered parameter first), so that a bucket, a range of elements, is final as soon as the last backward has passed
the bucket's lowest block. A tied parameter is a gradient block of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from autopiper.errors import PlanError
from autopiper.ir import GradientBlock
from autopiper.model.layout import BlockLayout
from autopiper.model.spec import Model
from autopiper.runtime.stages import LiveStage

Result = TypeVar("Result")


class GradientBuffer:
    """The gradients of one gradient block."""

    def __init__(self, block: GradientBlock, parameters: Sequence[nn.Parameter], ranks: Sequence[int]) -> None:
        self.block = block
        self.parameters = tuple(parameters)
        self.ranks = tuple(ranks)
        """Ranks that hold the block, the first of them counting it in the norm."""
        total = sum(p.numel() for p in parameters)
        if total != block.elements:
            raise PlanError(
                f"gradient block {block.index} (blocks {', '.join(map(str, block.blocks))}) has {total} elements in the "
                f"module; the plan says {block.elements}"
            )
        self.flat = torch.zeros(total, dtype=parameters[0].dtype, device=parameters[0].device)
        self.views: list[Tensor] = []
        at = 0
        for parameter in parameters:
            self.views.append(self.flat[at : at + parameter.numel()].view(parameter.shape))
            at += parameter.numel()

    def clear(self) -> None:
        """Begin a step: zero gradients, and every parameter's `.grad` a view of the buffer."""
        self.flat.zero_()
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.grad = view

    def bucket(self, number: int) -> Tensor:
        """Return the piece of the buffer that is reduced at once."""
        return self.flat[self.block.buckets[number].start : self.block.buckets[number].stop]


def match_tied(model: Model, layout: BlockLayout, sizes: Mapping[str, int]) -> list[tuple[str, ...]]:
    """Return, for each tied parameter of the model, its names in the module. Raises PlanError where they differ."""
    left = list(layout.tied)
    found = []
    for tied in model.tied:
        for group in left:
            blocks = {i for i, b in enumerate(layout.blocks) if set(group) & set(b.parameters)}
            if blocks == set(tied.blocks) and sizes[group[0]] == tied.parameters:
                found.append(group)
                left.remove(group)
                break
        else:
            raise PlanError(
                f"the plan's model ties '{tied.name}' ({tied.parameters} parameters) over blocks "
                f"{', '.join(map(str, tied.blocks))}; the module does not"
            )
    if left:
        raise PlanError(f"the module ties {', '.join(left[0])}; the plan's model does not")
    return found


def make_buffers(
    held: Sequence[tuple[GradientBlock, Sequence[int]]], stages: Sequence[LiveStage], tied: Sequence[tuple[str, ...]]
) -> dict[int, GradientBuffer]:
    """Make the buffers of the gradient blocks that a rank holds in its stages; `held` gives each with its ranks.

    A tied parameter that several of the stages use is one parameter with one gradient.
    """
    tied_names = {name for group in tied for name in group}
    out = {}
    for block, ranks in held:
        if block.kind == "tied":
            assert block.tied is not None
            names = set(tied[block.tied])
            parameters = [p for stage in stages for n, p in stage.held.items() if n in names][:1]
        else:
            parameters = [
                p
                for b in block.blocks
                for stage in stages
                if stage.start <= b < stage.stop
                for n, p in reversed(stage.block_parameters(b))
                if not {n, *_aliases(stage.layout, n)} & tied_names
            ]
        out[block.index] = GradientBuffer(block, parameters, ranks)
    return out


def _aliases(layout: BlockLayout, name: str) -> tuple[str, ...]:
    return next((group for group in layout.tied if name in group), ())


class BackwardWatch:
    """Says which blocks a backward has passed, by the gradients that it has finished.

    A block counts as passed when it and all higher blocks of the stage have their gradients. A tied parameter counts
    for its lowest block in the stage, where its last use is.
    """

    def __init__(self, stage: LiveStage) -> None:
        self._blocks = tuple(reversed(range(stage.start, stage.stop)))
        owner: dict[int, int] = {}
        tensors: dict[int, nn.Parameter] = {}
        for block in self._blocks:  # highest first, so that the lowest wins
            for _, parameter in stage.block_parameters(block):
                owner[id(parameter)] = block
                tensors[id(parameter)] = parameter
        self._expected = {b: sum(o == b for o in owner.values()) for b in self._blocks}
        self._tell: Callable[[int], None] | None = None
        for key, parameter in tensors.items():
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda _, block=owner[key]: self._arrived(block)
            )

    def over(self, tell: Callable[[int], None] | None, run: Callable[[], Result]) -> Result:
        """Run a backward and return what it returns; call `tell(block)` for each block that it passes."""
        self._tell = tell
        self._left = dict(self._expected)
        self._next = 0
        result = run()
        while self._tell is not None and self._next < len(self._blocks):  # it is over: it has passed every block
            self._pass()
        self._tell = None
        return result

    def _arrived(self, block: int) -> None:
        if self._tell is None:
            return
        self._left[block] -= 1
        while self._next < len(self._blocks) and self._left[self._blocks[self._next]] == 0:
            self._pass()

    def _pass(self) -> None:
        assert self._tell is not None
        self._next += 1
        self._tell(self._blocks[self._next - 1])
