# Targets for one CPU machine. `make` lists them. ARGS is handed on:
#   make maze ARGS="seed=1"      make test ARGS="tests/unit -k config"

PYTHON ?= $(or $(shell command -v python3.11),$(shell command -v python3.12),python3)
VENV := .venv
BIN := $(VENV)/bin
UV := uv==0.13.9
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup maze test test-long chaos lint format golden clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(VENV)/installed  ## build .venv, or bring it up to date with the requirements (6.5 GB)

# Written last, so an interrupted installation is done again.
$(VENV)/installed: requirements-cpu.txt overrides.txt pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if (3, 11) <= v < (3, 13) else \
		f"Python 3.11 or 3.12 is needed, found {v[0]}.{v[1]}: make setup PYTHON=<path>")'
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(UV)
	$(BIN)/uv pip install --python $(BIN)/python --compile-bytecode --override overrides.txt \
		-r requirements-cpu.txt -e .
	@touch $@

maze: setup  ## train the tiny model on 9x9 mazes (the main job)
	$(BIN)/python run.py +experiment=maze_easy $(ARGS)

test: setup  ## run all CPU tests
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest $(ARGS)

test-long: setup  ## run the tests of whole runs that lose processes on the way
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -m long $(ARGS)

chaos: setup  ## kill processes of small runs at random and compare the results (half an hour)
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 PYTHONPATH=tests $(BIN)/python tests/chaos/chaos.py $(ARGS)

lint: setup  ## check style
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

format: setup  ## mend style
	$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

golden: setup  ## rewrite the composed configs under tests/golden after a change to conf/
	$(BIN)/python -m pytest -q tests/unit/test_config_golden.py --update-golden

clean:  ## delete caches; runs and .venv stay
	rm -rf .pytest_cache .ruff_cache .hypothesis multirun
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
