"""A plan as a table that a person understands: the answer first, then who does what, then what limits it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from autopiper.plan.plan import Plan
from autopiper.plan.timeline import Timeline
from autopiper.report.summary import summarize

GIB = 2**30
PLAIN_WIDTH, MIN_WIDTH = 100, 80
"""Columns where the output is not a terminal, and the fewest that a table is drawn for."""


def plan_table(plan: Plan, timeline: Timeline) -> RenderableType:
    """Draw a plan; `timeline` is its own, by `api.simulate`. Print it with a rich Console."""
    return summary_table(summarize(plan, timeline))


def plan_text(plan: Plan, timeline: Timeline, *, width: int = PLAIN_WIDTH) -> str:
    """Return the same as plain text of `width` columns."""
    console = Console(width=max(width, MIN_WIDTH), color_system=None, force_terminal=False, legacy_windows=False)
    with console.capture() as captured:
        console.print(plan_table(plan, timeline))
    return "\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n"


def summary_table(s: dict[str, Any]) -> RenderableType:
    """Draw what `summarize` gathered."""
    parts: list[RenderableType] = [_facts(_head(s))]
    for pipe in s["pipelines"]:
        parts += [Text(""), Text(_pipeline_line(pipe), style="bold"), _stages(pipe)]
    parts += [Text(""), _facts(_foot(s))]
    return Group(*parts)


def _facts(lines: Iterable[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in lines:
        table.add_row(Text(label), Text(text))
    return table


def _head(s: dict[str, Any]) -> Iterable[tuple[str, str]]:
    model, cluster, training, uniform = s["model"], s["cluster"], s["training"], s["uniform"]
    tokens = model["sequence_length"]
    of_tokens = f", sequences of {tokens:,} tokens" if tokens > 1 else ""
    yield "Model", f"{model['name']}: {count(model['parameters'])} parameters{of_tokens}"
    nodes = "; ".join(
        f"{n['count']} node{'s' * (n['count'] > 1)} of {_devices(n['devices'])}, {_rate(n['intra_bytes_per_s'])} inside, "
        f"{_rate(n['network_bytes_per_s'])} between"
        for n in cluster["nodes"]
    )  # fmt: skip
    yield "Cluster", f"{cluster['name']}: {nodes}"
    error = s["relative_error"]
    bar = f" ± {error:.0%}" if error >= 0.01 else f" ± {error:.1%}" if error else ""
    yield "Step time", f"{seconds(s['step_time_s'])}{bar} (predicted)"
    if uniform is None:
        searched = s["gap"] is not None  # a plan made of a given strategy has no bound, and was compared with nothing
        yield "Compared", "no uniform 3D layout fits this cluster" if searched else "with nothing: it was not searched"
    else:
        note = f" ({uniform['note']})" if uniform["note"] else ""
        yield (
            "Compared",
            (
                f"{uniform['speedup']:.2f} x the speed of the best uniform 3D layout, which takes "
                f"{seconds(uniform['step_time_s'])}: {uniform['layout']}{note}"
            ),
        )
    yield (
        "Throughput",
        (
            f"{s['tokens_per_s']:,.0f} {'tokens' if tokens > 1 else 'samples'}/s, {s['tflops_per_device']:.3g} TFLOP/s per used device, MFU {s['mfu']:.1%} of their peak"
        ),
    )
    yield "Batch", f"{training['global_batch_size']:,} samples"
    yield (
        "Precision",
        (
            f"{training['precision']}: {training['precision_reason']}; {training['optimizer']}, "
            f"{training['bytes_per_parameter']} bytes per parameter"
        ),
    )


def _pipeline_line(pipe: dict[str, Any]) -> str:
    batches = ", ".join(
        f"{m['count']} micro-batch{'es' * (m['count'] > 1)} of {m['samples']}" for m in pipe["micro_batches"]
    )
    return (
        f"Pipeline {pipe['index']}: {pipe['samples']:,} samples ({pipe['share']:.1%} of the batch) in {batches}; "
        f"schedule {pipe['schedule']}"
    )


def _stages(pipe: dict[str, Any]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("stage", justify="right", no_wrap=True)
    table.add_column("blocks", overflow="fold")
    table.add_column("devices", overflow="fold")
    table.add_column("recompute", overflow="fold")
    table.add_column("peak memory", justify="right", no_wrap=True)
    table.add_column("full", no_wrap=True, justify="right")
    table.add_column("busy", no_wrap=True, justify="right")
    for stage in pipe["stages"]:
        for number, group in enumerate(stage["groups"]):
            first = number == 0
            blocks = stage["stop"] - stage["start"]
            table.add_row(
                str(stage["index"]) if first else "",
                stage["blocks"] if first else "",
                Text(_group(stage, group)),
                _recompute(stage["recompute"], blocks) if first else "",
                *_memory(group["peak_memory_bytes"], group["limit_bytes"]),
                f"{group['busy_fraction']:.0%}",
            )
    return table


def _group(stage: dict[str, Any], group: dict[str, Any]) -> str:
    text = f"{len(group['devices'])} x {group['type']} on {_names(group['nodes'])}"
    tp, dp = stage["tensor_parallel_size"], stage["data_parallel_size"]
    degrees = [f"{name} {size}" for name, size in (("tp", tp), ("dp", dp)) if size > 1]
    if degrees:
        text += f"; {' x '.join(degrees)}"
    if stage["expert_parallel_size"] > 1:
        text += f", experts over {stage['expert_parallel_size']}"
    if stage["zero"] and dp > 1:
        text += f", ZeRO {stage['zero']}"
    if dp > 1:
        rows = group["samples"]
        each = "/".join(str(n) for n in dict.fromkeys(n for row in rows for n in row))
        text += f", {each} sample{'' if each == '1' else 's'} each"
    return text


def _foot(s: dict[str, Any]) -> Iterable[tuple[str, str]]:
    yield "Prices", s["costs"]["source"]
    yield "Bubble", f"{s['bubble_fraction']:.1%} of all device time in one isolated step of {seconds(s['makespan_s'])}"
    exposed = {k.removeprefix("exposed "): v for k, v in s["breakdown_s"].items() if k.startswith("exposed ") and v > 0}
    kinds = ", ".join(f"{kind} {seconds(v)}" for kind, v in exposed.items()) or "none"
    yield "Exposed comm.", f"{s['exposed_fraction']:.1%} of device time; mean per device: {kinds}"
    if s["gap"] is None:
        yield "Lower bound", "none known"
    else:
        yield (
            "Lower bound",
            f"{seconds(s['lower_bound_s'])}: no plan in the space searched is faster; bound by {s['binding']}",
        )
        yield (
            "Gap",
            f"this plan takes at most {s['gap']:.1%} longer than the best possible one of the space, by these prices",
        )
    for idle in s["idle"]:
        yield "Idle", f"{len(idle['devices'])} x {idle['type']} on {_names(idle['nodes'])}"
    said = f"precision {s['training']['precision']}: {s['training']['precision_reason']}"  # at the head already
    for number, note in enumerate(n for n in s["notes"] if n != said):
        yield "Notes" if number == 0 else "", note


def _recompute(choices: dict[str, int], blocks: int) -> str:
    if not choices:
        return "none"
    return ", ".join(c if n == blocks else f"{c}: {n} of {blocks}" for c, n in choices.items())


def _devices(counts: dict[str, int]) -> str:
    return " + ".join(f"{count} x {name}" for name, count in counts.items())


def _names(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{names[0]} … {names[-1]} ({len(names)} nodes)"


def _memory(used: float, limit: float) -> tuple[str, str]:
    """Peak against limit in one unit, and how full that is."""
    if limit == float("inf"):
        return size(used), ""
    unit, scale = ("GiB", GIB) if limit >= GIB else ("MiB", 2**20)
    text = size(used).removesuffix(f" {unit}")
    return f"{text} / {limit / scale:.1f} {unit}", f"{used / limit:.0%}"


def size(number: float) -> str:
    """Bytes in GiB, or MiB below one."""
    return f"{number / GIB:.1f} GiB" if number >= GIB else f"{number / 2**20:.1f} MiB"


def _rate(bytes_per_s: float) -> str:
    return "free links" if bytes_per_s == float("inf") else f"{bytes_per_s / 1e9:g} GB/s"


def seconds(value: float) -> str:
    """Three digits and a unit that fits."""
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if value * scale >= 1 or unit == "us":
            return f"{value * scale:.0f} {unit}" if value * scale >= 1000 else f"{value * scale:.3g} {unit}"
    raise AssertionError


def count(number: float) -> str:
    """8.03 B, 3.1 M, 812."""
    for unit, scale in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= scale:
            return f"{number / scale:.3g} {unit}"
    return f"{number:g}"
