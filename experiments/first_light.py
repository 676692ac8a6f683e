"""First light: plan a large model on a mixed cluster, then train a small one by a plan, on four unlike ranks here.

    python experiments/first_light.py        (what `make demo` runs)

Results go to stdout and, as JSON, to experiments/results/first_light.json; progress goes to stderr.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import lab  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from emulation import (  # noqa: E402
    SIZES,
    emulated,
    gradient_error,
    make_model,
    measure,
    progress,
    read_text,
    reference,
    run,
)

import autopiper as ap  # noqa: E402
from autopiper.report.table import plan_text  # noqa: E402
from autopiper.runtime.links import LinkReading  # noqa: E402

QUOTAS = {"core-0.84": 0.84, "core-0.48": 0.48, "core-0.30": 0.30, "core-0.18": 0.18}
WITHOUT_QUOTAS = ("core", "core")
BATCH = 18
MEMORY = 0.65
"""Of what the whole model needs on one device: what each rank is given."""
STEPS, FEWER_STEPS, CHECKED = 40, 12, 5
"""Steps of the chosen plan; of those compared with it; repeated by one process."""
TOLERANCE = 1e-5
"""What counts as equal in float32."""
TITLES = {
    "chosen": "the chosen plan",
    "equal": "the best equal plan",
    "replicas": "two equal pipelines",
    "uniform": "equal plan, equal stages",
}
"""The plans that are run, most free first. Equal: all replicas alike in cuts and shares; one pipeline is equal, too."""


def say(text: str = "") -> None:
    print(text, flush=True)


def heading(text: str) -> None:
    say(f"\n{text}\n{'─' * len(text)}")


def describe(plan: ap.Plan) -> str:
    """One line per pipeline: share, and cuts with the devices that hold them."""
    lines = []
    for pipe in plan.strategy.pipelines:
        stages = " → ".join(
            f"{s.stop - s.start} blocks on {' + '.join(plan.cluster.device(d).type.name for d in s.group.devices)}"
            for s in pipe.stages
        )
        lines.append(f"{pipe.share:3d} of {BATCH} samples: {stages}")
    return "\n".join(f"      {line}" for line in lines)


def plan_large() -> dict[str, Any]:
    """(a) Plan a model of eight billion parameters on 32 devices of two kinds."""
    heading("1. Plan llama-3-8b on 16 A100 and 16 V100")
    start = time.monotonic()
    progress("searching")
    plan = ap.optimize(
        "llama-3-8b", HERE.parent / "examples/clusters/a100-v100.toml", global_batch_size=512, sequence_length=4096,
        timeout=40,
    )  # fmt: skip
    say(plan_text(plan, ap.simulate(plan)))
    return {
        "step_time_s": plan.step_time_s,
        "lower_bound_s": plan.lower_bound_s,
        "uniform_step_time_s": plan.uniform and plan.uniform.step_time_s,
        "search_s": time.monotonic() - start,
    }


def plan_small(
    devices: tuple[str, ...], model: ap.Model, training: ap.Training, costs: ap.CostTable, links: Sequence[LinkReading]
) -> dict[str, ap.Plan]:
    """Choose plans from measured prices: the one that is trained, and the best ones of narrower kinds."""
    free = emulated(devices, QUOTAS, links, 1e12)
    alone = ap.Strategy.uniform(model, free, training, devices=[0])
    need = ap.simulate(alone, model, free, costs).peak_memory_bytes[0]
    limit = MEMORY * need
    parameters = model.parameters * training.bytes_per_parameter
    say(
        f"The whole model on one device needs {need / 1e6:.1f} MB: {parameters / 1e6:.1f} MB for its {model.parameters:,} "
        f"parameters with\ngradients and Adam, the rest for one micro-batch of one sample. "
        f"Each rank is given {MEMORY} of it: {limit / 1e6:.1f} MB."
    )
    cluster = emulated(devices, QUOTAS, links, limit)

    def best(**limits: Any) -> ap.Plan:
        progress(f"searching {limits or ''}")
        space = ap.Space(micro_batch_sizes=SIZES, **limits)
        return ap.optimize(model, cluster, training=training, costs=costs, space=space, n_trials=32)

    plans = {"chosen": best()}
    if len(devices) > 2 and len(plans["chosen"].strategy.pipelines) < 2:
        say("The search prefers a single pipeline; it is shown here, and the space is now restricted to two or more.")
        say(f"    {plans['chosen'].step_time_s:.3f} s\n{describe(plans['chosen'])}")
        plans = {"chosen": best(min_pipelines=2), "preferred": plans["chosen"]}
    plans["equal"] = best(equal_pipelines=True)
    if len(devices) > 2:
        plans["replicas"] = best(equal_pipelines=True, min_pipelines=2)
    plans["uniform"] = best(equal_pipelines=True, equal_stages=True)
    return plans


def train_small() -> dict[str, Any]:
    """(b) Train by the plan that the search chooses, and see whether it does what was said."""
    heading("2. Train a small Llama on unlike ranks of this machine")
    reason = lab.why_not()
    devices = tuple(QUOTAS) if reason is None else WITHOUT_QUOTAS
    if reason is None:
        say(f"Four ranks with {', '.join(f'{q:.2f}' for q in QUOTAS.values())} of a core each, by CPU quota.")
    else:
        say(f"Two equal ranks: {reason}.")
    sample = read_text()[0]["input_ids"][None]
    model = ap.Model.from_module(make_model(), {"input_ids": sample}, name="small-llama")
    training = ap.Training(global_batch_size=BATCH, precision="fp32", optimizer="adamw")
    say(f"Text: the sources of Python's standard library, {len(read_text()):,} samples of {sample.numel()} bytes.")
    quotas = lab.Quotas(QUOTAS) if reason is None else None
    try:
        progress("measuring blocks and links on all ranks at once")
        costs, links = measure(devices, model, training, quotas)
        plans = plan_small(devices, model, training, costs, links)
        chosen = plans["chosen"]
        say(f"\n{plan_text(chosen, ap.simulate(chosen))}")
        say("Training by it: real ranks, gloo between them.")
        measured = {"chosen": run(chosen, quotas, STEPS, check=True)}
        for name in [n for n in TITLES if n != "chosen" and n in plans]:
            if plans[name].strategy == chosen.strategy:
                measured[name] = measured["chosen"]
            else:
                progress(f"training by the best {name} plan")
                measured[name] = run(plans[name], quotas, FEWER_STEPS)
    finally:
        if quotas is not None:
            quotas.close()
    return {
        "quotas": QUOTAS if reason is None else reason,
        "memory_limit_bytes": chosen.cluster.device(0).type.memory_bytes,
        **report(plans, measured),
        "hosts": [asdict(h) for h in costs.hosts],
        "links": [asdict(r) for r in links],
    }


def report(plans: dict[str, ap.Plan], measured: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Say what came out: losses, exactness, predicted beside measured."""
    heading("3. What came out")
    losses = measured["chosen"]["losses"]
    marks = [0, *range(4, len(losses), 5)]
    say("Loss, nats per byte, by step:  " + "  ".join(f"{i + 1}: {losses[i]:.2f}" for i in marks))
    again, gradients = reference(plans["chosen"], CHECKED)
    loss_error = max(abs(a - b) / abs(b) for a, b in zip(losses, again, strict=False))
    error = gradient_error(measured["chosen"]["gradients"], gradients)
    say(
        f"Against one process over the same micro-batches: losses of {CHECKED} steps differ by {loss_error:.1e} at most,\n"
        f"gradients of step 1 by {error:.1e} (relative, the worst of {len(gradients)} tensors); tolerance {TOLERANCE:.0e}: "
        f"{'equal' if max(loss_error, error) <= TOLERANCE else 'NOT EQUAL'}."
    )
    say("\nSeconds per step           predicted  measured  difference")
    rows = {}
    base = plans["chosen"].step_time_s, measured["chosen"]["step_time_s"]
    shown = {name: title for name, title in TITLES.items() if name in measured}
    for name, title in shown.items():
        if name != "chosen" and measured[name] is measured["chosen"]:
            say(f"  {title:27s}the same plan")
            continue
        predicted, found = plans[name].step_time_s, measured[name]["step_time_s"]
        slower = (
            f"   {predicted / base[0]:.2f} x predicted, {found / base[1]:.2f} x measured" if name != "chosen" else ""
        )
        say(f"  {title:27s}{predicted:7.3f}{found:10.3f}{predicted / found - 1:+11.1%}{slower}")
        rows[name] = {
            "predicted_s": predicted,
            "measured_s": found,
            "measured_quartiles_s": measured[name]["quartiles_s"],
            "error": predicted / found - 1,
            "lower_bound_s": plans[name].lower_bound_s,
            "pipelines": [
                {"share": p.share, "cuts": [s.stop - s.start for s in p.stages],
                 "devices": [list(s.group.devices) for s in p.stages], "micro_batches": list(p.micro_batch_sizes)}
                for p in plans[name].strategy.pipelines
            ],
        }  # fmt: skip
    for name, title in shown.items():
        if name not in rows:
            continue
        say(f"\n  {title}:\n{describe(plans[name])}")
    return {
        "step_times": rows,
        "losses": losses,
        "loss_error": loss_error,
        "gradient_error": error,
        "tolerance": TOLERANCE,
        "equal_to_one_process": max(loss_error, error) <= TOLERANCE,
    }


def main() -> int:
    start = time.monotonic()
    large = plan_large()
    small = train_small()
    seconds = time.monotonic() - start
    usage = [resource.getrusage(who).ru_maxrss / 2**20 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    say(
        f"\nDone in {seconds:.0f} s; memory: this process {usage[0]:.2f} GiB at most, the largest rank {usage[1]:.2f} GiB."
    )
    results = {
        "versions": {
            "autopiper": ap.__version__, "python": platform.python_version(), "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "cores": os.cpu_count(), "seconds": seconds, "large": large, "small": small,
    }  # fmt: skip
    path = HERE / "results/first_light.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")
    return 0 if small["equal_to_one_process"] else 1


if __name__ == "__main__":
    sys.exit(main())
