PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CORE := $(VENV)/.core-installed
DEV := $(VENV)/.dev-installed
BENCH := $(VENV)/.bench-installed

.DEFAULT_GOAL := help
.PHONY: help train test test-full test-learn test-report test-faults test-wheel lint type format bench bench-more bench-scale bench-offline docs docs-tables clean

help: ## list these targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "rl_training needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1). Use: make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# torch goes first and pinned, so that nothing installed after it pulls another build of it.
$(CORE): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@touch $@

$(DEV): pyproject.toml constraints.txt $(CORE)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[atari,mujoco,box2d,wandb,mlflow,offline,ray,multiagent,tune,export,share,video,report,bench,docs,dev]'
	@touch $@

$(BENCH): pyproject.toml constraints.txt $(CORE)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench,atari,mujoco]'
	@touch $@

train: $(CORE) ## train PPO on CartPole-v1 (about a minute after set-up)
	@$(BIN)/rl-training train --config configs/ppo/cartpole.yaml

test: $(DEV) ## run the tests
	$(BIN)/python -m pytest -n auto -m "not full and not learn"

test-full: $(DEV) ## all tests except the learning runs
	$(BIN)/python -m pytest -m "not learn"

test-learn: $(DEV) ## train presets and compare their returns with the published ones (minutes)
	$(BIN)/python -m pytest -m learn --timeout 3600 -s

test-report: $(DEV) ## tests of the HTML report in a browser (needs chromium)
	$(BIN)/python -m pytest tests/test_report.py tests/test_report_browser.py

test-faults: $(DEV) ## kill runs and open damaged files, many times (minutes)
	$(BIN)/python scripts/test_faults.py

test-wheel: $(CORE) ## build a wheel, install it in an empty environment and train with it
	PYTHON=$(PYTHON) PIP=$(BIN)/pip sh scripts/test_wheel.sh

lint: $(DEV) ## check style with ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: $(DEV) ## check types with mypy
	$(BIN)/mypy

format: $(DEV) ## format the code with ruff
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs-tables: $(DEV) ## write the generated tables and the Python API page into the Markdown files
	$(BIN)/python scripts/generate_docs.py

docs: $(DEV) ## build the documentation into site/ (no network needed)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(BENCH) ## measure speed beside other libraries on this machine (5 minutes)
	$(BIN)/python benchmarks/peers.py

bench-more: $(BENCH) ## what settings of PPO bring, PPG, Breakout (12 minutes)
	$(BIN)/python benchmarks/ppo_cartpole.py
	$(BIN)/python benchmarks/ppg.py
	$(BIN)/python benchmarks/atari.py

bench-scale: $(DEV) ## measure torchrun and Ray against one process (8 minutes)
	$(BIN)/python benchmarks/scale.py torchrun
	$(BIN)/python benchmarks/scale.py ray

bench-offline: $(DEV) ## compare with d3rlpy: PEER_PYTHON=... DATASETS="ID ..." [UPDATES=20000] [EXPERT=ENV=RETURN]
	@test -n "$(PEER_PYTHON)" && test -n "$(DATASETS)" || \
		{ echo "set PEER_PYTHON to the Python of an environment with d3rlpy 2.8.1, and DATASETS to Minari ids"; exit 1; }
	$(BIN)/python benchmarks/offline.py scores --dataset $(DATASETS) --updates $(or $(UPDATES),20000) \
		--peer-python $(PEER_PYTHON) --out offline-scores.json
	-$(BIN)/python benchmarks/offline.py speed --dataset $(firstword $(DATASETS)) --peer-python $(PEER_PYTHON)
	$(BIN)/python benchmarks/offline.py report offline-scores.json $(if $(EXPERT),--expert-return $(EXPERT))

clean: ## remove the environment and caches (runs/ stays)
	rm -rf $(VENV) build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis src/*.egg-info
