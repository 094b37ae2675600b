# One verb each, the same here and in CI. `make help` lists them.
SHELL := /bin/bash
.DEFAULT_GOAL := help

VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
PORT ?= 8000
GRPC_PORT ?= 8001
REPLICAS ?= 2
MODEL ?= smollm2-135m-instruct
ROOMS := proto gateway services engine_core kernels bench
SOURCES := gateway services engine_core kernels bench
PROTOS := $(wildcard proto/*.proto)
LOCKS := $(wildcard deploy/locks/*.txt)

.PHONY: help up test test-long check proto lock bench fmt clean types

help: ## list the verbs
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | column -t -s $$'\t'

up: $(VENV)/.run ## install what is missing and run the whole line on this machine (PORT, GRPC_PORT, REPLICAS, MODEL)
	$(BIN)/headwater up --model $(MODEL) --replicas $(REPLICAS) --port $(PORT) --grpc-port $(GRPC_PORT)

test: $(VENV)/.dev types ## run the tests (those marked `long` excepted)
	$(BIN)/python -m pytest -n 2 -m "not long and not gpu" -q -rs

test-long: $(VENV)/.dev types ## run the tests that take minutes
	$(BIN)/python -m pytest -m "long and not gpu" -q

check: $(VENV)/.dev types ## formatting, lint, types, stubs up to date
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy $(addprefix -p headwater.,$(SOURCES))
	MYPYPATH=.types:. $(BIN)/mypy tests/simulation
	deploy/check_stubs.sh $(BIN)/python

proto: $(VENV)/.dev types ## regenerate the gRPC stubs
	deploy/make_stubs.sh $(BIN)/python .types

lock: ## resolve deploy/locks after a change of pyproject.toml (UPGRADE=1: to the newest releases)
	deploy/make_locks.sh $(PYTHON) $(if $(UPGRADE),--upgrade)

bench: $(VENV)/.dev ## measure what docs/benchmarks.md records for this machine
	$(BIN)/headwater bench --help

fmt: $(VENV)/.dev ## format and mend what can be mended
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## remove what the other verbs made
	rm -rf $(VENV) .types build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache

# A link farm that shows mypy and protoc the rooms under their import name.
types:
	@mkdir -p .types/headwater
	@for room in $(ROOMS); do ln -sfn ../../$$room .types/headwater/$$room; done

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# Packages come from the locks, checked by hashes; the project itself is built with what they brought.
INSTALL_PROJECT := PYTHONWARNINGS=ignore $(BIN)/python -m pip install --no-deps --no-build-isolation -e .

$(VENV)/.run: pyproject.toml deploy/install.sh $(LOCKS) | $(BIN)/python
	deploy/install.sh $(BIN)/python up
	$(INSTALL_PROJECT)
	@touch $@

$(VENV)/.dev: pyproject.toml deploy/install.sh $(LOCKS) | $(BIN)/python
	deploy/install.sh $(BIN)/python dev
	$(INSTALL_PROJECT)
	@touch $@ $(VENV)/.run
