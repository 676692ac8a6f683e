"""What README shows works as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import autopiper as ap

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


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


def test_folders_and_commands_that_it_names_exist() -> None:
    for path in re.findall(r"`([\w./]+/[\w./]*)`", README):
        assert (ROOT / path).exists(), path
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
