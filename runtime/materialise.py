"""Bring the blocks that a rank holds to life: move built ones, allocate and fill those on the meta device."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from autopiper.errors import PlanError
from autopiper.model.layout import BlockLayout


def materialise(
    module: nn.Module,
    layout: BlockLayout,
    names: Iterable[str],
    *,
    device: torch.device,
    seed: int = 0,
    state: Mapping[str, Tensor] | None = None,
    recurse: bool = True,
) -> None:
    """Give the named sub-modules real parameters and buffers on `device`; all others stay as they are.

    With `recurse=False` only what each of them owns itself.

    Every sub-module is initialised under a seed of its own name, a tied parameter by its first name's sub-module,
    so the weights of a block are the same on whichever rank it lives.
    """
    if recurse:
        held = {full: sub for name in names for full, sub in _walk(name, module.get_submodule(name))}
    else:
        held = {name: module.get_submodule(name) for name in names}
    fresh = _allocate(module, held.values(), device)
    if not fresh:
        return
    first_names = {n: group[0] for group in layout.tied for n in group[1:]}
    order = list(held)
    for name in held:
        for leaf in held[name]._parameters:
            first = first_names.get(f"{name}.{leaf}")
            if first is not None:  # filled last, whoever filled it before
                order.append(first.rpartition(".")[0])
    for name in order:
        sub = module.get_submodule(name)
        inside = [*sub.parameters(), *sub.buffers()]
        if any(id(t) in fresh for t in inside):
            # What another stage of this rank shares with this one has been filled before.
            filled = [(t, t.detach().clone()) for t in inside if id(t) not in fresh and not t.is_meta]
            _initialise(module, name, sub, seed)
            for given, before in filled:
                given.data.copy_(before)
    for name, sub in held.items():
        for leaf, tensor in [*sub._parameters.items(), *sub._buffers.items()]:
            full = f"{name}.{leaf}" if name else leaf
            persistent = leaf in sub._parameters or leaf not in sub._non_persistent_buffers_set
            if tensor is None or id(tensor) not in fresh:
                continue
            if state is not None and persistent:
                _load(tensor, full, first_names.get(full, full), state)
            if _unfilled(tensor):
                raise PlanError(
                    f"'{full}' of {type(sub).__name__} was built on the meta device and has no reset_parameters() that "
                    "fills it; add one, give state=, or pass a built module"
                )


def _walk(name: str, module: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    """Yield every sub-module, children before parents: a parent's initialisation may refine its children's."""
    for child, sub in module.named_children():
        yield from _walk(f"{name}.{child}" if name else child, sub)
    yield name, module


def _allocate(root: nn.Module, held: Iterable[nn.Module], device: torch.device) -> set[int]:
    """Replace meta tensors by unfilled ones (wherever in `root` they are shared) and move the others."""
    new: dict[int, Tensor] = {}
    fresh: set[int] = set()
    for sub in held:
        for tensor in [*sub._parameters.values(), *sub._buffers.values()]:
            if tensor is None or id(tensor) in new:
                continue
            if tensor.is_meta:
                data = _mark(torch.empty_like(tensor, device=device))
                made = nn.Parameter(data, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else data
                new[id(tensor)] = made
                fresh.add(id(made))
            elif tensor.device != device:
                tensor.data = tensor.data.to(device)
    if new:
        for sub in root.modules():
            for registry in (sub._parameters, sub._buffers):
                for leaf, tensor in registry.items():
                    if tensor is not None and id(tensor) in new:
                        registry[leaf] = new[id(tensor)]  # type: ignore[assignment]
    return fresh


def _mark(tensor: Tensor) -> Tensor:
    """Fill with a value that no initialisation leaves behind."""
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.fill_(float("nan"))
    return tensor if tensor.dtype == torch.bool else tensor.fill_(torch.iinfo(tensor.dtype).min)


def _unfilled(tensor: Tensor) -> bool:
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(torch.isnan(tensor).any())
    return tensor.dtype != torch.bool and bool((tensor == torch.iinfo(tensor.dtype).min).any())


def _initialise(root: nn.Module, name: str, sub: nn.Module, seed: int) -> None:
    """Run a sub-module's own initialisation, seeded by its name."""
    own = getattr(root, "_init_weights", None)  # Hugging Face: one function of the model for all its sub-modules
    run: Callable[[], Any] | None = None
    if own is not None:
        run = lambda: own(sub)  # noqa: E731
    elif callable(getattr(sub, "reset_parameters", None)):
        run = sub.reset_parameters  # type: ignore[assignment]
    elif callable(getattr(sub, "_reset_parameters", None)):
        run = sub._reset_parameters  # type: ignore[assignment]
    if run is None:
        return
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    before = torch.get_default_dtype()
    torch.set_default_dtype(next((p.dtype for p in root.parameters() if p.is_floating_point()), before))
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            run()
    finally:
        torch.set_default_dtype(before)


def _load(tensor: Tensor, name: str, alias: str, state: Mapping[str, Tensor]) -> None:
    key = name if name in state else alias
    if key not in state:
        raise PlanError(f"state has no '{name}'; it must hold every parameter and persistent buffer of the held blocks")
    given = state[key]
    if tuple(given.shape) != tuple(tensor.shape):
        raise PlanError(f"state['{key}'] has shape {tuple(given.shape)}; the module's is {tuple(tensor.shape)}")
    with torch.no_grad():
        tensor.copy_(given)
