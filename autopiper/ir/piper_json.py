"""Piper's directive programs (arXiv 2606.11169): a JSON array of place, replicate, shard, split and order, read strictly.

What comes out are directives for `Strategy.from_directives`; their positions are those of the file. A program says
nothing about the training and nothing about the layers: it needs a model whose regions are annotated ("PP" for stages,
"EP" for experts), as Piper's own runtime does. `piper_write` goes the other way.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from autopiper.errors import PlanError, nearest
from autopiper.ir.filters import PASSES
from autopiper.ir.piper_rules import faults_together
from autopiper.plan import directives as d
from autopiper.plan.directives import Directive

UNCUT_BYTES = 2**50
"""Bucket size that cuts nothing: what Piper does where `bucket_size` is absent."""

DIGITS = re.compile("[0-9]{1,18}", re.ASCII)
"""A number as text, within 64 bits."""

Check = Callable[[str, Any], list[str]]
"""(field, value) -> what is wrong with it."""


def _shown(value: Any) -> str:
    text = json.dumps(value, default=repr)
    return text if len(text) <= 60 else text[:57] + "…"


def _filter(field: str, value: Any) -> list[str]:
    if not isinstance(value, dict):
        return [f"{field} is {_shown(value)}; it must be an object, such as {{'PP': 0}}, or {{}} for everything"]
    faults = []
    for tag, at in value.items():
        if tag == "PIPE":
            faults.append(f"{field} {value}: tag 'PIPE' is AutoPiper's own; a Piper program has one pipeline: drop it")
        elif tag == "PASS":
            if at not in PASSES:
                faults.append(
                    f"{field} {value}: PASS is {_shown(at)}{nearest(at, PASSES)}; allowed: {', '.join(PASSES)}"
                )
        elif _value(at) is None:
            faults.append(
                f"{field} {value}: {tag} is {_shown(at)}; allowed: an index of 0 or more, '*' or null (not in any)"
            )
    return faults


def _value(value: Any) -> int | str | None:
    """Return a tag's value as AutoPiper's filters have it; None = it is none. Piper reads "3" as 3 and null as untagged."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return value if value == "*" else int(value) if DIGITS.fullmatch(value) else None
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _made(value: dict[str, Any]) -> dict[str, int | str]:
    return {tag: at if tag == "PASS" else _value(at) for tag, at in value.items()}  # type: ignore[misc]


def _filters(field: str, value: Any) -> list[str]:
    if not isinstance(value, list) or len(value) < 2:
        came = f"{len(value)} groups" if isinstance(value, list) else _shown(value)
        return [f"{field} is {came}; it must be a list of 2 groups or more, each a list of filters"]
    faults = []
    for number, group in enumerate(value):
        if not isinstance(group, list) or not group:
            faults.append(f"{field}: group {number} is {_shown(group)}; it must be a list of one filter or more")
        else:
            faults += [fault for each in group for fault in _filter(f"group {number}, filter", each)]
    return faults


def _devices(field: str, value: Any) -> list[str]:
    good = isinstance(value, list) and all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in value)
    if not good or not value or len(set(value)) != len(value):
        return [f"{field} is {_shown(value)}; it must be a list of one device number or more, each 0 or more and once"]
    return []


def _name(field: str, value: Any) -> list[str]:
    return [] if isinstance(value, str) and value else [f"{field} is {_shown(value)}; it must be a name"]


def _flag(field: str, value: Any) -> list[str]:
    return [] if isinstance(value, bool) else [f"{field} is {_shown(value)}; it must be true or false"]


def _count(field: str, value: Any) -> list[str]:
    good = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    unit = " MB" if field == "bucket_size" else ""
    return [] if good else [f"{field} is {_shown(value)}; it must be a whole number{unit} of 1 or more"]


REQUIRED: dict[str, dict[str, Check]] = {
    "place": {"filter": _filter, "devices": _devices},
    "replicate": {"filter": _filter, "devices": _devices},
    "shard": {"filter": _filter, "devices": _devices},
    "split": {"filter": _filter, "dim_name": _name, "num_microbatches": _count},
    "order": {"filters": _filters},
}
OPTIONAL: dict[str, dict[str, Check]] = {
    "place": {"stream": _name},
    "replicate": {
        "reduce_stream": _name, "gather_stream": _name, "bucket_size": _count, "shard_grads": _flag, "shard_params": _flag,
    },
    "shard": {"stream": _name},
}  # fmt: skip


