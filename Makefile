# One environment, made from the lock file; every target makes it when it is missing or out of date.
VENV ?= .venv
ADAPTERS := .venv-adapters
PYTHON ?= $(shell command -v python3.11 || command -v python3)
# Where pip finds PyTorch's CPU build, if its own configuration does not say so: TORCH_ARGS="--index-url <PyTorch's CPU index>"
TORCH_ARGS ?=
LOCK := requirements/cpu.lock
STAMP := $(VENV)/.installed
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check -qq
export OMP_NUM_THREADS ?= 1
# A test run starts hundreds of processes; each would compile this package anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install demo test test-processes test-plain test-slow test-runs test-parts test-nightly test-adapters test-gpu lint format docs docs-build docs-serve recipes bench clean
.DEFAULT_GOAL := help

help:  ## Show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

install: $(STAMP)  ## Make .venv with everything pinned

$(STAMP): $(LOCK) pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] not in {(3, 11), (3, 12)} and "roll_lite needs Python 3.11 or 3.12; name one with: make PYTHON=/path/to/python3.11")'
	@echo "Installing into $(VENV) (2 to 4 minutes, once)"
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install -c $(LOCK) $(TORCH_ARGS) $$(grep '^torch==' $(LOCK))
	@grep -v '^torch==' $(LOCK) > $(VENV)/rest.lock
	@$(PIP) install --no-deps -r $(VENV)/rest.lock
	@$(PIP) install --no-deps --no-build-isolation -e .
	@touch $@

demo: $(STAMP)  ## Train the shipped tiny model; minutes later it has learned
	@$(VENV)/bin/python examples/start_rlvr_pipeline.py --config-name tiny_grpo

test: $(STAMP)  ## The fast tests (at most 20 minutes on 2 cores)
	@$(MAKE) --no-print-directory -j2 --output-sync=target test-processes test-plain

# About half of them: most of what starts Ray, engines or ranks.
PROCESSES := $(addprefix tests/,contracts distributed $(addprefix workers/,test_rollout_worker.py test_replay.py test_environment_pool.py test_reward_pool.py test_reward_lists.py))
SLOWEST := --durations=40 --durations-min=5
FAST := "not slow and not nightly and not gpu"

test-processes: $(STAMP)
	@$(VENV)/bin/python -m pytest -q -m $(FAST) $(SLOWEST) $(PROCESSES)

test-plain: $(STAMP)
	@$(VENV)/bin/python -m pytest -q -m $(FAST) $(SLOWEST) $(PROCESSES:%=--ignore=%)

test-slow: $(STAMP)  ## What takes longer: whole runs, and the rest beside them (at most 25 minutes)
	@$(MAKE) --no-print-directory -j2 --output-sync=target test-runs test-parts

# About half of it.
RUNS := $(addprefix tests/,$(addprefix integration/,test_runs.py test_replay.py test_recipes.py test_another_model.py test_lost_engines.py test_judge_run.py test_ledger.py test_several_hosts.py) chaos/test_training_ranks.py integration/test_environments.py examples/test_recompute.py chaos/test_engine_restarts.py chaos/test_wrong_weights.py)

test-runs: $(STAMP)
	@$(VENV)/bin/python -m pytest -q -m "slow and not nightly and not gpu" $(SLOWEST) $(RUNS)

test-parts: $(STAMP)
	@$(VENV)/bin/python -m pytest -q -m "slow and not nightly and not gpu" $(SLOWEST) $(RUNS:%=--ignore=%)

test-nightly: $(ADAPTERS)/.installed  ## The same claims on every other recipe, layout, model and engine (once before a large change is done)
	@$(ADAPTERS)/bin/python -m pytest -q -m "nightly and not gpu"

# Packages of other projects' environments and clients (docs/environments.md), an S3 server and Ray's job server, on top of the pinned ones.
SITE := -c 'import sysconfig; print(sysconfig.get_path("purelib"))'

WITH_PACKAGES := $(addprefix tests/,environments/test_adapters.py environments/test_endpoint_clients.py environments/test_trained_clients.py observability/test_tracking_services.py test_launch.py::test_pods_are_what_kubernetes_accepts)

test-adapters: $(ADAPTERS)/.installed  ## Environments, tools, clients and trackers of other projects, pods, with their packages (3 minutes)
	@$(ADAPTERS)/bin/python -m pytest -q $(WITH_PACKAGES)

$(ADAPTERS)/.installed: requirements/adapters.lock $(STAMP)
	@echo "Installing into $(ADAPTERS) (1 minute, once)"
	@$(VENV)/bin/python -m venv --clear $(ADAPTERS)
	@($(VENV)/bin/python $(SITE); echo $(CURDIR)) > $$($(ADAPTERS)/bin/python $(SITE))/pinned.pth
	@$(ADAPTERS)/bin/python -m pip --disable-pip-version-check -qq install --no-deps -r requirements/adapters.lock
	@touch $@

# The site of docs/, in an environment of its own.
DOCS := .venv-docs
export NO_MKDOCS_2_WARNING := 1

docs-build: $(DOCS)/.installed  ## The documentation as a site, in build/site (half a minute, once; then seconds)
	@$(DOCS)/bin/mkdocs build --strict
	@! grep -rlE '<(script|link|img|iframe)[^>]* (src|href)="?(https?:)?//' --include=*.html build/site || { echo "these pages load something from elsewhere"; exit 1; }

docs-serve: $(DOCS)/.installed  ## The same on http://127.0.0.1:8000, rebuilt when a page changes
	@$(DOCS)/bin/mkdocs serve --strict

$(DOCS)/.installed: requirements/docs.lock
	@echo "Installing into $(DOCS) (half a minute, once)"
	@$(PYTHON) -m venv --clear $(DOCS)
	@$(DOCS)/bin/python -m pip --disable-pip-version-check -qq install --no-deps -r requirements/docs.lock
	@touch $@

# By name: modules of other tests import what may not be installed there.
ON_GPU := tests/gpu tests/distributed/strategy/megatron tests/contracts

# In the environment that is active: the one of the lock file has builds for CPUs (docs/gpu.md).
test-gpu:  ## The tests that want a GPU, and those of trainer and engines that are for CPUs elsewhere
	@TEST_DEVICE=cuda python -m pytest -q -m gpu --durations=10 $(ON_GPU)

lint: $(STAMP)  ## Style, types, size and wording
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/mypy
	@$(VENV)/bin/python tools/house.py

format: $(STAMP)  ## Rewrite the code in the house's format
	@$(VENV)/bin/ruff check --fix .
	@$(VENV)/bin/ruff format .

docs: $(STAMP)  ## Write the generated pages of docs/
	@$(VENV)/bin/python tools/docs_pages.py
	@$(VENV)/bin/python tools/docs_scheduling.py

recipes: $(STAMP)  ## Run every tiny recipe to its end and see whether it has learned (about 20 minutes)
	@$(VENV)/bin/python examples/run_recipes.py

bench: $(STAMP)  ## Every performance statement, side by side with its peer
	@for script in bench/[a-z]*.py; do $(VENV)/bin/python $$script || exit 1; done

clean:  ## Remove caches (the environment and runs/ stay)
	@rm -rf .pytest_cache .mypy_cache .ruff_cache build *.egg-info
	@find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
