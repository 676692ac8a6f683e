"""The command line. Results go to stdout, progress and messages to stderr; `--json` prints one JSON document.

Exit codes: 0 done, 1 the launched script failed, 2 wrong input (or output that cannot be written), 3 no feasible plan,
130 interrupted, 141 nobody reads the output.
Only typer is imported here; each command imports what it needs, so that `--help` answers at once.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autopiper.errors import AutoPiperError, InfeasibleError, RuntimeFault
from autopiper.streams import quiet_stdout, usable_streams

if TYPE_CHECKING:
    from autopiper.plan.plan import Plan

WRONG_INPUT, INFEASIBLE, INTERRUPTED, READER_GONE = 2, 3, 130, 141

app = typer.Typer(
    name="autopiper",
    help="Finds how to train a large model on the accelerators you really have, and trains it that way.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan.json, or the run directory that holds it.")]


def main() -> None:
    """Run the command line and exit."""
    usable_streams()
    try:
        try:
            app()
        finally:
            sys.stdout.flush()  # here, where a full disk can still be told
    except KeyboardInterrupt:
        _say("interrupted")
        sys.exit(INTERRUPTED)
    except OSError as fault:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or the interpreter would try, and complain, once more
        if isinstance(fault, BrokenPipeError):  # whoever read our output has seen enough
            sys.exit(READER_GONE)
        _say(f"error: {fault}")
        sys.exit(WRONG_INPUT)


def _say(message: str) -> None:
    print(f"autopiper: {message}", file=sys.stderr, flush=True)


@contextmanager
def _faults(interrupted: str = "interrupted") -> Iterator[None]:
    """Turn errors of a user's making into one message and the right exit code."""
    try:
        yield
    except InfeasibleError as fault:
        _say(f"no feasible plan: {fault}")
        raise typer.Exit(INFEASIBLE) from None
    except RuntimeFault as fault:
        _say(str(fault))
        raise typer.Exit(1) from None
    except AutoPiperError as fault:
        _say(f"error: {fault}")
        raise typer.Exit(WRONG_INPUT) from None
    except KeyboardInterrupt:
        _say(interrupted)
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:  # typer would make it an exit code of 1
        raise typer.Exit(READER_GONE) from None


def _print_json(content: Any) -> None:
    # Infinity (a cluster with free links) is no JSON number; the plan files write it as this text too.
    print(json.dumps(json.loads(json.dumps(content), parse_constant=str), indent=1, ensure_ascii=False))


def _print_plan(plan: Plan) -> None:
    from rich.console import Console

    from autopiper.api import simulate
    from autopiper.report.table import MIN_WIDTH, PLAIN_WIDTH, plan_table

    console = Console()
    if not sys.stdout.isatty() and "COLUMNS" not in os.environ:
        console.width = PLAIN_WIDTH
    console.width = max(console.width, MIN_WIDTH)
    with console.capture() as table:
        console.print(plan_table(plan, simulate(plan)))
    lines = table.get() if console.is_terminal else "\n".join(line.rstrip() for line in table.get().split("\n"))
    print(lines, end="")  # by ourselves: rich ends the process where nobody reads


def _summary(plan: Plan) -> dict[str, Any]:
    from autopiper.api import simulate
    from autopiper.report.summary import summarize

    return summarize(plan, simulate(plan))


def _plan_path(given: Path) -> Path:
    return given / "plan.json" if given.is_dir() else given


def _load(path: Path) -> Plan:
    from autopiper.plan import load_plan

    return load_plan(_plan_path(path))


