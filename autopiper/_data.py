"""How every data type of AutoPiper is declared: frozen, slotted, keyword-only, strict when read from a file."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def data(cls: type[T]) -> type[T]:
    """Make `cls` a frozen, slotted, keyword-only dataclass.

    The pydantic settings only matter where a file comes in (`plan.file`): unknown keys are refused there, and
    infinity survives the way out (as the text "Infinity", which JSON numbers cannot express).
    """
    cls.__pydantic_config__ = {"extra": "forbid", "ser_json_inf_nan": "constants"}  # type: ignore[attr-defined]
    return dataclass(frozen=True, slots=True, kw_only=True)(cls)
