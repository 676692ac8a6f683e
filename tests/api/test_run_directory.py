"""What a run directory holds is readable, whatever names and odd values the arguments had."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

import autopiper as ap
from autopiper.errors import PlanError
from autopiper.run_directory import RunDirectory

NAME = 'a "quoted" \\ näme\nwith lines \U0001f600 and \t tabs'


def test_resolved_is_toml_whatever_the_names(tmp_path: Path) -> None:
    model = ap.Model.chain(2, name=NAME)
    cluster = replace(ap.Cluster.homogeneous("a100-80g", devices_per_node=2), name=NAME)
    training = ap.Training(global_batch_size=8).resolve(d.type for d in cluster.devices())
    costs = ap.CostTable(blocks=(), source=NAME)
    with RunDirectory(tmp_path / "deep" / "run") as run:
        run.resolved(model, cluster, training, costs, ap.Space(), [NAME], {"timeout": 1.5, "n_trials": None, "seed": 0})
        run.log("one line")
        run.trial(7, "tp 2", float("inf"))
    content = tomllib.loads((tmp_path / "deep" / "run" / "resolved.toml").read_text())
    assert (
        content["model"]["name"]
        == content["cluster"]["name"]
        == content["notes"]["lines"][0]
        == content["costs"]["source"]
        == NAME
    )
    assert content["model"]["fingerprint"] == model.fingerprint()
    assert content["training"] == {
        "global_batch_size": 8, "precision": "bf16", "optimizer": "adamw", "state_layout": "mixed",
        "precision_reason": "best precision, supported by all used devices", "bytes_per_parameter": 18,
    }  # fmt: skip
    assert content["search"] == {"timeout": 1.5, "seed": 0}
    assert content["space"]["schedules"] == ["gpipe", "1f1b"]
    log = (tmp_path / "deep" / "run" / "log.txt").read_text().splitlines()
    assert len(log) == 3
    assert log[1].endswith(" s  one line")
    assert log[2].endswith(" s  trial 7: tp 2; nothing fits yet")


def test_without_a_path_it_only_shows_what_is_gained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for show in (False, True):
        with RunDirectory(None, show=show) as run:
            run.trial(0, "too large", float("inf"))
            run.trial(1, "tp 2", 3.0)
            run.trial(2, "tp 4", 3.0)
            run.trial(3, "tp 8", 2.0)
        out, err = capsys.readouterr()
        assert out == ""
        shown = [line.partition(" s  ")[2] for line in err.splitlines()]
        assert shown == (["best so far 3 s, trial 1: tp 2", "best so far 2 s, trial 3: tp 8"] if show else [])
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(PlanError, match=r"cannot write to run_dir '.*file/run': "),
        RunDirectory(tmp_path / "file" / "run"),
    ):
        pass
