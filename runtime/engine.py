"""Engine: trains a module by a Plan, on the ranks of a torch.distributed job (torchrun, `run_local`, `launch`)."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopiper import ir
from autopiper._data import data
from autopiper.errors import PlanError, RuntimeFault
from autopiper.plan import Event, Plan
from autopiper.runtime import batches, checks
from autopiper.runtime.channels import Channel
from autopiper.runtime.gradients import make_buffers, match_tied
from autopiper.runtime.groups import Groups, holder_ranks
from autopiper.runtime.handlers import Handlers, InputsFunction, LossFunction
from autopiper.runtime.interpreter import Interpreter
from autopiper.runtime.lanes import make_lanes, now_s
from autopiper.runtime.places import LivePlace
from autopiper.runtime.stages import ModuleOrFactory, build_stage, held_by, open_module
from autopiper.runtime.totals import Totals

OptimizerFactory = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]


@data
class StepResult:
    """What one step gave, the same on every rank but for times."""

    loss: float
    """Global mean: the sum of all losses over the sum of all weights."""
    grad_norm: float | None
    """2-norm of the whole gradient before clipping; None without `clip_grad_norm`."""
    step_time_s: float
    """From the call of `step` to its end, on this rank."""
    log: list[Event]

    @property
    def events(self) -> tuple[Event, ...]:
        """What this rank did when, in seconds from the start of the step, by start."""
        return tuple(sorted(self.log, key=lambda e: e.start_s))


class Engine:
    """Runs one rank's part of a plan.

    `module_or_factory`: a module, of which the rank's blocks are trained in place (let go of it, and the other blocks
    are freed); or a function that makes it, called on the meta device, so that no rank ever holds other blocks, whose
    weights come from `state` or from their own initialisation under `seed`.
    `loss_fn(output, batch)` returns (loss sum, weight), or one number that is the mean over its samples.
    `optimizer(parameters)` is called once per gradient block; `optimizers` lists what it made.
    `inputs(batch)` returns (args, kwargs) of the module; by default `batches.module_inputs`.
    Raises PlanError, on all ranks alike and before the first message, where plan, module and machine do not belong
    together.
    """

    def __init__(
        self,
        plan: Plan,
        module_or_factory: ModuleOrFactory,
        *,
        loss_fn: LossFunction,
        optimizer: OptimizerFactory,
        device: torch.device | str | None = None,
        inputs: InputsFunction | None = None,
        state: Mapping[str, Tensor] | None = None,
        seed: int = 0,
    ) -> None:
        self.plan = plan
        graph = ir.build(plan.strategy, plan.model, plan.cluster)
        dtype = checks.training_dtype(plan.training)
        self.rank, world_size = _rank_and_world()
        faults = checks.plan_faults(plan, graph, world_size)
        if faults:  # the same on every rank, so nobody has to be told
            raise PlanError("this plan cannot be run here", faults)
        ir.verify(graph, plan.programs)
        self._graph = graph
        programs = ir.lower_all(graph)  # the plan keeps equal ranks once
        self._program = program = next(p for p in programs if self.rank in p.ranks)
        self.device = _device(plan, program.devices[program.ranks.index(self.rank)], device)
        _join(self.device, self.rank, world_size)
        facts: dict[str, dict[str, Any]] = {"the plan": {"fingerprint": checks.plan_digest(plan)}}
        faults, cause = checks.device_faults(plan, program, self.device, self.rank), None
        if not faults:
            try:
                self._build(module_or_factory, dtype, seed, state)
                self._per_block = {i: _optimizer(optimizer, b.parameters) for i, b in self._buffers.items()}
                facts["the initial value of"] = checks.weights_digest(self.held, self.layout)
            except PlanError as error:
                faults = list(error.faults) or [str(error)]
            except Exception as error:
                faults, cause = [f"module or optimizer cannot be built: {type(error).__name__}: {error}"], error
        checks.agree(faults, facts, cause)

        self._lanes = make_lanes(self.device)
        self._groups = Groups(graph, programs, self.rank, self.device)
        channels = {
            stream: Channel(group, peer, self.device, self._lanes)
            for stream, (group, peer) in self._groups.channels.items()
        }
        names = tuple(i.name for i in plan.model.inputs)
        self.optimizers = tuple(self._per_block.values())
        self._custom_inputs = inputs is not None
        places = [
            LivePlace(graph, program, place, stage, channels)
            for place, stage in zip(program.places, self.stages, strict=True)
        ]
        self._totals = Totals(
            self._buffers, self._per_block, self._groups, plan.training.clip_grad_norm, self.device, self.rank
        )
        self._handlers = Handlers(
            graph, program, places, channels, self._totals, loss_fn,
            inputs or (lambda batch: batches.module_inputs(batch, names)), self._lanes, self.device,
        )  # fmt: skip
        self._interpreter = Interpreter(program, self._handlers.table(), self._lanes, self.rank)
        self._handlers.interpreter = self._interpreter
        self.samples = batches.needed_samples(graph, program.places)
        """Samples of the global batch that this rank reads, in the order in which `step` expects them."""
        self._started = self._faulted = self._closed = False

    def _build(self, given: ModuleOrFactory, dtype: torch.dtype, seed: int, state: Mapping[str, Tensor] | None) -> None:
        """Build this rank's stages and gradient buffers. Raises PlanError with everything that differs from the plan."""
        model, graph, places = self.plan.model, self._graph, self._program.places
        example = {
            spec.name: torch.zeros((1, *spec.shape), dtype=getattr(torch, spec.dtype, dtype)) for spec in model.inputs
        }
        module, layout = open_module(given, dtype, example or None)
        faults = checks.module_faults(model, layout, module)
        if faults:
            raise PlanError("another module", faults)
        sizes = {n: module.get_parameter(n).numel() for b in layout.blocks for n in b.parameters}
        tied = match_tied(model, layout, sizes)
        parts = [graph.stage(place.pipeline, place.stage) for place in places]
        self.layout = layout
        self.stages = tuple(
            build_stage(
                module, layout, part.start, part.stop, recompute=part.recompute, device=self.device, seed=seed,
                state=state, example_inputs=example, samples={row[place.member] for row in part.slices} - {0},
            )
            for place, part in zip(places, parts, strict=True)
        )  # fmt: skip
        """Live stages, in the order of the places of this rank's Program."""
        self.held = held_by(self.stages)
        """Parameters that this rank holds, by their names in the whole module, each once."""
        faults = list(dict.fromkeys(fault for stage in self.stages for fault in checks.stage_faults(stage, dtype)))
        if faults:
            raise PlanError("another module", faults)
        ranks = holder_ranks(graph)
        held = [(b, ranks[b.index]) for b in graph.gradient_blocks if self.rank in ranks[b.index]]
        self._buffers = make_buffers(held, self.stages, tied)

    def step(self, batch: Any, *, whole: bool = False) -> StepResult:
        """Train one step and return its loss.

        `batch` holds this rank's samples (`samples`, what `batch_sampler` draws), or with `whole=True` the whole global
        batch. Raises PlanError where the batch is not what the plan was made for; RuntimeFault naming rank, stage and
        action where something fails meanwhile: then this process must end, and the others notice.
        """
        if self._faulted or self._closed:
            state = "an earlier step failed, so the ranks are no longer in step" if self._faulted else "it was closed"
            raise RuntimeFault(f"rank {self.rank}: this engine cannot train on: {state}; start the job anew")
        start = now_s()
        expected = self.plan.training.global_batch_size if whole else len(self.samples)
        faults = checks.batch_faults(self.plan.model, self.layout, batch, expected, self._custom_inputs)
        if not self._started:
            checks.agree(faults, {})
            self._started = True
        elif faults:
            raise PlanError("this batch cannot be trained on", faults)
        self._handlers.begin(batch, {sample: sample if whole else i for i, sample in enumerate(self.samples)})
        try:
            log = self._interpreter.run()
            self._lanes.synchronize()
            total, weight = self._totals.loss_and_weight.tolist()
            if weight == 0:
                raise RuntimeFault(f"rank {self.rank}: the weight of the whole global batch is 0; nothing to train on")
        except BaseException:
            self._fail()
            raise
        norm = self._totals.scales()[1]
        return StepResult(
            loss=total / weight, grad_norm=None if norm is None else float(norm), step_time_s=now_s() - start, log=log
        )

    def batch_sampler(self, dataset: Sized, *, shuffle: bool = False, seed: int = 0) -> batches.BatchSampler:
        """Return the indices of this rank's samples, step by step, for DataLoader(dataset, batch_sampler=…)."""
        size = self.plan.training.global_batch_size
        return batches.BatchSampler(dataset, size, self.samples, shuffle=shuffle, seed=seed)

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients of the last step of what this rank holds, divided and clipped, by parameter name."""
        return {name: p.grad.detach() for name, p in self.held.items() if p.grad is not None}

    def full_gradients(self) -> dict[str, Tensor]:
        """Return the gradients of the whole model on every rank. All ranks call it; meant for small models."""
        return self._gather(self.gradients())

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return all parameters of the whole module, on every rank. All ranks call it; meant for small models."""
        return self._gather({name: p.detach() for name, p in self.held.items()})

    def _gather(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Merge what the ranks hold, tied parameters under all their names."""
        found: list[Any] = [None] * dist.get_world_size()
        # Copies: pickle takes the whole storage of a view, which for gradients is that of all of them together.
        dist.all_gather_object(found, {name: tensor.cpu().clone() for name, tensor in own.items()})
        merged: dict[str, Tensor] = {}
        for theirs in reversed(found):
            merged.update(theirs)
        for group in self.layout.tied:
            value = next(merged[n] for n in group if n in merged)
            merged.update(dict.fromkeys(group, value))
        return {n: merged[n] for block in self.layout.blocks for n in block.parameters}

    def close(self) -> None:
        """Wait until all messages have arrived and give the engine's communicators back.

        The job itself stays joined, so that another engine can follow: under torchrun a process cannot join it twice.
        """
        if self._faulted or self._closed:
            return
        self._closed = True
        self._lanes.drain()
        self._groups.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _fail(self) -> None:
        """Make sure that this process ends: communicators wait at exit for peers that wait for this process."""
        if not self._faulted:
            self._faulted = True
            atexit.register(_leave)


def _leave() -> None:
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(1)


def _rank_and_world() -> tuple[int, int]:
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def _optimizer(factory: OptimizerFactory, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    made = factory(list(parameters))
    if not callable(getattr(made, "step", None)):
        raise PlanError(f"optimizer(parameters) returned a {type(made).__name__}; it must return a torch optimizer")
    return made


def _device(plan: Plan, planned: int, given: torch.device | str | None) -> torch.device:
    """Return the device of this rank: the one given, else the kind that the plan names, if the machine has it."""
    if given is not None:
        return torch.device(given)
    if plan.cluster.device(planned).type.platform == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def _join(device: torch.device, rank: int, world_size: int) -> None:
    """Join the job that the environment names, unless the process has done so."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if dist.is_initialized():
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if "MASTER_ADDR" in os.environ:
        dist.init_process_group(backend)
    elif world_size == 1:
        dist.init_process_group(backend, store=torch._C._distributed_c10d.HashStore(), rank=rank, world_size=world_size)
    else:
        raise PlanError(
            "RANK and WORLD_SIZE are set, but not MASTER_ADDR; start the ranks with torchrun, run_local or launch"
        )
