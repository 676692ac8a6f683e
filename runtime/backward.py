"""The backward of one micro-batch through one stage: whole, or split into I (for the inputs) and W (for the weights)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class Flow:
    """A micro-batch between its F and the end of its backward: what that starts from and what it ends in."""

    def __init__(self, received: Sequence[Tensor], roots: Sequence[Any]) -> None:
        self._wanted = [t for t in received if t.requires_grad]
        self._roots = list(roots)
        """The loss, or where the graphs of what was put out end."""
        self._gradients: list[Tensor | None] = [None] * len(self._roots)

    def arrive(self, gradients: Sequence[Tensor]) -> None:
        """Take what the next stage gives back, one gradient for each root; a loss needs none."""
        self._gradients = list(gradients)

    def whole(self) -> list[Tensor]:
        """B: add to the gradients of all parameters, and return those of what was received."""
        if self._roots:
            torch.autograd.backward(self._roots, self._gradients)
        return [torch.zeros_like(t) if t.grad is None else t.grad for t in self._wanted]

    def for_inputs(self) -> list[Tensor]:
        """I: return the gradients of what was received; parameters get none, and the graph is kept for W.

        Nothing to do where nothing was received that wants one: the first stage's I costs nothing.
        """
        if not self._roots or not self._wanted:
            return [torch.zeros_like(t) for t in self._wanted]
        found = torch.autograd.grad(
            self._roots, self._wanted, self._gradients, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        return list(found)

    def for_weights(self, parameters: Sequence[nn.Parameter]) -> None:
        """W: add to the gradients of the parameters, and let the graph go.

        It walks the graph anew from its roots, so gradients of activations above the lowest parameter are computed in
        I and again in W: I and W together cost up to half as much again as B. Blocks under full recompute run again
        in both.
        """
        if self._roots and parameters:
            torch.autograd.backward(self._roots, self._gradients, inputs=list(parameters))
