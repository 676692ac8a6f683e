"""The outer choices: by Bayesian search (Optuna's TPE), or one after the other where there are few.

What the ILPs take as given is chosen here: which device types work at all, their tensor-parallel sizes, the micro-batch
size, the recompute policy, the schedule family, how many different pipelines. A tensor-parallel size is only asked for
where its type is used.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product

from autopiper._data import data
from autopiper.search.proposals import Choice


@data
class Dimensions:
    """The values of each outer choice."""

    degrees: Mapping[str, tuple[int, ...]]
    """Tensor-parallel sizes of each device type."""
    samples: tuple[int, ...]
    recompute: tuple[tuple[str, ...], ...]
    families: tuple[str, ...]
    most_pipelines: tuple[int, ...]

    def __iter__(self) -> Iterator[Choice]:
        """Every choice, the same order each time."""
        names = list(self.degrees)
        for sizes in product(*((0, *self.degrees[n]) for n in names)):
            used = tuple((n, tp) for n, tp in zip(names, sizes, strict=True) if tp)
            if used:
                for samples, recompute, family, most in product(
                    self.samples, self.recompute, self.families, self.most_pipelines
                ):
                    yield Choice(degrees=used, samples=samples, recompute=recompute, family=family, most_pipelines=most)

    def __len__(self) -> int:
        """How many choices there are."""
        kinds = 1
        for sizes in self.degrees.values():
            kinds *= len(sizes) + 1
        return (kinds - 1) * len(self.samples) * len(self.recompute) * len(self.families) * len(self.most_pipelines)


def explore(
    dimensions: Dimensions, objective: Callable[[Choice], float | None], *, n_trials: int, seed: int,
    seeds: Sequence[Choice] = (), stop: Callable[[], bool] = lambda: False,
) -> int:  # fmt: skip
    """Call `objective` (seconds, or None where nothing fits) for up to `n_trials` choices; return how many.

    `seeds` come first. With the same seed and objective the choices are the same each time.
    """
    values: dict[Choice, float | None] = {}

    def value(choice: Choice) -> float | None:
        if choice not in values:
            values[choice] = objective(choice)
        return values[choice]

    if len(dimensions) <= n_trials:
        for choice in (*seeds, *dimensions):
            if stop():
                break
            value(choice)
        return len(values)
    _sample(dimensions, value, values, n_trials, seed, seeds, stop)
    return len(values)


def _sample(
    dimensions: Dimensions, value: Callable[[Choice], float | None], values: Mapping[Choice, float | None],
    n_trials: int, seed: int, seeds: Sequence[Choice], stop: Callable[[], bool],
) -> None:  # fmt: skip
    import optuna

    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            study = optuna.create_study(
                sampler=optuna.samplers.TPESampler(seed=seed, n_startup_trials=min(10, max(2, n_trials // 4)))
            )
            for choice in dict.fromkeys(seeds):
                study.enqueue_trial(_parameters(choice, dimensions), skip_if_exists=True)
            asked = 0
            while len(values) < n_trials and asked < 3 * n_trials and not stop():
                asked += 1  # the sampler repeats itself in small spaces; repetitions cost nothing
                trial = study.ask()
                found = _suggest(trial, dimensions)
                seconds = value(found) if found is not None else None
                if seconds is None:
                    study.tell(trial, state=optuna.trial.TrialState.PRUNED)
                else:
                    study.tell(trial, seconds)
    finally:
        optuna.logging.set_verbosity(verbosity)


def _suggest(trial: object, dimensions: Dimensions) -> Choice | None:
    """Read one choice from a trial; None where it uses no device type."""
    suggest = trial.suggest_categorical  # type: ignore[attr-defined]
    names = list(dimensions.degrees)
    used = []
    for name in names:
        if len(names) == 1 or suggest(f"use {name}", (True, False)):
            used.append((name, int(suggest(f"tp {name}", dimensions.degrees[name]))))
    recompute = suggest("recompute", tuple("/".join(r) for r in dimensions.recompute))
    samples, family, most = (
        suggest("micro-batch", dimensions.samples),
        suggest("schedule", dimensions.families),
        suggest("pipelines", dimensions.most_pipelines),
    )
    if not used:
        return None
    return Choice(
        degrees=tuple(used), samples=samples, recompute=tuple(recompute.split("/")), family=family, most_pipelines=most
    )


def _parameters(choice: Choice, dimensions: Dimensions) -> dict[str, object]:
    used = dict(choice.degrees)
    out: dict[str, object] = {}
    for name in dimensions.degrees:
        if len(dimensions.degrees) > 1:
            out[f"use {name}"] = name in used
        if name in used:
            out[f"tp {name}"] = used[name]
    return out | {
        "recompute": "/".join(choice.recompute),
        "micro-batch": choice.samples,
        "schedule": choice.family,
        "pipelines": choice.most_pipelines,
    }
