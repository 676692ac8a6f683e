"""The verb `trace` and its command: a plan's step as a Chrome trace or a picture, and what they refuse."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import autopiper as ap
from autopiper import run_directory
from autopiper.errors import PlanError
from autopiper.plan import Plan
from autopiper.report.trace import trace_events
from autopiper.run_directory import RunDirectory


@pytest.fixture(scope="module")
def plan() -> Plan:
    model = ap.Model.transformer(
        num_layers=4, hidden_size=256, num_attention_heads=4, sequence_length=128, vocab_size=512, name="small & quick"
    )
    cluster = ap.Cluster.homogeneous("a100-80g", devices_per_node=2)
    strategy = ap.Strategy.uniform(model, cluster, ap.Training(global_batch_size=4), pipeline_parallel_size=2)
    return ap.make_plan(strategy, model, cluster)


def test_a_plan_leaves_as_a_trace(plan: Plan, tmp_path: Path) -> None:
    assert ap.trace(plan, tmp_path / "a" / "step.trace.json") == tmp_path / "a" / "step.trace.json"
    content = json.loads((tmp_path / "a" / "step.trace.json").read_text())
    assert content["otherData"]["makespan_s"] == plan.makespan_s
    assert content["traceEvents"] == trace_events(ap.simulate(plan), plan.cluster)
    slices = [e for e in content["traceEvents"] if e["ph"] == "X"]
    assert len(slices) == sum(1 for program in plan.programs for _ in program.actions())
    assert max(e["ts"] + e["dur"] for e in slices) == pytest.approx(plan.makespan_s * 1e6)
    assert sum(e["ph"] == "s" for e in content["traceEvents"]) == sum(
        action.kind.startswith("SEND") for program in plan.programs for action in program.actions()
    )
    assert any("a100-80g" in e["args"].get("name", "") for e in content["traceEvents"] if e["ph"] == "M")


def test_a_plan_leaves_as_a_picture(plan: Plan, tmp_path: Path) -> None:
    ap.trace(plan, str(tmp_path / "step.SVG"))
    root = ET.parse(tmp_path / "step.SVG").getroot()
    title = root.find("{http://www.w3.org/2000/svg}title")
    assert title is not None and title.text is not None
    assert title.text.startswith("small & quick on ")
    assert title.text.endswith(f"one step, bubble {ap.simulate(plan).bubble_fraction:.1%}")


def test_a_timeline_does_as_well(plan: Plan, tmp_path: Path) -> None:
    timeline = ap.simulate(plan)
    for name in ("step.json", "step.svg"):
        ap.trace(timeline, tmp_path / name)
        assert (tmp_path / name).stat().st_size > 1000
    assert json.loads((tmp_path / "step.json").read_text())["traceEvents"] == trace_events(timeline)


def test_wrong_input_is_refused_in_words(plan: Plan, tmp_path: Path) -> None:
    for path in ("step.html", "step", "step.jsn", tmp_path):
        with pytest.raises(PlanError, match=r"it must end in \.json \(a Chrome trace\) or \.svg \(a picture\)"):
            ap.trace(plan, path)
    with pytest.raises(PlanError, match=r"did you mean '\.json'\?"):
        ap.trace(plan, "step.jsn")
    wrong: Any = plan.strategy
    with pytest.raises(PlanError, match=r"plan_or_timeline is .* \(Strategy\); it must be a Plan or a Timeline"):
        ap.trace(wrong, "step.svg")
    nothing: Any = None
    with pytest.raises(PlanError, match="path is None"):
        ap.trace(plan, nothing)
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "step.svg", tmp_path / "a\0b.json"):
        with pytest.raises(PlanError, match=r"cannot write '.*': "):
            ap.trace(plan, path)
    timeline = ap.simulate(plan)
    empty = replace(timeline, lanes=tuple(replace(lane, events=()) for lane in timeline.lanes))
    for name in ("step.json", "step.svg"):
        with pytest.raises(PlanError, match="no events, so there is nothing to draw"):
            ap.trace(empty, tmp_path / name)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file"]


def autopiper(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from autopiper.cli import main; main()", *map(str, arguments)],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def test_the_command(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "run" / "plan.json")
    done = autopiper("trace", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    written = tmp_path / "run" / "step.trace.json"
    assert done.stdout == f"{written}\n"
    assert "ui.perfetto.dev" in done.stderr
    assert len(json.loads(written.read_text())["traceEvents"]) > 10
    picture = autopiper("trace", tmp_path / "run" / "plan.json", "-o", tmp_path / "step.svg", "--json")
    assert picture.returncode == 0, picture.stderr
    assert json.loads(picture.stdout) == {
        "path": str(tmp_path / "step.svg"), "makespan_s": plan.makespan_s, "step_time_s": plan.step_time_s,
    }  # fmt: skip
    assert ET.parse(tmp_path / "step.svg").getroot().tag.endswith("svg")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["absent.json"], "cannot read plan file 'absent.json'"),
        (["{run}", "-o", "step.png"], "must end in .json (a Chrome trace) or .svg (a picture)"),
        (["{run}", "-o", "{run}/plan.json/step.svg"], "cannot write '"),
    ],
)
def test_the_command_refuses(plan: Plan, tmp_path: Path, arguments: list[str], words: str) -> None:
    plan.save(tmp_path / "plan.json")
    done = autopiper("trace", *(argument.replace("{run}", str(tmp_path)) for argument in arguments))
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr and "Traceback" not in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_a_run_directory_holds_the_trace(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with RunDirectory(tmp_path) as run:
        run.trace(plan, ap.simulate)
        assert json.loads((tmp_path / "step.trace.json").read_text())["otherData"]["step_time_s"] == plan.step_time_s
        monkeypatch.setattr(run_directory, "MOST_TRACED", 10)
        run.trace(plan, ap.simulate)
        assert not (tmp_path / "step.trace.json").exists()
        monkeypatch.undo()

        def interrupted(_: Plan) -> ap.Timeline:
            raise KeyboardInterrupt

        run.trace(plan, interrupted)  # the plan is made: whoever interrupts now still gets it
        assert not (tmp_path / "step.trace.json").exists()
    actions = sum(1 for program in plan.programs for _ in program.actions())
    said = [line.partition(" s  ")[2] for line in (tmp_path / "log.txt").read_text().splitlines()[1:]]
    assert said == [
        f"wrote {tmp_path / 'step.trace.json'}",
        f"left step.trace.json out: a step of {actions} actions; `autopiper trace` writes it",
        "left step.trace.json out: KeyboardInterrupt",
    ]
    with RunDirectory(None) as run:
        run.trace(plan, ap.simulate)
    assert capsys.readouterr().out == ""


def test_a_search_leaves_a_trace(plan: Plan, tmp_path: Path) -> None:
    found = ap.optimize(plan.model, plan.cluster, global_batch_size=4, n_trials=1, run_dir=tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log.txt", "plan.json", "resolved.toml", "step.trace.json"]
    assert json.loads((tmp_path / "step.trace.json").read_text())["otherData"]["step_time_s"] == found.step_time_s
