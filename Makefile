# `make demo` and `make test` need only Linux, Python >= 3.11, make and git; everything else goes into $(VENV).
# PYTHON picks the interpreter; PIP_ARGS is handed to pip (an index of CPU-only torch wheels, a mirror, --no-index).
PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
PYTEST_ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# A virtual environment that happens to be active, or a PYTHONPATH, must not leak into this one.
unexport VIRTUAL_ENV PYTHONPATH PYTHONHOME

.DEFAULT_GOAL := help
.PHONY: help setup demo bench-simulator pictures uw-schedules test lint clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## /\1\t/' | awk -F'\t' '{printf "  make %-16s %s\n", $$1, $$2}'

setup: $(STAMP) ## make the virtual environment and install the pinned set

demo: $(STAMP) ## plan llama-3-8b on a mixed cluster, then train a small model by a plan (under 5 minutes)
	$(BIN)/python experiments/first_light.py

bench-simulator: $(STAMP) ## how many actions per second the simulator walks, against torch's own (a minute)
	$(BIN)/python experiments/simulator.py

pictures: $(STAMP) ## draw the schedule families anew, for docs/schedules.md
	$(BIN)/python experiments/pictures.py

uw-schedules: $(STAMP) ## Piper's comparison of schedules and its memory limits, simulated (half a minute)
	$(BIN)/python experiments/uw_schedules.py

test: lint ## all checks: style, types, floors, tests
	$(BIN)/python -m pytest -n 2 $(PYTEST_ARGS)

lint: $(STAMP) ## style (ruff), types (mypy --strict) and import floors (import-linter)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean: ## remove the virtual environment and what the tools left
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist

# The stamp is written last, so that an interrupted installation is done again.
$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "make: there is no '$(PYTHON)'; install Python 3.11 or newer, or name one: make $(MAKECMDGOALS) PYTHON=/path/to/python3" >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make: '$(PYTHON)' is $$($(PYTHON) -V 2>&1), AutoPiper needs Python 3.11 or newer; name one: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11" >&2; exit 2; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "make: '$(PYTHON)' has no venv module; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 2; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) -c constraints.txt -e ".[hf,dev]"
	@touch $@
