"""The verbs: functions from models, clusters and strategies to prices, plans and timelines.

Everything heavy is imported where it is used, so that `import autopiper` stays light.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopiper._data import require
from autopiper.cluster.spec import Cluster
from autopiper.errors import AutoPiperError, ClusterError, CostError, PlanError
from autopiper.inputs import as_cluster, as_model, as_training, length_notes, of_types, usable
from autopiper.model.spec import Model
from autopiper.plan.costs import CostTable
from autopiper.plan.plan import Plan, Provenance
from autopiper.plan.space import Space
from autopiper.plan.strategy import Strategy
from autopiper.plan.timeline import Timeline
from autopiper.plan.training import Training
from autopiper.proofs import differences, memory_faults

if TYPE_CHECKING:
    import torch

    from autopiper.inputs import ClusterLike, ModelLike
    from autopiper.ir import TrainingGraph
    from autopiper.plan.actions import Program

MOST_SEED = 2**32
"""Seeds of the samplers are 32 bits wide."""


def price(model: ModelLike, cluster: ClusterLike, training: Training | None = None) -> CostTable:
    """Price every block and link by formula. `training=None`: the model's published batch, the best common precision."""
    from autopiper.costmodel import price as analytic

    model, cluster = as_model(model), as_cluster(cluster)
    training, _ = as_training(training, None, model, cluster)
    return analytic(model, cluster, training)


def profile(
    module: torch.nn.Module | Callable[[], torch.nn.Module],
    cluster: ClusterLike,
    training: Training | None = None,
    *,
    example_inputs: Any,
    model: Model | None = None,
    device_type: str | None = None,
    device: str | None = None,
    **options: Any,
) -> CostTable:
    """Measure what the blocks of `module` cost on this machine, which stands for `device_type` of the cluster.

    `device_type=None`: the only type of the cluster. `model`: the description that plans are made for, by default that
    of the module itself; `example_inputs`: a batch as the engine takes it. `device` is torch's; by default "cuda" for an
    accelerator, else "cpu". `options` (loss_fn, optimizer, micro_batch_sizes, repeats, …) are `runtime.profile`'s.
    Tables of several device types join by `CostTable.merge`. Raises ClusterError where the type is not in the cluster.
    """
    from autopiper.runtime.profile import profile as measure

    cluster = as_cluster(cluster)
    names = list(cluster.counts())
    if device_type is None:
        if len(names) > 1:
            raise ClusterError(
                f"device_type is None, but the cluster has {', '.join(names)}; name the one measured here"
            )
        device_type = names[0]
    platform = cluster.device_type(device_type).platform
    if model is None:
        model = as_model(module, example_inputs=example_inputs)  # type: ignore[arg-type]
    training, _ = as_training(training, None, model, cluster)
    training = training.resolve(d.type for d in cluster.devices())
    return measure(
        module, model, training, device_type=device_type, example_inputs=example_inputs,
        device=device or ("cpu" if platform == "cpu" else "cuda"), **options,
    )  # fmt: skip


def _lowered(
    given: Strategy | Plan, model: Model | None, cluster: Cluster | None, costs: CostTable | None
) -> tuple[TrainingGraph, tuple[Program, ...], CostTable]:
    """Build and lower what was given; a plan brings its own model, cluster and costs."""
    from autopiper import ir
    from autopiper.costmodel import price as analytic

    require(PlanError, "model", model, Model | None)
    require(PlanError, "cluster", cluster, Cluster | None)
    require(CostError, "costs", costs, CostTable | None)
    if isinstance(given, Plan):
        if model is not None or cluster is not None:
            raise PlanError("a plan brings its own model and cluster; give only costs beside it")
        strategy, model, cluster, costs = given.strategy, given.model, given.cluster, costs or given.costs
    elif isinstance(given, Strategy):
        if model is None or cluster is None:
            lacking = " and ".join(n for n, v in (("model", model), ("cluster", cluster)) if v is None)
            raise PlanError(f"a strategy does not name its {lacking}; give {lacking} beside it")
        strategy = given
    else:
        raise PlanError(f"expected a Strategy or a Plan, got a {type(given).__name__}")
    graph = ir.build(strategy, model, cluster)
    if costs is None:
        largest = max(max(row) for stage in graph.stages() for row in stage.slices)
        used = of_types(cluster, {cluster.device(d).type.name for d in graph.devices()})
        costs = analytic(model, used, graph.training, max_samples=largest)
    for name in ("precision", "optimizer"):
        priced, trained = getattr(costs, name), getattr(graph.training, name)
        if priced is not None and priced != trained:
            raise CostError(
                f"the costs hold for {name} '{priced}', the strategy trains with '{trained}'; price it again"
            )
    return graph, tuple(ir.lower(graph)), costs


