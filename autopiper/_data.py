"""How every data type of AutoPiper is declared: frozen, slotted, keyword-only, strict when read from a file.

And how what a person hands over in code is checked: `require` for arguments, `require_fields` for a whole value.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from numbers import Integral, Real
from typing import Any, Literal, TypeVar, Union, dataclass_transform, get_args, get_origin, get_type_hints

T = TypeVar("T")
_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "True or False", type(None): "None"}
_hints: Callable[[Any], dict[str, Any]] = cache(get_type_hints)


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def data(cls: type[T]) -> type[T]:
    """Make `cls` a frozen, slotted, keyword-only dataclass.

    The pydantic settings only matter where a file comes in (`plan.file`): unknown keys are refused there, and
    infinity survives the way out (as the text "Infinity", which JSON numbers cannot express).
    """
    cls.__pydantic_config__ = {"extra": "forbid", "ser_json_inf_nan": "constants"}  # type: ignore[attr-defined]
    return dataclass(frozen=True, slots=True, kw_only=True)(cls)


def _is(value: Any, hint: Any) -> bool:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return any(_is(value, each) for each in get_args(hint))
    if origin is Literal:
        return value in get_args(hint)
    if origin is tuple:  # of any length; a list does as well
        return isinstance(value, (tuple, list)) and all(_is(v, get_args(hint)[0]) for v in value)
    if hint in (int, float):  # True is no number here, and a number of numpy is one
        return isinstance(value, Integral if hint is int else Real) and not isinstance(value, bool)
    return isinstance(value, hint)


def _words(hint: Any) -> str:
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(_words(each) for each in get_args(hint))
    if get_origin(hint) is tuple:
        if get_origin(get_args(hint)[0]) in (Union, types.UnionType):
            return f"a tuple of {_words(get_args(hint)[0])}"
        return f"a tuple of {_words(get_args(hint)[0]).removeprefix('a ').removesuffix('number')}" + (
            "numbers" if get_args(hint)[0] in (int, float) else ""
        )
    return _WORDS.get(hint) or f"a {hint.__name__}"


def shown(value: Any) -> str:
    """Write what came, briefly, for a message."""
    try:
        return repr(value)[:80]
    except ValueError:  # a whole number of more digits than Python writes
        return "a number of thousands of digits"


def require(error: type[Exception], name: str, value: Any, hint: Any) -> None:
    """Raise `error`, saying what came and what is allowed, where `value` is not what the type `hint` says."""
    if not _is(value, hint):
        raise error(f"{name} is {shown(value)} ({type(value).__name__}); it must be {_words(hint)}")


def require_fields(value: Any, error: type[Exception], prefix: str = "") -> None:
    """Check every field of a data type against its annotation; for the few that people make by hand."""
    for name, hint in _hints(type(value)).items():
        require(error, f"{prefix}{name}", getattr(value, name), hint)
