"""The funnel: precision, bound, uniform layouts, outer choices, polish; the best of all becomes the Plan."""

from __future__ import annotations

import importlib.metadata
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from autopiper import ir
from autopiper._version import __version__
from autopiper.cluster.spec import Cluster
from autopiper.costmodel.fold import Prediction
from autopiper.errors import AutoPiperError, PlanError
from autopiper.ir.graph import TrainingGraph
from autopiper.model.spec import Model
from autopiper.plan.actions import Program
from autopiper.plan.costs import CostTable
from autopiper.plan.plan import Alternative, Plan, Provenance
from autopiper.plan.space import Space
from autopiper.plan.strategy import Strategy
from autopiper.plan.training import Training
from autopiper.search.evaluate import Outcome, outside
from autopiper.search.exploration import Candidate, Exploration, Journal
from autopiper.search.misses import infeasible
from autopiper.search.precisions import Variant, variants
from autopiper.search.prices import Prices
from autopiper.search.proposals import Choice
from autopiper.search.uniform import BestUniform, best_uniform

DEFAULT_TRIALS = 32
ALTERNATIVES = 5
SAME = 1e-9
"""Steps that were folded and those that were not agree to this."""
MOST_MICRO_BATCHES = 20_000
"""Of the largest size in one step. The plan is proven over all; whoever asks for more has given tokens, most likely."""


