"""What ends a step: sums of gradients over their holders, the global loss and norm, and the updates."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from autopiper.plan import Action
from autopiper.runtime.gradients import GradientBuffer
from autopiper.runtime.groups import Groups
from autopiper.runtime.interpreter import Handler
from autopiper.runtime.lanes import Collective, Pending


class Totals:
    """Loss, weight and norm of a step, and the gradients and optimizers of one rank."""

    def __init__(
        self,
        buffers: Mapping[int, GradientBuffer],
        optimizers: Mapping[int, torch.optim.Optimizer],
        groups: Groups,
        limit: float | None,
        device: torch.device,
        rank: int,
    ) -> None:
        self._buffers, self._optimizers, self._groups = buffers, optimizers, groups
        self._limit, self._device, self._rank = limit, device, rank

    def table(self) -> dict[str, Handler]:
        """Return the handler of each kind."""
        return {"REDUCE_GRAD": self._reduce, "LOSS": self._loss, "NORM": self._norm, "UPDATE": self._update}

    def begin(self) -> None:
        """Begin a step with zeros."""
        self._sums = torch.zeros(2, dtype=torch.float64, device=self._device)
        self._squares: Tensor | None = None
        for buffer in self._buffers.values():
            buffer.clear()

    def add(self, loss_sum: Tensor, weight: Tensor) -> None:
        """Add the loss and the weight of some samples."""
        self._sums += torch.stack([loss_sum.detach(), weight]).to(self._sums)

    @property
    def loss_and_weight(self) -> Tensor:
        """Global loss sum and weight, float64; after LOSS."""
        return self._sums

    def scales(self) -> tuple[Tensor, Tensor | None]:
        """Return the global weight, and the gradient norm where it is asked for; after LOSS and NORM."""
        weight = torch.where(self._sums[1] == 0, 1.0, self._sums[1])
        return weight, None if self._squares is None else self._squares.sqrt() / weight

    def _sum(self, tensor: Tensor, action: Action, then: Callable[[], None] | None = None) -> Pending:
        """Sum a tensor in place over the ranks of an action."""
        group = self._groups.of(action)
        work = None if group is None else dist.all_reduce(tensor, group=group, async_op=True)
        return Collective([] if work is None else [work], then)

    def _reduce(self, action: Action) -> Pending:
        assert action.gradient_block is not None and action.bucket is not None
        return self._sum(self._buffers[action.gradient_block].bucket(action.bucket), action)

    def _loss(self, action: Action) -> Pending:
        return self._sum(self._sums, action)

    def _norm(self, action: Action) -> Pending:
        """Sum of squares of the summed gradients, every parameter counted by its first holder."""
        first = [b.flat for b in self._buffers.values() if b.ranks[0] == self._rank]
        squares = [torch.linalg.vector_norm(f, dtype=torch.float64).square() for f in first]
        self._squares = torch.stack(squares).sum() if squares else self._sums.new_zeros(())
        return self._sum(self._squares, action)

    def _update(self, action: Action) -> None:
        assert action.gradient_block is not None
        buffer = self._buffers[action.gradient_block]
        weight, norm = self.scales()
        buffer.flat.div_(weight.to(buffer.flat.dtype))
        if norm is not None and self._limit is not None:  # as torch.nn.utils.clip_grad_norm_ does
            buffer.flat.mul_((self._limit / (norm + 1e-6)).clamp(max=1.0).to(buffer.flat.dtype))
        self._optimizers[action.gradient_block].step()
