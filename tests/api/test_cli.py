"""The command line as a shell sees it: exit codes, one clear message, results on stdout and nothing else there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

import autopiper as ap
from autopiper import ir
from autopiper.plan import Plan, Provenance

MIXED = """
name = "small-mixed"
[[nodes]]
name = "fast"
devices = "a100-80g"
devices_per_node = 2
intra_node_GBps = 300
inter_node_GBps = 25
[[nodes]]
name = "slow"
devices = "v100-32g"
devices_per_node = 2
intra_node_GBps = 150
inter_node_GBps = 25
"""
LLAMA = {
    "model_type": "llama", "hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4,
    "intermediate_size": 1024, "vocab_size": 1000, "max_position_embeddings": 512,
}  # fmt: skip


def autopiper(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from autopiper.cli import main; main()", *map(str, arguments)],
        capture_output=True, text=True, timeout=120, env={**os.environ, **environment},
    )  # fmt: skip


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "mixed.toml").write_text(MIXED)
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return folder / "config.json", folder / "mixed.toml"


@pytest.fixture(scope="module")
def found(inputs: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run directory that `optimize` left, and what it printed with --json."""
    run = tmp_path_factory.mktemp("runs") / "first"
    done = autopiper(
        "optimize", *inputs, "--global-batch-size", 24, "--sequence-length", 256, "--n-trials", 4, "--json", "-o", run
    )
    assert done.returncode == 0, done.stderr
    content = json.loads(done.stdout)  # one document and nothing else: no banner of a solver
    assert isinstance(content, dict)
    return run, content


def test_optimize_leaves_a_run_directory(found: tuple[Path, dict[str, Any]]) -> None:
    run, printed = found
    plan = ap.load_plan(run / "plan.json")
    assert printed["step_time_s"] == plan.step_time_s
    assert printed["training"]["global_batch_size"] == plan.training.global_batch_size == 24
    assert printed["plan"]["step_time_s"] == plan.step_time_s
    assert sum(p["samples"] for p in printed["pipelines"]) == 24
    assert plan.lower_bound_s <= plan.step_time_s
    resolved = tomllib.loads((run / "resolved.toml").read_text())
    assert resolved["model"]["sequence_length"] == 256
    assert resolved["cluster"]["devices"] == {"a100-80g": 2, "v100-32g": 2}
    assert resolved["training"]["precision"] == "fp16"
    assert resolved["search"]["n_trials"] == 4
    assert "wrote" in (run / "log.txt").read_text()


def test_show_and_verify_read_the_directory_or_the_file(found: tuple[Path, dict[str, Any]]) -> None:
    run, printed = found
    table = autopiper("show", run, NO_COLOR="1")
    assert table.returncode == 0, table.stderr
    assert table.stdout == autopiper("show", run / "plan.json").stdout
    assert "Pipeline 0: " in table.stdout
    assert "\x1b" not in table.stdout
    assert max(len(line) for line in table.stdout.splitlines()) <= 100
    as_json = json.loads(autopiper("show", run, "--json").stdout)
    assert as_json == {k: v for k, v in printed.items() if k != "plan"}
    proof = autopiper("verify", run)
    assert proof.returncode == 0, proof.stderr
    assert all(line.startswith("proved: ") for line in proof.stdout.splitlines())
    assert json.loads(autopiper("verify", run, "--json").stdout)["valid"] is True


def test_verify_refuses_a_doctored_plan(found: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    content = json.loads((found[0] / "plan.json").read_text())
    content["step_time_s"] /= 2
    (tmp_path / "plan.json").write_text(json.dumps(content))
    done = autopiper("verify", tmp_path)
    assert done.returncode == 2
    assert "step_time_s is stored as" in done.stderr
    assert done.stdout == ""
    as_json = autopiper("verify", tmp_path, "--json")
    assert as_json.returncode == 2
    faults = json.loads(as_json.stdout)
    assert (faults["valid"], len(faults["faults"])) == (False, 1)


def refused(done: subprocess.CompletedProcess[str], *words: str, code: int = 2) -> None:
    """One message on stderr, no traceback, nothing on stdout."""
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"a100-80g"', '"a100-80gb"', ("a100-80gb", "did you mean 'a100-80g'?")),
        ("inter_node_GBps = 25", "inter_node_GBps = 0", ("inter_node_GBps is 0", "must be above 0")),
        ("devices_per_node = 2", "devices_per_node = -2", ("devices_per_node is -2", "1 or more")),
        ("devices_per_node = 2", "devices_per_node = 99999999999999999999", ("must be 1024 or less",)),
        ("devices_per_node", "device_per_node", ("device_per_node: unknown key", "did you mean 'devices_per_node'?")),
        ("[[nodes]]", "[[nodes", ("is not TOML",)),
    ],
)
def test_wrong_cluster_files(
    inputs: tuple[Path, Path], tmp_path: Path, old: str, new: str, words: tuple[str, ...]
) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(MIXED.replace(old, new))
    refused(autopiper("optimize", inputs[0], path), str(path), *words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_attention_heads": 7, "num_key_value_heads": 7}, ("hidden_size", "512", "7")),
        ({"num_hidden_layers": 0}, ("num_hidden_layers",)),
        ({"model_type": "lama"}, ("lama", "did you mean 'llama'?")),
    ],
)
def test_wrong_models(
    inputs: tuple[Path, Path], tmp_path: Path, change: dict[str, Any], words: tuple[str, ...]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA | change))
    refused(autopiper("optimize", path, inputs[1]), *words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--global-batch-size", "0"], ("global_batch_size is 0; it must be 1 or more",)),
        (["--global-batch-size", "-8"], ("global_batch_size is -8; it must be 1 or more",)),
        (["--global-batch-size", "many"], ("--global-batch-size", "integer")),
        (["--sequence-length", "0"], ("sequence_length is 0",)),
        (["--timeout", "-1"], ("timeout is -1.0; it must be seconds above zero",)),
        (["--costs", "absent.json"], ("cannot read costs file 'absent.json'",)),
        (["--no-such-option"], ("--no-such-option",)),
    ],
)
def test_wrong_arguments(inputs: tuple[Path, Path], arguments: list[str], words: tuple[str, ...]) -> None:
    refused(autopiper("optimize", *inputs, *arguments), *words)


