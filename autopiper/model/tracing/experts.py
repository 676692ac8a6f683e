"""What of a unit runs in scopes of experts: its work forward and backward, its parameters, how many experts they are.

Parameters are told by the operations that read them within the scope (and nowhere outside it). Experts are counted by
the names of their parameters ("experts.0.…", "experts.1.…"), or by the leading dimension of stacked ones; where neither
tells, they are one, and then there is nothing to share out.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autopiper.model.annotations import EXPERTS
from autopiper.model.tracing.scopes import MARKER


@dataclass(frozen=True, slots=True)
class ExpertPart:
    """The experts' part of a unit's cost, for one sample."""

    forward_flops: float
    backward_input_flops: float
    backward_weight_flops: float
    moved_elements: float
    kernels: int
    parameters: tuple[int, ...]
    """Positions among all names of the unit's parameters."""
    num_experts: int
    all_to_all_elements: float


class ExpertWork(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Listens while a unit runs, and notes what is done in scopes of experts.

    `depth`: such scopes that are open already; `read` returns the FLOPs, bytes moved and kernels counted so far.
    """

    def __init__(self, *, depth: int, read: Callable[[], tuple[float, float, int]], weights: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.depth = depth
        self.ran = False
        self._read, self._weights = read, weights
        self._before = read() if depth else (0.0, 0.0, 0)
        self._totals = [0.0, 0.0, 0.0]
        self._begin = _next_node() if depth else 0
        self._nodes: list[range] = []
        self._used: set[int] = set()
        self._used_outside: set[int] = set()
        self._made: set[int] = set()
        self._entering: torch.Tensor | None = None

    def enter(self, name: str) -> None:
        """Hear that a scope begins."""
        if name == EXPERTS:
            self.depth += 1
            if self.depth == 1:
                self._before, self._begin = self._read(), _next_node()

    def exit(self, name: str) -> None:
        """Hear that it ends."""
        if name == EXPERTS:
            self.depth -= 1
            if self.depth == 0:
                self._close()

    def end(self) -> None:
        """Close what is still open: a scope around the whole unit."""
        if self.depth > 0:
            self._close()

    def _close(self) -> None:
        self._totals = [t + now - was for t, now, was in zip(self._totals, self._read(), self._before, strict=True)]
        self._nodes.append(range(self._begin, _next_node()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is MARKER:
            return result
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        weights = {_storage(t) for t in tensors} & self._weights
        if self.depth <= 0:
            self._used_outside |= weights
            return result
        self.ran = True
        self._used |= weights
        known = self._made | weights
        entering = [t for t in tensors if t.is_floating_point() and t.dim() and _storage(t) not in known]
        largest = max(entering, key=torch.Tensor.numel, default=None)
        if largest is not None and (self._entering is None or largest.numel() > self._entering.numel()):
            self._entering = largest
        self._made |= {_storage(t) for t in tree_leaves(result) if isinstance(t, torch.Tensor)}
        return result

    def backward(self, read: Callable[[], float]) -> ExpertBackward:
        """Return a mode that counts the FLOPs of the backward of what ran in the scopes."""
        return ExpertBackward(self._nodes, read)

    def part(
        self, parameters: Sequence[tuple[str, torch.Tensor]], backward: float, to_inputs: float, width: int
    ) -> ExpertPart:
        """Sum up; `backward`, `to_inputs` = FLOPs of the scopes' backward, whole and for the inputs alone.

        `parameters` = all of the unit, by name; `width` = bytes of an element.
        """
        used = self._used - self._used_outside
        mine = [(i, n, t) for i, (n, t) in enumerate(parameters) if _storage(t) in used]
        unique = {_storage(t): t for _, _, t in mine}
        flops, moved, kernels = self._totals
        experts = count_experts({n: tuple(t.shape) for _, n, t in mine})
        return ExpertPart(
            forward_flops=flops,
            backward_input_flops=to_inputs,
            backward_weight_flops=backward - to_inputs,
            moved_elements=moved / width,
            kernels=int(kernels),
            parameters=tuple(i for i, _, _ in mine),
            num_experts=experts,
            all_to_all_elements=self._carried(flops, experts, sum(t.numel() for t in unique.values())),
        )

    def _carried(self, flops: float, experts: int, parameters: int) -> float:
        """Elements that enter the experts: so many rows as their FLOPs need, of the width of what enters the scope."""
        if self._entering is None:
            return 0.0
        rows = round(flops * experts / (2 * parameters)) if flops and parameters else 0
        return float(rows * self._entering.shape[-1]) if rows else float(self._entering.numel())


class ExpertBackward(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the FLOPs of those nodes of a backward that were made in these ranges of the forward."""

    def __init__(self, nodes: Sequence[range], read: Callable[[], float]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0.0
        self._nodes, self._read = nodes, read

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self._read()
        result = func(*args, **(kwargs or {}))
        node = torch._C._current_autograd_node()
        if node is not None and any(node._sequence_nr() in made for made in self._nodes):
            self.flops += self._read() - before
        return result


@contextmanager
def expert_hooks(module: nn.Module, work: ExpertWork) -> Iterator[None]:
    """Within, sub-modules called "experts" are scopes of experts, as Hugging Face's mixtures call them."""
    with ExitStack() as stack:
        for name, child in module.named_modules():
            if name.rpartition(".")[2] == "experts" and next(child.parameters(), None) is not None:
                stack.callback(child.register_forward_pre_hook(lambda *_: work.enter(EXPERTS)).remove)
                stack.callback(child.register_forward_hook(lambda *_: work.exit(EXPERTS)).remove)
        yield


def count_experts(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Return how many equal experts these parameters are, by their names or their leading dimension; 1 = cannot tell."""
    if not shapes:
        return 1
    numbers: dict[str, set[tuple[str, ...]]] = defaultdict(set)
    for name in shapes:
        numbers[re.sub(r"(?<![^.])\d+(?![^.])", "*", name)].add(tuple(re.findall(r"(?<![^.])\d+(?![^.])", name)))
    counts = {len(each) for each in numbers.values()}
    if counts != {1}:
        return counts.pop() if len(counts) == 1 else 1
    leading = {shape[0] if shape else 0 for shape in shapes.values()}
    stacked = len(leading) == 1 and any(len(shape) > 2 for shape in shapes.values())
    return max(1, math.prod(leading)) if stacked else 1


def _next_node() -> int:
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
