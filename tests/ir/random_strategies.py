"""Random strategies that build: every family, unequal pipelines, unequal and empty slices, V and loops, ZeRO, experts."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

from autopiper import ir
from autopiper.cluster.spec import Cluster, DeviceType, Link, Node
from autopiper.errors import PlanError
from autopiper.ir.schedules import FAMILIES
from autopiper.model.spec import Model, TiedParameter
from autopiper.plan import Strategy, Training
from autopiper.plan import directives as d

NUM_EXPERTS = 4


def _cluster(devices: int) -> Cluster:
    kind = DeviceType(name="unit", memory_bytes=float("inf"), peak_flops={"fp32": 1e12}, memory_bytes_per_s=1e11)
    link = Link(bytes_per_s=float("inf"), latency_s=0.0)
    return Cluster(
        name="one node",
        device_types=(kind,),
        nodes=(Node(name="n", devices=("unit",) * devices, intra=link, nic=link),),
    )


def _shares(rng: random.Random, total: int, parts: int, least: int) -> tuple[int, ...]:
    """`parts` numbers of `least` or more that sum to `total`."""
    out = [least] * parts
    for _ in range(total - least * parts):
        out[rng.randrange(parts)] += 1
    return tuple(out)


def _slices(rng: random.Random, size: int, members: int, group: int, equal: bool) -> tuple[int, ...]:
    """Unequal, empty ones included; of members that divide experts all or none are empty."""
    if equal and size % members == 0:
        return (size // members,) * members
    if group == 1:
        return _shares(rng, size, members, 0)
    by_group = _shares(rng, size // group, members // group, 0)
    shares = [list(_shares(rng, n * group, group, 1)) if n else [0] * group for n in by_group]
    if not size // group:
        raise PlanError("too few samples for each member of a group that divides experts")
    next(share for share in shares if any(share))[0] += size % group
    return tuple(s for share in shares for s in share)


def _model(rng: random.Random, blocks: int) -> Model:
    model = Model.chain(blocks)
    experts = {b for b in range(blocks) if rng.random() < 0.5} if rng.random() < 0.5 else set()
    parts = [
        replace(b, dense_parameters=rng.choice((1, 3, 10, 24)), expert_parameters=8, num_experts=NUM_EXPERTS, segments=("dense", "experts"))
        if i in experts else replace(b, dense_parameters=rng.choice((3, 10, 24)))
        for i, b in enumerate(model.blocks)
    ]  # fmt: skip
    tied: tuple[TiedParameter, ...] = ()
    if blocks > 1 and rng.random() < 0.4:
        parts[0], parts[-1] = (replace(b, dense_parameters=b.dense_parameters + 6) for b in (parts[0], parts[-1]))
        tied = (TiedParameter(name="embedding", blocks=(0, blocks - 1), parameters=6),)
    return replace(model, blocks=tuple(parts), tied=tied)


def _cuts(rng: random.Random, blocks: int, stages: int) -> list[tuple[int, int]]:
    ends = [0, *sorted(rng.sample(range(1, blocks), stages - 1)), blocks]
    return list(pairwise(ends))


def _attempt(rng: random.Random, family: str) -> ir.TrainingGraph:
    both = FAMILIES[family].num_pipelines == 2
    pipelines = 2 if both or rng.random() < 0.35 else 1
    blocks = rng.randint(2, 9)
    model = _model(rng, blocks)
    written: list[d.Directive] = []
    devices = total = 0
    tp = 2 if rng.random() < 0.1 else 1
    equal = rng.random() < 0.25
    even = rng.choice((1, 1, 2, 4))
    groups: list[list[int]] = []
    level = rng.randrange(4) if pipelines == 1 else rng.randrange(2)
    for p in range(pipelines):
        shape = FAMILIES[family].stage_map
        virtual = shape == "v" or (shape in ("loop", "any") and rng.random() < 0.6)
        mirrored = both and p == 1
        ranks = len(groups) if mirrored else rng.choice((2, 4)) if both else rng.randint(1, 3)
        stages = 2 * ranks if virtual else ranks
        count = 2 * ranks if shape in ("opposite", "v") else rng.randint(2, 5)
        sizes = [rng.choice((1, 2, 3, 4, 5)) * even for _ in range(count)]
        total += sum(sizes)
        written.append(d.pipeline(p, sizes))
        if not mirrored:
            groups = []
            for _ in range(ranks):
                wide = rng.choice((1, 1, 2, 3, 4) if even == 1 else (2, 4)) * tp
                groups.append(list(range(devices, devices + wide)))
                devices += wide
        for s, cut in enumerate(_cuts(rng, blocks, stages)):
            rank = s if s < ranks else (2 * ranks - 1 - s if shape == "v" or (shape == "any" and s % 2) else s - ranks)
            where = groups[ranks - 1 - rank if mirrored else rank]
            members = len(where) // tp
            here: d.Filter = {"PIPE": p, "PP": s}
            written += [d.cut(p, s, blocks=cut), d.place(here, where)]
            sharded = any(model.blocks[b].num_experts for b in range(*cut)) and members in (2, 4) and rng.random() < 0.8
            group = rng.choice([g for g in (2, 4) if g <= members]) if sharded else 1
            written.append(d.degrees(here, tensor_parallel_size=tp, expert_parallel_size=group))
            if sharded:
                written.append(d.shard(here, where))
            written.append(d.slices(here, [_slices(rng, size, members, group, equal) for size in sizes]))
            mine = level if pipelines > 1 else rng.choice((level, level, rng.randrange(4)))
            name = rng.choice((None, None, None, "shared"))
            written.append(
                d.replicate(
                    here, shard_optimizer=mine == 1, shard_grads=mine == 2, shard_params=mine == 3, reduce_stream=name
                )
            )
    written += [d.buckets({}, bucket_bytes=rng.choice((16, 40, 80, 400))), d.order(schedule=family)]
    training = Training(global_batch_size=total, clip_grad_norm=rng.choice((None, 1.0)))
    return ir.build(Strategy.from_directives(written, training), model, _cluster(devices))


def random_graph(rng: random.Random, family: str | None = None) -> ir.TrainingGraph:
    """A training graph of a random strategy; shapes that the family refuses are drawn again."""
    chosen = family or rng.choice(sorted(FAMILIES))
    while True:
        try:
            return _attempt(rng, chosen)
        except (PlanError, ValueError):
            continue
