"""Plans and cost tables as JSON files: strict on the way in, atomic on the way out, never executing anything.

A file is {"autopiper": "plan" | "costs", "schema_version": n, …the fields}. Programs are written as their texts.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

from pydantic import TypeAdapter, ValidationError

from autopiper._data import data
from autopiper.errors import AutoPiperError, PlanError, nearest
from autopiper.plan.actions import Copy, Place, Program, Wait, parse_action
from autopiper.plan.plan import SCHEMA_VERSION, Plan

T = TypeVar("T")


@data
class ProgramText:
    """A Program as a file holds it: each action is "text" or "text after wait, wait"."""

    ranks: tuple[int, ...]
    devices: tuple[int, ...]
    places: tuple[tuple[int, int, int], ...]
    streams: dict[str, tuple[str, ...]]
    copies: tuple[Copy, ...] = ()


def _to_text(program: Program) -> ProgramText:
    def line(action: Any) -> str:
        waits = ", ".join(w.text for w in action.waits)
        return f"{action.text} after {waits}" if waits else str(action.text)

    return ProgramText(
        ranks=program.ranks,
        devices=program.devices,
        places=tuple((p.pipeline, p.stage, p.member) for p in program.places),
        streams={name: tuple(line(a) for a in actions) for name, actions in program.streams.items()},
        copies=program.copies,
    )


def _wait(text: str) -> Wait:
    action, at, block = text.strip().partition("@")
    if at and not block.isdigit():
        raise PlanError(f"wait '{text}' names block '{block}'; expected a number after '@'")
    return Wait(action=action, block=int(block) if at else None)


def _from_text(text: ProgramText) -> Program:
    places = tuple(Place(pipeline=p, stage=s, member=m) for p, s, m in text.places)
    owner = places[0].pipeline if places else 0
    streams = {}
    for name, lines in text.streams.items():
        actions = []
        for line in lines:
            action, _, waits = line.partition(" after ")
            parsed = tuple(_wait(w) for w in waits.split(",")) if waits else ()
            actions.append(parse_action(action, stream=name, waits=parsed, pipeline=owner))
        streams[name] = tuple(actions)
    return Program(ranks=text.ranks, devices=text.devices, places=places, streams=streams, copies=text.copies)


_adapter: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)


def _dump(value: Any) -> dict[str, Any]:
    # By way of text, where infinity is a constant that becomes the string "Infinity": standard JSON has no such number.
    dumped: dict[str, Any] = json.loads(_adapter(type(value)).dump_json(value), parse_constant=str)
    return dumped


def encode(kind: str, value: Any) -> dict[str, Any]:
    """Return the JSON object of a plan or cost table."""
    head = {"autopiper": kind, "schema_version": SCHEMA_VERSION}
    if isinstance(value, Plan):
        body = _dump(replace(value, programs=()))
        body["programs"] = [_dump(_to_text(p)) for p in value.programs]
        return head | body
    return head | _dump(value)


def _field_names(types: Iterable[Any], path: Sequence[int | str]) -> set[str]:
    """Names of the fields allowed at `path`, walking down from these types; steps that are no field are passed over."""
    classes: list[Any] = []
    queue = list(types)
    while queue:
        each = queue.pop()
        queue.extend(get_args(each))
        if is_dataclass(each):
            classes.append(each)
    for at, step in enumerate(path):
        hints = [get_type_hints(c)[step] for c in classes if step in {f.name for f in fields(c)}]
        if hints:
            return _field_names(hints, path[at + 1 :])
    return {f.name for c in classes for f in fields(c)}


def _explain(error: ValidationError, cls: Any, prefix: str = "") -> list[str]:
    """Turn pydantic's faults into lines that name the field, what came and the nearest right one."""
    lines = []
    for fault in error.errors()[:20]:
        where = (prefix + ".".join(str(part) for part in fault["loc"])).rstrip(".")
        if fault["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
            allowed = _field_names([cls], fault["loc"][:-1])
            lines.append(f"{where}: unknown field{nearest(str(fault['loc'][-1]), allowed)}")
        elif isinstance(fault.get("ctx", {}).get("error"), AutoPiperError):
            lines.append(f"{where}: {fault['ctx']['error']}")
        else:
            came = repr(fault["input"])
            lines.append(f"{where}: {fault['msg']} (came: {came[:80]})")
    return lines


def _programs(content: Any) -> tuple[ProgramText, ...]:
    shape = tuple[ProgramText, ...]
    try:
        texts: tuple[ProgramText, ...] = _adapter(shape).validate_python(content)
    except ValidationError as fault:
        raise PlanError("its programs are wrong:", _explain(fault, shape, "programs.")) from None
    return texts


def decode(content: Any, kind: str, cls: type[T], error: type[AutoPiperError], where: str = "the text") -> T:
    """Check the JSON object of a plan or cost table and make the value. Raises `error` naming each wrong field."""
    if not isinstance(content, dict) or content.get("autopiper") != kind:
        found = content.get("autopiper", "nothing") if isinstance(content, dict) else type(content).__name__
        raise error(f"{where} is not an AutoPiper {kind} file: its key 'autopiper' says {found!r}, expected '{kind}'")
    version = content.get("schema_version")
    if version != SCHEMA_VERSION:
        raise error(f"{where}: schema_version is {version!r}; this AutoPiper reads {SCHEMA_VERSION}")
    body = {k: v for k, v in content.items() if k not in ("autopiper", "schema_version")}
    try:
        if cls is Plan:
            texts = _programs(body.get("programs"))
            plan: Plan = _adapter(Plan).validate_python(body | {"programs": ()})
            return replace(plan, programs=tuple(_from_text(t) for t in texts))  # type: ignore[return-value]
        value: T = _adapter(cls).validate_python(body)
    except ValidationError as fault:
        raise error(f"{where} is not a valid {kind} file:\n  - " + "\n  - ".join(_explain(fault, cls))) from None
    except AutoPiperError as fault:
        raise error(f"{where} is not a valid {kind} file: {fault}") from None
    return value


def write_text(path: str | Path, text: str) -> None:
    """Write a file so that a kill at any moment leaves the old one or the new one, never half of one."""
    target = Path(path)
    if "\0" in str(target):  # a ValueError to some, nothing to others
        raise OSError(errno.EINVAL, "no file can be called so", str(target))
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.parent / f".{target.name}.{secrets.token_hex(4)}.tmp"
    try:
        with temporary.open("x") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write(path: str | Path, kind: str, value: Any) -> None:
    """Write a plan or cost table atomically."""
    write_text(path, json.dumps(encode(kind, value), indent=1, allow_nan=False) + "\n")


def read(path: str | Path, kind: str, cls: type[T], error: type[AutoPiperError]) -> T:
    """Read a plan or cost table. Raises `error` where the file is missing, truncated or wrong."""
    try:
        text = Path(path).read_text()
    except FileNotFoundError:
        raise error(f"cannot read {kind} file '{path}': there is no such file") from None
    except (OSError, ValueError, TypeError) as fault:  # unreadable, no text in it, or no path at all
        raise error(f"cannot read {kind} file '{path}': {fault}") from None
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as fault:
        raise error(
            f"{kind} file '{path}' is not complete JSON: {fault}; was it cut off while being written?"
        ) from None
    return decode(content, kind, cls, error, f"{kind} file '{path}'")