@app.command()
def optimize(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A preset's name (a wrong one lists all), or a Hugging Face config.json."),
    ],
    cluster: Annotated[str, typer.Argument(metavar="CLUSTER", help="A cluster file (TOML, see README), or 'local'.")],
    global_batch_size: Annotated[
        int | None, typer.Option(help="Samples of one optimizer step; by default the preset's, else 16 a device.")
    ] = None,
    sequence_length: Annotated[
        int | None, typer.Option(help="Tokens of one sample; by default the model's, of a config at most 8192.")
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            help="fp64, fp32, tf32, bf16 or fp16; by default the best that the used devices share. `launch` runs fp32 and fp64."
        ),
    ] = None,
    no_tensor_parallel: Annotated[
        bool, typer.Option("--no-tensor-parallel", help="No tensor-parallel stages, which `launch` cannot run yet.")
    ] = False,
    timeout: Annotated[
        float | None, typer.Option(help="Seconds to search at most; by default until all trials are done.")
    ] = None,
    n_trials: Annotated[
        int | None, typer.Option(help="Trials of the outer search; without --timeout they alone decide the result.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the search.")] = 0,
    costs: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Prices to use instead of formulas: what CostTable.save wrote.")
    ] = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(
            "-o", "--run-dir", metavar="RUN_DIR", help="Write plan.json, resolved.toml, step.trace.json, log.txt."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find the fastest plan for MODEL on CLUSTER."""
    kept = "" if run_dir is None else f" What it saw so far is in {run_dir}."
    with _faults(
        f"interrupted: no plan was written.{kept} Run it again with --timeout or --n-trials to end it earlier."
    ):
        from autopiper import api
        from autopiper.plan import CostTable, Space

        with quiet_stdout():
            table = None if costs is None else CostTable.load(costs)
            plan = api.optimize(
                model, cluster, global_batch_size=global_batch_size, sequence_length=sequence_length, precision=precision,
                costs=table, space=Space(tensor_parallel_sizes=(1,) if no_tensor_parallel else None),
                timeout=timeout, n_trials=n_trials, seed=seed, show_progress_bar=True, run_dir=run_dir,
            )  # fmt: skip
        if as_json:
            from autopiper.plan.file import encode

            _print_json(_summary(plan) | {"plan": encode("plan", plan)})
        else:
            _print_plan(plan)
    if run_dir is not None:
        _say(f"the plan is in {run_dir / 'plan.json'}")
    elif not as_json:
        _say("the plan was not kept; give -o RUN_DIR to keep it")


@app.command()
def show(plan: PlanFile, as_json: AsJson = False) -> None:
    """Show a plan as a table."""
    with _faults():
        loaded = _load(plan)
        if as_json:
            _print_json(_summary(loaded))
        else:
            _print_plan(loaded)


@app.command()
def verify(plan: PlanFile, as_json: AsJson = False) -> None:
    """Prove that a plan is whole, that it fits, and that its predictions follow from it."""
    with _faults():
        from autopiper import api
        from autopiper.errors import PlanError

        loaded = _load(plan)
        try:
            proved = api.verify(loaded)
        except PlanError as fault:
            if not as_json:
                raise
            _print_json({"valid": False, "faults": list(fault.faults) or [str(fault)]})
            raise typer.Exit(WRONG_INPUT) from None
        if as_json:
            _print_json({"valid": True, "proved": list(proved)})
        else:
            print("\n".join(f"proved: {line}" for line in proved))


@app.command()
def trace(
    plan: PlanFile,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            help="Ends in .json (Chrome trace) or .svg (picture); by default step.trace.json beside the plan.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write one step of a plan as a Chrome trace (for ui.perfetto.dev) or as a picture."""
    with _faults():
        from autopiper import api
        from autopiper.run_directory import TRACE

        loaded = _load(plan)
        written = api.trace(loaded, output or _plan_path(plan).with_name(TRACE))
        if as_json:
            _print_json({"path": str(written), "makespan_s": loaded.makespan_s, "step_time_s": loaded.step_time_s})
        else:
            print(written)
            _say(
                "open it at https://ui.perfetto.dev or chrome://tracing"
                if written.suffix.lower() == ".json"
                else "any browser shows it"
            )


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}
)
def launch(
    context: typer.Context,
    plan: PlanFile,
    script: Annotated[
        Path,
        typer.Argument(
            metavar="SCRIPT", help="The training script; it makes an Engine of the plan that AUTOPIPER_PLAN names."
        ),
    ],
) -> None:
    """Run SCRIPT [ARGS]… on this machine, one process for each rank of the plan."""
    with _faults("interrupted: the ranks were stopped"):
        from autopiper.runtime.launch import launch as start

        start(_plan_path(plan), script, context.args)


@app.command()
def env(as_json: AsJson = False) -> None:
    """Say what this machine and this installation are, for a bug report."""
    from autopiper.environment import describe

    facts = describe()
    if as_json:
        _print_json(facts)
    else:
        for name, value in facts.items():
            text = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else value
            text = ", ".join(map(str, value)) or "none" if isinstance(value, list) else text
            print(f"{name:<10} {text}")