def simulate(
    strategy_or_plan: Strategy | Plan,
    model: Model | None = None,
    cluster: Cluster | None = None,
    costs: CostTable | None = None,
) -> Timeline:
    """Walk one training step and say when everything happens. `costs=None`: the plan's, else `price`."""
    from autopiper import costmodel

    graph, programs, costs = _lowered(strategy_or_plan, model, cluster, costs)
    return costmodel.simulate(graph, programs, costs)


def verify(
    strategy_or_plan: Strategy | Plan,
    model: Model | None = None,
    cluster: Cluster | None = None,
    costs: CostTable | None = None,
) -> tuple[str, ...]:
    """Prove structure and memory; for a plan also that its programs and predictions follow from its strategy.

    Returns what was proved, in words. Raises PlanError with every fault.
    """
    from autopiper import costmodel, ir

    graph, programs, prices = _lowered(strategy_or_plan, model, cluster, costs)
    proved = list(ir.verify(graph, programs))
    timeline = costmodel.simulate(graph, programs, prices)
    faults = list(memory_faults(timeline, graph.cluster))
    if isinstance(strategy_or_plan, Plan):
        faults += differences(strategy_or_plan, programs, timeline, predictions=costs is None)
    if faults:
        raise PlanError("the plan does not hold:", faults)
    fullest, device = max(
        (lane.peak_memory_bytes / graph.cluster.device(d).type.usable_bytes, d)
        for lane in timeline.lanes
        for d in lane.devices
    )
    where = graph.cluster.device(device)
    proved.append(
        f"memory fits by the costs given: the fullest device is {device} ({where.type.name} on {graph.cluster.nodes[where.node].name}), "
        f"{fullest:.1%} full"
    )
    if isinstance(strategy_or_plan, Plan):
        proved.append("the stored programs are what the strategy lowers to")
        if costs is None:
            proved.append("the stored step time, makespan and memory are what the simulator finds")
    return tuple(proved)


def make_plan(strategy: Strategy, model: Model, cluster: Cluster, costs: CostTable | None = None) -> Plan:
    """Make the plan of a strategy that was written by hand, as the runtime takes it; nothing is searched or bounded.

    `costs=None`: `price`. Raises PlanError with every fault where the strategy does not hold (`verify`).
    """
    from autopiper import costmodel
    from autopiper._version import __version__

    require(PlanError, "strategy", strategy, Strategy)
    graph, programs, costs = _lowered(strategy, model, cluster, costs)
    timeline = costmodel.simulate(graph, programs, costs)
    plan = Plan(
        model=model, cluster=cluster, costs=costs, strategy=replace(strategy, training=graph.training),
        programs=programs, step_time_s=timeline.step_time_s, makespan_s=timeline.makespan_s,
        relative_error=timeline.relative_error, peak_memory_bytes=timeline.peak_memory_bytes,
        lower_bound_s=0.0, binding="none known: the strategy was given, not searched",
        provenance=Provenance(autopiper_version=__version__),
    )  # fmt: skip
    verify(plan)
    return plan


def trace(plan_or_timeline: Plan | Timeline, path: str | Path) -> Path:
    """Write one step: to a .json a Chrome trace, which ui.perfetto.dev opens; to an .svg a picture. Return the path.

    A plan is simulated, by its own costs. Raises PlanError for another ending, for what is neither plan nor timeline
    (or a timeline without events), and where the file cannot be written.
    """
    from autopiper.report.step import check_ending, write_step

    require(PlanError, "plan_or_timeline", plan_or_timeline, Plan | Timeline)
    require(PlanError, "path", path, str | Path)
    check_ending(path)  # before the work
    if isinstance(plan_or_timeline, Timeline):
        return write_step(plan_or_timeline, path)
    plan = plan_or_timeline
    return write_step(simulate(plan), path, cluster=plan.cluster, name=f"{plan.model.name} on {plan.cluster.name}")