def search(
    model: Model, cluster: Cluster, training: Training, costs: CostTable, space: Space | None = None, *,
    baseline: Strategy | None = None, timeout: float | None = None, n_trials: int | None = None, seed: int = 0,
    progress: Callable[[int, str, float], object] | None = None,
) -> Plan:  # fmt: skip
    """Find the best plan of a space and prove how far it can be from the best possible.

    `timeout` in seconds; without it the result depends on `n_trials` (outer choices tried) and `seed` alone.
    `baseline` = the present setup: simulated first, its choices tried, and never beaten by the plan. `progress` is
    called with (number, label, best step so far). Raises PlanError where the batch or the space is impossible,
    InfeasibleError where nothing fits the memory.
    """
    space = space or Space()
    _check(model, training, space, timeout, n_trials)
    journal = Journal(deadline_s=timeout, progress=progress)
    trials = n_trials or DEFAULT_TRIALS
    options, notes = variants(model, cluster, training, costs, space)
    explorations: list[tuple[Variant, Exploration]] = []
    for option in options:
        prices = Prices(model, cluster, option.training, option.costs, space.recompute)
        explorations.append((option, Exploration(prices, option.devices, space, journal, max(space.micro_batch_sizes))))
    explorations.sort(key=lambda pair: pair[1].bound.seconds)
    uniform: BestUniform | None = None
    best_s = float("inf")
    for number, (_, exploration) in enumerate(explorations):
        if best_s < float("inf") and (exploration.bound.seconds >= best_s or journal.late(0.5)):
            continue
        found = _uniform(exploration, space, journal)
        if found is not None and (uniform is None or found.outcome.step_s < uniform.outcome.step_s):
            uniform = found
        hints = _baseline(exploration, baseline, space, notes) if baseline is not None and number == 0 else []
        exploration.run(-(-trials // (number + 1)), seed, hints)  # fewer for the less promising
        best_s = min(best_s, exploration.best_s)
    option, exploration, candidate, (graph, programs, predicted) = _proven(explorations, space)
    bound = min((e.bound for _, e in explorations), key=lambda b: b.seconds)
    provenance = Provenance(
        autopiper_version=__version__, seed=seed, n_trials=trials, search_s=journal.elapsed_s(),
        libraries=_libraries(), history=tuple(journal.history),
    )  # fmt: skip
    return Plan(
        model=model,
        cluster=cluster,
        costs=option.costs,
        strategy=replace(candidate.outcome.strategy, training=graph.training),
        programs=programs,
        step_time_s=predicted.step_time_s,
        makespan_s=predicted.makespan_s,
        relative_error=predicted.relative_error,
        peak_memory_bytes=predicted.peak_memory_bytes,
        lower_bound_s=bound.seconds,
        binding=bound.binding,
        uniform=None
        if uniform is None
        else _alternative(uniform.layout.words, uniform.outcome, predicted, uniform.note),
        alternatives=_alternatives([e for _, e in explorations], candidate, predicted),
        notes=(*notes, *_notes(graph.training, cluster, candidate, option.devices, space)),
        provenance=provenance,
    )


def _proven(
    explorations: Sequence[tuple[Variant, Exploration]], space: Space
) -> tuple[Variant, Exploration, Candidate, tuple[TrainingGraph, tuple[Program, ...], Prediction]]:
    """Return the best candidate that holds from end to end; raises InfeasibleError where none does."""
    rows = [(option, e, c) for option, e in explorations for c in e.candidates.values()]
    for option, exploration, candidate in sorted(rows, key=lambda row: row[2].outcome.step_s):
        whole = exploration.evaluate.whole(candidate.outcome.strategy)
        if whole is not None:
            return option, exploration, candidate, whole
    option, exploration = explorations[0]
    raise infeasible(exploration.prices, option.devices, space)


def _check(model: Model, training: Training, space: Space, timeout: float | None, n_trials: int | None) -> None:
    batch, smallest = training.global_batch_size, min(space.micro_batch_sizes)
    if batch < smallest * space.min_pipelines:
        raise PlanError(
            f"global_batch_size {batch} is too small for the space: space.min_pipelines {space.min_pipelines} x smallest "
            f"of space.micro_batch_sizes {smallest} = {smallest * space.min_pipelines} samples; give at least that many, "
            "fewer pipelines or smaller micro-batches"
        )
    largest = max(space.micro_batch_sizes)
    if batch > largest * MOST_MICRO_BATCHES:
        raise PlanError(
            f"global_batch_size is {batch} samples: {-(-batch // largest)} micro-batches of {largest}, and at most "
            f"{MOST_MICRO_BATCHES} can be planned. It counts samples, not tokens: {batch} tokens are "
            f"{max(1, batch // model.sequence_length)} samples of sequence_length {model.sequence_length}"
        )
    if timeout is not None and not timeout > 0:
        raise PlanError(f"timeout is {timeout}; it must be above zero seconds, or None")
    if n_trials is not None and n_trials < 1:
        raise PlanError(f"n_trials is {n_trials}; it must be 1 or more, or None")
    if space.max_stages is not None and space.max_stages > len(model.blocks) and space.equal_stages:
        raise PlanError(
            f"space.max_stages is {space.max_stages} for {len(model.blocks)} blocks; a stage holds at least one"
        )


def _uniform(exploration: Exploration, space: Space, journal: Journal) -> BestUniform | None:
    """Find the best uniform layout; where the space allows it, it is a candidate too."""
    found = best_uniform(
        exploration.prices, exploration.evaluate, replace(space, max_stages=None), exploration.shop.devices,
        stop=lambda: journal.late(0.25),
    )  # fmt: skip
    if found is None:
        return None
    journal.note(found.layout.words, found.outcome.step_s)
    if _seed(exploration, found.layout.words, found.outcome, space) is None:
        exploration.refine(found.layout.shape(exploration.prices.cluster))
    if space.max_stages is not None or space.min_pipelines > 1:
        # The best of the space itself, which the best of all may not belong to.
        own = best_uniform(
            exploration.prices, exploration.evaluate, space, exploration.shop.devices,
            stop=lambda: journal.late(0.3), accept=lambda s: _reason(exploration, s, space) is None,
        )  # fmt: skip
        if own is not None:
            _seed(exploration, own.layout.words, own.outcome, space)
    return found


def _reason(exploration: Exploration, strategy: Strategy, space: Space) -> str | None:
    graph = ir.build(strategy, exploration.prices.model, exploration.prices.cluster)
    families = [s.family for s in strategy.schedules] or ["1f1b"]
    return outside(graph, space, families)


def _seed(exploration: Exploration, label: str, outcome: Outcome, space: Space) -> str | None:
    """Admit a strategy if it is one of the space; return why not."""
    reason = _reason(exploration, outcome.strategy, space)
    if reason is None:
        exploration.admit(label, outcome)
    return reason


def _baseline(exploration: Exploration, baseline: Strategy, space: Space, notes: list[str]) -> list[Choice]:
    """Simulate the present setup, say how it fares, and return its choices as the first to try."""
    strategy = replace(baseline, training=exploration.prices.training)
    try:
        outcome = exploration.evaluate(strategy)
        reason = _seed(exploration, "baseline", outcome, space)
    except AutoPiperError as fault:
        notes.append(f"the baseline cannot be simulated under these prices: {fault}")
        return []
    exploration.journal.note("baseline", outcome.step_s if outcome.feasible else None)
    words = f"baseline: step {outcome.step_s:.4g} s"
    if not outcome.feasible:
        words += f", but {outcome.worst[0] / 2**30:.2f} GiB too much on device {outcome.worst[1]}"
    if reason is not None:
        words += f"; not a plan of the space: {reason}"
    notes.append(words)
    return _choices(exploration, strategy)


def _choices(exploration: Exploration, strategy: Strategy) -> list[Choice]:
    graph = ir.build(strategy, exploration.prices.model, exploration.prices.cluster)
    degrees: dict[str, int] = {}
    for stage in graph.stages():
        for member in stage.members:
            degrees[exploration.prices.cluster.device(member[0]).type.name] = stage.tensor_parallel_size
    dimensions = exploration.dimensions()
    samples = max(max(row) for stage in graph.stages() for row in stage.slices)
    family = strategy.schedules[0].family if strategy.schedules else dimensions.families[0]
    if (
        any(tp not in dimensions.degrees.get(n, ()) for n, tp in degrees.items())
        or samples not in dimensions.samples
        or family not in dimensions.families
    ):
        return []
    order = [n for n in dimensions.degrees if n in degrees]
    return [
        Choice(
            degrees=tuple((n, degrees[n]) for n in order), samples=samples, recompute=dimensions.recompute[0],
            family=family, most_pipelines=dimensions.most_pipelines[-1],
        )
    ]  # fmt: skip


def _alternative(label: str, outcome: Outcome, chosen: Prediction, note: str = "") -> Alternative:
    """Write an outcome down; where it is the plan itself, as that was simulated from end to end."""
    same = math.isclose(outcome.step_s, chosen.step_time_s, rel_tol=SAME)
    step_s = chosen.step_time_s if same else outcome.step_s
    return Alternative(label=label, step_time_s=step_s, strategy=outcome.strategy, note=note)


def _alternatives(
    explorations: Sequence[Exploration], chosen: Candidate, predicted: Prediction
) -> tuple[Alternative, ...]:
    """Return the few best others, each in other words than the rest."""
    others = [c for e in explorations for c in e.candidates.values() if c.label != chosen.label]
    others.sort(key=lambda c: (c.outcome.step_s, c.label))
    return tuple(_alternative(c.label, c.outcome, predicted) for c in others[:ALTERNATIVES])


def _notes(
    training: Training, cluster: Cluster, candidate: Candidate, devices: Sequence[int], space: Space
) -> list[str]:
    notes = [f"precision {training.precision}: {training.precision_reason}", f"plan: {candidate.label}"]
    strategy = candidate.outcome.strategy
    used = {d for p in strategy.pipelines for s in p.stages for d in s.group.devices}
    idle = [d for d in range(cluster.num_devices) if d not in used] if used else []
    reasons: Mapping[str, list[int]] = {
        "not allowed by space.devices": [d for d in idle if space.devices is not None and d not in space.devices],
        "using them would make the step longer in every plan met": [d for d in idle if d in devices],
    }
    for reason, ids in reasons.items():
        if ids:
            notes.append(f"idle: {_counted(cluster, ids)} (devices {', '.join(map(str, ids))}): {reason}")
    rest = [d for d in idle if d not in devices and (space.devices is None or d in space.devices)]
    if rest:
        notes.append(
            f"idle: {_counted(cluster, rest)}: not usable in precision {training.precision} under these prices"
        )
    return notes


def _counted(cluster: Cluster, ids: Sequence[int]) -> str:
    return ", ".join(f"{n} x {name}" for name, n in Counter(cluster.device(d).type.name for d in ids).items())


def _libraries() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in ("numpy", "PuLP", "highspy", "optuna")}
