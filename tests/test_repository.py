"""The shape of the repository: floors, guards of the linked folders, a light import, a whole wheel, short files."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import autopiper

ROOT = Path(__file__).parents[1]
PARTS = ("costmodel", "runtime", "search")
HEAVY = ("torch", "optuna", "pulp", "highspy", "networkx", "pydantic", "transformers", "numpy", "numba")


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, env={**os.environ, **environment}
    )


def loaded_after(code: str) -> set[str]:
    done = python(f"import sys, json\n{code}\nprint(json.dumps(sorted(sys.modules)))")
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("part", PARTS)
def test_a_linked_folder_refuses_to_be_imported_from_the_top(part: str) -> None:
    done = python(f"import {part}")
    assert done.returncode == 1
    assert (
        f"ImportError: import this as autopiper.{part}, not as {part}: the folder is linked into the package"
        in done.stderr
    )


@pytest.mark.parametrize("part", PARTS)
def test_links_are_relative_and_the_same_files(part: str) -> None:
    link = ROOT / "autopiper" / part
    assert os.readlink(link) == f"../{part}"
    module = importlib.import_module(f"autopiper.{part}")
    assert module.__file__ is not None
    assert Path(module.__file__).samefile(ROOT / part / "__init__.py")


def test_importing_the_package_is_light() -> None:
    assert not loaded_after("import autopiper").intersection(HEAVY)


@pytest.mark.parametrize("command", [[], ["optimize"], ["show"], ["verify"], ["launch"], ["env"]])
def test_help_is_light(command: list[str]) -> None:
    loaded = loaded_after(
        f"sys.argv = ['autopiper', *{command!r}, '--help']\n"
        "from autopiper.cli import main\n"
        "try: main()\n"
        "except SystemExit as done: assert done.code == 0, done.code"
    )
    assert "typer" in loaded
    # typer itself reads the arguments of a command with pydantic, in a few hundredths of a second.
    assert not loaded.intersection(HEAVY) - {"pydantic"}


def test_planning_and_pricing_never_import_torch() -> None:
    loaded = loaded_after(
        "import autopiper as ap, autopiper.search, autopiper.costmodel, autopiper.ir, autopiper.report, autopiper.api\n"
        "model = ap.Model.from_preset('llama-3-8b', sequence_length=1024)\n"
        "cluster = ap.Cluster.homogeneous('a100-80g', devices_per_node=8)\n"
        "training = ap.Training(global_batch_size=8)\n"
        "ap.simulate(ap.Strategy.uniform(model, cluster, training, tensor_parallel_size=8), model, cluster)"
    )
    assert "autopiper.search" in loaded
    assert not loaded.intersection({"torch", "transformers"})


def test_the_floors_hold() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Contracts: 1 kept, 0 broken." in done.stdout


def test_the_wheel_holds_the_linked_parts(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("autopiper-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    sources = {
        f"autopiper/{path.relative_to(ROOT / 'autopiper').as_posix()}"
        for folder in ("", *PARTS)
        for path in sorted((ROOT / "autopiper" / folder).rglob("*"))
        if path.suffix in (".py", ".toml", ".typed") and "__pycache__" not in path.parts
    }
    assert {f"autopiper/{part}/__init__.py" for part in PARTS} <= sources
    assert not sources - names
    assert not [n for n in names if n.startswith((*PARTS, "tests"))]


def test_files_are_short() -> None:
    folders = ("autopiper", *PARTS, "tests", "experiments")
    files = {p.resolve() for folder in folders for p in (ROOT / folder).rglob("*.py")}
    assert len(files) > 30
    long = {str(p.relative_to(ROOT)): n for p in files if (n := len(p.read_text().splitlines())) > 500}
    assert not long


def test_every_public_name_resolves() -> None:
    for name in autopiper.__all__:
        assert getattr(autopiper, name) is not None, name
    for part in ("costmodel", "runtime", "search", "model", "cluster", "plan", "ir", "report"):
        assert getattr(autopiper, part).__name__ == f"autopiper.{part}"
    assert set(autopiper.__all__) <= set(dir(autopiper))
    with pytest.raises(AttributeError, match="module 'autopiper' has no attribute 'optimise'"):
        _ = autopiper.optimise


def test_names_of_the_public_face_exist() -> None:
    from autopiper import Cluster, CostTable, Model, Plan, Strategy, Timeline

    promised = {
        Model: "from_preset from_config from_module transformer chain presets",
        Cluster: "from_file homogeneous local",
        CostTable: "from_layers load save merge",
        Strategy: "uniform from_directives directives",
        Timeline: "step_time_s makespan_s peak_memory_bytes bubble_fraction tokens_per_s tflops_per_device mfu breakdown",
        Plan: "step_time_s makespan_s lower_bound_s gap binding peak_memory_bytes strategy training alternatives save",
    }
    for owner, names in promised.items():
        for name in names.split():
            assert hasattr(owner, name), f"{owner.__name__}.{name}"


def test_errors_are_also_the_built_in_that_a_reader_expects() -> None:
    from autopiper import errors

    for name in ("ModelError", "ClusterError", "CostError", "PlanError", "ExportError"):
        assert issubclass(getattr(errors, name), (errors.AutoPiperError, ValueError))
        assert issubclass(getattr(errors, name), ValueError)
    for name in ("InfeasibleError", "RuntimeFault"):
        assert issubclass(getattr(errors, name), RuntimeError)
    assert str(errors.PlanError("two faults:", ["a", "b"])) == "two faults:\n  - a\n  - b"


def test_one_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == autopiper.__version__
    assert project["scripts"] == {"autopiper": "autopiper.cli:main"}


def test_make_lists_its_targets() -> None:
    done = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0
    for target in ("setup", "demo", "test", "lint", "clean"):
        assert f"make {target}" in done.stdout
