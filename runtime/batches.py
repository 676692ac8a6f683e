"""Which samples each rank works on, and how they are cut out of a batch.

The order is: the global batch, pipeline by pipeline, micro-batch by micro-batch, member by member in the order of the
slices. Sample i of a global batch is the i-th index that `BatchSampler` drew for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Sized
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from autopiper.errors import PlanError
from autopiper.ir import TrainingGraph
from autopiper.plan import Place


def sample_range(graph: TrainingGraph, place: Place, micro_batch: int) -> tuple[int, int]:
    """Return the samples [start, stop) of the global batch that a place takes of one micro-batch."""
    before = sum(sum(p.micro_batch_sizes) for p in graph.pipelines[: place.pipeline])
    before += sum(graph.pipelines[place.pipeline].micro_batch_sizes[:micro_batch])
    start, stop = graph.stage(place.pipeline, place.stage).ranges(micro_batch)[place.member]
    return before + start, before + stop


def needed_samples(graph: TrainingGraph, places: Sequence[Place]) -> tuple[int, ...]:
    """Return the samples of the global batch that these places read (first stages: inputs; last stages: targets).

    Sorted, each once; empty for stages in the middle of a pipeline.
    """
    needed: set[int] = set()
    for place in places:
        pipe = graph.pipelines[place.pipeline]
        if place.stage in (0, len(pipe.stages) - 1):
            for micro_batch in range(len(pipe.micro_batch_sizes)):
                needed.update(range(*sample_range(graph, place, micro_batch)))
    return tuple(sorted(needed))


class BatchSampler:
    """Gives each rank the indices of its own samples, one list per step; for torch's DataLoader(batch_sampler=…).

    Every rank gets equally many lists, and never an empty one: a rank that reads no samples is given the first index
    of the batch, which `step` ignores. The tail of the dataset that fills no global batch is left out.
    `shuffle` draws a new order in every epoch (call `set_epoch`), the same on all ranks.
    """

    def __init__(
        self, dataset: Sized, global_batch_size: int, samples: Sequence[int], *, shuffle: bool = False, seed: int = 0
    ) -> None:
        if len(dataset) < global_batch_size:
            raise PlanError(
                f"the dataset has {len(dataset)} samples; the plan's global_batch_size is {global_batch_size}, so not "
                "one step can be made"
            )
        self._length, self._global = len(dataset), global_batch_size
        self._samples = tuple(samples) or (0,)
        self._shuffle, self._seed, self._epoch = shuffle, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order that `shuffle` draws."""
        self._epoch = epoch

    def __len__(self) -> int:
        return self._length // self._global

    def __iter__(self) -> Iterator[list[int]]:
        order: Sequence[int] = range(self._length)
        if self._shuffle:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self._epoch)
            order = torch.randperm(self._length, generator=generator).tolist()
        for step in range(len(self)):
            yield [order[step * self._global + i] for i in self._samples]


def leaves(batch: Any, where: str = "batch") -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of everything in a batch. Raises PlanError for what is not a tensor."""
    if isinstance(batch, Tensor):
        yield where, batch
    elif isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from leaves(value, f"{where}[{key!r}]")
    elif isinstance(batch, tuple | list):
        for position, value in enumerate(batch):
            yield from leaves(value, f"{where}[{position}]")
    elif batch is not None:
        raise PlanError(f"{where} is a {type(batch).__name__}; a batch consists of tensors with the samples first")


def count(batch: Any) -> int:
    """Return how many samples a batch has. Raises PlanError where its tensors disagree."""
    sizes = {name: (tensor.shape[0] if tensor.ndim else None) for name, tensor in leaves(batch)}
    if len(set(sizes.values())) != 1 or None in sizes.values():
        found = ", ".join(f"{name}: {size}" for name, size in sizes.items()) or "no tensor"
        raise PlanError(f"the tensors of a batch must have equally many samples first; came: {found}")
    size = next(iter(sizes.values()))
    assert size is not None
    return size


def cut(batch: Any, start: int, stop: int, device: torch.device) -> Any:
    """Return samples [start, stop) of a batch, on `device`."""
    if isinstance(batch, Tensor):
        return batch[start:stop].to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: cut(value, start, stop, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(cut(value, start, stop, device) for value in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(cut(value, start, stop, device) for value in batch)
    return batch


def module_inputs(batch: Any, names: Sequence[str]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return (args, kwargs) of the module for a batch: the default rule of `Engine`.

    A mapping gives the entries that bear the names of the model's inputs ("input_ids" where it says nothing); a tuple
    or list its first elements, as many as the model has inputs; a tensor itself.
    """
    if isinstance(batch, Mapping):
        wanted = [n for n in names if n in batch] or [n for n in ("input_ids",) if n in batch]
        if not wanted:
            raise PlanError(
                f"the batch has {', '.join(map(str, batch))}; the model's inputs are {', '.join(names) or 'not named'}; "
                "give the batch one of these, or tell the engine with inputs= which entries the module takes"
            )
        return (), {n: batch[n] for n in wanted}
    if isinstance(batch, tuple | list):
        return tuple(batch[: max(1, len(names))]), {}
    return (batch,), {}


def offsets(sizes: Sequence[int]) -> list[int]:
    """Return where each piece begins, and the end."""
    return [0, *accumulate(sizes)]