def read_piper(program: str | Path | Sequence[Any]) -> tuple[Directive, ...]:
    """Read a Piper program: a path to its JSON file, or the parsed list. Nothing in it is executed.

    Piper leaves gradients uncut where `bucket_size` is absent; AutoPiper does not, so a `buckets` directive that says the
    same is appended to those of the file. Raises PlanError for everything that Piper would not take either, one message
    a fault, with the directive's position (from 0) and the nearest right word. What depends on the model (tags that it
    lacks, stages that nobody places, orders that go in a circle) `simulate`, `verify` or `make_plan` refuse likewise.
    """
    where, given = _loaded(program)
    faults: list[str] = []
    made: list[Directive] = []
    for position, each in enumerate(given):
        op, wrong = _faults(each)
        if wrong:
            faults += [f"directive {position}{f' ({op})' if op else ''}: {fault}" for fault in wrong]
        else:
            made.append(_directive(op, each))
    faults = faults or faults_together(made)
    if len(faults) == 1:
        raise PlanError(f"{where}: {faults[0]}")
    if faults:
        raise PlanError(f"{where} has {len(faults)} faults", faults)
    return (*made, d.buckets({}, bucket_bytes=UNCUT_BYTES))


def _loaded(program: str | Path | Sequence[Any]) -> tuple[str, list[Any]]:
    """Return what to call the program in messages, and its directives as they came."""
    where, content = "Piper program", program
    if isinstance(program, str | Path):
        where = f"Piper program '{program}'"
        try:
            content = json.loads(
                Path(program).read_text(encoding="utf-8"), object_pairs_hook=_once, parse_constant=_no_number
            )
        except FileNotFoundError:
            raise PlanError(f"cannot read {where}: there is no such file") from None
        except PlanError as fault:
            raise PlanError(f"{where}: {fault}") from None
        except OSError as fault:
            raise PlanError(f"cannot read {where}: {fault}") from None
        except (ValueError, RecursionError) as fault:
            raise PlanError(f"{where} is not JSON: {fault}") from None
    if not isinstance(content, list | tuple):
        raise PlanError(f"{where} is {_shown(content)}; it must be a JSON array of directives")
    if not content:
        raise PlanError(f"{where} is empty; it must have one place directive or more")
    return where, list(content)


def _once(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise PlanError(f"field '{key}' stands twice in {_shown(dict(pairs))}; give it once")
        found[key] = value
    return found


def _no_number(text: str) -> Any:
    raise PlanError(f"{text} is no JSON number")


def _faults(each: Any) -> tuple[str, list[str]]:
    """Return the op of a directive as it came, and what is wrong with its fields."""
    if not isinstance(each, dict):
        return "", [f"it is {_shown(each)}; it must be an object with 'op'"]
    op = each.get("op")
    if not isinstance(op, str):
        return "", [f"'op' is {_shown(op)}; it must be one of {', '.join(REQUIRED)}"]
    if op not in REQUIRED:
        own = (
            " (it is AutoPiper's own)" if op in ("pipeline", "cut", "degrees", "slices", "recompute", "buckets") else ""
        )
        return op, [f"op '{op}' is unknown in Piper{own}{nearest(op, REQUIRED)}; allowed: {', '.join(REQUIRED)}"]
    known = REQUIRED[op] | OPTIONAL.get(op, {})
    faults = [
        f"field '{name}' is unknown{nearest(name, known)}; allowed: {', '.join(known)}"
        for name in each
        if name not in known and name != "op"
    ]
    lacking = [name for name in REQUIRED[op] if name not in each]
    faults += [f"field '{name}' is missing" for name in lacking]
    for name, check in known.items():
        if name in each and not (name in OPTIONAL.get(op, {}) and each[name] is None):
            faults += check(name, each[name])
    return op, faults


def _directive(op: str, it: dict[str, Any]) -> Directive:
    """Make the directive of an object that has been checked."""
    if op == "place":
        return d.place(_made(it["filter"]), it["devices"], stream=it.get("stream"))
    if op == "replicate":
        return d.replicate(
            _made(it["filter"]), it["devices"], reduce_stream=it.get("reduce_stream"),
            gather_stream=it.get("gather_stream"), bucket_size=it.get("bucket_size"),
            shard_grads=bool(it.get("shard_grads")), shard_params=bool(it.get("shard_params")),
        )  # fmt: skip
    if op == "shard":
        return d.shard(_made(it["filter"]), it["devices"], stream=it.get("stream"))
    if op == "split":
        return d.split(_made(it["filter"]), num_microbatches=it["num_microbatches"], dim_name=it["dim_name"])
    return d.order([[_made(each) for each in group] for group in it["filters"]])
