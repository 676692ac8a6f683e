"""Who works on which samples, and how they are cut out of a batch."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from runtime_cases import cpu_cluster, random_strategy
from torch.utils.data import DataLoader

from autopiper import ir
from autopiper.errors import PlanError
from autopiper.model.spec import Model
from autopiper.runtime.batches import BatchSampler, count, cut, module_inputs, needed_samples, sample_range


def graph_of(seed: int) -> ir.TrainingGraph:
    strategy = random_strategy(random.Random(seed), 6, "fp32", None)
    world = len({d for p in strategy.pipelines for s in p.stages for d in s.group.devices})
    return ir.build(strategy, Model.chain(6), cpu_cluster(world))


@given(st.integers(0, 10_000))
def test_every_stage_of_every_pipeline_takes_every_sample_once(seed: int) -> None:
    graph = graph_of(seed)
    depth = max(len(p.stages) for p in graph.pipelines)
    for index in range(depth):
        taken: Counter[int] = Counter()
        for pipe in graph.pipelines:
            stage = pipe.stages[min(index, len(pipe.stages) - 1)]
            for micro_batch in range(len(pipe.micro_batch_sizes)):
                for place in stage.places():
                    taken.update(range(*sample_range(graph, place, micro_batch)))
        assert taken == Counter(range(graph.training.global_batch_size))


@given(st.integers(0, 10_000), st.integers(0, 3))
def test_samplers_agree_on_the_number_of_batches_and_cover_the_dataset(seed: int, steps: int) -> None:
    graph = graph_of(seed)
    size = graph.training.global_batch_size
    dataset: Any = range(max(size, size * steps + size - 1))
    places = [place for stage in graph.stages() for place in stage.places()]
    samplers = [BatchSampler(dataset, size, needed_samples(graph, [place]), shuffle=True) for place in places]
    per_rank = [list(DataLoader(dataset, batch_sampler=sampler)) for sampler in samplers]
    assert {len(batches) for batches in per_rank} == {len(dataset) // size}
    assert all(len(batch) for batches in per_rank for batch in batches)
    for step in range(len(dataset) // size):
        seen = {int(i) for batches in per_rank for i in batches[step]}
        assert len(seen) == size


def test_shuffling_changes_with_the_epoch_and_not_with_the_rank() -> None:
    one, other = (BatchSampler(range(12), 4, samples, shuffle=True, seed=5) for samples in ((0, 1), (0, 3)))
    first = [list(one), list(other)]
    assert [a[0] for a in first[0]] == [b[0] for b in first[1]]
    one.set_epoch(1)
    assert list(one) != first[0]


def test_a_dataset_below_one_global_batch() -> None:
    with pytest.raises(PlanError, match="the dataset has 3 samples; the plan's global_batch_size is 4"):
        BatchSampler(range(3), 4, (0,))


def test_what_a_batch_may_be() -> None:
    batch = {"x": torch.arange(6).view(3, 2), "y": [torch.arange(3), None]}
    assert count(batch) == 3
    part = cut(batch, 1, 3, torch.device("cpu"))
    assert part["x"].tolist() == [[2, 3], [4, 5]] and part["y"][0].tolist() == [1, 2] and part["y"][1] is None
    with pytest.raises(PlanError, match=r"equally many samples first; came: batch\['x'\]: 3, batch\['y'\]: 2"):
        count({"x": torch.zeros(3), "y": torch.zeros(2)})
    with pytest.raises(PlanError, match=r"batch\['x'\] is a str"):
        count({"x": "text"})


def test_what_the_module_is_given() -> None:
    ids, mask = torch.zeros(1), torch.ones(1)
    assert module_inputs({"input_ids": ids, "labels": mask}, ("input_ids",)) == ((), {"input_ids": ids})
    assert module_inputs({"input_ids": ids, "labels": mask}, ()) == ((), {"input_ids": ids})
    assert module_inputs((ids, mask), ("x",)) == ((ids,), {})
    assert module_inputs((ids, mask, ids), ("x", "y")) == ((ids, mask), {})
    assert module_inputs(ids, ()) == ((ids,), {})
    with pytest.raises(PlanError, match="the batch has a, b; the model's inputs are x"):
        module_inputs({"a": ids, "b": mask}, ("x",))
