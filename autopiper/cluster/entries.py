"""What cluster files and the catalogue share: numbers in the units that people write, and one entry of a device type."""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from autopiper.cluster.spec import DeviceType
from autopiper.errors import nearest

GIGA, TERA, MICRO, GIB = Decimal(10**9), Decimal(10**12), Decimal("1e-6"), 2**30


def _number(value: Any) -> Any:
    """Let numbers through as the decimals that they are written as; refuse text and booleans, which pydantic would read."""
    if isinstance(value, bool) or not isinstance(value, (int, float, Decimal)):
        raise ValueError("a number is expected")
    number = Decimal(str(value)) if isinstance(value, float) else Decimal(value)
    if number.is_nan():
        raise ValueError("a number is expected")
    return number


Positive = Annotated[Decimal, Field(gt=0, allow_inf_nan=True), BeforeValidator(_number)]
NonNegative = Annotated[Decimal, Field(ge=0, allow_inf_nan=True), BeforeValidator(_number)]


class Entry(BaseModel):
    """A table of a file: unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class DeviceEntry(Entry):
    """A device type as a file writes it; the name is the table's key in the catalogue, a key of its own elsewhere."""

    memory_GiB: Positive
    memory_GBps: Positive
    TFLOPS: dict[str, Positive]
    platform: Literal["cuda", "rocm", "cpu"] = "cuda"
    kernel_launch_us: NonNegative = Decimal(4)
    reserved_GiB: NonNegative = Decimal(0)
    price_per_hour: NonNegative | None = None
    source: str = "given"
    match: str | None = None
    """What the driver's name of the device contains (catalogue only)."""

    def device_type(self, name: str) -> DeviceType:
        """Return the entry in bytes and seconds."""
        return DeviceType(
            name=name,
            memory_bytes=float(self.memory_GiB) * GIB,
            peak_flops={precision: float(peak * TERA) for precision, peak in self.TFLOPS.items()},
            memory_bytes_per_s=float(self.memory_GBps * GIGA),
            kernel_launch_s=float(self.kernel_launch_us * MICRO),
            reserved_bytes=float(self.reserved_GiB) * GIB,
            price_per_hour=None if self.price_per_hour is None else float(self.price_per_hour),
            platform=self.platform,
            source=self.source,
        )


def explain(fault: ValidationError, allowed: dict[str, Iterable[str]]) -> list[str]:
    """Turn the faults of a file into lines that say key, value and what is allowed.

    `allowed` has the keys of each kind of table, by the name of the array it stands in ("" for the file itself).
    """
    return list(dict.fromkeys(_line(error, allowed) for error in fault.errors()))


def where(location: Iterable[int | str]) -> str:
    """Write a place in a file as people point at it: "nodes[0].devices"."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def _line(error: Any, allowed: dict[str, Iterable[str]]) -> str:
    location, kind, context = error["loc"], error["type"], error.get("ctx", {})
    # Where a value may be this or that, the branch that was tried is no place in the file.
    at, came = where(part for part in location if part not in ("str", "list[str]")), error["input"]
    came = repr(came) if isinstance(came, str) else str(came)
    if kind == "extra_forbidden":
        key, table = str(location[-1]), str(location[0]) if len(location) > 1 else ""
        keys = list(allowed.get(table, ()))
        if "Gbps" in key:
            return (
                f"{at}: unknown key; bandwidths are in GBps, gigabytes per second and direction, not in gigabits: "
                f"200 Gb/s = 25 GBps{nearest(key.replace('Gbps', 'GBps'), keys)}"
            )
        return f"{at}: unknown key{nearest(key, keys)}; allowed: {', '.join(keys)}"
    if kind == "missing":
        return f"{at} is missing"
    if kind == "too_short":
        return f"{at} is empty; give at least one"
    if kind in ("list_type", "tuple_type"):
        return f"{at} is {came[:80]}; a list is expected{f', written as [[{at}]]' if at in allowed else ''}"
    if kind == "model_type":
        return f"{at} is {came[:80]}; a table is expected"
    if kind == "string_type":
        return f"{at} is {came[:80]}; text in quotes is expected"
    if kind == "int_type":
        return f"{at} is {came[:80]}; a whole number is expected"
    if kind == "greater_than":
        return f"{at} is {came}; it must be above {context['gt']}"
    if kind == "greater_than_equal":
        return f"{at} is {came}; it must be {context['ge']} or more"
    if kind == "less_than_equal":
        return f"{at} is {came}; it must be {context['le']} or less"
    if kind == "literal_error":
        return f"{at} is {came}{nearest(str(error['input']), ('cuda', 'rocm', 'cpu'))}; allowed: {context['expected']}"
    return f"{at} is {came[:80]}; {error['msg'].removeprefix('Value error, ')}"
