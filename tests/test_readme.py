"""What README and the pages in docs/ show works as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import autopiper as ap
from autopiper.plan.directives import Directive

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = sorted((ROOT / "docs").glob("*.md"))

NEW_FILE = "autopiper/ir/schedules/portions.py"
"""The file that the page on schedules writes."""


def blocks(text: str) -> list[str]:
    """Return the pieces of Python in a page."""
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def test_the_python_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = README.split("```python\n")[1].split("```")[0]
    assert len([line for line in example.splitlines() if line.strip()]) <= 10
    # The same search, cut short; the cluster file is found wherever the test runs.
    short = example.replace("timeout=60", "n_trials=1").replace("=512", "=64").replace("examples/", f"{ROOT}/examples/")
    assert short.count("n_trials=1") == 1
    monkeypatch.chdir(tmp_path)
    exec(compile(short, "README.md", "exec"), {})
    plan = ap.load_plan("plan.json")
    out = capsys.readouterr().out
    assert f"{plan.step_time_s:.2f} s a step, at most {plan.gap:.0%} above the best possible" in out
    assert sum(int(share) for share in re.findall(r"(\d+) samples over", out)) == 64


def test_the_strategy_by_hand_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (by_hand,) = (b for b in blocks(README) if "from_directives" in b)
    known = {
        "ap": ap,
        "model": ap.Model.from_preset("llama-3-8b", sequence_length=8192),
        "cluster": ap.Cluster.from_file(ROOT / "examples/clusters/a100-v100.toml"),
    }
    exec(compile(by_hand, "README.md", "exec"), known)
    assert re.fullmatch(r"\d+\.\d\d s a step\n", capsys.readouterr().out)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_pages_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All the Python of a page, from top to bottom, as one script in an empty folder."""
    from autopiper.ir import schedules

    monkeypatch.setattr(schedules, "FAMILIES", dict(schedules.FAMILIES))  # a page may add one
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    pieces = blocks(page.read_text())
    assert pieces
    for number, piece in enumerate(pieces):
        exec(compile(piece, f"{page.name}, piece {number}", "exec"), names)


def test_the_overlap_by_hand_is_a_plan_like_any_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for piece in blocks((ROOT / "docs/directives.md").read_text()):
        exec(compile(piece, "directives.md", "exec"), names)
    assert (tmp_path / "by_hand.svg").read_text().startswith("<svg")
    plan = ap.load_plan("by_hand.json")
    assert ap.verify(plan)
    passes = [a.text for program in plan.programs for a in program.streams["compute"] if a.kind in ("F", "B")]
    assert any(  # the forward of one stage between two parts of the backward of another
        one.startswith("3.2B") and two.startswith("0.") and three.startswith("3.1B")
        for one, two, three in zip(passes, passes[1:], passes[2:], strict=False)
    )


def test_the_schedule_of_the_page_allows_any_map() -> None:
    """The page says "any": every stage on any rank, any count, any portion, without circles."""
    from autopiper import ir

    names: dict[str, Any] = {}
    exec(compile(blocks((ROOT / "docs/schedules.md").read_text())[0], "schedules.md", "exec"), names)
    family = names["FAMILY"]
    cluster = ap.Cluster.homogeneous(
        "a100-80g", num_nodes=1, devices_per_node=3, intra_node_GBps=300, inter_node_GBps=25
    )
    for where, count, portion in product([(0, 1, 2), (0, 1, 0, 1), (2, 0, 0, 1, 2), (0, 0)], (1, 3, 5), (1, 2, 7)):
        holds = {r: tuple((0, s) for s, rank in enumerate(where) if rank == r) for r in sorted(set(where))}
        layout = ir.schedules.Layout(
            holds=tuple(holds.values()), num_stages={0: len(where)}, num_micro_batches={0: count}
        )
        rows = [
            ap.order([[{"PP": p.stage, "MB": p.micro_batch, "PASS": p.kind} for p in group] for group in row])
            for row in family.rows(layout, portion=portion)
        ]
        cuts: list[Directive] = [ap.cut(0, s, blocks=(s, s + 1)) for s in range(len(where))]
        places = [ap.place({"PP": s}, [rank]) for s, rank in enumerate(where)]
        given = [ap.split({}, num_microbatches=count), *cuts, *places, *rows]
        strategy = ap.Strategy.from_directives(given, ap.Training(global_batch_size=count))
        assert ir.build(strategy, ap.Model.chain(len(where)), cluster).rows  # complete, and no circle


def test_folders_and_commands_that_they_name_exist() -> None:
    for page in (ROOT / "README.md", *PAGES):
        text = page.read_text()
        for path in re.findall(r"`([\w./]+/[\w./]*)`", text):
            assert (ROOT / path).exists() or path == NEW_FILE, path
        for path in re.findall(r"\]\(([\w./]+)\)", text):
            assert (page.parent / path).exists(), path
    from typer.main import get_command

    from autopiper.cli import app

    commands = set(getattr(get_command(app), "commands"))  # noqa: B009
    assert set(re.findall(r"^    autopiper (\w+)", README, flags=re.MULTILINE)) == commands


def test_the_cluster_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(README.split("```toml\n")[1].split("```")[0])
    cluster = ap.Cluster.from_file(path)
    assert cluster.counts() == {"h100": 8, "l4": 8}
    assert len(cluster.nodes) == 3


def test_every_option_of_its_commands_exists() -> None:
    import typer
    from typer.main import get_command

    from autopiper.cli import app

    lines = [line.strip() for line in README.replace("\\\n", " ").splitlines() if line.startswith("    autopiper ")]
    assert len(lines) >= 6
    for line in lines:
        words = line.partition("#")[0].split()[1:]
        command = getattr(get_command(app), "commands")[words[0]]  # noqa: B009
        known = {name for p in command.get_params(typer.Context(command)) for name in p.opts}
        assert {w for w in words if w.startswith("-")} <= known, line
        assert all((ROOT / w).exists() for w in words if w.startswith("examples/")), line


def test_the_example_by_hand_trains(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples/hand_written.py")],
        cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert sum(line.startswith("proved: ") for line in done.stdout.splitlines()) >= 6
    found = re.search(r"^trained: loss ([\d.]+) -> ([\d.]+), the same on every rank$", done.stdout, re.MULTILINE)
    assert found is not None, done.stdout
    assert float(found[2]) < float(found[1]) / 2