def _refuse(name: str, came: Any, allowed: str) -> None:
    raise PlanError(f"{name} is {came!r}; this version allows {allowed}")


def optimize(
    model: ModelLike,
    cluster: ClusterLike,
    *,
    training: Training | None = None,
    global_batch_size: int | None = None,
    precision: str | None = None,
    sequence_length: int | None = None,
    example_inputs: Any = None,
    costs: CostTable | None = None,
    space: Space | None = None,
    objective: str | tuple[str, ...] = "step_time",
    baseline: Strategy | None = None,
    timeout: float | None = None,
    n_trials: int | None = None,
    seed: int = 0,
    study_name: str | None = None,
    storage: str | None = None,
    load_if_exists: bool = False,
    num_workers: int = 1,
    callbacks: Sequence[Callable[..., None]] = (),
    show_progress_bar: bool = False,
    run_dir: str | Path | None = None,
) -> Plan:
    """Find the plan with the shortest step time, and say how far it may be from the best possible.

    `model` and `cluster` may be what their constructors take: an nn.Module with `example_inputs`, a preset's name, a
    config.json; a cluster file, "local". `global_batch_size=None`: the published one of the preset, else an assumption
    that the plan's notes state. `precision=None`: that of `training`, else the best that the used devices share. `timeout` in seconds. With `run_dir`, plan.json, resolved.toml,
    step.trace.json and log.txt go there.
    Raises ModelError, ClusterError, CostError or PlanError for wrong input, InfeasibleError where nothing fits.
    """
    from autopiper.run_directory import RunDirectory

    if objective != "step_time":
        _refuse("objective", objective, "'step_time'")
    for name, came, allowed in (
        ("study_name", study_name, None), ("storage", storage, None), ("load_if_exists", load_if_exists, False),
        ("num_workers", num_workers, 1), ("callbacks", tuple(callbacks) if isinstance(callbacks, Sequence) else callbacks, ()),
    ):  # fmt: skip
        if came != allowed:
            _refuse(name, came, f"{allowed!r}: a search runs in one process and keeps no study yet")
    hints: dict[str, tuple[Any, Any]] = {
        "space": (space, Space | None), "baseline": (baseline, Strategy | None), "timeout": (timeout, float | None),
        "n_trials": (n_trials, int | None), "seed": (seed, int), "run_dir": (run_dir, str | Path | None),
    }  # fmt: skip
    for name, (given, hint) in hints.items():
        require(PlanError, name, given, hint)
    if not 0 <= seed < MOST_SEED:
        raise PlanError(f"seed is {seed}; it must be 0 to {MOST_SEED - 1}")
    if timeout is not None and not timeout > 0:
        raise PlanError(f"timeout is {timeout}; it must be seconds above zero, or None")
    if n_trials is not None and n_trials < 1:
        raise PlanError(f"n_trials is {n_trials}; it must be 1 or more, or None")

    given, model = model, as_model(model, sequence_length=sequence_length, example_inputs=example_inputs)
    cluster = as_cluster(cluster)
    training, notes = as_training(training, global_batch_size, model, cluster, costs, precision)
    notes = (*length_notes(given, sequence_length, model), *notes)
    space = space or Space()
    if costs is None:
        part, left_out = usable(cluster, training, space)
        costs, notes = price(model, part, training), (*notes, *left_out)
    settings = {"objective": objective, "timeout": timeout, "n_trials": n_trials, "seed": seed}
    with RunDirectory(run_dir, show=show_progress_bar) as run:
        run.resolved(model, cluster, training, costs, space, notes, settings)
        try:
            from autopiper.search import search

            plan = search(
                model, cluster, training, costs, space,
                baseline=baseline, timeout=timeout, n_trials=n_trials, seed=seed, progress=run.trial,
            )  # fmt: skip
        except (AutoPiperError, KeyboardInterrupt) as fault:
            run.log(f"stopped: {type(fault).__name__}: {fault}")
            raise
        plan = replace(plan, notes=(*notes, *plan.notes))
        run.resolved(model, cluster, plan.training, plan.costs, space, plan.notes, settings)
        run.plan(plan)
        run.trace(plan, simulate)
    return plan
