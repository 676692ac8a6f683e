"""The profiler: measures what the blocks of a live module cost on this device, by running the runtime's own stages.

Every distinct kind of block is measured once, for several slice sizes, in short windows of back-to-back passes whose
mean is taken (a throttled or clock-scaled device has its sustained speed only over such a window). All
measurements of one round follow each other before the next round begins, so that a slow spell of the machine meets them
all alike; the median over the rounds counts, and the spread between quartiles is the error bar.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from autopiper._data import data
from autopiper.errors import CostError
from autopiper.model.layout import BlockLayout
from autopiper.model.spec import Model
from autopiper.plan.costs import BlockCost, CostTable, HostCost
from autopiper.plan.training import OPTIMIZER_STATES, Training
from autopiper.runtime import batches
from autopiper.runtime.bench import Bench, Memory
from autopiper.runtime.checks import DTYPES
from autopiper.runtime.handlers import InputsFunction, LossFunction
from autopiper.runtime.stages import ModuleOrFactory, build_stage, open_module

OptimizerFactory = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]
RUN = 4
"""Blocks of one kind that are measured in one stage, where the model has so many in a row."""


@data
class Part:
    """A stage that is measured: `count` blocks of one kind from block `start` on."""

    start: int
    count: int
    kind: str

    @property
    def stop(self) -> int:
        """The block behind the last."""
        return self.start + self.count


@data
class Reading:
    """What the benches of one part gave, by samples."""

    windows: dict[int, tuple[list[float], list[float], list[float], list[float]]]
    """Seconds of forwards, backwards, and of their halves I and W, an entry per window."""
    memory: dict[int, Memory]
    update_s: float

    def median_s(self, samples: int) -> tuple[float, ...]:
        """Return the medians of the four."""
        return tuple(statistics.median(times) for times in self.windows[samples])

    def spread(self, samples: int) -> float:
        """Return the relative spread of forward and backward together."""
        return spread([f + b for f, b in zip(*self.windows[samples][:2], strict=True)])


def parts_of(model: Model) -> tuple[Part, ...]:
    """Choose what to measure: one block of each kind, and its longest run of equal blocks, at most RUN of them.

    Not block 0 where the kind occurs again: whose inputs are the model's own has no backward for them.
    """
    longest: dict[str, Part] = {}
    start = 0
    for index, block in enumerate(model.blocks):
        if index < 2 or block.kind != model.blocks[index - 1].kind:
            start = index
        here = Part(start=start, count=min(RUN, index - start + 1), kind=block.kind)
        known = longest.get(block.kind)
        if known is None or known.start == 0 or here.count > known.count:
            longest[block.kind] = here
    ones = tuple(Part(start=p.start, count=1, kind=p.kind) for p in longest.values())
    return (*ones, *(p for p in longest.values() if p.count > 1))


def profile(
    given: ModuleOrFactory,
    model: Model,
    training: Training,
    *,
    device_type: str,
    example_inputs: Any,
    loss_fn: LossFunction | None = None,
    optimizer: OptimizerFactory | None = None,
    inputs: InputsFunction | None = None,
    micro_batch_sizes: Sequence[int] = (1, 2, 4),
    repeats: int = 5,
    window_s: float = 0.25,
    device: torch.device | str = "cpu",
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> CostTable:
    """Measure every distinct block of `model`, which describes the module `given`, as `device_type`.

    `example_inputs`: a batch as `Engine.step` takes it, of one sample or more (args tuple, dict with the module's
    inputs and what the loss needs); `loss_fn`, `optimizer` and `inputs` as the engine's. Without `loss_fn` the loss is
    the mean of the output; without `optimizer` torch's own for `training.optimizer`. `training.precision` must be
    resolved. On a CPU one thread is used, as each rank does.

    Measured: forward, fused backward, the backwards for the inputs and for the weights as the runtime splits them (of
    a first block, whose inputs want no gradient, I is nothing and W all of it), optimizer step, bytes. Derived: what a
    stage costs beside its blocks (masks, position tables, the call of the model): that is told apart by stages of one
    and of several blocks of one kind. Raises CostError where module and model do not fit together.
    """
    if training.precision is None:
        raise CostError("training.precision is None; resolve it first: training.resolve(device types)")
    if training.precision not in DTYPES:
        raise CostError(f"precision '{training.precision}' cannot be run yet; allowed: {', '.join(DTYPES)}")
    sizes = sorted(set(micro_batch_sizes))
    if not sizes or sizes[0] < 1:
        raise CostError(f"micro_batch_sizes is {tuple(micro_batch_sizes)}; give sizes of 1 or more")
    if repeats < 1 or not window_s > 0:
        raise CostError(f"repeats is {repeats} and window_s {window_s}; allowed: 1 or more, and above zero")
    target = torch.device(device)
    threads = torch.get_num_threads()
    if target.type == "cpu":
        torch.set_num_threads(1)
    try:
        module, layout = open_module(given, DTYPES[training.precision], example_inputs)
        _check(model, layout, module)
        names = tuple(i.name for i in model.inputs)
        take = inputs or (lambda batch: batches.module_inputs(batch, names))
        found = _measure(
            module, layout, model, _examples(example_inputs, sizes, target), take, loss_fn or _mean_loss,
            optimizer or default_optimizer(training.optimizer), repeats, window_s, target, seed, progress or (lambda _: None),
        )  # fmt: skip
    finally:
        torch.set_num_threads(threads)
    blocks, host = _prices(found, device_type)
    return CostTable(
        blocks=blocks,
        hosts=(host,),
        precision=training.precision,
        optimizer=training.optimizer,
        source=f"measured with torch {torch.__version__}",
    )


def _measure(
    module: nn.Module, layout: BlockLayout, model: Model, examples: dict[int, Any], take: InputsFunction,
    loss_fn: LossFunction, optimizer: OptimizerFactory, repeats: int, window_s: float, device: torch.device, seed: int,
    progress: Callable[[str], None],
) -> dict[Part, Reading]:  # fmt: skip
    """Walk through the blocks once to know what each receives, then measure the parts round by round."""
    parts = parts_of(model)
    benches: dict[tuple[Part, int], Bench] = {}
    outputs: dict[str, dict[int, Any]] = {}
    received: dict[int, Any] = {}
    for index, block in enumerate(model.blocks):
        for part in (p for p in parts if p.start == index):
            stage = build_stage(module, layout, part.start, part.stop, device=device, seed=seed)
            for n, batch in examples.items():
                benches[part, n] = Bench(stage, batch, received.get(n), take, loss_fn, device)
        if block.kind not in outputs:  # blocks of one kind put out tensors of one form, so a kind is run once
            stage = build_stage(module, layout, index, index + 1, device=device, seed=seed)
            outputs[block.kind] = {
                n: Bench(stage, batch, received.get(n), take, loss_fn, device).output() for n, batch in examples.items()
            }
        received = outputs[block.kind]
    memory = {key: bench.memory() for key, bench in benches.items()}
    for bench in benches.values():
        bench.prepare(window_s)
    for number in range(repeats):
        progress(f"round {number + 1} of {repeats}")
        for bench in benches.values():
            bench.window()
    found = {}
    for part in parts:
        own = {n: benches[part, n] for n in examples}
        found[part] = Reading(
            windows={n: bench.windows for n, bench in own.items()},
            memory={n: memory[part, n] for n in own},
            update_s=statistics.median(own[min(own)].update_windows(optimizer, repeats, window_s / 4)),
        )
    for bench in benches.values():
        bench.close()
    return found


def spread(values: Sequence[float]) -> float:
    """Return half the distance between the quartiles, relative to the median; 0 for a single value."""
    if len(values) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / 2 / middle


def _prices(found: dict[Part, Reading], device_type: str) -> tuple[tuple[BlockCost, ...], HostCost]:
    """Turn readings into prices of single blocks, and of what a stage costs beside them."""
    one = {p.kind: r for p, r in found.items() if p.count == 1}
    runs = {p.kind: (p.count, r) for p, r in found.items() if p.count > 1}
    beside_s = tuple(
        min((beside([(one[k].windows[n][i], run.windows[n][i]) for n in run.windows], count)
             for k, (count, run) in runs.items()), default=0.0)
        for i in range(4)
    )  # fmt: skip
    out = []
    for kind, single in one.items():
        count, reading = runs.get(kind, (1, single))
        for n in reading.windows:
            forward_s, backward_s, input_s, weight_s = (
                max(0.0, t - less) / count for t, less in zip(reading.median_s(n), beside_s, strict=True)
            )
            # Tables that all blocks of a stage use are kept once: what one block more keeps is what counts.
            more = reading.memory[n].kept - single.memory[n].kept
            kept = more / (count - 1) if count > 1 else single.memory[n].kept
            out.append(
                BlockCost(
                    kind=kind, device_type=device_type, samples=n, forward_s=forward_s, backward_s=backward_s,
                    backward_input_s=input_s, backward_weight_s=weight_s,
                    update_s=reading.update_s / count, kept_bytes=kept, kept_bytes_selective=kept,
                    kept_bytes_full=single.memory[n].inputs, workspace_bytes=single.memory[n].workspace,
                    evidence="measured", relative_error=reading.spread(n),
                )
            )  # fmt: skip
    return tuple(out), HostCost(device_type=device_type, forward_s=beside_s[0], backward_s=beside_s[1])


def beside(windows: Sequence[tuple[Sequence[float], Sequence[float]]], count: int) -> float:
    """What a stage costs beside its blocks, from T(1) = beside + block and T(count) = beside + count·block.

    `windows` = pairs of times of one block and of `count` blocks, entry by entry of one round; the median counts,
    because it is a small difference of large numbers.
    """
    found = [a - (b - a) / (count - 1) for one, several in windows for a, b in zip(one, several, strict=True)]
    return max(0.0, statistics.median(found)) if found else 0.0


def _examples(example: Any, sizes: Sequence[int], device: torch.device) -> dict[int, Any]:
    """Make a batch of each size, samples repeated where there are too few."""
    count = batches.count(example)

    def pick(value: Any, samples: int) -> Any:
        if isinstance(value, torch.Tensor):
            return value[torch.arange(samples) % count].to(device)
        if isinstance(value, dict):
            return {k: pick(v, samples) for k, v in value.items()}
        return type(value)(pick(v, samples) for v in value) if isinstance(value, tuple | list) else value

    return {n: pick(example, n) for n in sizes}


def _mean_loss(output: Any, batch: Any) -> torch.Tensor:
    value = output if isinstance(output, torch.Tensor) else output[0]
    return value.float().mean()


def default_optimizer(name: str) -> OptimizerFactory:
    """Return torch's optimizer of a `Training.optimizer` name."""
    make: dict[str, OptimizerFactory] = {
        "adamw": torch.optim.AdamW,
        "adam": torch.optim.Adam,
        "sgd": lambda p: torch.optim.SGD(p, lr=1e-3),
        "sgd-momentum": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),
    }
    assert set(make) == set(OPTIMIZER_STATES)
    return make[name]


def _check(model: Model, layout: BlockLayout, module: nn.Module) -> None:
    if len(model.blocks) != len(layout.blocks):
        raise CostError(
            f"the module has {len(layout.blocks)} blocks, model '{model.name}' has {len(model.blocks)}; "
            "profile the module that the model was described from"
        )
    for block, live in zip(model.blocks, layout.blocks, strict=True):
        held = sum(module.get_parameter(n).numel() for n in live.parameters)
        if held != block.parameters:
            raise CostError(
                f"block '{live.name}' of the module has {held} parameters, block '{block.name}' of model '{model.name}' "
                f"has {block.parameters}; profile the module that the model was described from"
            )
