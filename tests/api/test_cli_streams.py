"""The command line where its streams are closed, full, read by someone who leaves, or of a narrow encoding."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import autopiper as ap

MAIN = [sys.executable, "-c", "from autopiper.cli import main; main()"]
CONFIG = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "intermediate_size": 128, "vocab_size": 100, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("streams")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "one.toml").write_text('[[nodes]]\ndevices = ["t4"]\n')
    plan = ap.optimize(folder / "config.json", folder / "one.toml", global_batch_size=4, n_trials=1)
    plan.save(folder / "plan.json")
    return folder


def shell(command: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a line of bash where `ap` is the command line."""
    quoted = " ".join(f"'{word}'" for word in MAIN)
    return subprocess.run(
        ["bash", "-c", f"ap() {{ {quoted} \"$@\"; }}; {command}"], cwd=folder, capture_output=True, text=True,
        timeout=120, env={**os.environ, **environment},
    )  # fmt: skip


@pytest.mark.parametrize("command", ["show .", "verify .", "show . --json", "env", "optimize . one.toml --n-trials 1"])
def test_a_closed_stdout_is_no_fault(folder: Path, command: str) -> None:
    done = shell(f"ap {command} >&-", folder)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr


def test_a_closed_stderr_keeps_the_result(folder: Path) -> None:
    done = shell("ap optimize . one.toml --global-batch-size 4 --n-trials 1 --json 2>&-", folder)
    assert done.returncode == 0
    assert json.loads(done.stdout)["training"]["global_batch_size"] == 4


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("command", ["show .", "verify .", "env"])
def test_a_full_disk_is_told_once(folder: Path, command: str) -> None:
    done = shell(f"ap {command} >/dev/full", folder)
    assert done.returncode == 2
    assert done.stderr == "autopiper: error: [Errno 28] No space left on device\n"


@pytest.mark.parametrize("command", ["show .", "show . --json", "verify ."])
def test_a_reader_that_leaves_ends_it_silently(folder: Path, command: str) -> None:
    # The reader is gone before anything is written.
    done = shell(f'(sleep 1; ap {command}; echo "code $?" >&2) | true', folder)
    assert done.stderr == "code 141\n"


def test_a_narrow_encoding_loses_letters_not_the_table(folder: Path) -> None:
    done = shell("ap show .", folder, PYTHONIOENCODING="ascii", LC_ALL="C")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Model ")


def test_a_seed_out_of_range_is_wrong_input(folder: Path) -> None:
    done = shell("ap optimize . one.toml --seed -1", folder)
    assert done.returncode == 2
    assert done.stderr == "autopiper: error: seed is -1; it must be 0 to 4294967295\n"
