"""Strategies of every schedule family, drawn at random: virtual stages on any map, opposite pipelines, orders by hand."""

from __future__ import annotations

import random
from itertools import pairwise

from runtime_cases import split

from autopiper.plan import Group, Pipeline, Schedule, Stage, Strategy, Training
from autopiper.plan.passes import Pass, PassGroup, group_text

V_SHAPED = ("zb-v", "dualpipe-v")
KINDS = (
    "gpipe", "1f1b", "interleaved-1f1b", "eager-1f1b", "zb-h1", "zb-h2", "zb-v", "dualpipe", "dualpipe-v", "searched",
)  # fmt: skip
Members = tuple[int, ...]


def draw_strategy(draw: random.Random, family: str, num_blocks: int, precision: str, clip: float | None) -> Strategy:
    """One pipeline (dualpipe: two) by a family on two to four ranks; what ranks are left over work by other families."""
    world = draw.choice((2, 3, 4, 4)) if family != "dualpipe" else draw.choice((2, 4, 4))
    ranks = draw.sample(range(world), world)
    used = world if family == "dualpipe" or draw.random() < 0.6 else draw.randint(1, world)
    mine, rest = ranks[:used], ranks[used:]
    most = used if family not in V_SHAPED else min(used, num_blocks // 2)
    if family == "dualpipe":
        groups = _groups(draw, mine, draw.choice([s for s in (2, 4) if s <= used]), even=True)
    else:
        groups = _groups(draw, mine, draw.randint(min(2, most), most))
    pipelines = _pipelines(draw, family, groups, num_blocks)
    schedules = [_schedule(draw, family, pipelines, tuple(range(len(pipelines))))]
    if rest:
        other = draw.choice(("gpipe", "1f1b", "zb-h1", "interleaved-1f1b"))
        more = _pipelines(draw, other, _groups(draw, rest, draw.randint(1, len(rest))), num_blocks)
        schedules.append(_schedule(draw, other, more, (len(pipelines),)))
        pipelines += more
    return Strategy(
        training=Training(
            global_batch_size=sum(p.share for p in pipelines), precision=precision, clip_grad_norm=clip,
            optimizer="sgd-momentum",
        ),
        pipelines=tuple(pipelines), schedules=tuple(schedules), bucket_bytes=draw.choice((600, 5000, 25 * 2**20)),
    )  # fmt: skip


def _groups(draw: random.Random, ranks: list[int], count: int, *, even: bool = False) -> list[Members]:
    sizes = [len(ranks) // count] * count if even else split(draw, len(ranks), count, 1)
    starts = [sum(sizes[:n]) for n in range(count)]
    return [tuple(ranks[start : start + size]) for start, size in zip(starts, sizes, strict=True)]


def _pipelines(draw: random.Random, family: str, groups: list[Members], num_blocks: int) -> list[Pipeline]:
    count = len(groups)
    if family in V_SHAPED:
        maps = [[*groups, *reversed(groups)]]
    elif family == "dualpipe":
        maps = [groups, groups[::-1]]
    elif draw.random() < 0.5 and family == "interleaved-1f1b" and 2 * count <= num_blocks:
        maps = [groups * draw.randint(2, num_blocks // count)]
    else:  # any map: every group holds a stage or more
        extra = draw.randint(0, num_blocks - count)
        maps = [draw.sample([*groups, *draw.choices(groups, k=extra)], count + extra)]
    least = {"dualpipe": count, "dualpipe-v": 2 * count}.get(family, 1)
    micro_batches = draw.randint(least, least + 3)
    made: list[Pipeline] = []
    for where in maps:
        sizes = tuple(draw.randint(1, 4) for _ in range(micro_batches))
        cuts = [0, *sorted(draw.sample(range(1, num_blocks), len(where) - 1)), num_blocks]
        if made:  # opposite pipelines meet at one block, or a rank would hold one twice
            middle, half = made[0].stages[len(where) // 2].start, len(where) // 2 - 1
            ends = draw.sample(range(1, middle), half), draw.sample(range(middle + 1, num_blocks), half)
            cuts = [0, *sorted(ends[0]), middle, *sorted(ends[1]), num_blocks]
        made.append(
            Pipeline(
                micro_batch_sizes=sizes,
                stages=tuple(
                    Stage(
                        start=start, stop=stop, recompute=tuple(draw.choice(("none", "full")) for _ in range(start, stop)),
                        group=Group(
                            members=tuple((rank,) for rank in members),
                            slices=tuple(tuple(split(draw, s, len(members), 0)) for s in sizes),
                        ),
                    )
                    for members, (start, stop) in zip(where, pairwise(cuts), strict=True)
                ),
            )
        )  # fmt: skip
    return made


def _schedule(draw: random.Random, family: str, made: list[Pipeline], numbers: tuple[int, ...]) -> Schedule:
    if family != "searched":
        return Schedule(family=family, pipelines=numbers)
    return Schedule(family=family, pipelines=numbers, rows=random_rows(draw, made[0], numbers[0]))


def random_rows(draw: random.Random, pipe: Pipeline, number: int) -> tuple[tuple[str, ...], ...]:
    """Any order that can be: of all passes whose inputs are there, one at random comes next on its device group."""
    last = len(pipe.stages) - 1
    split_at = {(s, m): draw.random() < 0.5 for s in range(last + 1) for m in range(len(pipe.micro_batch_sizes))}
    ready = [Pass(kind="F", stage=0, micro_batch=m, pipeline=number) for m in range(len(pipe.micro_batch_sizes))]
    rows: dict[tuple[tuple[int, ...], ...], list[PassGroup]] = {s.group.members: [] for s in pipe.stages}

    def backward(stage: int, m: int) -> Pass:
        return Pass(kind="I" if split_at[stage, m] else "B", stage=stage, micro_batch=m, pipeline=number)

    while ready:
        it = ready.pop(draw.randrange(len(ready)))
        row = rows[pipe.stages[it.stage].group.members]
        before = row[-1][0] if row and len(row[-1]) == 1 else None
        if before and before.kind == "F" != it.kind and before.micro_batch != it.micro_batch and draw.random() < 0.3:
            row[-1] = (before, it)  # may overlap
        else:
            row.append((it,))
        if it.kind == "F":
            ready.append(
                Pass(kind="F", stage=it.stage + 1, micro_batch=it.micro_batch, pipeline=number)
                if it.stage < last
                else backward(last, it.micro_batch)
            )
        elif it.kind != "W":
            ready += [backward(it.stage - 1, it.micro_batch)] if it.stage else []
            ready += (
                [Pass(kind="W", stage=it.stage, micro_batch=it.micro_batch, pipeline=number)] if it.kind == "I" else []
            )
    return tuple(tuple(map(group_text, row)) for row in rows.values())
