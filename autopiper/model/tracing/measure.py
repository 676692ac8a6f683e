"""What a live module costs, measured under fake tensors: no weights, no arithmetic, only shapes.

`measure` runs one unit (`capture.Unit`) by itself, forward and backward. Every parameter is replaced by a fake one of
the same shape, so modules with real weights, on the meta device or built under a FakeTensorMode are all the same here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode, flop_registry, sdpa_flop_count

from autopiper.model.annotations import listening
from autopiper.model.tracing.capture import Call
from autopiper.model.tracing.experts import ExpertPart, ExpertWork, expert_hooks


@dataclass(frozen=True, slots=True)
class Measure:
    """Cost of one unit, for the batch it was called with (one sample). Elements are of the training precision."""

    forward_flops: float
    backward_input_flops: float
    backward_weight_flops: float
    moved_elements: float
    kernels: int
    kept_inside: float
    """Kept for the backward, its own input and output left out."""
    kept_input: float
    """Its input's elements where it keeps them, else 0."""
    kept_output: float
    experts: ExpertPart | None = None
    """What of it ran in scopes of experts; None = nothing."""


class Fakes:
    """Fake stand-ins for the parameters and buffers of a module."""

    def __init__(self, module: nn.Module) -> None:
        named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        modes = [t.fake_mode for _, t in named if isinstance(t, FakeTensor)]
        # A module built under a mode may hold more of its tensors in plain attributes: stay in that mode.
        self.mode = modes[0] if modes else FakeTensorMode(allow_non_fake_inputs=True)
        made: dict[int, torch.Tensor] = {}
        for _, tensor in named:
            if id(tensor) not in made:
                made[id(tensor)] = self.like(tensor, tensor.requires_grad)
        self.state = {name: made[id(tensor)] for name, tensor in named}
        self._parameters = [name for name, _ in module.named_parameters(remove_duplicate=False)]
        widths: Counter[torch.dtype] = Counter()
        for parameter in module.parameters():
            if parameter.is_floating_point():
                widths[parameter.dtype] += parameter.numel()
        self.dtype = widths.most_common(1)[0][0] if widths else torch.get_default_dtype()
        self.weights = {_storage(t) for t in made.values()}

    def like(
        self, tensor: torch.Tensor, requires_grad: bool = False, shape: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Return a fake tensor of this shape and type, on the CPU whatever the device."""
        with self.mode:
            fake = torch.empty(tuple(tensor.shape) if shape is None else tuple(shape), dtype=tensor.dtype, device="cpu")
        return fake.requires_grad_(requires_grad)

    def parameters_of(self, prefix: str) -> list[tuple[str, torch.Tensor]]:
        """Return the parameters of the sub-module `prefix` by their names within it, each under all its names."""
        dot = f"{prefix}." if prefix else ""
        return [(name[len(dot) :], self.state[name]) for name in self._parameters if name.startswith(dot)]

    def call(self, module: nn.Module, prefix: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a (sub-)module, whose qualified name is `prefix`, on fake parameters."""
        dot = f"{prefix}." if prefix else ""
        state = {name[len(dot) :]: tensor for name, tensor in self.state.items() if name.startswith(dot)}
        return functional_call(module, state, args, kwargs)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within, every tensor is fake. Enter it before any counter, so that the counters see each operation first."""
        with self.mode, _GroupedShapes():  # type: ignore[no-untyped-call]
            yield


class _GroupedShapes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives grouped matrix products their shape in any precision; torch's own shape rule refuses all but bf16."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten._grouped_mm.default:
            return func(*args, **(kwargs or {}))
        a, b = args[0], args[1]
        if a.dim() == 2 and b.dim() == 2:
            offsets: Any = args[2] if len(args) > 2 else (kwargs or {})["offs"]
            return a.new_empty((offsets.shape[0], a.shape[0], b.shape[1]))
        return a.new_empty((*a.shape[:-1], b.shape[-1]))


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _bytes(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().nbytes())


class _Moved(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts kernels, and the elements that operations other than matrix products read and write."""

    def __init__(self, fakes: Fakes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fakes = fakes
        self.kernels = 0
        self.bytes = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sources = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        results = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        written = {_storage(t) for t in results}
        mutates = func._schema.is_mutable
        is_view = not mutates and bool(written) and written <= {_storage(t) for t in sources}
        if results and not is_view and "empty" not in func._schema.name:
            self.kernels += 1
            if func._overloadpacket not in _MATRIX_WORK:
                moved = [t for t in (*sources, *results) if _storage(t) not in self.fakes.weights]
                self.bytes += sum(t.numel() * t.element_size() for t in moved)
        return result


def _grouped(a: Sequence[int], b: Sequence[int], *_: Any, **__: Any) -> int:
    """Grouped product: (rows, k) x (groups, k, n), or (m, rows) x (rows, n) -> (groups, m, n)."""
    return 2 * a[0] * a[1] * b[-1]


def _attention(q: Sequence[int], k: Sequence[int], v: Sequence[int], *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(q, k, v))  # type: ignore[no-untyped-call]


def _attention_backward(
    grad: Sequence[int], q: Sequence[int], k: Sequence[int], v: Sequence[int], *_: Any, **__: Any
) -> int:
    """Four products; the fifth, which recomputes the scores, is no work of the model."""
    return 2 * _attention(q, k, v)


_CUSTOM = {
    torch.ops.aten._grouped_mm: _grouped,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
_MATRIX_WORK = {*flop_registry, *_CUSTOM}


def measure(fakes: Fakes, module: nn.Module, prefix: str, call: Call, *, first: bool, by_name: bool) -> Measure:
    """Run one unit forward and backward. `first`: it belongs to block 0, whose inputs are the model's own.

    `by_name`: sub-modules called "experts" are scopes of experts, since the forward has no scopes that say so.
    """

    def fresh(tensor: torch.Tensor) -> torch.Tensor:
        return fakes.like(tensor, tensor.requires_grad)

    def entered(tensor: torch.Tensor) -> torch.Tensor:  # no leaf, so a unit may begin with an operation in place
        return tensor.clone() if tensor.requires_grad else tensor

    leaves = tree_map_only(torch.Tensor, fresh, (call.args, call.kwargs))
    wanted = [t for t in tree_leaves(leaves) if isinstance(t, torch.Tensor) and t.requires_grad]
    args, kwargs = tree_map_only(torch.Tensor, entered, leaves)
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    inputs = [t for t in tensors if t.requires_grad]
    saved: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[_storage(tensor)] = tensor
        return tensor

    moved = _Moved(fakes)
    counter = FlopCounterMode(display=False, custom_mapping=_CUSTOM)
    work = ExpertWork(
        depth=call.expert_depth,
        read=lambda: (float(counter.get_total_flops()), moved.bytes, moved.kernels),
        weights=fakes.weights,
    )
    with ExitStack() as stack:
        for context in (fakes.active(), saved_tensors_hooks(pack, lambda t: t), moved, counter, work, listening(work)):
            stack.enter_context(context)
        if by_name:
            stack.enter_context(expert_hooks(module, work))
        output = fakes.call(module, prefix, args, kwargs)
    work.end()
    outputs = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor)]
    width = torch.empty((), dtype=fakes.dtype).element_size()
    kept = {key: _bytes(t) / width for key, t in saved.items() if key not in fakes.weights}
    # What came in without a gradient (masks, rotary tables) is one copy for all blocks, except in block 0.
    own = {_storage(t) for t in (tensors if first else inputs)}
    alien = {_storage(t) for t in tensors} - own
    results = {_storage(t) for t in outputs} - own
    total, to_inputs, *of_experts = _backward_flops(fakes, outputs, wanted, work)
    return Measure(
        forward_flops=float(counter.get_total_flops()),
        backward_input_flops=to_inputs,
        backward_weight_flops=total - to_inputs,
        moved_elements=moved.bytes / width,
        kernels=moved.kernels,
        kept_inside=sum(n for key, n in kept.items() if key not in own | alien | results),
        kept_input=sum(n for key, n in kept.items() if key in own),
        kept_output=sum(n for key, n in kept.items() if key in results),
        experts=work.part(fakes.parameters_of(prefix), of_experts[0], of_experts[1], width) if work.ran else None,
    )


def _backward_flops(
    fakes: Fakes, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], work: ExpertWork
) -> tuple[float, float, float, float]:
    """Return the FLOPs of the whole backward and of the part that yields the gradient for the inputs; the experts' too."""
    roots = [t for t in outputs if t.requires_grad]
    parameters = [t for t in fakes.state.values() if t.requires_grad]
    if not roots:
        return 0.0, 0.0, 0.0, 0.0

    def count(targets: Sequence[torch.Tensor]) -> tuple[float, float]:
        if not targets:
            return 0.0, 0.0
        with fakes.active(), FlopCounterMode(display=False, custom_mapping=_CUSTOM) as counter:
            back = work.backward(lambda: float(counter.get_total_flops()))
            with back:
                gradients = [torch.ones_like(t) for t in roots]
                torch.autograd.grad(roots, targets, gradients, retain_graph=True, allow_unused=True)
        return float(counter.get_total_flops()), back.flops

    total, experts = count([*inputs, *{id(p): p for p in parameters}.values()])
    to_inputs, experts_to_inputs = count(inputs)
    return total, to_inputs, experts, experts_to_inputs