def test_unknown_names(inputs: tuple[Path, Path]) -> None:
    refused(autopiper("optimize", "llama3-8b", inputs[1]), "'llama3-8b'", "did you mean 'llama-3-8b'?")
    refused(
        autopiper("optimize", inputs[0], inputs[1].with_name("mixd.toml")), "does not exist (did you mean 'mixed'?)"
    )
    refused(autopiper("show", "absent.json"), "cannot read plan file 'absent.json'")


def test_a_truncated_plan(found: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    text = (found[0] / "plan.json").read_text()
    (tmp_path / "plan.json").write_text(text[: len(text) // 2])
    for command in ("show", "verify"):
        refused(autopiper(command, tmp_path), "is not complete JSON", "was it cut off while being written?")


def test_no_feasible_plan(tmp_path: Path) -> None:
    (tmp_path / "one.toml").write_text('[[nodes]]\ndevices = ["t4"]\n')
    done = autopiper("optimize", "llama-2-70b", tmp_path / "one.toml", "--global-batch-size", 8, "-o", tmp_path / "run")
    refused(done, "no feasible plan: ", "GiB", "t4", code=3)
    assert "stopped: InfeasibleError" in (tmp_path / "run" / "log.txt").read_text()
    assert not (tmp_path / "run" / "plan.json").exists()


def test_a_plan_that_is_not_kept_is_said_so(inputs: tuple[Path, Path]) -> None:
    done = autopiper("optimize", *inputs, "--global-batch-size", 8, "--sequence-length", 128, "--n-trials", 1)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Model ")
    assert "give -o RUN_DIR to keep it" in done.stderr


def test_ctrl_c_ends_a_search_with_what_to_do(inputs: tuple[Path, Path], tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from autopiper.cli import main; main()", "optimize", "llama-3-70b", inputs[1]]
    with subprocess.Popen(
        [*map(str, command), "--n-trials", "100000", "-o", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as search:
        deadline = time.monotonic() + 60
        while not (tmp_path / "resolved.toml").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        search.send_signal(signal.SIGINT)
        out, err = search.communicate(timeout=60)
    assert search.returncode == 130, err
    assert out == ""
    assert "Traceback" not in err
    assert f"interrupted: no plan was written. What it saw so far is in {tmp_path}." in err
    assert "stopped: KeyboardInterrupt" in (tmp_path / "log.txt").read_text()


SCRIPT = """
import os, sys
import autopiper as ap

plan = ap.load_plan(os.environ["AUTOPIPER_PLAN"])
sys.stdout.write(f"rank {os.environ['RANK']} of {len(plan.devices)} got {sys.argv[1:]}\\n")  # whole, though unbuffered
sys.stdout.flush()
if "--fail" in sys.argv and os.environ["RANK"] == "1":
    raise ValueError("the data ended")
"""


def test_launch_runs_a_script_on_every_rank(tmp_path: Path) -> None:
    model, cluster = ap.Model.chain(2), ap.Cluster.local(2)
    training = ap.Training(global_batch_size=2)
    strategy = ap.Strategy.uniform(model, cluster, training, pipeline_parallel_size=2)
    costs = ap.CostTable.from_layers(forward_s=[1, 1], backward_s=[1, 1])
    made_by_hand(strategy, model, cluster, costs).save(tmp_path / "plan.json")
    (tmp_path / "train.py").write_text(SCRIPT)
    done = autopiper("launch", tmp_path, tmp_path / "train.py", "--lr", "3e-4", "-x")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {r} of 2 got ['--lr', '3e-4', '-x']" for r in (0, 1)]
    failed = autopiper("launch", tmp_path, tmp_path / "train.py", "--fail")
    assert failed.returncode == 1
    assert "rank 1: ValueError: the data ended" in failed.stderr
    refused(autopiper("launch", tmp_path, tmp_path / "absent.py"), "there is no script")


def made_by_hand(strategy: ap.Strategy, model: ap.Model, cluster: ap.Cluster, costs: ap.CostTable) -> Plan:
    graph = ir.build(strategy, model, cluster)
    return Plan(
        model=model, cluster=cluster, costs=costs, strategy=strategy, programs=tuple(ir.lower(graph)), step_time_s=1.0,
        makespan_s=1.0, relative_error=0.0, peak_memory_bytes=(0.0, 0.0), lower_bound_s=1.0, binding="nothing",
        provenance=Provenance(autopiper_version="0"),
    )  # fmt: skip


def test_env() -> None:
    facts = json.loads(autopiper("env", "--json").stdout)
    assert facts["autopiper"] == ap.__version__
    assert facts["python"] == ".".join(map(str, sys.version_info[:3]))
    assert facts["cores"] == len(os.sched_getaffinity(0))
    assert set(facts["libraries"]) >= {"torch", "optuna", "pulp", "highspy"}
    assert "libraries  torch" in autopiper("env").stdout
