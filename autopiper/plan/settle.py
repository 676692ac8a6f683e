"""What the fields of a directive may be: checked when one is made, and settled into plain tuples, numbers and mappings.

Whatever a person hands over in code (lists, ranges, arrays, numbers of numpy) becomes what a plan file can hold, or is
refused with the directive's op, the field, what came and what is allowed. What a *right* value means is `ir`'s business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from numbers import Integral, Real
from typing import Any

from autopiper._data import shown
from autopiper.errors import PlanError

MOST = 2**63 - 1
"""Of whole numbers: what arrays and other readers of plan files hold."""

Kind = Callable[[str, Any], Any]
"""(field as messages name it, what came) -> the settled value."""


def settle(it: Any, **kinds: Kind) -> None:
    """Settle fields of a frozen directive in place; for its `__post_init__`."""
    for name, kind in kinds.items():
        object.__setattr__(it, name, kind(f"{it.op}: {name}", getattr(it, name)))


def _refuse(name: str, value: Any, allowed: str) -> PlanError:
    return PlanError(f"{name} is {shown(value)} ({type(value).__name__}); it must be {allowed}")


def whole(name: str, value: Any) -> int:
    """A whole number; True is none, and a number of numpy is one."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise _refuse(name, value, "a whole number")
    found = int(value)
    if not -MOST <= found <= MOST:
        raise _refuse(name, value, f"within 64 bits, at most {MOST}")
    return found


def items(name: str, value: Any, allowed: str) -> tuple[Any, ...]:
    """Anything with an order: a list, tuple, range, array or generator; no text, mapping or set."""
    if isinstance(value, str | bytes | Mapping | Set) or not isinstance(value, Iterable):
        raise _refuse(name, value, allowed)
    try:
        return tuple(value)
    except TypeError:  # an array of no dimension
        raise _refuse(name, value, allowed) from None


def wholes(name: str, value: Any) -> tuple[int, ...]:
    """Whole numbers in order."""
    found = items(name, value, "a list of whole numbers")
    if set(map(type, found)) == {int} and min(found) >= -MOST and max(found) <= MOST:  # by far the most, and often many
        return found
    return tuple(whole(f"{name}[{i}]", each) for i, each in enumerate(found))


def devices(name: str, value: Any) -> tuple[int, ...]:
    """Device ids in order."""
    if isinstance(value, Integral) and not isinstance(value, bool):
        value = whole(name, value)
        raise PlanError(f"{name} is {value}; give a list of device ids, such as [{value}]")
    return wholes(name, value)


def rows(name: str, value: Any) -> tuple[tuple[int, ...], ...]:
    """Rows of whole numbers; rows that are one object are looked at once."""
    found = items(name, value, "a list of rows, each of whole numbers")
    settled = {
        id(row): wholes(f"{name}[{i}]", row) for i, row in {id(row): (i, row) for i, row in enumerate(found)}.values()
    }
    return tuple(settled[id(row)] for row in found)


def pair(name: str, value: Any) -> tuple[int, int]:
    """A range [start, stop)."""
    found = wholes(name, value)
    if len(found) != 2:
        raise _refuse(name, value, "a pair (start, stop)")
    return found[0], found[1]


def filter(name: str, value: Any) -> dict[str, Any]:
    """A filter; which tags and values there are depends on the graph, so `ir.filters` says."""
    if not isinstance(value, Mapping):
        raise _refuse(name, value, "a mapping of tags, such as {'PP': 0}, or {} for everything")
    for tag in value:
        if not isinstance(tag, str):
            raise PlanError(
                f"{name} {shown(dict(value))}: the tag {shown(tag)} is no text; tags are PIPE, PP, MB, PASS and regions of the model"
            )
    return {
        t: whole(f"{name}, {t}", v) if isinstance(v, Integral) and not isinstance(v, bool) else v
        for t, v in value.items()
    }


def groups(name: str, value: Any) -> tuple[tuple[dict[str, Any], ...], ...] | None:
    """Groups of filters, or None."""
    if value is None:
        return None
    found = items(name, value, "a list of groups, each a list of filters, or None")
    return tuple(
        tuple(filter(f"{name}, group {n}", each) for each in items(f"{name}, group {n}", group, "a list of filters"))
        for n, group in enumerate(found)
    )


def text(name: str, value: Any) -> str:
    """A word that is not empty."""
    if not isinstance(value, str) or not value:
        raise _refuse(name, value, "text that is not empty")
    return str(value)


def words(name: str, value: Any) -> tuple[str, ...] | str:
    """One word, or several in order."""
    if isinstance(value, str):
        return value
    found = items(name, value, "one word for all, or a list of one for each")
    return tuple(text(f"{name}[{i}]", each) for i, each in enumerate(found))


def flag(name: str, value: Any) -> bool:
    """True or False, and nothing that only looks like it."""
    if not isinstance(value, bool):
        raise _refuse(name, value, "True or False")
    return value


def number(name: str, value: Any) -> float:
    """A number, as a float."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise _refuse(name, value, "a number")
    try:
        return float(value)
    except OverflowError:
        raise _refuse(name, value, "a number that a float can hold") from None


def _parameter(name: str, value: Any) -> int | float | str | bool:
    if isinstance(value, bool | str):
        return value
    return whole(name, value) if isinstance(value, Integral) else number(name, value)


def parameters(name: str, value: Any) -> dict[str, int | float | str | bool]:
    """Parameters of a schedule family, by name."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise _refuse(name, value, "a mapping of names to values")
    return {key: _parameter(f"{name}['{key}']", each) for key, each in value.items()}


def optional(kind: Kind) -> Kind:
    """The same, or None."""
    return lambda name, value: None if value is None else kind(name, value)
