"""The pictures in the docs are those that the simulator and the drawing give today."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from autopiper.ir.schedules import FAMILIES

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def pictures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pictures_of_families", ROOT / "experiments/pictures.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("family", FAMILIES)
def test_pictures_of_the_docs_are_up_to_date(family: str, pictures: ModuleType) -> None:
    assert (ROOT / f"docs/pictures/{family}.svg").read_text() == pictures.drawn(family), "run `make pictures`"
    assert f"(pictures/{family}.svg)" in (ROOT / "docs/schedules.md").read_text()
