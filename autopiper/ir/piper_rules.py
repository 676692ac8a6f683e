"""What Piper demands of the directives of a program taken together, as its schedule loader checks it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from autopiper.errors import nearest
from autopiper.plan import directives as d
from autopiper.plan.directives import Directive, Filter

D = TypeVar("D")


def _all(given: Sequence[Directive], kind: type[D]) -> list[tuple[str, D]]:
    """Return the directives of a kind, each with its label for messages."""
    return [(f"directive {i} ({each.op})", each) for i, each in enumerate(given) if isinstance(each, kind)]


def faults_together(given: Sequence[Directive]) -> list[str]:
    """Return every fault of a program whose directives are right one by one."""
    faults = [*_places(given), *_splits(given)]
    if not faults:  # what follows would only repeat them
        faults += _tags(given)
    return faults + list(_pairs(given))


def _places(given: Sequence[Directive]) -> Iterator[str]:
    """Stages contiguous from 0, placed once each, equally many devices, one stream between stages."""
    places = _all(given, d.PlaceDirective)
    if not places:
        yield "there is no place directive; every stage needs one"
        return
    first: dict[int, str] = {}
    for label, it in places:
        stage = it.filter.get("PP")
        if not isinstance(stage, int) or set(it.filter) != {"PP"}:
            yield f"{label}: filter {dict(it.filter)} must name one stage, as {{'PP': 0}} does, and nothing else"
        elif stage in first:
            yield f"{label}: filter {dict(it.filter)} places PP {stage} again; {first[stage]} has placed it"
        else:
            first[stage] = label
    for stage, label in sorted(first.items()):
        if stage and stage - 1 not in first:
            yield (
                f"{label}: filter {{'PP': {stage}}} leaves a gap: no directive places PP {stage - 1}; the stages that are "
                f"placed are {', '.join(map(str, sorted(first)))}, and they must run from 0 without a gap"
            )
    count = len(places[0][1].devices)
    for label, it in places[1:]:
        if len(it.devices) != count:
            yield (
                f"{label}: filter {dict(it.filter)} has {len(it.devices)} devices {list(it.devices)}, {places[0][0]} has "
                f"{count}; Piper wants equally many for each stage (AutoPiper's own directives do not)"
            )
    stream = next((it.stream for _, it in places if it.stream), None)
    for label, it in places:
        if it.stream not in (None, stream):
            yield f"{label}: stream '{it.stream}' differs from '{stream}'; all place directives name one stream"


def _splits(given: Sequence[Directive]) -> Iterator[str]:
    splits = _all(given, d.SplitDirective)
    for label, it in splits[1:]:
        first_label, first = splits[0]
        for name in ("num_microbatches", "dim_name"):
            if getattr(it, name) != getattr(first, name):
                yield f"{label}: {name} is {getattr(it, name)!r}, {first_label} says {getattr(first, name)!r}; they must agree"


def _tags(given: Sequence[Directive]) -> Iterator[str]:
    """Stages and micro-batches that a filter names are there."""
    stages = {it.filter["PP"] for _, it in _all(given, d.PlaceDirective)}
    split = next((it for _, it in _all(given, d.SplitDirective)), None)
    seen: set[tuple[str, str]] = set()
    for label, where, it in _every_filter(given):
        stage = it.get("PP")
        if isinstance(stage, int) and stage not in stages and (label, "PP") not in seen:
            seen.add((label, "PP"))
            yield (
                f"{label}{where}: filter {dict(it)} names PP {stage}, which no directive places; nearest: "
                f"{dict(it) | {'PP': max(s for s in stages if isinstance(s, int))}}"
            )
        tag = split.dim_name if split else "MB"
        number = it.get(tag)
        if split is None and tag in it:
            yield f"{label}{where}: filter {dict(it)} names micro-batches, but there is no split directive; add one"
            return
        if split and isinstance(number, int) and number >= split.num_microbatches and (label, tag) not in seen:
            seen.add((label, tag))
            yield (
                f"{label}{where}: filter {dict(it)} matches nothing; {tag} runs 0..{split.num_microbatches - 1}; nearest: "
                f"{dict(it) | {tag: split.num_microbatches - 1}}"
            )


def _every_filter(given: Sequence[Directive]) -> Iterator[tuple[str, str, Filter]]:
    for i, each in enumerate(given):
        label = f"directive {i} ({each.op})"
        if isinstance(each, d.OrderDirective):
            for n, group in enumerate(each.filters or ()):
                yield from ((label, f", group {n}", it) for it in group)
        elif isinstance(each, d.ReplicateDirective | d.ShardDirective | d.SplitDirective):
            yield label, "", each.filter


def _pairs(given: Sequence[Directive]) -> Iterator[str]:
    """One BI and one BW for each key, in one row, BI first, and no B beside them."""
    found: dict[tuple[tuple[str, int | str], ...], list[tuple[int, int, str]]] = {}
    for i, each in enumerate(given):
        for n, group in enumerate((each.filters or ()) if isinstance(each, d.OrderDirective) else ()):
            for it in group:
                if it.get("PASS") in ("B", "BI", "BW"):
                    key = tuple(sorted((tag, value) for tag, value in it.items() if tag != "PASS"))
                    found.setdefault(key, []).append((i, n, str(it["PASS"])))
    for key, entries in found.items():
        kinds = [kind for _, _, kind in entries]
        if (kinds == ["BI", "BW"] and entries[0][0] == entries[1][0]) or set(kinds) == {"B"}:
            continue  # two B are told by the row itself
        stand = ", ".join(f"{kind} in directive {i} (order), group {n}" for i, n, kind in entries)
        yield (
            f"directive {entries[0][0]} (order): {dict(key)} has {stand}{nearest(', '.join(kinds), ['B', 'BI, BW'])}; allowed: "
            "one B, or one BI and then one BW in the same directive"
        )
