"""What is handed to the public functions by mistake: one clear message each, and never a bare traceback."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import autopiper as ap
from autopiper.errors import AutoPiperError
from autopiper.model.spec import TiedParameter
from autopiper.plan import Space

MODEL = ap.Model.transformer(num_layers=2, hidden_size=64, num_attention_heads=2, sequence_length=16, vocab_size=100)
CLUSTER = ap.Cluster.homogeneous("a100-80g", devices_per_node=2)
TRAINING = ap.Training(global_batch_size=8)
STRATEGY = ap.Strategy.uniform(MODEL, CLUSTER, TRAINING)
WRONG: tuple[Any, ...] = (3, 3.5, True, "x", "", b"x", [], {}, object(), math.nan, -1, "a\0b", "x" * 5000)


def optimize(**given: Any) -> ap.Plan:
    return ap.optimize(**{"model": MODEL, "cluster": CLUSTER, "global_batch_size": 8, "n_trials": 1, **given})


CALLS: dict[str, Callable[[Any], object]] = {
    "model": lambda x: optimize(model=x),
    "cluster": lambda x: optimize(cluster=x),
    "training": lambda x: optimize(training=x, global_batch_size=None),
    "costs": lambda x: optimize(costs=x),
    "space": lambda x: optimize(space=x),
    "baseline": lambda x: optimize(baseline=x),
    "training of price": lambda x: ap.price(MODEL, CLUSTER, x),
    "strategy": lambda x: ap.simulate(x, MODEL, CLUSTER),
    "model of simulate": lambda x: ap.simulate(STRATEGY, x, CLUSTER),
    "cluster of simulate": lambda x: ap.simulate(STRATEGY, MODEL, x),
    "costs of simulate": lambda x: ap.simulate(STRATEGY, MODEL, CLUSTER, x),
    "path of a plan": lambda x: ap.load_plan(x),
    "path of costs": lambda x: ap.CostTable.load(x),
    "path of a cluster": lambda x: ap.Cluster.from_file(x),
    "config": lambda x: ap.Model.from_config(x),
    "preset": lambda x: ap.Model.from_preset(x),
    "device": lambda x: ap.Cluster.homogeneous(x),
    "precision": lambda x: ap.Training(global_batch_size=8, precision=x),
    "optimizer": lambda x: ap.Training(global_batch_size=8, optimizer=x),
    "space.schedules": lambda x: Space(schedules=x),
    "space.micro_batch_sizes": lambda x: Space(micro_batch_sizes=x),
    "directives": lambda x: ap.Strategy.from_directives([x], TRAINING),
    "list of directives": lambda x: ap.Strategy.from_directives(x, TRAINING),
    "recompute": lambda x: ap.Strategy.uniform(MODEL, CLUSTER, TRAINING, recompute=x),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_wrong_type_is_told(call: str) -> None:
    for wrong in WRONG:
        with pytest.raises(AutoPiperError):
            CALLS[call](wrong)


WHOLE: dict[str, Callable[[Any], object]] = {
    "global_batch_size": lambda x: ap.Training(global_batch_size=x),
    "n_trials": lambda x: optimize(n_trials=x),
    "seed": lambda x: optimize(seed=x),
    "num_blocks": lambda x: ap.Model.chain(x),
    "num_nodes": lambda x: ap.Cluster.homogeneous("h100", num_nodes=x),
    "nics": lambda x: ap.Cluster.homogeneous("h100", nics=x),
    "space.max_stages": lambda x: Space(max_stages=x),
    "space.min_pipelines": lambda x: Space(min_pipelines=x),
    "space.bucket_bytes": lambda x: Space(bucket_bytes=x),
    "micro_batch_size": lambda x: ap.Strategy.uniform(MODEL, CLUSTER, TRAINING, micro_batch_size=x),
}


@pytest.mark.parametrize("name", WHOLE)
def test_what_is_no_whole_number_is_named(name: str) -> None:
    for wrong in (1.5, math.nan, math.inf, "1", True):
        with pytest.raises(AutoPiperError, match=rf"^{name} is .*it must be a whole number"):
            WHOLE[name](wrong)
    with pytest.raises(AutoPiperError, match=r"-1"):
        WHOLE[name](-1)


def test_numbers_of_numpy_and_lists_are_welcome() -> None:
    assert ap.Training(global_batch_size=np.int64(8)).global_batch_size == 8  # type: ignore[arg-type]
    assert Space(micro_batch_sizes=[1, 2]).micro_batch_sizes == [1, 2]  # type: ignore[arg-type, comparison-overlap]
    assert ap.Training(global_batch_size=8, clip_grad_norm=1).clip_grad_norm == 1


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_outside_the_samplers_range_is_told_before_the_search(seed: int) -> None:
    with pytest.raises(ap.PlanError, match=r"^seed is .*it must be 0 to 4294967295"):
        optimize(seed=seed)
    assert optimize(seed=2**32 - 1)


def test_tokens_given_for_samples_are_told() -> None:
    with pytest.raises(ap.PlanError, match=r"counts samples, not tokens: 4194304 tokens are 262144 samples"):
        optimize(global_batch_size=2**22)
    with pytest.raises(ap.PlanError, match=r"counts samples, not tokens"):
        optimize(global_batch_size=10**23)


def test_buckets_without_number_are_refused_with_the_least_size() -> None:
    large = ap.Model.from_preset("gpt-2", sequence_length=64)
    with pytest.raises(ap.PlanError, match=r"into \d+ buckets.*give bucket_bytes of at least 1\d\d\d\b"):
        ap.simulate(replace(ap.Strategy.uniform(large, CLUSTER, TRAINING), bucket_bytes=1), large, CLUSTER)


def test_a_tied_parameter_larger_than_its_block_is_refused() -> None:
    with pytest.raises(ap.ModelError, match=r"tied parameter 'w' has 5 elements, but block 'layer0'.*has 0 dense"):
        replace(ap.Model.chain(2), tied=(TiedParameter(name="w", blocks=(0, 1), parameters=5),))


def test_sizes_that_nothing_can_run_at_are_named() -> None:
    with pytest.raises(ap.CostError, match=r"none of a100-80g has prices .*tensor_parallel_sizes \(64,\)"):
        optimize(space=Space(tensor_parallel_sizes=(64,)))


def test_files_that_are_no_json_or_toml_at_all(tmp_path: Path) -> None:
    for number, text in enumerate(("[" * 100_000, '{"a": ' + "1" * 5000 + "}", "\0", "a = " + "[" * 100_000)):
        path = tmp_path / f"{number}.json"
        path.write_text(text)
        for read in (ap.load_plan, ap.CostTable.load, ap.Cluster.from_file, ap.Model.from_config):
            with pytest.raises(AutoPiperError, match=str(number) + r"\.json"):
                read(path)
