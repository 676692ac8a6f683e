"""Patterns and their packing: no two alike, and packings equal to brute force."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest

from autopiper.cluster.spec import Cluster, DeviceType, Link, Node
from autopiper.costmodel.balance import PipelinePace, share_batch, step_s
from autopiper.search.patterns import Limits, PacedPattern, Packing, enumerate_patterns, groups, pack
from autopiper.search.placement import Habit, place
from autopiper.search.shapes import Pattern, Shape


def _cluster(*nodes: str) -> Cluster:
    """Nodes such as "aabb": one device for each letter, which names its type."""
    names = sorted({c for n in nodes for c in n})
    link = Link(bytes_per_s=1.0)
    return Cluster(
        name="c",
        device_types=tuple(
            DeviceType(name=n, memory_bytes=1.0, peak_flops={"fp32": 1.0}, memory_bytes_per_s=1.0) for n in names
        ),
        nodes=tuple(Node(name=f"n{i}", devices=tuple(n), intra=link, nic=link) for i, n in enumerate(nodes)),
    )


def test_every_pattern_once() -> None:
    found = list(enumerate_patterns({"a": 2, "b": 1}, {"a": 1, "b": 2}, 4, max_stages=3))
    words = [" ".join(f"{name}{tp}" for name, tp in p.stages) for p in found]
    assert sorted(words) == sorted(["a1", "a1 a1", "b2", "a1 b2", "a1 a1 b2", "b2 a1", "b2 a1 a1"])
    assert all(p.samples == 4 for p in found)
    assert found[words.index("a1 a1 b2")].use == Counter(a=2, b=2)


def test_four_single_devices_make_every_ordered_subset() -> None:
    found = list(enumerate_patterns(dict.fromkeys("abcd", 1), dict.fromkeys("abcd", 1), 1, max_stages=9))
    assert len(found) == len(set(found)) == 4 + 12 + 24 + 24
    assert (
        max(
            len(p.stages)
            for p in enumerate_patterns(dict.fromkeys("abcd", 1), dict.fromkeys("abcd", 1), 1, max_stages=2)
        )
        == 2
    )


def test_large_clusters_are_thinned_out() -> None:
    many = list(enumerate_patterns(dict.fromkeys("abc", 64), dict.fromkeys("abc", 1), 1, max_stages=99))
    assert 500 < len(many) < 8000
    assert any(len(p.stages) == 1 for p in many) and any(len(p.stages) > 60 for p in many)


def test_tensor_parallel_groups_stay_inside_a_node() -> None:
    cluster = _cluster("aaaaaa", "aaaaaa")
    assert groups(cluster, range(12), "a", 4) == 2  # not 12 // 4
    assert groups(cluster, range(1, 12), "a", 3) == 3
    four = PacedPattern(
        pattern=Pattern(stages=(("a", 4),), samples=1), pace=PipelinePace(fill_s=1, bottleneck_s=1, quantum=1)
    )
    found = pack([four], cluster, range(12), 6)
    assert found is not None and found.replicas == ((four, 2),) and found.step_s == pytest.approx(3)


def _brute(
    candidates: list[PacedPattern], counts: dict[str, int], batch: int, low: int, high: int | None
) -> float | None:
    best = None
    tops = [min(counts.get(n, 0) // k for n, k in c.pattern.use.items()) for c in candidates]
    for numbers in itertools.product(*(range(t + 1) for t in tops)):
        distinct = sum(n > 0 for n in numbers)
        used: Counter[str] = Counter()
        for c, n in zip(candidates, numbers, strict=True):
            used.update({name: k * n for name, k in c.pattern.use.items()})
        if not low <= distinct <= (high or 99) or any(used[n] > counts.get(n, 0) for n in used):
            continue
        paces = [c.pace for c, n in zip(candidates, numbers, strict=True) for _ in range(n)]
        if paces:
            value = step_s(paces, share_batch(paces, batch, ragged=True))
            best = value if best is None else min(best, value)
    return best


@pytest.mark.parametrize("seed", range(120))
def test_packing_equals_brute_force(seed: int) -> None:
    rng = random.Random(seed)
    cluster = _cluster("a" * rng.randint(1, 3) + "b" * rng.randint(0, 3))
    counts = cluster.counts()
    names = list(counts)
    seen: dict[Pattern, PacedPattern] = {}
    for _ in range(rng.randint(1, 5)):
        pattern = Pattern(stages=tuple((rng.choice(names), 1) for _ in range(rng.randint(1, 3))), samples=1)
        pace = PipelinePace(fill_s=rng.uniform(1, 9), bottleneck_s=rng.uniform(0.3, 3), quantum=rng.choice((1, 2)))
        seen[pattern] = PacedPattern(pattern=pattern, pace=pace)
    candidates = list(seen.values())
    batch, low = rng.randint(4, 20), rng.choice((1, 1, 2))
    high = rng.choice((None, low, low + 1))
    best = _brute(candidates, counts, batch, low, high)
    found = pack(
        candidates, cluster, range(cluster.num_devices), batch, limits=Limits(min_pipelines=low, max_pipelines=high)
    )
    if found is None:
        assert best is None or low > 1, "a packing exists"
        return
    assert best is not None
    used: Counter[str] = Counter()
    for c, n in found.replicas:
        used.update({name: k * n for name, k in c.pattern.use.items()})
    assert all(used[n] <= counts[n] for n in used)
    assert low <= len(found.replicas) <= (high or 99)
    if low == 1:
        assert found.step_s == pytest.approx(best, rel=2e-3)
    else:  # every pipeline must get work, which sharing by brute force may leave idle
        assert found.step_s >= best * (1 - 1e-9)


def test_replicas_are_limited() -> None:
    cluster = _cluster("aaaaaa")
    one = PacedPattern(
        pattern=Pattern(stages=(("a", 1),), samples=1), pace=PipelinePace(fill_s=1, bottleneck_s=1, quantum=1)
    )
    three = PacedPattern(
        pattern=Pattern(stages=(("a", 1),) * 3, samples=1), pace=PipelinePace(fill_s=3, bottleneck_s=0.1, quantum=1)
    )
    for low, high, expected in ((1, None, (one, 6)), (1, 2, (three, 2)), (3, 4, (one, 4))):
        limits = Limits(max_pipelines=1, min_replicas=low, max_replicas=high)
        found = pack([one, three], cluster, range(6), 24 if high is None else 60, limits=limits)
        assert found is not None and found.replicas == (expected,)
    assert pack([three], cluster, range(6), 60, limits=Limits(min_replicas=3)) is None


def test_forbidden_packings_are_not_found_again() -> None:
    cluster = _cluster("aaaa")
    two, four = (
        PacedPattern(
            pattern=Pattern(stages=(("a", 1),) * k, samples=1),
            pace=PipelinePace(fill_s=4, bottleneck_s=4 / k, quantum=1),
        )
        for k in (2, 4)
    )
    found: list[Packing] = []
    while (packing := pack([two, four], cluster, range(4), 16, forbidden=found)) is not None:
        found.append(packing)
    sets = [frozenset(c.pattern for c, _ in p.replicas) for p in found]
    assert len(sets) == len(set(sets)) == 2
    assert found[0].step_s <= found[1].step_s


def _shape(types: str, replicas: int, tp: int = 1) -> Shape:
    return Pattern(stages=tuple((t, tp) for t in types), samples=1).shape(replicas)


@pytest.mark.parametrize("habit", ["pipeline", "data"])
def test_every_device_is_placed_once_and_fits(habit: Habit) -> None:
    cluster = _cluster("aaaa", "aabb", "bbbb")
    shapes = [_shape("ab", 2, tp=2), _shape("a", 2), _shape("b", 2)]
    placed = place(shapes, cluster, range(12), habit)
    assert placed is not None
    ids = [d for members in placed for stage in members for group in stage for d in group]
    assert sorted(ids) == list(range(12))
    for shape, members in zip(shapes, placed, strict=True):
        for types, tp, stage in zip(shape.types, shape.tensor_parallel_sizes, members, strict=True):
            for name, group in zip(types, stage, strict=True):
                assert len(group) == tp
                assert {cluster.device(d).type.name for d in group} == {name}
                assert len({cluster.device(d).node for d in group}) == 1
    assert place([_shape("a", 7)], cluster, range(12), habit) is None
    assert place([_shape("a", 3, tp=4)], cluster, range(12), habit) is None


def test_the_two_habits_keep_different_things_close() -> None:
    cluster = _cluster("aaaa", "aaaa")
    node = {d: cluster.device(d).node for d in range(8)}
    by_pipeline, by_data = (place([_shape("aa", 4)], cluster, range(8), habit) for habit in ("pipeline", "data"))
    assert by_pipeline is not None and by_data is not None
    assert all(node[a[0]] == node[b[0]] for a, b in zip(*by_pipeline[0], strict=True))
    assert all(len({node[m[0]] for m in stage}) == 1 for stage in by_data[0])
