# `make quickstart` and `make test` are all there is to know; both install what they need.
# PYTHON=... names an interpreter, SET=cuda the CUDA packages.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

SET ?= cpu
PYTHON ?=
BIN := .venv/bin
BENCH_MODELS := .cache/bench-tiny .cache/bench-smollm2
INSTALL := requirements/install.sh $(SET) $(if $(PYTHON),--python $(PYTHON))

.PHONY: help install install-dev osworld-programs quickstart test test-long lint typecheck test-fast bench lock clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' Makefile

install:  ## virtual environment .venv with the locked packages
	@$(INSTALL)

install-dev:  ## the same with tests, linter and type checker
	@$(INSTALL) --with dev --with smollm2 --with sandboxes --with osworld --with swebench

osworld-programs:  ## programs that OSWorld's tasks are about, for `rz-agent env check osworld` (needs root)
	@apt-get install -y --no-install-recommends gimp vlc-bin vlc-plugin-base vlc-plugin-qt chromium socat xdg-utils procps

quickstart: install  ## build the tiny model, train it on the Python-tool task, show the result
	@$(BIN)/rz-agent train --env python

# Starting engines is work for one core, so two tests at a time; more would only share two cores' memory.
test: install-dev lint typecheck  ## every check and every test but the long ones
	@tests/run.sh $(BIN)/pytest -m "not long" --durations 40

test-long: install-dev  ## the few tests that are too long for every change
	@$(BIN)/pytest -m long

test-fast: install-dev  ## the tests that take seconds
	@$(BIN)/pytest -m "not slow"

lint: install-dev  ## ruff
	@$(BIN)/ruff check .

# The checkout is the package rz_agent whatever its folder is called, so mypy sees it through a link;
# tests and benchmarks stand beside the package and are checked as what they are.
typecheck: install-dev  ## mypy --strict
	@mkdir -p .cache/types && ln -sfn "$(CURDIR)" .cache/types/rz_agent
	@$(BIN)/mypy -p rz_agent
	@$(BIN)/mypy --explicit-package-bases tests $(wildcard benchmarks/*.py)

.cache/bench-%:
	@$(BIN)/rz-agent model $* $@

bench: install-dev $(BENCH_MODELS)  ## the measurements of benchmarks/, on an idle machine
	$(BIN)/python benchmarks/harness_efficiency.py --model .cache/bench-smollm2
	$(BIN)/python benchmarks/harness_efficiency.py --model .cache/bench-tiny --env python --episodes 256
	$(BIN)/python benchmarks/episodes_at_once.py --model .cache/bench-tiny
	$(BIN)/python benchmarks/learner_step.py --model .cache/bench-smollm2
	$(BIN)/python benchmarks/learner_step.py --model .cache/bench-tiny --episodes 128 --tokens 64
	$(BIN)/python benchmarks/journal_memory.py
	$(BIN)/python benchmarks/sandbox_local.py
	$(BIN)/python benchmarks/harness_killed.py
	$(BIN)/python benchmarks/desktop.py
	$(BIN)/python benchmarks/sandbox_side_by_side.py

lock: install-dev  ## write what is installed now into the CPU and developer lock files
	@$(BIN)/python requirements/lock.py

clean:  ## remove what was built; keeps runs/
	@rm -rf .venv .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
